"""How far a quantized model is from its base, on text: perplexity of both, and KL(base || quantized)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qerl_core.errors import BadData

WINDOW_TOKENS = 2048
_ROWS = 256  # positions whose float32 log-probs over the vocabulary are in memory at once


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two models make of the same tokens."""

    num_tokens: int
    """Tokens that were predicted."""
    base_perplexity: float
    perplexity: float
    """Of the quantized model."""
    kl_nats: float
    """KL(base || quantized) a token."""


def windows(text: str, tokenizer: Any, *, max_tokens: int = WINDOW_TOKENS) -> list[list[int]]:
    """The text as token ids in pieces of at most `max_tokens`; each begins as the tokenizer begins a text.

    `tokenizer` is one of transformers'. BadData if there is nothing to predict.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begun: list[int] = tokenizer("a")["input_ids"]
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    start = start if begun[: len(start)] == start else []
    size = max_tokens - len(start)
    pieces = [start + ids[at : at + size] for at in range(0, len(ids), size)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise BadData(f"the text has {len(ids)} tokens, and two are the least that can be compared on")
    return pieces


@torch.inference_mode()
def compare(
    base: Any, quantized: Any, pieces: Sequence[Sequence[int]], *, on_piece: Callable[[], None] = lambda: None
) -> Comparison:
    """Both models on the same pieces of text. They may be on different devices."""
    base_nll = nll = kl = 0.0
    for piece in pieces:
        ids = torch.tensor([piece])
        wanted_TV, got_TV = (model(ids.to(model.device), use_cache=False).logits[0, :-1] for model in (base, quantized))
        for start in range(0, len(piece) - 1, _ROWS):
            rows = slice(start, start + _ROWS)
            wanted, got = wanted_TV[rows].float().log_softmax(-1), got_TV[rows].to(wanted_TV.device).float()
            got, target = got.log_softmax(-1), ids[0, 1:][rows, None].to(wanted.device)
            base_nll -= wanted.gather(1, target).double().sum().item()
            nll -= got.gather(1, target).double().sum().item()
            kl += torch.nn.functional.kl_div(got, wanted, reduction="sum", log_target=True).item()
        on_piece()
    num_tokens = sum(len(piece) - 1 for piece in pieces)
    # Past a few hundred nats a token the perplexity is no float any more; it is infinite for every purpose.
    return Comparison(num_tokens, _exp(base_nll / num_tokens), _exp(nll / num_tokens), max(0.0, kl / num_tokens))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
