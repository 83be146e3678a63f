import json
import subprocess
import sys

import pytest

from qerl_core.config import TrainConfig
from qerl_core.evaluation import compare
from tests.core.conftest import VARIETY
from tests.tiny import write_rows

RUN = """
num_steps = 4
checkpoint_every = 2
max_idle_steps = 3
model = {{ id = "tiny", source = "{source}" }}
data = {{ train_path = "train.jsonl", valid_path = "valid.jsonl" }}
grader = {{ type = "python", source = '''{grader}''' }}
rollout = {{ num_prompts = 2, group_size = 2, max_completion_tokens = 6 }}
lora = {{ rank = 4, alpha = 8 }}
noise = {{ num_stages = 3 }}
"""


@pytest.fixture
def run_file(tiny_folder, tmp_path):
    write_rows(tmp_path / "train.jsonl", 6)
    write_rows(tmp_path / "valid.jsonl", 3)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(source=tiny_folder, grader=VARIETY))
    return path


def qerl_core(*arguments):
    command = [sys.executable, "-m", "qerl_core", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_file_trains_without_any_service_and_its_adapter_can_be_scored(run_file, cache):
    done = qerl_core(run_file, "--cache", cache)

    assert done.returncode == 0, done.stderr
    folder = run_file.with_suffix("")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert done.stdout.count("step ") == 5
    adapter = folder / "checkpoints" / "step-000004" / "adapter"
    assert json.loads((folder / "config.json").read_text())["num_steps"] == 4

    scores = compare(TrainConfig.from_toml(run_file), adapter, cache)

    assert scores["base"]["eval/reward_mean"] == pytest.approx(lines[0]["eval/reward_mean"])
    assert scores["adapter"]["eval/reward_mean"] == pytest.approx(lines[-1]["eval/reward_mean"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml", "error: "),
        ("num_steps = 0", "num_steps: Input should be greater than or equal to 1"),
        ("group_size = 8", "group_size: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_config_is_said_in_a_line(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)

    done = qerl_core(tmp_path / "run.toml")

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_base_that_is_not_there_fails_with_its_code(run_file, tiny_folder):
    run_file.write_text(run_file.read_text().replace(str(tiny_folder), "./nowhere"))

    done = qerl_core(run_file)

    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error (bad_checkpoint): the folder of tiny")
