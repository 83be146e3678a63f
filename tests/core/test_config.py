import tomllib

import pytest
from pydantic import ValidationError

from qerl_core.config import NoiseConfig, TrainConfig

RUN = """
num_steps = 12
[model]
id = "tiny"
source = "models/tiny"
[data]
train_path = "train.jsonl"
[grader]
type = "math"
reference = "{{ item.answer }}"
"""


def test_a_run_s_paths_count_from_its_file(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)

    config = TrainConfig.from_toml(tmp_path / "run.toml")

    assert config.data.train_path == tmp_path / "train.jsonl"
    assert config.noise == NoiseConfig()


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"rollout": {"group_size": 1}}, "rollout.group_size", "greater than or equal to 2"),
        ({"num_minibatches": 3}, "", "num_minibatches 3 does not divide num_prompts 8"),
        ({"noise": {"num_stages": 20}}, "", "noise.num_stages 20 is above num_steps 12"),
        ({"noise": {"sigma_start": 1e-4}}, "noise", r"sigma_end 0.0005 is above sigma_start 0.0001"),
        ({"evaluation": {"every": 5}}, "", "no data.valid_path"),
        ({"optimizer": {"warmup_steps": 13}}, "", "warmup_steps 13 is above num_steps 12"),
        ({"group_size": 8}, "group_size", "Extra inputs are not permitted"),
        ({"loss": {"type": "ppo"}}, "loss.type", "Input should be"),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "at least 1"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_both_values(change, field, message):
    with pytest.raises(ValidationError, match=message) as caught:
        TrainConfig.model_validate(tomllib.loads(RUN) | change)

    assert ".".join(map(str, caught.value.errors()[0]["loc"])) == field


def test_a_config_survives_its_json():
    config = TrainConfig.model_validate(tomllib.loads(RUN))

    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
