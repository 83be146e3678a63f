"""One config for a run: resolved at the HTTP edge, stored on the row, read by the loop, written beside the adapter.

Torch-free. The string under a field is its documentation, here and in the API. The defaults are a recipe that
works: QeRL's (arXiv:2510.11696) with corrections for what its sampler did.
"""

import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qerl_core.graders.spec import GraderSpec

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_TARGETS: tuple[TargetModule, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


class Config(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Config):
    """The base model."""

    id: str = Field(min_length=1)
    """Its public name; an adapter's `base_model_name_or_path` is `hub_id`, or else this, never a local path."""
    source: str = Field(min_length=1)
    """A folder, a hub id, or `package:NAME` for weights (GGUF) that an installed Python package carries."""
    revision: str | None = None
    """The hub commit; wanted for a hub id."""
    gguf_file: str | None = None
    """The file inside `source` if the weights are GGUF; converted to safetensors once."""
    hub_id: str | None = None
    """Where others find the same base."""
    quantization: Literal["nvfp4", "none"] = "nvfp4"
    """How the frozen weights are held: 4-bit NVFP4, or as they are."""
    quantization_method: Literal["rtn", "four_over_six", "sweep"] = "rtn"
    """How weights are rounded to NVFP4 (`quant/nvfp4.py`); of no account for a base that is NVFP4 already."""


class DataConfig(Config):
    """The rows. Paths are the runner's own and never shown."""

    train_path: Path
    """JSONL rows to train on."""
    valid_path: Path | None = None
    """JSONL rows to evaluate on; None: the run is not evaluated."""
    shuffle: bool = True
    """Draw the rows in a seeded order, new in each epoch; else in the file's order."""


class LoraConfig(Config):
    """The trained low-rank adapter (PEFT)."""

    rank: int = Field(32, ge=1, le=512)
    alpha: float = Field(64.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: tuple[TargetModule, ...] = Field(ALL_TARGETS, min_length=1)
    """The linears of each block that get an adapter."""


class NoiseConfig(Config):
    """Adaptive quantization noise on RMSNorm weights while sampling (QeRL, arXiv:2510.11696)."""

    sigma_start: float = Field(1e-2, gt=0, le=1)
    """Standard deviation in the first noisy stage."""
    sigma_end: float = Field(5e-4, gt=0, le=1)
    """The same in the last stage; the stages between fall geometrically."""
    num_stages: int = Field(10, ge=3)
    """Equal parts of the run. Stage 0 is free of noise."""

    @model_validator(mode="after")
    def _sigma_falls(self) -> Self:
        if self.sigma_end > self.sigma_start:
            raise ValueError(f"sigma_end {self.sigma_end} is above sigma_start {self.sigma_start}")
        return self


class LossConfig(Config):
    """The clipped surrogate and what corrects it for the sampler (algo/loss.py)."""

    type: Literal["grpo", "dapo"] = "dapo"
    """`grpo`: mean over each completion's tokens, then over completions. `dapo`: mean over all tokens."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || base), k3 estimator; 0 (QeRL) needs no reference forward."""
    correction: Literal["none", "token_tis"] = "token_tis"
    """`token_tis`: weight each token by min(policy / rollout probability, tis_cap) (Ionides 2008)."""
    tis_cap: float = Field(2.0, ge=1)
    """The cap C of `token_tis`."""
    mask_truncated: bool = False
    """Leave completions that were cut at max_completion_tokens out of the loss."""


class OptimizerConfig(Config):
    """AdamW over the LoRA tensors."""

    learning_rate: float = Field(1e-5, ge=0)
    """Peak rate. 0 trains nothing: a control run."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up; `cosine` falls to zero at the last step."""
    max_grad_norm: float = Field(1.0, gt=0)


class RolloutConfig(Config):
    """How completions are sampled."""

    num_prompts: int = Field(8, ge=1)
    """Prompts a step."""
    group_size: int = Field(8, ge=2)
    """Completions a prompt: a group of one has no spread."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is an error before the run, never cut."""
    max_completion_tokens: int = Field(512, ge=1)
    temperature: float = Field(1.0, gt=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


class EvaluationConfig(Config):
    """Held-out rows, graded with the training grader and prompt."""

    every: int | None = Field(None, ge=1)
    """Evaluate each so many steps; None: only the base before and the adapter after the run."""
    max_rows: int = Field(256, ge=1)
    """The first so many rows of the validation file."""
    samples: int = Field(1, ge=1, le=64)
    """Completions a row: 1 is greedy, more are sampled at the training temperature and averaged."""


class TrainConfig(Config):
    """A whole run. The same config, data and seed on the same machine give the same run."""

    model: ModelConfig
    data: DataConfig
    grader: GraderSpec
    rollout: RolloutConfig = RolloutConfig()
    lora: LoraConfig = LoraConfig()
    noise: NoiseConfig | None = NoiseConfig()
    """None: no noise."""
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scale_by_std: bool = True
    """Divide advantages by their group's standard deviation."""
    num_steps: int = Field(100, ge=1)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps a batch of rollouts; divides num_prompts."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens of one forward and backward; a longer sequence goes alone."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Make each block's activations anew in the backward pass; `auto` does so on a GPU, where memory is short."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    max_idle_steps: int | None = Field(3, ge=1)
    """End as `no_learning_signal` if the run's first so many steps had no group with any spread; None: never."""
    seed: int = Field(0, ge=0, lt=2**31)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the policy; `auto` is float32 on a CPU and bfloat16 on a GPU."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.rollout.num_prompts % self.num_minibatches:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} does not divide num_prompts {self.rollout.num_prompts}"
            )
        if self.noise and self.noise.num_stages > self.num_steps:
            raise ValueError(f"noise.num_stages {self.noise.num_stages} is above num_steps {self.num_steps}")
        if self.evaluation.every is not None and self.data.valid_path is None:
            raise ValueError("evaluation.every is set, but there is no data.valid_path to evaluate on")
        if self.optimizer.warmup_steps > self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} is above num_steps {self.num_steps}"
            )
        return self

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read a run's file; relative paths in it count from its folder. ValidationError if it is not a config."""
        raw = tomllib.loads(path.read_text())
        for key in ("train_path", "valid_path"):
            if isinstance(raw.get("data"), dict) and key in raw["data"]:
                raw["data"][key] = str(path.parent / raw["data"][key])
        return cls.model_validate(raw)
