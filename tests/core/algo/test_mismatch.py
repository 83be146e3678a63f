import math

import pytest
import torch

from qerl_core.algo.mismatch import diagnostics, importance_weights, kl_k3


def test_importance_weights_are_truncated_from_above_only():
    old = torch.tensor([[math.log(0.5), math.log(0.9), math.log(0.1)]])
    rollout = torch.tensor([[math.log(0.25), math.log(0.1), math.log(0.4)]])

    weights = importance_weights(old, rollout, cap=2.0)

    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.0, 0.25]]))


def test_importance_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)

    assert not importance_weights(old, torch.zeros(1, 2), cap=2.0).requires_grad


def test_diagnostics_by_hand():
    # ratios policy / rollout of 1/2 and 3, the third token masked out
    old = torch.tensor([[math.log(0.5), math.log(0.9), 7.0]])
    rollout = torch.tensor([[math.log(1.0), math.log(0.3), -7.0]])
    mask = torch.tensor([[True, True, False]])

    found = diagnostics(old, rollout, mask, cap=2.0)

    assert found["mismatch/logprob_gap"] == pytest.approx((math.log(2) + math.log(3)) / 2, rel=1e-6)
    k3 = [(0.5 - 1 - math.log(0.5)), (3 - 1 - math.log(3))]
    assert found["mismatch/kl"] == pytest.approx(sum(k3) / 2, rel=1e-6)
    assert found["mismatch/ess"] == pytest.approx(3.5**2 / (2 * (0.25 + 9)), rel=1e-6)
    assert found["mismatch/truncated_frac"] == 0.5


def test_equal_policies_have_no_mismatch():
    logprobs, mask = torch.randn(3, 5), torch.ones(3, 5, dtype=torch.bool)

    found = diagnostics(logprobs, logprobs, mask, cap=2.0)

    assert found == {
        "mismatch/logprob_gap": 0.0, "mismatch/kl": 0.0, "mismatch/ess": 1.0, "mismatch/truncated_frac": 0.0,
    }  # fmt: skip


def test_no_tokens_give_no_diagnostics():
    empty = torch.zeros(2, 0)

    assert diagnostics(empty, empty, torch.zeros(2, 0, dtype=torch.bool), cap=2.0) == {}


def test_k3_is_never_negative_and_zero_only_for_equal_policies():
    policy, ref = torch.tensor([0.0, -1.0, -1.0]), torch.tensor([0.0, -3.0, -0.5])

    kl = kl_k3(policy, ref)

    torch.testing.assert_close(kl, torch.tensor([0.0, math.exp(-2) + 2 - 1, math.exp(0.5) - 0.5 - 1]))
