"""Two processes on a CPU (gloo) against one: the same run."""

import json
import os
import subprocess
import sys

import pytest

from qerl_core import distributed
from qerl_core.config import TrainConfig
from tests.tiny import write_rows

VARIETY = "def grade(sample, item):\\n    return len(set(sample['output_text'])) / 16\\n"


@pytest.fixture
def run_file(tiny_folder, tmp_path):
    write_rows(tmp_path / "train.jsonl", 12)
    write_rows(tmp_path / "valid.jsonl", 3)
    path = tmp_path / "run.toml"
    path.write_text(f'''
num_steps = 4
checkpoint_every = 2
num_minibatches = 2
seed = 5
model = {{ id = "tiny", source = "{tiny_folder}" }}
data = {{ train_path = "train.jsonl", valid_path = "valid.jsonl" }}
grader = {{ type = "python", source = "{VARIETY}" }}
rollout = {{ num_prompts = 4, group_size = 4, max_completion_tokens = 8, max_prompt_tokens = 64 }}
lora = {{ rank = 4, alpha = 8 }}
optimizer = {{ learning_rate = 1e-3 }}
noise = {{ num_stages = 3 }}
loss = {{ kl_coef = 0.01 }}
''')
    TrainConfig.from_toml(path)
    return path


def run(command, run_file, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(run_file), "--folder", str(folder), "--cache", str(run_file.parent / "cache")],
        capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], done.stdout


@pytest.mark.timeout(300)
def test_two_processes_take_the_steps_of_one(run_file, tmp_path):
    alone, _ = run(["-m", "qerl_core"], run_file, tmp_path / "alone")

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qerl_core"]
    together, out = run(torchrun, run_file, tmp_path / "together")

    assert [step["step"] for step in together] == [0, 1, 2, 3, 4]
    assert out.count("step 1:") == 1
    for one, two in zip(alone, together, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            if not name.startswith("time/"):
                assert two[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
    assert (tmp_path / "together" / "checkpoints" / "step-000004" / "adapter").is_dir()


def test_alone_there_is_nothing_to_share():
    assert (distributed.rank(), distributed.size()) == (0, 1)
    assert distributed.part(7) == slice(0, 7)
    assert distributed.gathered([1, 2]) == [1, 2]
    assert distributed.added({"a": 1.5}) == {"a": 1.5}
    assert distributed.agreed(True)


@pytest.mark.parametrize(("num_items", "size"), [(7, 3), (2, 4), (0, 2), (8, 2)])
def test_shares_cover_everything_once_and_differ_by_one_at_most(monkeypatch, num_items, size):
    monkeypatch.setattr(distributed, "size", lambda: size)
    shares = []
    for rank in range(size):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(list(range(num_items))[distributed.part(num_items)])

    assert [item for share in shares for item in share] == list(range(num_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
