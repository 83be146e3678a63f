"""One config for a run: resolved at the HTTP edge, stored on the row, read by the loop, written beside the adapter.

Torch-free. The string under a field is its documentation, here and in the API. The defaults are a recipe that
works: QeRL's (arXiv:2510.11696) with corrections for what its sampler did.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qerl_core.graders.spec import GraderSpec

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_TARGETS: tuple[TargetModule, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip


RoundingMethod = Literal["rtn", "four_over_six", "sweep", "gptq"]


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
    quantization_method: RoundingMethod | Literal["auto"] = "auto"
    """How weights are rounded to NVFP4 (`quant/nvfp4.py`); of no account for a base that is NVFP4 already.

    `gptq`, the best measured, rounds for the inputs that the run's own prompts and the base's answers to them bring
    each layer. `auto` is `gptq` on a GPU, and `rtn` on a CPU, where calibration takes minutes.
    """


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

    schedule: Literal["exponential", "linear", "cosine", "adaptive"] = "exponential"
    """How sigma goes from sigma_start to sigma_end: geometrically (the paper's), linearly or by half a cosine over the
    stages. `adaptive` starts from sigma_end and, from step to step, holds what `hold` names at `set_point`."""
    sigma_start: float = Field(1e-2, gt=0, le=1)
    """Standard deviation in the first noisy stage; the largest that `adaptive` takes."""
    sigma_end: float = Field(5e-4, gt=0, le=1)
    """The same in the last stage; the smallest that `adaptive` takes."""
    num_stages: int = Field(10, ge=3)
    """Equal parts of the run. Stage 0 is free of noise."""
    hold: Literal["kl", "entropy"] = "kl"
    """What `adaptive` controls: KL(rollout || policy), which noise raises, or the policy's entropy, which falls
    without exploration."""
    set_point: float | None = Field(None, gt=0)
    """In nats a token; `adaptive` wants it, the others have no use for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.sigma_end > self.sigma_start:
            raise ValueError(f"sigma_end {self.sigma_end} is above sigma_start {self.sigma_start}")
        if (self.schedule == "adaptive") != (self.set_point is not None):
            wanted = "wants a set_point" if self.set_point is None else "has no use for set_point"
            raise ValueError(f"schedule {self.schedule} {wanted}")
        return self


class LossConfig(Config):
    """The clipped surrogate and what corrects it for the sampler (algo/loss.py)."""

    type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """`grpo`: mean over each completion's tokens, then over completions. `dapo`: mean over all tokens. `dr_grpo`: sum
    over tokens by max_completion_tokens, so long wrong answers are not favoured; wants scale_by_std false. `gspo`: one
    ratio a completion, the geometric mean of its tokens'. `cispo`: every token keeps its gradient, weighted by the
    clipped ratio."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low. `gspo`: 3e-4 unless it is given."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high. `gspo`: 4e-4 unless it is given."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of KL(policy || base), k3 estimator; 0 (QeRL) needs no reference forward."""
    correction: Literal["none", "token_tis", "sequence_mask", "icepop", "bypass"] = "token_tis"
    """With k = policy / rollout probability: `token_tis` weights each token by min(k, tis_cap) (Ionides 2008).
    `sequence_mask` weights a completion by the product of its k, and drops it where that is above sequence_cap.
    `icepop` weights each token by k, and drops it outside [0.5, 5]. `bypass` takes the clipped ratio against the
    rollout's probability itself."""
    tis_cap: float = Field(2.0, ge=1)
    """The cap C of `token_tis`."""
    sequence_cap: float = Field(3.0, ge=1)
    """The cap C of `sequence_mask`."""
    mask_truncated: bool = False
    """Leave completions that were cut at max_completion_tokens out of the loss."""

    @model_validator(mode="before")
    @classmethod
    def _clip_of_a_sequence(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("type") == "gspo":
            return {"clip_low": 3e-4, "clip_high": 4e-4} | raw
        return raw


class OverlongConfig(Config):
    """DAPO's soft penalty for long completions (arXiv:2503.14476): subtracted from the reward before advantages."""

    buffer_tokens: int = Field(..., ge=1)
    """The last so many tokens before max_completion_tokens; over them the penalty grows from 0 to `penalty`."""
    penalty: float = Field(1.0, gt=0)
    """Of a completion that was cut."""


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
    max_rounds: int = Field(1, ge=1, le=20)
    """Dynamic sampling (DAPO): prompts whose completions all got one reward are replaced by new ones, in so many
    rounds a step at most. 1: never."""
    engine: Literal["auto", "hf", "vllm", "vllm_stock"] = "auto"
    """What samples. `vllm` shares the base with the trainer, and wants a Hopper GPU, an NVFP4 base and LoRA of rank 64
    at most; `vllm_stock` is vLLM as it comes, with a base of its own; `hf` runs anywhere, slowly. `auto` takes `vllm`
    where it can, else `vllm_stock` where there is a GPU with vLLM, and an event says which it took and why."""
    memory_fraction: float = Field(0.5, gt=0, lt=1)
    """The part of the GPU's memory that vllm may fill: the base's weights, KV cache and its own activations."""


class EvaluationConfig(Config):
    """Held-out rows, graded with the training grader and prompt."""

    every: int | None = Field(None, ge=1)
    """Evaluate each so many steps; None: only the base before and the adapter after the run."""
    max_rows: int = Field(256, ge=1)
    """The first so many rows of the validation file."""
    samples: int = Field(1, ge=1, le=64)
    """Completions a row: 1 is greedy, more are sampled at the training temperature and averaged."""


class SafeguardsConfig(Config):
    """When the service pauses a run by itself (`safeguards.py`). Each looks at five steps together; null is off."""

    max_grader_error_frac: float | None = Field(0.05, ge=0, lt=1)
    """Part of the grades that may be errors. Above a tenth the run fails as `grader_failed`, in any case."""
    max_kl: float | None = Field(1.0, gt=0)
    """KL(rollout || policy), in nats a token."""
    min_entropy_ratio: float | None = Field(0.05, gt=0, lt=1)
    """The policy's entropy against that of the first five steps; of account only while the reward has not risen."""
    min_length_ratio: float | None = Field(0.1, gt=0, lt=1)
    """The completions' mean length, likewise."""


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
    overlong: OverlongConfig | None = None
    """None: no penalty."""
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    safeguards: SafeguardsConfig | None = SafeguardsConfig()
    """None: the service never pauses the run by itself."""
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
        if self.loss.type == "dr_grpo" and self.scale_by_std:
            raise ValueError("loss.type dr_grpo leaves advantages unscaled: set scale_by_std to false")
        if self.overlong and self.overlong.buffer_tokens >= self.rollout.max_completion_tokens:
            raise ValueError(
                f"overlong.buffer_tokens {self.overlong.buffer_tokens} is not below rollout.max_completion_tokens "
                f"{self.rollout.max_completion_tokens}"
            )
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
