import math

import pytest
import torch

from qerl_core.algo.mismatch import correction_weights, diagnostics, kl_k3
from qerl_core.config import LossConfig

TIS = LossConfig(correction="token_tis", tis_cap=2.0)


def test_importance_weights_are_truncated_from_above_only():
    old = torch.tensor([[math.log(0.5), math.log(0.9), math.log(0.1)]])
    rollout = torch.tensor([[math.log(0.25), math.log(0.1), math.log(0.4)]])

    weights = correction_weights(old, rollout, torch.ones(1, 3, dtype=torch.bool), TIS)

    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.0, 0.25]]))


def ratios(*rows):
    """Old and rollout log-probs, and a mask, of tokens with these ratios old / rollout; None is padding."""
    old = torch.tensor([[math.log(k or 99.0) for k in row] for row in rows])
    return old, torch.zeros_like(old), torch.tensor([[k is not None for k in row] for row in rows])


def test_a_sequence_is_weighted_by_its_product_and_dropped_above_the_cap():
    config = LossConfig(correction="sequence_mask", sequence_cap=3.0)

    weights = correction_weights(*ratios([2.0, 1.25, None], [2.0, 1.0, 1.75], [0.1, 0.5, 1.0]), config)

    torch.testing.assert_close(weights, torch.tensor([[2.5], [0.0], [0.05]]))


def test_icepop_drops_tokens_on_both_sides():
    weights = correction_weights(*ratios([0.49, 0.5, 1.0, 4.9, 5.1]), LossConfig(correction="icepop"))

    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.5, 1.0, 4.9, 0.0]]))


@pytest.mark.parametrize("correction", ["none", "bypass"])
def test_what_corrects_elsewhere_weighs_nothing(correction):
    weights = correction_weights(*ratios([0.1, 9.0]), LossConfig(correction=correction))

    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_mask", "icepop", "bypass"])
def test_corrections_carry_no_gradient_and_ignore_what_is_masked_out(correction):
    config = LossConfig(correction=correction)
    old, rollout, mask = ratios([1.5, 0.8, None])

    weights = correction_weights(old.requires_grad_(True), rollout, mask, config)
    others = correction_weights(old + torch.tensor([0.0, 0.0, 50.0]), rollout, mask, config)

    assert not weights.requires_grad
    assert torch.equal(weights.expand(1, 3)[mask], others.expand(1, 3)[mask])


@pytest.mark.parametrize(("correction", "dropped"), [("token_tis", 0.0), ("sequence_mask", 0.5), ("icepop", 0.25)])
def test_what_a_correction_drops_is_counted(correction, dropped):
    found = diagnostics(*ratios([1.0, 1.0], [4.0, 6.0]), LossConfig(correction=correction))

    assert found["mismatch/dropped_frac"] == dropped


def test_diagnostics_by_hand():
    # ratios policy / rollout of 1/2 and 3, the third token masked out
    old = torch.tensor([[math.log(0.5), math.log(0.9), 7.0]])
    rollout = torch.tensor([[math.log(1.0), math.log(0.3), -7.0]])
    mask = torch.tensor([[True, True, False]])

    found = diagnostics(old, rollout, mask, TIS)

    assert found["mismatch/logprob_gap"] == pytest.approx((math.log(2) + math.log(3)) / 2, rel=1e-6)
    k3 = [(0.5 - 1 - math.log(0.5)), (3 - 1 - math.log(3))]
    assert found["mismatch/kl"] == pytest.approx(sum(k3) / 2, rel=1e-6)
    assert found["mismatch/ess"] == pytest.approx(3.5**2 / (2 * (0.25 + 9)), rel=1e-6)
    assert found["mismatch/truncated_frac"] == 0.5


def test_equal_policies_have_no_mismatch():
    logprobs, mask = torch.randn(3, 5), torch.ones(3, 5, dtype=torch.bool)

    found = diagnostics(logprobs, logprobs, mask, TIS)

    assert found == {
        "mismatch/logprob_gap": 0.0, "mismatch/kl": 0.0, "mismatch/ess": 1.0, "mismatch/truncated_frac": 0.0,
        "mismatch/dropped_frac": 0.0,
    }  # fmt: skip


def test_no_tokens_give_no_diagnostics():
    empty = torch.zeros(2, 0)

    assert diagnostics(empty, empty, torch.zeros(2, 0, dtype=torch.bool), TIS) == {}


def test_k3_is_never_negative_and_zero_only_for_equal_policies():
    policy, ref = torch.tensor([0.0, -1.0, -1.0]), torch.tensor([0.0, -3.0, -0.5])

    kl = kl_k3(policy, ref)

    torch.testing.assert_close(kl, torch.tensor([0.0, math.exp(-2) + 2 - 1, math.exp(0.5) - 0.5 - 1]))
