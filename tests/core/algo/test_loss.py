"""Losses against numbers worked by hand, and their gradients against autograd of the formula in float64."""

import math

import pytest
import torch

from qerl_core.algo.loss import TokenBatch, surrogate_loss, token_weights
from qerl_core.config import LossConfig

PLAIN = LossConfig(type="grpo", clip_low=0.2, clip_high=0.28, correction="none")


def batch_of(old, rollout, advantages, mask, type_, num_sequences=None):
    mask = torch.tensor(mask)
    weights = token_weights(mask, type=type_, num_sequences=num_sequences or len(mask), max_tokens=8)
    return TokenBatch(torch.tensor(old), torch.tensor(rollout), torch.tensor(advantages), mask, weights)


def test_grpo_averages_each_completion_and_then_completions():
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [False] * 4])

    weights = token_weights(mask, type="grpo", num_sequences=3, max_tokens=8)

    torch.testing.assert_close(weights, torch.tensor([[1 / 12] * 4, [1 / 6, 1 / 6, 0, 0], [0.0] * 4]))


def test_dapo_averages_all_tokens():
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [False] * 4])

    weights = token_weights(mask, type="dapo", num_sequences=3, max_tokens=8)

    torch.testing.assert_close(weights, torch.tensor([[1 / 6] * 4, [1 / 6, 1 / 6, 0, 0], [0.0] * 4]))


def test_completions_left_out_for_having_no_advantage_still_count_in_grpo():
    mask = torch.tensor([[True, True]])

    assert token_weights(mask, type="grpo", num_sequences=4, max_tokens=8).tolist() == [[0.125, 0.125]]


def test_grpo_by_hand():
    # Ratios 1.5 (clipped at 1.28 for A > 0), 0.5 (not clipped for A > 0), and 0.5 with A < 0 (clipped at 0.8).
    policy = torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(0.5), 0.0]])
    batch = batch_of([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]] * 2, [2.0, -1.0], [[True, True], [True, False]], "grpo")

    loss, sums = surrogate_loss(policy, batch, PLAIN)

    by_hand = -(((1.28 * 2 + 0.5 * 2) / 2) + (-0.8)) / 2
    assert loss.item() == pytest.approx(by_hand)
    assert by_hand == pytest.approx(-0.49)
    assert sums["ratio/clip_frac"].item() == pytest.approx((0.5 + 1) / 2)


def test_dapo_by_hand():
    policy = torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(0.5), 0.0]])
    batch = batch_of([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]] * 2, [2.0, -1.0], [[True, True], [True, False]], "dapo")

    loss, sums = surrogate_loss(policy, batch, PLAIN.model_copy(update={"type": "dapo"}))

    assert loss.item() == pytest.approx(-(1.28 * 2 + 0.5 * 2 - 0.8) / 3)
    assert sums["ratio/clip_frac"].item() == pytest.approx(2 / 3)


def test_the_correction_weighs_each_token_by_the_truncated_ratio():
    # old / rollout: 0.5 and 4 (cut to 2)
    old = [[math.log(0.25), math.log(0.8)]]
    batch = batch_of(old, [[math.log(0.5), math.log(0.2)]], [1.0], [[True, True]], "dapo")

    loss, _ = surrogate_loss(torch.tensor(old), batch, LossConfig(type="dapo", correction="token_tis", tis_cap=2.0))

    assert loss.item() == pytest.approx(-(0.5 + 2.0) / 2)


def test_kl_to_the_base_is_added_by_its_weight():
    batch = batch_of([[0.0]], [[0.0]], [0.0], [[True]], "dapo")
    config = PLAIN.model_copy(update={"kl_coef": 0.1})

    loss, sums = surrogate_loss(torch.zeros(1, 1), batch, config, ref_logprobs_BT=torch.tensor([[-1.0]]))

    kl = math.exp(-1) + 1 - 1
    assert sums["kl/base"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.1 * kl)


def test_kl_without_a_reference_is_refused():
    batch = batch_of([[0.0]], [[0.0]], [0.0], [[True]], "dapo")

    with pytest.raises(ValueError, match="no reference log-probs"):
        surrogate_loss(torch.zeros(1, 1), batch, PLAIN.model_copy(update={"kl_coef": 0.1}))


def formula(policy, old, rollout, advantages, mask, config, num_sequences, ref):
    """The loss in float64, token by token, as the papers write it."""
    total = torch.zeros((), dtype=torch.float64)
    all_tokens = sum(sum(row) for row in mask)
    for b, row in enumerate(mask):
        for t, counts in enumerate(row):
            if not counts:
                continue
            ratio = (policy[b, t] - old[b, t]).exp()
            low, high = 1 - config.clip_low, 1 + config.clip_high
            gain = torch.min(ratio * advantages[b], torch.clamp(ratio, low, high) * advantages[b])
            if config.correction == "token_tis":
                gain = gain * min(math.exp(old[b, t] - rollout[b, t]), config.tis_cap)
            share = 1 / all_tokens if config.type == "dapo" else 1 / (num_sequences * sum(row))
            kl = (ref[b, t] - policy[b, t]).exp() - (ref[b, t] - policy[b, t]) - 1
            total = total + share * (-gain + config.kl_coef * kl)
    return total


@pytest.mark.parametrize("type_", ["grpo", "dapo"])
@pytest.mark.parametrize("correction", ["none", "token_tis"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_equals_autograd_of_the_formula_in_float64(type_, correction, kl_coef):
    generator = torch.Generator().manual_seed(3)
    lengths, longest = [5, 1, 0, 7], 7
    mask = [[t < n for t in range(longest)] for n in lengths]
    policy, old, rollout, ref = (torch.randn(4, longest, generator=generator) * 0.4 for _ in range(4))
    advantages = torch.randn(4, generator=generator)
    config = LossConfig(type=type_, correction=correction, kl_coef=kl_coef)

    policy.requires_grad_(True)
    tensor = torch.tensor(mask)
    weights = token_weights(tensor, type=type_, num_sequences=6, max_tokens=8)
    loss, _ = surrogate_loss(policy, TokenBatch(old, rollout, advantages, tensor, weights), config, ref_logprobs_BT=ref)
    loss.backward()

    exact = policy.detach().double().requires_grad_(True)
    wanted = formula(exact, old.double(), rollout.double(), advantages.double(), mask, config, 6, ref.double())
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(policy.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("type_", ["grpo", "dapo"])
def test_losses_of_the_parts_add_up_to_the_loss_of_the_whole(type_):
    torch.manual_seed(0)
    mask = torch.rand(6, 9) < 0.7
    weights = token_weights(mask, type=type_, num_sequences=6, max_tokens=8)
    policy, old, rollout, advantages = torch.randn(6, 9), torch.randn(6, 9), torch.randn(6, 9), torch.randn(6)
    config = LossConfig(type=type_)

    def loss_of(rows):
        part = TokenBatch(old[rows], rollout[rows], advantages[rows], mask[rows], weights[rows])
        return surrogate_loss(policy[rows], part, config)[0]

    torch.testing.assert_close(loss_of([0, 3]) + loss_of([1, 2, 4, 5]), loss_of(list(range(6))))


def test_what_the_mask_leaves_out_is_never_read():
    mask = torch.tensor([[True, False]])
    nan = torch.tensor([[0.0, math.nan]])
    weights = token_weights(mask, type="grpo", num_sequences=1, max_tokens=8)
    policy = nan.clone().requires_grad_(True)

    loss, _ = surrogate_loss(policy, TokenBatch(nan, nan, torch.ones(1), mask, weights), LossConfig())
    loss.backward()

    assert loss.item() == -1.0
    assert policy.grad.tolist() == [[-1.0, 0.0]]


def test_a_batch_of_empty_completions_has_no_loss():
    empty = torch.zeros(2, 0)
    mask = torch.zeros(2, 0, dtype=torch.bool)
    weights = token_weights(mask, type="dapo", num_sequences=2, max_tokens=8)

    loss, _ = surrogate_loss(empty, TokenBatch(empty, empty, torch.ones(2), mask, weights), LossConfig())

    assert loss.item() == 0.0


def test_dr_grpo_divides_by_a_constant():
    mask = torch.tensor([[True, True, True], [True, False, False]])

    weights = token_weights(mask, type="dr_grpo", num_sequences=4, max_tokens=8)

    assert weights.tolist() == [[1 / 32] * 3, [1 / 32, 0, 0]]


def test_gspo_by_hand():
    # Ratios of the sequences: exp((log 2 + log 0.5) / 2) = 1, and 1.5 (clipped at 1.28 for A > 0).
    policy = torch.tensor([[math.log(2.0), math.log(0.5)], [math.log(1.5), 0.0]])
    batch = batch_of([[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, [2.0, 1.0], [[True, True], [True, False]], "gspo")
    config = PLAIN.model_copy(update={"type": "gspo"})

    loss, sums = surrogate_loss(policy, batch, config)

    assert loss.item() == pytest.approx(-(1.0 * 2 + 1.28 * 1) / 2)
    assert sums["ratio/clip_frac"].item() == pytest.approx(1 / 2)


def test_gspo_s_gradient_is_its_formula_s():
    torch.manual_seed(0)
    policy = torch.randn(3, 4, dtype=torch.float64) * 0.1
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, False, False, False]])
    old, advantages = torch.randn(3, 4, dtype=torch.float64) * 0.1, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = token_weights(mask, type="gspo", num_sequences=3, max_tokens=4)
    config = LossConfig(type="gspo", clip_low=0.9, clip_high=9.0, correction="none")
    mine, theirs = (policy.clone().requires_grad_(True) for _ in range(2))

    surrogate_loss(mine, TokenBatch(old, old, advantages, mask, weights), config)[0].backward()
    mean = ((theirs - old) * mask).sum(1) / mask.sum(1)
    (-(mean.exp() * advantages).mean()).backward()

    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_gspo_clips_tightly_unless_told_otherwise():
    assert (LossConfig(type="gspo").clip_low, LossConfig(type="gspo").clip_high) == (3e-4, 4e-4)
    assert LossConfig(type="gspo", clip_low=0.1).clip_low == 0.1
    assert LossConfig().clip_low == 0.2


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # Ratios 1.5 (cut to 1.28) and 1: d loss / d policy = -weight * clip(ratio) * A
    policy = torch.tensor([[math.log(1.5), 0.0]], requires_grad=True)
    batch = batch_of([[0.0, 0.0]], [[0.0, 0.0]], [2.0], [[True, True]], "cispo")

    loss, _ = surrogate_loss(policy, batch, PLAIN.model_copy(update={"type": "cispo"}))
    loss.backward()

    torch.testing.assert_close(policy.grad, torch.tensor([[-0.5 * 1.28 * 2, -0.5 * 1.0 * 2]]))


def test_bypass_takes_the_ratio_against_the_rollout():
    batch = batch_of([[0.0]], [[math.log(0.8)]], [1.0], [[True]], "dapo")

    loss, _ = surrogate_loss(torch.tensor([[0.0]]), batch, PLAIN.model_copy(update={"correction": "bypass"}))

    assert loss.item() == pytest.approx(-1.25)


@pytest.mark.parametrize("type_", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_mask", "icepop", "bypass"])
def test_parts_of_whole_sequences_add_up(type_, correction):
    torch.manual_seed(1)
    policy, old, rollout = (torch.randn(4, 3) * 0.3 for _ in range(3))
    mask = torch.tensor([[True] * 3, [True, True, False], [True, False, False], [True] * 3])
    weights = token_weights(mask, type=type_, num_sequences=4, max_tokens=3)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    config = LossConfig(type=type_, correction=correction)

    def loss_of(rows):
        batch = TokenBatch(old[rows], rollout[rows], advantages[rows], mask[rows], weights[rows])
        return surrogate_loss(policy[rows], batch, config)[0]

    torch.testing.assert_close(loss_of(slice(0, 2)) + loss_of(slice(2, 4)), loss_of(slice(0, 4)))
