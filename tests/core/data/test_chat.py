import pytest

from qerl_core.data.chat import render_prompts
from qerl_core.errors import BadData
from tests.tiny import make_tokenizer


def item(*contents, role="user"):
    return {"messages": [{"role": role, "content": content} for content in contents]}


def test_a_prompt_is_the_template_s_tokens_up_to_where_the_assistant_speaks():
    tokenizer = make_tokenizer()

    [prompt] = render_prompts([item("2+2") | {"answer": 4}], tokenizer, max_prompt_tokens=64)

    assert tokenizer.decode(list(prompt.token_ids)) == "<|im_start|>u2+2<|im_end|><|im_start|>a"
    assert prompt.item["answer"] == 4


def test_every_row_that_is_too_long_is_named_with_its_length():
    items = [item("x"), item("y" * 50), item("z"), item("w" * 70)]

    with pytest.raises(BadData, match=r"2 prompts .* max_prompt_tokens 20: row 2 \(55 tokens\), row 4 \(75 tokens\)"):
        render_prompts(items, make_tokenizer(), max_prompt_tokens=20)


def test_a_model_without_a_chat_template_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(BadData, match="no chat template"):
        render_prompts([item("x")], tokenizer, max_prompt_tokens=20)


def test_a_row_that_the_template_refuses_is_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(BadData, match="refuses row 1: roles must alternate"):
        render_prompts([item("x")], tokenizer, max_prompt_tokens=20)


def test_a_developer_s_message_works_with_a_template_that_knows_only_system():
    tokenizer = make_tokenizer()
    items = [{"messages": [{"role": "developer", "content": "b"}, {"role": "user", "content": "q"}]}]

    [prompt] = render_prompts(items, tokenizer, max_prompt_tokens=64)

    assert tokenizer.decode(list(prompt.token_ids)).startswith("<|im_start|>sb")
