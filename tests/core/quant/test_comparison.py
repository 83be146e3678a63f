import math
from types import SimpleNamespace

import pytest
import torch

from qerl_core.errors import BadData
from qerl_core.quant.checkpoint import load_model, load_plain_model, quantize_folder
from qerl_core.quant.comparison import compare, windows
from tests.tiny import make_model, make_tokenizer


class Fixed:
    """A model that says the same distribution everywhere."""

    device = torch.device("cpu")

    def __init__(self, *probabilities: float) -> None:
        self.logits = torch.tensor(probabilities).log()

    def __call__(self, ids, use_cache):
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, -1))


def test_by_hand():
    base, quantized = Fixed(0.5, 0.25, 0.25), Fixed(0.25, 0.25, 0.5)

    found = compare(base, quantized, [[0, 0, 2], [1, 1]])

    # Predicted are 0, 2, 1.
    assert found.num_tokens == 3
    assert found.base_perplexity == pytest.approx((2 * 4 * 4) ** (1 / 3))
    assert found.perplexity == pytest.approx((4 * 2 * 4) ** (1 / 3))
    assert found.kl_nats == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(1 / 2))


def test_a_model_compared_with_itself_differs_by_nothing_and_pieces_are_counted(tmp_path):
    causal = load_plain_model(make_model(tmp_path / "model"), compute_dtype=torch.float32)
    pieces = torch.randint(256, (3, 300), generator=torch.Generator().manual_seed(0)).tolist()
    counted = []

    found = compare(causal, causal, pieces, on_piece=lambda: counted.append(1))

    with torch.no_grad():
        losses = [causal(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in pieces]
    assert found.perplexity == found.base_perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)
    assert found.kl_nats == pytest.approx(0, abs=1e-6)
    assert len(counted) == 3


def test_rounding_shows_in_the_kl(tmp_path):
    source = make_model(tmp_path / "model")
    quantize_folder(source, tmp_path / "out")
    base = load_plain_model(source, compute_dtype=torch.float32)

    found = compare(base, load_model(tmp_path / "out", compute_dtype=torch.float32), [list(range(50))])

    assert found.kl_nats > 1e-3
    assert found.num_tokens == 49


def test_a_long_text_is_cut_and_loses_nothing_but_what_cannot_be_predicted():
    tokenizer = make_tokenizer()

    assert [len(piece) for piece in windows("x" * 5000, tokenizer)] == [2048, 2048, 904]
    assert [len(piece) for piece in windows("x" * 21, tokenizer, max_tokens=10)] == [10, 10]
    pieces = windows("äöü€ x", tokenizer, max_tokens=3)
    assert tokenizer.decode([token for piece in pieces for token in piece]) == "äöü€ x"


def test_each_piece_begins_with_the_token_that_the_tokenizer_begins_a_text_with():
    class WithStart:
        bos_token_id = 7

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": [7] * add_special_tokens + list(text.encode())}

    assert windows("abc", WithStart(), max_tokens=3) == [[7, 97, 98], [7, 99]]


@pytest.mark.parametrize("text", ["", "x"])
def test_a_text_with_nothing_to_predict_is_refused(text):
    with pytest.raises(BadData, match="two are the least"):
        windows(text, make_tokenizer())
