"""vLLM against its slow twin, on a tiny model whose sizes the kernel takes. One engine for all: it is slow to start."""

import pytest
import torch

from qerl_core.config import TrainConfig
from qerl_core.kernels.nvfp4_matmul import is_supported
from qerl_core.policy.update import Policy
from qerl_core.quant.linear import NVFP4Linear
from qerl_core.rollout.engine import Sampling, completion_seed
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.rollout.vllm_engine import VllmEngine
from qerl_core.types import Prompt
from tests.tiny import make_model, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and is_supported(torch.device("cuda", 0))), reason="there is no Hopper GPU"
    ),
]
DRAWN = Sampling(num_completions=4, max_tokens=24)
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def open_policy(folder, dtype="bfloat16") -> Policy:
    """A policy on a tiny NVFP4 base, its adapter moved away from zero."""
    if not (folder / "model").exists():
        make_model(folder / "model", architecture="qwen2", tied=False, **SIZES)
    config = TrainConfig.model_validate(
        {
            "model": {"id": "tiny", "source": str(folder / "model"), "quantization_method": "rtn"},
            "data": {"train_path": write_rows(folder / "train.jsonl", 12)},
            "grader": {"type": "string_check", "name": "x", "input": "x", "reference": "x", "operation": "eq"},
            "lora": {"rank": 8, "alpha": 16},
            "dtype": dtype,
        }
    )
    policy = Policy.open(config, folder / "cache")
    move_adapter(policy, seed=7)
    return policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def policy(folder):
    return open_policy(folder)


@pytest.fixture(scope="module")
def exact(folder):
    """The same policy in float32."""
    return open_policy(folder, "float32")


@pytest.fixture(scope="module")
def before(policy):
    """What the trainer made of the model while it held its own copy."""
    return policy.logprobs(HfEngine(policy.model).rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=3))


@pytest.fixture(scope="module")
def engine(policy, before):
    return VllmEngine(policy.model, rank=8, max_tokens=256, max_sequences=32, memory_fraction=0.1)


def move_adapter(policy, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.trainable().items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def prompts_of(policy):
    encode = policy.model.tokenizer.encode
    return [Prompt(i, {}, tuple(encode(text))) for i, text in enumerate(["1+1=", "a longer prompt " * 4, "x"])]


def flat(groups):
    return [completion for group in groups for completion in group.completions]


def gap(policy, groups) -> float:
    """Mean difference between recorded log-probs and a policy's."""
    recorded = [torch.tensor(completion.rollout_logprobs) for completion in flat(groups)]
    return mean_gap(policy.logprobs(groups).cpu(), recorded)


def mean_gap(logprobs, others) -> float:
    return torch.cat([(row[: len(r)] - r).abs() for row, r in zip(logprobs, others, strict=True)]).mean().item()


def rounding(policy, exact, groups) -> float:
    """What bfloat16 makes of the trainer's own log-probs, mean difference from float32's."""
    recorded = [torch.tensor(completion.rollout_logprobs) for completion in flat(groups)]
    in_bfloat16, in_float32 = policy.logprobs(groups).cpu(), exact.logprobs(groups).cpu()
    return mean_gap(in_bfloat16, [row[: len(r)] for row, r in zip(in_float32, recorded, strict=True)])


def test_the_trainer_is_the_same_to_the_bit_on_the_engine_s_tensors(policy, before, engine):
    groups = HfEngine(policy.model).rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=3)

    assert torch.equal(policy.logprobs(groups), before)


def test_there_is_one_base(policy, engine):
    tiles = {tensor.untyped_storage().data_ptr() for name, tensor in engine._inside.named_buffers() if "tiles" in name}

    linears = [module for module in policy.model.causal.modules() if isinstance(module, NVFP4Linear)]
    assert linears
    for linear in linears:
        assert linear._tiled.tiles_TUB.untyped_storage().data_ptr() in tiles
        assert not linear.weight_packed.numel()
    head = policy.model.head_VH.untyped_storage().data_ptr()
    assert head == engine._inside.lm_head.weight.untyped_storage().data_ptr()


def test_recorded_logprobs_are_the_policy_s_own(policy, exact, engine):
    groups = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    assert [len(group.completions) for group in groups] == [4, 4, 4]
    assert all(len(c.token_ids) == len(c.rollout_logprobs) > 0 for c in flat(groups))
    assert gap(exact, groups) < 2 * rounding(policy, exact, groups)


def test_a_changed_adapter_changes_the_next_rollout_through_the_graphs(policy, exact, engine):
    first = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)
    for each in (policy, exact):
        move_adapter(each, seed=8)

    second = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    assert [c.token_ids for c in flat(first)] != [c.token_ids for c in flat(second)]
    assert gap(exact, second) < 2 * rounding(policy, exact, second)
    assert gap(exact, first) > 5 * gap(exact, second)


def test_a_seed_gives_the_same_rollouts_and_another_gives_others(policy, engine):
    first, again, other = (engine.rollout(prompts_of(policy), DRAWN, sigma=0.01, seed=seed) for seed in (5, 5, 6))

    assert first == again
    assert [c.token_ids for c in flat(first)] != [c.token_ids for c in flat(other)]


def test_noise_is_there_while_it_samples_and_gone_after(policy, engine):
    clean = {name: weight.detach().clone() for name, weight in engine._norms.items()}
    assert len(clean) == 2 * policy.model.causal.config.num_hidden_layers

    quiet = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)
    noisy = engine.rollout(prompts_of(policy), DRAWN, sigma=0.05, seed=1)
    after = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    assert gap(policy, noisy) > 2 * gap(policy, quiet)
    assert after == quiet
    for name, weight in engine._norms.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, clean[name])


def test_greedy_tokens_are_the_slow_twin_s_but_for_near_ties(policy, engine):
    greedy = Sampling(1, 24, temperature=0.0)

    fast = flat(engine.rollout(prompts_of(policy), greedy, sigma=0.0, seed=0))
    slow = flat(HfEngine(policy.model).rollout(prompts_of(policy), greedy, sigma=0.0, seed=0))

    assert sum(a.token_ids[:4] == b.token_ids[:4] for a, b in zip(fast, slow, strict=True)) >= 2


def test_every_eos_id_ends_a_completion(policy, engine):
    stopped = [c for c in flat(engine.rollout(prompts_of(policy), Sampling(16, 64), sigma=0.0, seed=2))]

    for completion in stopped:
        ended = completion.token_ids[-1] in policy.model.eos_ids
        assert ended == (completion.finish_reason == "stop")
        assert not policy.model.eos_ids & set(completion.token_ids[:-1])


def test_an_update_trains_on_the_shared_base(policy, engine):
    groups = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)
    advantages = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    metrics = policy.update(groups[:3], advantages)

    assert metrics["tokens/trained"] > 0
    assert metrics["mismatch/kl"] < 0.05


def test_a_request_a_completion_draws_what_a_request_a_group_would(policy, engine):
    from vllm import SamplingParams

    engine.load(sigma=0.0, seed=1)
    wanted = [
        SamplingParams(
            n=4, seed=completion_seed(1, place, 0), max_tokens=24, stop_token_ids=sorted(policy.model.eos_ids),
            detokenize=False,
        )
        for place in range(3)
    ]  # fmt: skip
    requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts_of(policy)]
    found = engine._llm.generate(requests, wanted, use_tqdm=False)

    groups = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    assert [c.token_ids for c in flat(groups)] == [tuple(o.token_ids) for request in found for o in request.outputs]


def test_a_completion_is_told_of_once_as_it_ends(policy, engine):
    told, unfinished = {}, []

    def hear(place, number, completion):
        assert (place, number) not in told
        told[place, number] = completion
        unfinished.append(engine._llm.llm_engine.get_num_unfinished_requests())

    groups = engine.rollout(prompts_of(policy), Sampling(16, 64), sigma=0.0, seed=2, first=7, on_completion=hear)

    assert told == {(7 + p, number): c for p, group in enumerate(groups) for number, c in enumerate(group.completions)}
    if any(c.finish_reason == "stop" for c in told.values()):
        assert unfinished[0] > 0


def test_a_rollout_that_was_broken_off_leaves_no_request_and_no_noise(policy, engine):
    before = engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1)

    def refuse(place, number, completion):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.rollout(prompts_of(policy), DRAWN, sigma=0.05, seed=1, on_completion=refuse)

    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.rollout(prompts_of(policy), DRAWN, sigma=0.0, seed=1) == before
