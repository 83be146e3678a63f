"""How much noise the RMSNorm weights carry at a step: QeRL's adaptive quantization noise (arXiv:2510.11696, eq. 9).

The run is cut into K equal stages. Stage 0 is free of noise; then sigma falls, in the paper geometrically:
sigma_i = sigma_start * (sigma_end / sigma_start) ** (i / (K - 2)), i = 0 .. K - 2. The adaptive controller is that of
parameter-space noise (Plappert et al. 2018, arXiv:1706.01905): sigma grows by a tenth while what it holds is on the
quiet side of the set point, and shrinks by as much on the other.
"""

import math
from collections.abc import Mapping

from qerl_core.config import NoiseConfig

GROWTH = 1.1
HELD = {"kl": "mismatch/kl", "entropy": "policy/entropy"}
"""The metric that the controller reads."""


def sigma_at(step: int, num_steps: int, config: NoiseConfig | None, *, controlled: float | None = None) -> float:
    """The standard deviation for step `step` of `num_steps`, counted from 0. ValueError outside the run.

    `controlled` is what the adaptive controller has come to; None: it begins.
    """
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} is not one of the run's {num_steps}")
    if config is None:
        return 0.0
    stage = step * config.num_stages // num_steps
    if stage == 0:
        return 0.0
    start, end = config.sigma_start, config.sigma_end
    if config.schedule == "adaptive":
        return end if controlled is None else controlled
    fraction = (stage - 1) / (config.num_stages - 2)
    if config.schedule == "linear":
        return start + (end - start) * fraction
    if config.schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
    return float(start * (end / start) ** fraction)


def next_sigma(sigma: float, metrics: Mapping[str, float], config: NoiseConfig | None) -> float | None:
    """What the controller makes of a step's metrics; None if nothing is controlled, or there was no noise yet.

    A step that trained on nothing has no such metric, and changes nothing.
    """
    if config is None or config.set_point is None or sigma == 0:
        return None
    found = metrics.get(HELD[config.hold])
    if found is None:
        return sigma
    wants_more = found < config.set_point
    return min(max(sigma * (GROWTH if wants_more else 1 / GROWTH), config.sigma_end), config.sigma_start)
