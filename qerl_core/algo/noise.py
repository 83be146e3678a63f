"""How much noise the RMSNorm weights carry at a step: QeRL's adaptive quantization noise (arXiv:2510.11696, eq. 9).

The run is cut into K equal stages. Stage 0 is free of noise; then sigma falls geometrically:
sigma_i = sigma_start * (sigma_end / sigma_start) ** (i / (K - 2)), i = 0 .. K - 2.
"""

from qerl_core.config import NoiseConfig


def sigma_at(step: int, num_steps: int, config: NoiseConfig | None) -> float:
    """The standard deviation for step `step` of `num_steps`, counted from 0. ValueError outside the run."""
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} is not one of the run's {num_steps}")
    if config is None:
        return 0.0
    stage = step * config.num_stages // num_steps
    if stage == 0:
        return 0.0
    fraction = (stage - 1) / (config.num_stages - 2)
    return float(config.sigma_start * (config.sigma_end / config.sigma_start) ** fraction)
