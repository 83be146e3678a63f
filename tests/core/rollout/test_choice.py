import pytest
import torch

from qerl_core.errors import RolloutFailed
from qerl_core.observer import NullObserver
from qerl_core.rollout import choice
from qerl_core.rollout.choice import open_engine, takes_vllm, why_not_vllm
from qerl_core.rollout.hf_engine import HfEngine


class Notes(NullObserver):
    def __init__(self):
        self.notes = []

    def on_note(self, message):
        self.notes.append(message)


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr(choice, "is_supported", lambda device: True)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_hf_and_says_why(make_policy):
    policy, observer = make_policy(), Notes()

    engine = open_engine(policy.config, policy.model, observer)

    assert isinstance(engine, HfEngine)
    (note,) = observer.notes
    assert "no Hopper GPU" in note


def test_hf_by_name_is_no_fallback(make_policy, with_vllm):
    policy, observer = make_policy(rollout={"engine": "hf"}), Notes()

    assert isinstance(open_engine(policy.config, policy.model, observer), HfEngine)
    assert observer.notes == ["Rollouts by transformers, as asked."]


def test_vllm_by_name_never_becomes_another(make_policy, monkeypatch):
    monkeypatch.setattr(choice, "is_supported", lambda device: False)
    policy = make_policy(rollout={"engine": "vllm"})

    with pytest.raises(RolloutFailed, match=r"rollout\.engine is vllm, but there is no Hopper GPU.*set it to auto"):
        open_engine(policy.config, policy.model, Notes())


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"dtype": "float32"}, "the policy computes in float32"),
        ({"lora": {"rank": 128, "alpha": 8}}, "LoRA has rank 128, and 64 is the most"),
        ({"model": {"id": "m", "source": "m", "quantization": "none"}}, "the base is not NVFP4"),
    ],
)
def test_what_keeps_vllm_away(make_config, with_vllm, changes, obstacle):
    assert why_not_vllm(make_config(**changes), torch.device("cuda")) == obstacle


def test_vllm_that_is_not_installed_is_named(make_config, with_vllm, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)

    assert why_not_vllm(make_config(), torch.device("cuda")) == "vLLM is not installed"
    assert not takes_vllm(make_config(), torch.device("cuda"))


def test_hf_by_name_takes_no_vllm(make_config, with_vllm):
    assert takes_vllm(make_config(), torch.device("cuda"))
    assert not takes_vllm(make_config(rollout={"engine": "hf"}), torch.device("cuda"))
