import math

import pytest
import torch

from qerl_core.errors import RolloutFailed
from qerl_core.rollout.engine import Sampling
from qerl_core.rollout.hf_engine import HfEngine, sample
from qerl_core.types import Prompt

DRAWN = Sampling(num_completions=4, max_tokens=12)


def prompts_of(policy, *texts):
    encode = policy.model.tokenizer.encode
    return [Prompt(i, {}, tuple(encode(text))) for i, text in enumerate(texts)]


def tokens_of(groups):
    return [completion.token_ids for group in groups for completion in group.completions]


def logprobs_of(groups):
    flat = [completion.rollout_logprobs for group in groups for completion in group.completions]
    return torch.cat([torch.tensor(row) for row in flat])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_the_policy_s_own(make_policy, temperature):
    policy = make_policy(rollout={"temperature": temperature})
    engine = HfEngine(policy.model)

    sampling = Sampling(num_completions=4, max_tokens=12, temperature=temperature)
    groups = engine.rollout(prompts_of(policy, "1+1=", "a longer prompt", "x"), sampling, sigma=0.0, seed=1)

    lengths = [len(tokens) for tokens in tokens_of(groups)]
    trained = torch.cat([row[:n] for row, n in zip(policy.logprobs(groups), lengths, strict=True)])
    torch.testing.assert_close(logprobs_of(groups), trained, rtol=1e-4, atol=1e-4)


def test_greedy_equals_transformers_generate(make_policy):
    policy = make_policy()
    prompts = prompts_of(policy, "1+1=", "a longer prompt", "x")

    groups = HfEngine(policy.model).rollout(prompts, Sampling(1, 12, temperature=0.0), sigma=0.0, seed=0)

    for prompt, tokens in zip(prompts, tokens_of(groups), strict=True):
        generated = policy.model.causal.generate(
            torch.tensor([prompt.token_ids]), attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.long),
            max_new_tokens=12, do_sample=False,
        )  # fmt: skip
        assert tuple(generated[0, len(prompt.token_ids) :].tolist()) == tokens


def test_a_seed_gives_the_same_rollouts_and_another_gives_others(make_policy):
    policy = make_policy()
    engine, prompts = HfEngine(policy.model), prompts_of(policy, "1+1=", "2+2=")

    first, again, other = (engine.rollout(prompts, DRAWN, sigma=0.01, seed=seed) for seed in (5, 5, 6))

    assert first == again
    assert tokens_of(first) != tokens_of(other)


def test_noise_changes_rollouts_and_leaves_no_trace(make_policy):
    policy = make_policy()
    engine, prompts = HfEngine(policy.model), prompts_of(policy, "1+1=", "2+2=")
    before = engine.rollout(prompts, DRAWN, sigma=0.0, seed=5)

    noisy = engine.rollout(prompts, DRAWN, sigma=0.05, seed=5)

    assert noisy != before
    assert engine.rollout(prompts, DRAWN, sigma=0.0, seed=5) == before


def test_noisy_logprobs_are_those_of_the_noisy_policy(make_policy):
    policy = make_policy()
    engine = HfEngine(policy.model)
    groups = engine.rollout(prompts_of(policy, "1+1="), DRAWN, sigma=0.2, seed=5)
    lengths = [len(tokens) for tokens in tokens_of(groups)]

    def trained():
        return torch.cat([row[:n] for row, n in zip(policy.logprobs(groups), lengths, strict=True)])

    assert (logprobs_of(groups) - trained()).abs().max() > 1e-2
    with engine.noise.applied(0.2, 5):
        torch.testing.assert_close(logprobs_of(groups), trained(), rtol=1e-4, atol=1e-4)


def test_every_eos_id_ends_a_completion_and_is_its_last_token(make_policy):
    policy = make_policy()
    model = policy.model
    some = frozenset({*model.eos_ids, *range(0, 256, 4)})
    object.__setattr__(model, "eos_ids", some)

    groups = HfEngine(model).rollout(prompts_of(policy, "1+1=", "2+2="), Sampling(16, 20), sigma=0.0, seed=0)

    completions = [completion for group in groups for completion in group.completions]
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert len({completion.token_ids[-1] for completion in stopped}) > 3
    assert min(len(completion.token_ids) for completion in stopped) == 1
    for completion in completions:
        ended = completion.token_ids[-1] in some
        assert ended == (completion.finish_reason == "stop")
        assert ended or len(completion.token_ids) == 20
        assert not some.intersection(completion.token_ids[:-1])
        assert len(completion.token_ids) == len(completion.rollout_logprobs)


def test_batches_larger_than_the_engine_takes_at_once_are_cut(make_policy):
    policy = make_policy()
    prompts = prompts_of(policy, "1", "22", "333", "4444", "55555")

    groups = HfEngine(policy.model, max_sequences=8).rollout(prompts, DRAWN, sigma=0.0, seed=0)

    assert [group.prompt for group in groups] == prompts
    assert {len(group.completions) for group in groups} == {4}


def test_a_policy_that_is_not_finite_is_an_error(make_policy):
    policy = make_policy()
    for parameter in policy.model.trainable().values():
        parameter.data.fill_(float("nan"))

    with pytest.raises(RolloutFailed, match="not finite"):
        HfEngine(policy.model).rollout(prompts_of(policy, "1"), DRAWN, sigma=0.0, seed=0)


def test_top_p_draws_from_the_smallest_sufficient_set_and_says_its_probability():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    draws = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    token, logprob = sample(logits, Sampling(1, 1, top_p=0.7), draws)

    assert set(token.tolist()) == {0, 1}
    torch.testing.assert_close(logprob.exp(), torch.where(token == 0, 0.625, 0.375))
    assert (token == 0).float().mean().item() == pytest.approx(0.625, abs=0.03)


def test_a_tiny_top_p_still_leaves_the_likeliest_token():
    token, logprob = sample(torch.tensor([[0.0, 1.0, 0.5]]), Sampling(1, 1, top_p=1e-6), torch.tensor([0.999]).double())

    assert token.tolist() == [1]
    assert logprob.tolist() == [0.0]


def test_a_draw_says_where_in_the_distribution_and_never_names_what_is_impossible():
    logits = torch.tensor([[-torch.inf, math.log(0.25), -torch.inf, math.log(0.75), -torch.inf]]).expand(5, 5)
    draws = torch.tensor([0.0, 0.2499, 0.2501, 0.75, 1 - 2.0**-53], dtype=torch.float64)

    token, _ = sample(logits, Sampling(1, 1), draws)

    assert token.tolist() == [1, 1, 3, 3, 3]


def test_a_completion_does_not_depend_on_what_is_sampled_beside_it(make_policy):
    policy = make_policy()
    prompts = prompts_of(policy, "1", "22", "333", "4444", "55555")
    whole = HfEngine(policy.model).rollout(prompts, DRAWN, sigma=0.01, seed=4)

    cut = HfEngine(policy.model, max_sequences=8).rollout(prompts, DRAWN, sigma=0.01, seed=4)
    end = HfEngine(policy.model).rollout(prompts[3:], DRAWN, sigma=0.01, seed=4, first=3)

    assert tokens_of(cut) == tokens_of(whole)
    assert tokens_of(end) == tokens_of(whole[3:])


def test_completions_of_a_prompt_and_of_its_double_differ(make_policy):
    policy = make_policy()

    groups = HfEngine(policy.model).rollout(prompts_of(policy, "1+1=", "1+1="), DRAWN, sigma=0.0, seed=4)

    assert len(set(tokens_of(groups))) == 8


def test_a_completion_is_told_of_once_and_while_others_are_still_sampled(make_policy):
    policy = make_policy()
    model, told, forwards = policy.model, [], 0
    object.__setattr__(model, "eos_ids", frozenset({*model.eos_ids, *range(0, 256, 4)}))
    engine = HfEngine(model, max_sequences=16)

    def count(*_):
        nonlocal forwards
        forwards += 1

    hook = model.decoder.register_forward_hook(count)
    groups = engine.rollout(
        prompts_of(policy, "1+1=", "2+2=", "3"), Sampling(8, 20), sigma=0.0, seed=0, first=5,
        on_completion=lambda place, number, completion: told.append((forwards, place, number, completion)),
    )  # fmt: skip
    hook.remove()

    by_place = {(place, number): completion for _, place, number, completion in told}
    assert len(told) == len(by_place) == 24
    assert by_place == {(5 + p, g): c for p, group in enumerate(groups) for g, c in enumerate(group.completions)}
    for when, place, _, completion in told:  # as soon as it has ended: a forward for each of its tokens
        before = 0 if place < 7 else max(when for when, place, _, _ in told if place < 7)
        assert when - before == len(completion.token_ids)


def test_what_a_listener_raises_ends_the_rollout_and_leaves_the_policy_clean(make_policy):
    policy = make_policy()
    engine, prompts = HfEngine(policy.model), prompts_of(policy, "1+1=", "2+2=")
    policy.model.causal.train()
    before = engine.rollout(prompts, DRAWN, sigma=0.0, seed=5)

    def refuse(place, number, completion):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.rollout(prompts, DRAWN, sigma=0.05, seed=5, on_completion=refuse)

    assert policy.model.causal.training
    assert engine.rollout(prompts, DRAWN, sigma=0.0, seed=5) == before
