"""Rows to token ids by the model's chat template, once."""

from collections.abc import Sequence
from typing import Any

from qerl_core.data.rows import messages_of
from qerl_core.errors import BadData
from qerl_core.types import Item, Prompt

SHOWN = 20


def render_prompts(items: Sequence[Item], tokenizer: Any, *, max_prompt_tokens: int) -> list[Prompt]:
    """A prompt for each row, up to where the assistant speaks. BadData names every row that is too long."""
    if not tokenizer.chat_template:
        raise BadData("the model has no chat template; use an instruction-tuned base")
    prompts = [Prompt(i, item, _token_ids(item, tokenizer, i)) for i, item in enumerate(items)]
    long = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_tokens]
    if long:
        shown = ", ".join(f"row {prompt.index + 1} ({len(prompt.token_ids)} tokens)" for prompt in long[:SHOWN])
        more = f" and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        raise BadData(
            f"{len(long)} prompts are longer than max_prompt_tokens {max_prompt_tokens}: {shown}{more}; "
            "raise it or shorten the rows"
        )
    return prompts


def _token_ids(item: Item, tokenizer: Any, index: int) -> tuple[int, ...]:
    try:
        ids = tokenizer.apply_chat_template(
            messages_of(item), tools=item.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, their own
        raise BadData(f"the chat template refuses row {index + 1}: {error}") from error
    if not ids:
        raise BadData(f"the chat template makes nothing of row {index + 1}")
    return tuple(int(token) for token in ids)
