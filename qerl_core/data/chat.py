"""Rows to token ids by the model's chat template, once."""

from collections.abc import Sequence
from typing import Any

from qerl_core.data.rows import messages_of
from qerl_core.errors import BadData
from qerl_core.types import Item, Prompt

_SHOWN = 20


def render_prompts(items: Sequence[Item], tokenizer: Any, *, max_prompt_tokens: int) -> list[Prompt]:
    """A prompt for each row, up to where the assistant speaks; `tokenizer` is one of transformers'.

    BadData names every row that is too long, or the first that the template refuses. Rows count from 1, without
    blank lines.
    """
    if not tokenizer.chat_template:
        raise BadData("the model's tokenizer has no chat template; use an instruction-tuned base model")
    prompts = [Prompt(i, item, _token_ids(item, tokenizer, i + 1)) for i, item in enumerate(items)]
    long = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_tokens]
    if long:
        shown = ", ".join(f"row {prompt.index + 1} ({len(prompt.token_ids)} tokens)" for prompt in long[:_SHOWN])
        more = f" and {len(long) - _SHOWN} more" if len(long) > _SHOWN else ""
        longest = max(len(prompt.token_ids) for prompt in long)
        raise BadData(
            f"{len(long)} of {len(prompts)} prompts are longer than max_prompt_tokens {max_prompt_tokens}: "
            f"{shown}{more}; shorten these rows or raise max_prompt_tokens to {longest}"
        )
    return prompts


def _token_ids(item: Item, tokenizer: Any, row: int) -> tuple[int, ...]:
    try:
        ids = tokenizer.apply_chat_template(
            messages_of(item),
            tools=item.get("tools") or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, their own
        raise BadData(f"the chat template refuses row {row}: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TypeError("the tokenizer's chat template gave something else than a list of token ids")
    if not ids:
        raise BadData(f"the chat template makes nothing of row {row}")
    return tuple(ids)
