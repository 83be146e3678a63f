"""The tiny model, as a folder, a config and a policy."""

from pathlib import Path

import pytest
import torch

from qerl_core.config import TrainConfig
from qerl_core.policy.update import Policy
from qerl_core.types import Completion, Group, Prompt
from tests.tiny import make_model, write_rows

VARIETY = "def grade(sample, item):\n    return len(set(sample['output_text'])) / 16\n"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2_cache(request) -> Path:
    """The converted model, kept between runs of the suite as it is kept between jobs."""
    folder = request.config.rootpath / ".qerl" / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def make_config(tiny_folder, tmp_path):
    """A config of the tiny model; keyword arguments replace its parts."""

    def make(**changes) -> TrainConfig:
        data = {"train_path": write_rows(tmp_path / "train.jsonl", 12)}
        parts = {
            "model": {"id": "tiny", "source": str(tiny_folder), "quantization_method": "rtn"},
            "data": data,
            "grader": {"type": "python", "source": VARIETY},
            "rollout": {"num_prompts": 2, "group_size": 4, "max_completion_tokens": 8, "max_prompt_tokens": 64},
            "lora": {"rank": 4, "alpha": 8},
            "optimizer": {"learning_rate": 1e-3},
            "noise": {"num_stages": 3},
            "num_steps": 6,
            "checkpoint_every": 2,
        }
        return TrainConfig.model_validate(parts | changes)

    return make


@pytest.fixture
def make_policy(make_config, cache):
    """A policy on the NVFP4 base, its adapter moved away from zero unless `fresh`."""

    def make(*, fresh: bool = False, **changes) -> Policy:
        policy = Policy.open(make_config(**changes), cache)
        if not fresh:
            generator = torch.Generator().manual_seed(7)
            for name, parameter in policy.model.trainable().items():
                if "lora_B" in name:
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return policy

    return make


def group_of(prompt: list[int], *completions: list[int], logprob: float = -1.0) -> Group:
    """A group with the given tokens."""
    made = tuple(Completion(tuple(c), (logprob,) * len(c), "", "stop") for c in completions)
    return Group(Prompt(0, {}, tuple(prompt)), made)
