"""A step's batch: rollouts and their rewards, drawn again where a group has nothing to teach.

P = prompts, G = completions a prompt.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_core.algo.advantage import group_advantages, has_signal, overlong_penalty
from qerl_core.config import TrainConfig
from qerl_core.data.prompts import PromptStream
from qerl_core.observer import Metrics
from qerl_core.rollout.engine import RolloutEngine, Sampling
from qerl_core.scoring import Scorer, by_grader, summarize
from qerl_core.types import Grade, Group

ROUND = 2**40
"""Between the seeds of a step's rounds: far above any step's."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step learns from."""

    groups: list[Group]
    advantages_PG: Tensor
    metrics: Metrics
    """Of all that was sampled for it."""


def sample_batch(
    engine: RolloutEngine, scorer: Scorer, prompts: PromptStream, config: TrainConfig, *, sigma: float, seed: int
) -> Batch:
    """`num_prompts` groups; with `max_rounds` above 1, those without signal are replaced while rounds are left (DAPO).

    Should prompts with signal be too few at the end, the last groups without fill the batch. A completion is graded as
    soon as it has ended, so `time/grade_s` is what is left to wait for after `time/rollout_s`.
    """
    rollout = config.rollout
    sampling = Sampling(
        num_completions=rollout.group_size,
        max_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
    )
    times: Metrics = {"time/rollout_s": 0.0, "time/grade_s": 0.0}
    seen: list[Group] = []
    seen_rewards: list[list[float | None]] = []
    teaching: list[tuple[Group, Tensor]] = []
    idle: list[tuple[Group, Tensor]] = []
    grades: list[Grade] = []
    penalties: list[float] = []
    rounds = 0
    while rounds < rollout.max_rounds and len(teaching) < rollout.num_prompts:
        drawn = prompts.take(rollout.num_prompts - len(teaching))
        with scorer.grading(drawn) as grading:
            with timed(times, "time/rollout_s"):
                groups = engine.rollout(
                    drawn, sampling, sigma=sigma, seed=seed + rounds * ROUND, on_completion=grading.take
                )
            with timed(times, "time/grade_s"):
                rewards_PG = grading.rewards()
        penalties_PG = [
            [
                overlong_penalty(len(c.token_ids), config.overlong, max_tokens=rollout.max_completion_tokens)
                for c in group.completions
            ]
            for group in groups
        ]
        shaped_PG = [
            [None if reward is None else reward - penalty for reward, penalty in zip(*rows, strict=True)]
            for rows in zip(rewards_PG, penalties_PG, strict=True)
        ]
        advantages_PG = group_advantages(shaped_PG, group_size=rollout.group_size, scale_by_std=config.scale_by_std)
        for group, advantages_G, teaches in zip(groups, advantages_PG, has_signal(advantages_PG).tolist(), strict=True):
            (teaching if teaches else idle).append((group, advantages_G))
        seen += groups
        seen_rewards += rewards_PG
        grades += grading.grades
        penalties += [penalty for row in penalties_PG for penalty in row]
        rounds += 1
    chosen = teaching + idle[len(idle) - (rollout.num_prompts - len(teaching)) :]
    metrics = summarize(seen, seen_rewards) | by_grader(grades) | times
    metrics |= {"groups/sampled": float(len(seen)), "groups/rounds": float(rounds)}
    if config.overlong:
        metrics["reward/overlong_penalty"] = sum(penalties) / len(penalties)
    return Batch([group for group, _ in chosen], torch.stack([row for _, row in chosen]), metrics)


@contextmanager
def timed(times: Metrics, name: str) -> Iterator[None]:
    """Add to `times` how many seconds the inside took."""
    started = time.monotonic()
    yield
    times[name] = times.get(name, 0.0) + time.monotonic() - started
