"""The twin of `VllmEngine`: vLLM's own kernels and LoRA, a base of its own. Held to the trainer as the other is."""

import pytest
import torch

from qerl_core.rollout.engine import Sampling
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.rollout.vllm_engine import StockVllmEngine
from tests.core.rollout.test_vllm_engine import DRAWN, flat, gap, move_adapter, open_policy, prompts_of, rounding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def policy(folder):
    return open_policy(folder)


@pytest.fixture(scope="module")
def engine(policy):
    return StockVllmEngine(policy.model, rank=8, max_tokens=256, max_sequences=32, memory_fraction=0.15)


def test_it_samples_the_policy_and_each_new_adapter(folder, policy, engine):
    exact = open_policy(folder, "float32")
    first = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)
    assert gap(exact, first) < 2 * rounding(policy, exact, first)
    for each in (policy, exact):
        move_adapter(each, seed=8)

    second = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    assert gap(exact, second) < 2 * rounding(policy, exact, second)
    assert gap(exact, first) > 5 * gap(exact, second)


def test_noise_is_there_while_it_samples_and_gone_after(policy, engine):
    clean = {name: weight.detach().clone() for name, weight in engine._norms.items()}

    quiet = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)
    noisy = engine.rollout(prompts_of(policy), DRAWN, sigma=0.05, seed=1)

    assert gap(policy, noisy) > 2 * gap(policy, quiet)
    assert all(torch.equal(weight, clean[name]) for name, weight in engine._norms.items())


def test_greedy_tokens_are_the_slow_twin_s_but_for_near_ties(policy, engine):
    greedy = Sampling(1, 24, temperature=0.0)

    fast = flat(engine.rollout(prompts_of(policy), greedy, sigma=0.0, seed=0))
    slow = flat(HfEngine(policy.model).rollout(prompts_of(policy), greedy, sigma=0.0, seed=0))

    assert sum(a.token_ids[:4] == b.token_ids[:4] for a, b in zip(fast, slow, strict=True)) >= 2
