import pytest
import torch

from qerl_core.errors import NotEnoughMemory, TrainingDiverged
from qerl_core.policy import update
from tests.core.conftest import group_of

GROUPS = [
    group_of([70, 71, 72], [80, 81, 82, 83], [84], [], [85, 86]),
    group_of([75], [90, 91], [92, 93, 94], [95], [96, 97, 98, 99, 100]),
]
ADVANTAGES = torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.2, -0.7, 1.0, -0.5]])


def weights(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.model.trainable().items()}


def gradients(policy):
    return {name: parameter.grad.clone() for name, parameter in policy.model.trainable().items()}


def assert_close(some, others):
    for name, tensor in some.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-6)


def test_only_lora_trains(make_policy):
    policy = make_policy()

    policy.update(GROUPS, ADVANTAGES)

    assert policy.model.trainable()
    for name, parameter in policy.model.peft.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert (parameter.grad is not None) == ("lora_" in name)


def test_shared_prompts_give_the_logprobs_and_gradients_of_separate_rows(make_policy, monkeypatch):
    fast = make_policy()
    slow = make_policy()

    fast_logprobs = fast.logprobs(GROUPS)
    fast.update(GROUPS, ADVANTAGES)
    monkeypatch.setattr(update, "MAX_ROW_TOKENS", 0)
    slow_logprobs = slow.logprobs(GROUPS)
    slow.update(GROUPS, ADVANTAGES)

    torch.testing.assert_close(fast_logprobs, slow_logprobs, rtol=1e-4, atol=1e-5)
    assert_close(gradients(fast), gradients(slow))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_micro_batches_do_not_change_the_gradient(make_policy, loss):
    whole = make_policy(loss={"type": loss}, micro_batch_tokens=10_000)
    parts = make_policy(loss={"type": loss}, micro_batch_tokens=1)

    found = whole.update(GROUPS, ADVANTAGES)
    found_in_parts = parts.update(GROUPS, ADVANTAGES)

    assert_close(gradients(whole), gradients(parts))
    assert found == pytest.approx(found_in_parts, rel=1e-4, abs=1e-6)


def test_checkpointed_activations_do_not_change_the_gradient(make_policy):
    kept, anew = make_policy(), make_policy(activation_checkpointing="on")
    calls = []
    anew.model.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    found, found_anew = kept.update(GROUPS, ADVANTAGES), anew.update(GROUPS, ADVANTAGES)

    assert len(calls) == 2  # once forward, once in the backward pass
    assert_close(gradients(kept), gradients(anew))
    assert found == pytest.approx(found_anew, rel=1e-5)


def test_groups_without_signal_change_nothing_but_their_share(make_policy):
    with_idle, without = make_policy(loss={"type": "grpo"}), make_policy(loss={"type": "grpo"})
    idle = torch.cat([ADVANTAGES[:1], torch.zeros(1, 4)])

    found = with_idle.update(GROUPS, idle)

    assert found["groups/with_signal_frac"] == 0.5
    assert found["tokens/trained"] == 7.0
    # GRPO's mean is over all completions: half of what the group alone would give.
    without.update(GROUPS[:1], ADVANTAGES[:1])
    assert_close({n: 2 * g for n, g in gradients(with_idle).items()}, gradients(without))


def test_a_batch_without_any_signal_is_no_update(make_policy):
    policy = make_policy()
    before = weights(policy)

    found = policy.update(GROUPS, torch.zeros(2, 4))

    assert found == {"groups/with_signal_frac": 0.0, "tokens/trained": 0.0}
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())


def test_a_learning_rate_of_zero_leaves_the_weights_as_they_were(make_policy):
    policy = make_policy(optimizer={"learning_rate": 0.0})
    before = weights(policy)

    policy.update(GROUPS, ADVANTAGES)

    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(make_policy):
    policy = make_policy(optimizer={"learning_rate": 1e-3})
    before = policy.logprobs(GROUPS).sum(dim=1)

    for _ in range(5):
        policy.update(GROUPS, ADVANTAGES)

    gain = (policy.logprobs(GROUPS).sum(dim=1) - before) * ADVANTAGES.flatten()
    assert gain.sum() > 0


def test_minibatches_take_an_optimizer_step_each_against_the_old_policy(make_policy):
    policy = make_policy(num_minibatches=2)

    found = policy.update(GROUPS, ADVANTAGES)

    assert {int(state["step"]) for state in policy.optimizer.state.values()} == {2}
    assert found["tokens/trained"] == 18.0


def test_truncated_completions_can_be_left_out(make_policy):
    cut = [
        group_of([70], [80, 81], [82, 83]),
        group_of([70], [84, 85], [86, 87]),
    ]
    completion = cut[0].completions[0]
    object.__setattr__(completion, "finish_reason", "length")
    policy = make_policy(loss={"mask_truncated": True}, rollout={"group_size": 2})

    found = policy.update(cut, torch.tensor([[1.0, -1.0], [1.0, -1.0]]))

    assert found["tokens/trained"] == 6.0


def test_kl_to_the_base_needs_no_signal_and_is_zero_for_a_fresh_adapter(make_policy):
    fresh, moved = (make_policy(fresh=fresh, loss={"kl_coef": 0.5}) for fresh in (True, False))

    assert fresh.update(GROUPS, torch.zeros(2, 4))["kl/base"] == pytest.approx(0.0, abs=1e-6)
    assert moved.update(GROUPS, torch.zeros(2, 4))["kl/base"] > 1e-4


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(make_policy):
    policy = make_policy()
    before = weights(policy)

    with pytest.raises(TrainingDiverged, match=r"step 1: .*lower the learning rate"):
        policy.update(GROUPS, ADVANTAGES * float("inf"))

    assert all(torch.equal(before[name], tensor) for name, tensor in weights(policy).items())


def test_the_base_is_the_policy_without_its_adapter(make_policy):
    moved, fresh = make_policy(), make_policy(fresh=True)

    torch.testing.assert_close(moved.logprobs(GROUPS, adapter=False), fresh.logprobs(GROUPS))


def runs_out_of_memory_above(monkeypatch, policy, num_rows):
    """Let forwards with gradients fail for micro-batches of more rows than that; returns the sizes that were tried."""
    tried, forward = [], policy._forward

    def limited(rows, shape):
        tried.append(len(rows))
        if len(rows) > num_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(rows, shape)

    monkeypatch.setattr(policy, "_forward", limited)
    return tried


def test_memory_that_runs_out_halves_the_micro_batch_once_and_it_is_said(make_policy, monkeypatch):
    monkeypatch.setattr(update, "MAX_ROW_TOKENS", 0)
    free = make_policy(micro_batch_tokens=64)
    short = make_policy(micro_batch_tokens=64)
    notes = []
    short.on_note = notes.append
    free.update(GROUPS, ADVANTAGES)
    tried = runs_out_of_memory_above(monkeypatch, short, 6)

    short.update(GROUPS, ADVANTAGES)
    short.update(GROUPS, ADVANTAGES)

    assert max(tried) > 6
    assert tried.count(max(tried)) == 1  # the second update begins with what fits
    assert notes == ["The GPU's memory ran out: micro_batch_tokens is 32 from here on."]
    assert short.config.micro_batch_tokens == 64


def test_after_memory_ran_out_the_step_is_the_same(make_policy, monkeypatch):
    monkeypatch.setattr(update, "MAX_ROW_TOKENS", 0)
    free, short = make_policy(micro_batch_tokens=64), make_policy(micro_batch_tokens=64)
    runs_out_of_memory_above(monkeypatch, short, 6)

    free.update(GROUPS, ADVANTAGES)
    short.update(GROUPS, ADVANTAGES)

    assert_close(gradients(short), gradients(free))
    assert_close(weights(short), weights(free))


def test_memory_that_runs_out_again_ends_the_run(make_policy, monkeypatch):
    policy = make_policy(micro_batch_tokens=64)
    before = weights(policy)
    runs_out_of_memory_above(monkeypatch, policy, 0)

    with pytest.raises(NotEnoughMemory, match=r"step 1: .* micro_batch_tokens 32; lower it"):
        policy.update(GROUPS, ADVANTAGES)

    assert_close(weights(policy), before)
