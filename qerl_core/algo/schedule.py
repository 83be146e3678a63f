"""The learning rate at a step: linear warm-up, then constant or a cosine to zero. A function of the step alone."""

import math

from qerl_core.config import OptimizerConfig


def learning_rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The rate for step `step` of `num_steps`, counted from 0. The first step of a warm-up is above zero."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
