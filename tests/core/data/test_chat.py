import subprocess
import sys
from pathlib import Path

import pytest

from qerl_core.data.chat import render_prompts
from qerl_core.errors import BadData
from tests.tiny import make_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def item(content, **fields):
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_a_row_becomes_the_tokens_up_to_the_assistant_s_turn(tokenizer):
    items = [item("hé"), {"messages": [{"role": "developer", "content": "b"}, {"role": "user", "content": "q"}]}]

    first, second = render_prompts(items, tokenizer, max_prompt_tokens=100)

    assert tokenizer.decode(first.token_ids) == "<|im_start|>uhé<|im_end|><|im_start|>a"
    assert tokenizer.decode(second.token_ids) == "<|im_start|>sb<|im_end|><|im_start|>uq<|im_end|><|im_start|>a"
    assert all(type(token) is int for token in first.token_ids)
    assert [(p.index, p.item) for p in (first, second)] == list(enumerate(items))


def test_tools_reach_the_template(tokenizer):
    tokenizer.chat_template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"

    with_tools, without = render_prompts([item("q", tools=[{"name": "f"}]), item("q")], tokenizer, max_prompt_tokens=9)

    assert tokenizer.decode(with_tools.token_ids) == "fq"
    assert tokenizer.decode(without.token_ids) == "q"


def test_every_prompt_that_is_too_long_is_named_with_its_length(tokenizer):
    items = [item("x" * (100 if i % 2 else 1)) for i in range(6)]

    with pytest.raises(BadData, match="raise max_prompt_tokens to 105") as caught:
        render_prompts(items, tokenizer, max_prompt_tokens=20)

    assert "3 of 6 prompts are longer than max_prompt_tokens 20" in str(caught.value)
    assert "row 2 (105 tokens), row 4 (105 tokens), row 6 (105 tokens)" in str(caught.value)
    assert len(render_prompts(items, tokenizer, max_prompt_tokens=105)) == 6


def test_of_very_many_long_prompts_twenty_are_named(tokenizer):
    with pytest.raises(BadData, match=r"row 20 \(\d+ tokens\) and 30 more;"):
        render_prompts([item("q")] * 50, tokenizer, max_prompt_tokens=2)


def test_a_tokenizer_without_chat_template_is_bad_data(tokenizer):
    tokenizer.chat_template = None

    with pytest.raises(BadData, match="no chat template"):
        render_prompts([item("q")], tokenizer, max_prompt_tokens=100)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('System role not supported') }}", "refuses row 1: System role not supported"),
        ("{{ messages[0].content + 1 }}", "refuses row 1"),
        ("{% if %}", "refuses row 1"),
        ("", "no chat template"),
        ("{{ '' }}", "makes nothing of row 1"),
    ],
)
def test_what_a_template_refuses_is_bad_data(template, words, tokenizer):
    tokenizer.chat_template = template

    with pytest.raises(BadData, match=words):
        render_prompts([item("q")], tokenizer, max_prompt_tokens=100)


@pytest.mark.parametrize("module", ["rows", "prompts", "chat"])
def test_nothing_heavy_is_imported(module):
    heavy = {"torch", "transformers", "numpy", "jinja2"}
    code = f"import sys, qerl_core.data.{module}; print({heavy} & set(sys.modules))"

    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert found.stdout == "set()\n"
