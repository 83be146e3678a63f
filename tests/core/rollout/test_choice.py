import pytest
import torch
from transformers import AutoConfig

from qerl_core.errors import RolloutFailed
from qerl_core.observer import NullObserver
from qerl_core.policy.memory import sizes_of
from qerl_core.rollout import choice
from qerl_core.rollout.choice import chosen, open_engine, why_not_vllm
from qerl_core.rollout.hf_engine import HfEngine


class Notes(NullObserver):
    def __init__(self):
        self.notes = []

    def on_note(self, message):
        self.notes.append(message)


CUDA = torch.device("cuda")
SIZES = sizes_of(AutoConfig.for_model("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2))


@pytest.fixture
def with_vllm(monkeypatch):
    """A Hopper GPU with vLLM, as far as anyone asks."""
    monkeypatch.setattr(choice, "is_supported", lambda device: True)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_hf_and_says_why(make_policy):
    policy, observer = make_policy(), Notes()

    engine = open_engine(policy.config, policy.model, observer)

    assert isinstance(engine, HfEngine)
    assert observer.notes == ["Rollouts by transformers, since there is no GPU."]


def test_hf_by_name_is_no_fallback(make_policy, with_vllm):
    policy, observer = make_policy(rollout={"engine": "hf"}), Notes()

    assert isinstance(open_engine(policy.config, policy.model, observer), HfEngine)
    assert observer.notes == ["Rollouts by transformers, as asked."]


@pytest.mark.parametrize("name", ["vllm", "vllm_stock"])
def test_an_engine_by_name_never_becomes_another(make_config, name):
    with pytest.raises(RolloutFailed, match=rf"rollout\.engine is {name}, but there is no GPU; set it to auto"):
        chosen(make_config(rollout={"engine": name}), torch.device("cpu"), SIZES)


def test_auto_takes_the_fastest_that_can(make_config, with_vllm, monkeypatch):
    assert chosen(make_config(), CUDA, SIZES) == ("vllm", "the fastest there is")
    monkeypatch.setattr(choice, "is_supported", lambda device: False)
    assert chosen(make_config(), CUDA, SIZES) == (
        "vllm_stock", "since there is no Hopper GPU with Triton and the CUDA bindings",
    )  # fmt: skip
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert chosen(make_config(), CUDA, SIZES) == ("hf", "since vLLM is not installed")


@pytest.mark.parametrize(
    ("changes", "taken", "obstacle"),
    [
        ({}, "vllm", None),
        ({"dtype": "float32"}, "hf", "the policy computes in float32"),
        ({"lora": {"rank": 128, "alpha": 8}}, "vllm_stock", "LoRA has rank 128, and 64 is the most"),
        ({"model": {"id": "m", "source": "m", "quantization": "none"}}, "vllm_stock", "the base is not NVFP4"),
    ],
)
def test_what_keeps_vllm_away(make_config, with_vllm, changes, taken, obstacle):
    config = make_config(**changes)

    assert why_not_vllm(config, CUDA, SIZES) == obstacle
    assert chosen(config, CUDA, SIZES)[0] == taken


@pytest.mark.parametrize(
    ("sizes", "obstacle"),
    [
        ({"num_key_value_heads": 2, "head_dim": 16}, "k_proj has 32 out features, which is no multiple of 64"),
        ({"num_attention_heads": 2, "head_dim": 48}, "q_proj has 96 out features, which is no multiple of 64"),
        ({"intermediate_size": 96}, "gate_proj has 96 out features, which is no multiple of 64"),
    ],
)
def test_a_model_whose_fused_linears_do_not_begin_at_tiles_goes_elsewhere(make_config, with_vllm, sizes, obstacle):
    odd = sizes_of(AutoConfig.for_model("qwen3", **{"hidden_size": 256, "num_attention_heads": 4, **sizes}))

    assert chosen(make_config(), CUDA, odd) == ("vllm_stock", f"since {obstacle}")


def test_a_model_of_unknown_sizes_goes_elsewhere(make_config, with_vllm):
    assert chosen(make_config(), CUDA, None) == ("vllm_stock", "since the model's config has not the usual sizes")
