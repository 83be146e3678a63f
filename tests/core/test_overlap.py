"""Grading beside sampling, with real grader processes and an engine that takes its time."""

import os
import threading
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from qerl_core.batch import sample_batch
from qerl_core.data.prompts import PromptStream
from qerl_core.errors import GraderFailed
from qerl_core.evaluation import evaluate
from qerl_core.graders.runner import GradeRequest, GraderPool
from qerl_core.graders.spec import GraderSpec
from qerl_core.rollout.hf_engine import HfEngine
from qerl_core.scoring import Scorer
from qerl_core.types import Completion, Group, Prompt

GRADE_S = 0.05
SLOW = f"import time\ndef grade(sample, item):\n    time.sleep({GRADE_S})\n    return float(sample['output_text'])\n"


class SteadyEngine:
    """A completion each `pace_s`, those of the last prompt first; fails before number `fails_at`."""

    def __init__(self, *, pace_s=0.0, fails_at=None):
        self.pace_s, self.fails_at = pace_s, fails_at

    def rollout(self, prompts, sampling, *, sigma, seed, first=0, on_completion=None):
        made = {}
        places = [(p, number) for p in range(len(prompts)) for number in range(sampling.num_completions)]
        for count, (p, number) in enumerate(reversed(places)):
            if count == self.fails_at:
                raise RuntimeError("out of memory")
            time.sleep(self.pace_s)
            text = str(prompts[p].index + number / 8)
            made[p, number] = Completion((5,), (-1.0,), text, "stop")
            on_completion(first + p, number, made[p, number])
        numbers = range(sampling.num_completions)
        return [Group(prompt, tuple(made[p, number] for number in numbers)) for p, prompt in enumerate(prompts)]


def python(source):
    return TypeAdapter(GraderSpec).validate_python({"type": "python", "source": source})


def stream():
    return PromptStream([Prompt(i, {}, (1,)) for i in range(16)], shuffle=False, seed=0)


def warm(pool):
    """Start the pool's process, which is not what is measured."""
    pool.grade([GradeRequest({}, "0")])


def zygotes():
    folders = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit())
    found = [folder.parent.name for folder in folders if folder.exists() and b"graders.zygote" in folder.read_bytes()]
    return {pid for pid in found if f"\nPPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()}


def graders():
    return [thread for thread in threading.enumerate() if thread.name == "qerl-graders"]


@pytest.fixture
def config(make_config):
    return make_config(rollout={
        "num_prompts": 8, "group_size": 4, "max_completion_tokens": 8, "max_prompt_tokens": 64,
    })  # fmt: skip


def test_slow_grades_cost_their_tail_and_rewards_keep_their_places(config):
    engine = SteadyEngine(pace_s=GRADE_S / 2)  # as fast as two workers grade
    with GraderPool(python(SLOW), num_workers=2) as pool:
        warm(pool)
        batch = sample_batch(engine, Scorer(pool), stream(), config, sigma=0.0, seed=0)

    times = batch.metrics
    assert times["time/rollout_s"] >= 32 * GRADE_S / 2
    assert times["time/grade_s"] < 32 * GRADE_S / 2 / 2  # alone it takes 32 * GRADE_S / 2 at least
    assert times["reward/mean"] == pytest.approx(sum(range(8)) / 8 + 1.5 / 8)
    assert all((row[1:] > row[:-1]).all() for row in batch.advantages_PG)


def test_a_batch_is_what_it_is_when_grading_waits_for_all_of_it(make_policy):
    policy = make_policy()
    engine = HfEngine(policy.model)
    prompts = [Prompt(i, {}, tuple(policy.model.tokenizer.encode(text))) for i, text in enumerate(["1+1=", "2", "33"])]
    with GraderPool(policy.config.grader, num_workers=2) as pool:
        seed = {"sigma": 0.01, "seed": 3}
        batch = sample_batch(engine, Scorer(pool), PromptStream(prompts, shuffle=False, seed=0), policy.config, **seed)
        grades = pool.grade([GradeRequest(g.prompt.item, c.text) for g in batch.groups for c in g.completions])
        again = sample_batch(engine, Scorer(pool), PromptStream(prompts, shuffle=False, seed=0), policy.config, **seed)

    rewards = [grade.reward for grade in grades]
    assert batch.metrics["reward/mean"] == sum(rewards) / len(rewards)
    assert batch.groups == again.groups
    assert (batch.advantages_PG == again.advantages_PG).all()


def test_evaluation_has_the_rewards_of_all(config):
    prompts = [Prompt(i, {}, (1,)) for i in range(6)]
    with GraderPool(python(SLOW), num_workers=4) as pool:
        assert evaluate(SteadyEngine(), Scorer(pool), prompts, config)["eval/reward_mean"] == 2.5


def test_an_engine_that_fails_leaves_no_process_and_no_thread(config):
    before = zygotes(), graders()
    with GraderPool(python(SLOW), num_workers=2) as pool:
        warm(pool)
        assert len(zygotes() - before[0]) == 1
        with pytest.raises(RuntimeError, match="out of memory"):
            sample_batch(SteadyEngine(fails_at=31), Scorer(pool), stream(), config, sigma=0.0, seed=0)
        assert all(call.future.cancelled() for call in list(pool._waiting))

    assert (zygotes(), graders()) == before


def test_a_batch_after_one_that_failed_has_its_own_grades(config):
    with GraderPool(python(SLOW), num_workers=2) as pool:
        warm(pool)
        with pytest.raises(RuntimeError, match="out of memory"):
            sample_batch(SteadyEngine(fails_at=31), Scorer(pool), stream(), config, sigma=0.0, seed=0)
        started = time.monotonic()
        batch = sample_batch(SteadyEngine(), Scorer(pool), stream(), config, sigma=0.0, seed=0)

    assert time.monotonic() - started < 32 * GRADE_S  # it does not wait for the other's
    assert batch.metrics["reward/mean"] == pytest.approx(sum(range(8)) / 8 + 1.5 / 8)


def test_errors_of_the_grader_are_counted_and_end_the_run(config):
    few = "def grade(sample, item):\n    return float('nan' if sample['output_text'] == '3.125' else 1)\n"
    with GraderPool(python(few)) as pool:
        batch = sample_batch(SteadyEngine(), Scorer(pool), stream(), config, sigma=0.0, seed=0)
    assert batch.metrics["grader/error_frac"] == 1 / 32

    all_of_them = "def grade(sample, item):\n    return item['no such key']\n"
    with GraderPool(python(all_of_them)) as pool, pytest.raises(GraderFailed, match=r"(?s)32 of the last 32.*KeyError"):
        sample_batch(SteadyEngine(), Scorer(pool), stream(), config, sigma=0.0, seed=0)
