"""The whole loop on the tiny model: NVFP4 base, noise, real grader processes."""

import json

import pytest

from qerl_core.errors import BadData, GraderFailed, NoLearningSignal
from qerl_core.loop import train
from qerl_core.observer import JsonlObserver, NullObserver
from tests.tiny import write_rows


class Recorder(NullObserver):
    """Keeps what it is told and stops after a step."""

    def __init__(self, stop_after=None):
        self.stop_after = stop_after
        self.steps, self.checkpoints, self.phases, self.starts = {}, [], [], []

    def on_phase(self, phase):
        self.phases.append(phase)

    def on_start(self, step):
        self.starts.append(step)

    def on_step(self, step, metrics):
        self.steps[step] = metrics
        return step == self.stop_after

    def on_checkpoint(self, step, folder):
        self.checkpoints.append((step, (folder / "adapter").is_dir()))


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.fixture
def with_validation(make_config, tmp_path):
    def make(**changes):
        config = make_config(**changes)
        data = {"train_path": config.data.train_path, "valid_path": write_rows(tmp_path / "valid.jsonl", 3)}
        return make_config(**{"data": data, "evaluation": {"every": 4}, **changes})

    return make


def test_a_run_reports_each_step_and_its_checkpoints(with_validation, cache, tmp_path):
    seen = Recorder()

    assert train(with_validation(), tmp_path / "run", seen, cache=cache)

    assert list(seen.steps) == [0, 1, 2, 3, 4, 5, 6]
    assert seen.checkpoints == [(2, True), (4, True), (6, True)]
    assert seen.starts == [-1]
    assert seen.phases[:3] == ["preparing", "evaluating", "training"]
    assert [step for step, metrics in seen.steps.items() if "eval/reward_mean" in metrics] == [0, 4, 6]
    assert [seen.steps[step]["noise/sigma"] for step in (1, 2, 3, 4, 5, 6)] == [0, 0, 1e-2, 1e-2, 5e-4, 5e-4]
    assert seen.steps[3]["mismatch/kl"] > seen.steps[1]["mismatch/kl"]
    assert all(isinstance(value, float | int) for metrics in seen.steps.values() for value in metrics.values())


CONTROLLED = {
    "noise": {"schedule": "adaptive", "set_point": 1e-4, "sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 6},
    "rollout": {
        "num_prompts": 2, "group_size": 4, "max_completion_tokens": 8, "max_prompt_tokens": 64, "max_rounds": 2,
    },
    "loss": {"type": "gspo", "correction": "sequence_mask"},
    "overlong": {"buffer_tokens": 4, "penalty": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, CONTROLLED], ids=["plain", "controlled"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(with_validation, cache, tmp_path, changes):
    whole, first, second = Recorder(), Recorder(stop_after=3), Recorder()
    train(with_validation(**changes), tmp_path / "whole", whole, cache=cache)

    assert not train(with_validation(**changes), tmp_path / "cut", first, cache=cache)
    assert train(with_validation(**changes), tmp_path / "cut", second, cache=cache)

    assert second.starts == [3]
    assert second.checkpoints[0] == (3, True)
    assert list(second.steps) == [4, 5, 6]
    together = first.steps | second.steps
    for step, metrics in whole.steps.items():
        assert without_times(together[step]) == without_times(metrics)


def test_the_controller_raises_noise_that_is_too_quiet(make_config, cache, tmp_path):
    seen = Recorder()

    train(make_config(**CONTROLLED | {"noise": CONTROLLED["noise"] | {"set_point": 1e9}}), tmp_path, seen, cache=cache)

    sigmas = [seen.steps[step]["noise/sigma"] for step in range(1, 7)]
    assert sigmas == pytest.approx([0.0, 0.01, 0.011, 0.0121, 0.01331, 0.014641])  # far too quiet: up by a tenth


def test_a_finished_run_has_nothing_left_to_do(make_config, cache, tmp_path):
    train(make_config(), tmp_path / "run", NullObserver(), cache=cache)
    again = Recorder()

    assert train(make_config(), tmp_path / "run", again, cache=cache)

    assert not again.steps


def test_a_file_has_each_step_once_after_a_crash_between_checkpoints(make_config, cache, tmp_path):
    class Crash(JsonlObserver):
        def on_step(self, step, metrics):
            super().on_step(step, metrics)
            if step == 3:
                raise KeyboardInterrupt
            return False

    path = tmp_path / "metrics.jsonl"
    with pytest.raises(KeyboardInterrupt):
        train(make_config(), tmp_path / "run", Crash(path), cache=cache)
    train(make_config(), tmp_path / "run", JsonlObserver(path), cache=cache)

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_any_spread_ends_and_says_so(make_config, cache, tmp_path):
    grader = {"type": "string_check", "input": "x", "reference": "y", "operation": "eq"}
    seen = Recorder()

    with pytest.raises(NoLearningSignal, match="first 3 steps"):
        train(make_config(grader=grader), tmp_path / "run", seen, cache=cache)

    assert list(seen.steps) == [1, 2]


def test_a_grader_that_keeps_failing_ends_the_run_with_its_traceback(make_config, cache, tmp_path):
    grader = {"type": "python", "source": "def grade(sample, item):\n    return item['no such key']\n"}

    with pytest.raises(GraderFailed, match=r"(?s)8 of the last 8 grades were errors.*KeyError"):
        train(make_config(grader=grader), tmp_path / "run", NullObserver(), cache=cache)


def test_a_prompt_that_is_too_long_is_found_before_the_first_step(make_config, cache, tmp_path):
    seen = Recorder()
    with pytest.raises(BadData, match="tokens"):
        train(make_config(rollout={"max_prompt_tokens": 3}), tmp_path / "run", seen, cache=cache)

    assert not seen.steps


def test_the_same_seed_gives_the_same_run_and_another_gives_another(make_config, cache, tmp_path):
    runs = [Recorder(), Recorder(), Recorder()]
    for i, (seed, seen) in enumerate(zip((0, 0, 1), runs, strict=True)):
        train(make_config(seed=seed, num_steps=3), tmp_path / str(i), seen, cache=cache)

    first, again, other = ([without_times(m) for m in seen.steps.values()] for seen in runs)
    assert first == again
    assert first != other
