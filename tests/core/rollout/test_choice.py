import pytest
import torch

from qerl_core.errors import RolloutFailed
from qerl_core.observer import NullObserver
from qerl_core.rollout import choice
from qerl_core.rollout.choice import chosen, open_engine, why_not_vllm
from qerl_core.rollout.hf_engine import HfEngine


class Notes(NullObserver):
    def __init__(self):
        self.notes = []

    def on_note(self, message):
        self.notes.append(message)


CUDA = torch.device("cuda")


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
        chosen(make_config(rollout={"engine": name}), torch.device("cpu"))


def test_auto_takes_the_fastest_that_can(make_config, with_vllm, monkeypatch):
    assert chosen(make_config(), CUDA) == ("vllm", "the fastest there is")
    monkeypatch.setattr(choice, "is_supported", lambda device: False)
    assert chosen(make_config(), CUDA) == (
        "vllm_stock", "since there is no Hopper GPU with Triton and the CUDA bindings",
    )  # fmt: skip
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert chosen(make_config(), CUDA) == ("hf", "since vLLM is not installed")


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

    assert why_not_vllm(config, CUDA) == obstacle
    assert chosen(config, CUDA)[0] == taken
