"""OpenAI's request becomes a `TrainConfig` here: the one place that knows both.

`RL` is the translation of our own block; bounds, defaults and documentation of its keys are `TrainConfig`'s.
"""

import copy
import math
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from app.errors import BadRequest
from app.files.models import File
from app.models.catalog import CatalogModel
from qerl_core.config import (
    LoraConfig,
    LossConfig,
    ModelConfig,
    NoiseConfig,
    OptimizerConfig,
    RolloutConfig,
    RoundingMethod,
    TrainConfig,
)
from qerl_core.graders.spec import GraderSpec

T = TypeVar("T")

RL = {
    "group_size": "rollout.group_size",
    "max_prompt_tokens": "rollout.max_prompt_tokens",
    "max_completion_tokens": "rollout.max_completion_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "loss": "loss.type",
    "clip_low": "loss.clip_low",
    "clip_high": "loss.clip_high",
    "kl_coef": "loss.kl_coef",
    "correction": "loss.correction",
    "tis_cap": "loss.tis_cap",
    "sequence_cap": "loss.sequence_cap",
    "mask_truncated": "loss.mask_truncated",
    "scale_by_std": "scale_by_std",
    "noise": "noise",
    "overlong": "overlong",
    "max_rounds": "rollout.max_rounds",
    "engine": "rollout.engine",
    "memory_fraction": "rollout.memory_fraction",
    "learning_rate": "optimizer.learning_rate",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "schedule": "optimizer.schedule",
    "max_grad_norm": "optimizer.max_grad_norm",
    "num_minibatches": "num_minibatches",
    "micro_batch_tokens": "micro_batch_tokens",
    "checkpoint_interval": "checkpoint_every",
    "max_idle_steps": "max_idle_steps",
    "safeguards": "safeguards",
    "shuffle": "data.shuffle",
    "eval_rows": "evaluation.max_rows",
    "activation_checkpointing": "activation_checkpointing",
    "dtype": "dtype",
}
"""Each key of the `rl` block, and where the config has it. Besides these there is `max_steps`."""

REQUEST_NAMES = {
    **{target: f"rl.{name}" for name, target in RL.items()},
    "num_steps": "rl.max_steps",
    "num_prompts": "method.reinforcement.hyperparameters.batch_size",
    "rollout.num_prompts": "method.reinforcement.hyperparameters.batch_size",
    "evaluation.every": "method.reinforcement.hyperparameters.eval_interval",
    "data.valid_path": "validation_file",
}
"""What the request calls a field of the config; those of `noise`, `overlong` and `safeguards` get `rl.` before them."""
_CONFIG_NAME = re.compile(
    r"(?<![\w.])(?:"
    + "|".join(
        [
            r"(?:noise|overlong|safeguards)\.\w+",
            *(
                re.escape(name)
                for name in sorted(REQUEST_NAMES, key=len, reverse=True)
                if "." in name or name.count("_")
            ),
        ]
    )
    + r")(?![\w.])"
)

AUTO_STEPS = 100
"""What `n_epochs: "auto"` aims at."""
MAX_EPOCHS = 50
DEFAULT_RATE = OptimizerConfig().learning_rate
MIN_STAGES = 3


class Block(BaseModel):
    """A part of a request: no unknown keys, no "8" for 8, no Infinity."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def given(self) -> dict[str, Any]:
        """What the client set."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _refuse(value: object) -> None:
    if value is not None and value != []:
        raise PydanticCustomError("unsupported_parameter", "this is not supported: leave it out")


def _only_reinforcement(value: object) -> object:
    if value in ("supervised", "dpo"):
        raise PydanticCustomError("unsupported_method", "only 'reinforcement' is supported")
    return value


def _only_once(value: object) -> object:
    if value not in (None, "auto", 1):
        raise PydanticCustomError(
            "unsupported_parameter", "only 1 is supported: set `rl.group_size` for more completions a prompt"
        )
    return None


Auto = Annotated[T | None, BeforeValidator(_auto)]
Unsupported = Annotated[None, BeforeValidator(_refuse)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]


class Hyperparameters(Block):
    """OpenAI's; each may be "auto"."""

    batch_size: Auto[int] = Field(None, ge=1, le=256)
    """Prompts a step, at most the rows of the training file. auto: 8, or as many rows as there are."""
    n_epochs: Auto[int] = Field(None, ge=1, le=MAX_EPOCHS)
    """Passes over the training file. auto: so many, up to 50, as make `rl.max_steps`, or else 100 steps."""
    learning_rate_multiplier: Auto[float] = Field(None, gt=0)
    """Times the default rate of 1e-5; or give `rl.learning_rate`."""
    compute_multiplier: Annotated[None, BeforeValidator(_only_once)] = None
    """1 is all that is supported."""
    eval_interval: Auto[int] = Field(None, ge=1)
    """Evaluate each so many steps; wants `validation_file`. auto: only before and after the run."""
    eval_samples: Auto[int] = Field(None, ge=1, le=64)
    """Completions a row of an evaluation; wants `validation_file`. auto: 1, greedy."""
    reasoning_effort: Literal["auto", "default"] | None = None
    """Base models here have no levels of it."""


class Reinforcement(Block):
    """How completions are graded and the model trained."""

    grader: GraderSpec
    """What scores a completion: string_check, text_similarity, format, math, python, reasoning_gym or multi."""
    hyperparameters: Hyperparameters = Hyperparameters()
    response_format: Unsupported = None
    """Completions are free text."""


class Method(Block):
    """The method; reinforcement is the only one."""

    type: Annotated[Literal["reinforcement"], BeforeValidator(_only_reinforcement)]
    """Always `reinforcement`: this service does nothing else."""
    reinforcement: Reinforcement
    """The grader and hyperparameters of the method."""
    supervised: Unsupported = None
    dpo: Unsupported = None


class Quantization(Block):
    """How the frozen base is held."""

    format: Literal["nvfp4", "none"]
    """4-bit NVFP4, or as the weights are."""
    method: RoundingMethod | None = None
    """How weights are rounded to NVFP4. `gptq`, the best measured, is calibrated on the job's training file; null is
    `gptq` on a GPU, and `rtn` on a CPU, where calibration takes minutes."""


def _config_field(path: str) -> tuple[Any, FieldInfo]:
    owner: type[BaseModel] = TrainConfig
    *sections, name = path.split(".")
    for section in sections:
        owner = owner.model_fields[section].annotation  # type: ignore[assignment]
    field = copy.copy(owner.model_fields[name])
    return field.annotation, field


if TYPE_CHECKING:

    class RlBlock(Block):
        """See `RL`."""

        max_steps: int | None = None
else:
    RlBlock = create_model(
        "RlBlock",
        __base__=Block,
        __doc__="Our own knobs; each has the default of a recipe that works.",
        max_steps=(int | None, Field(None, ge=1, description="End after so many steps, if the epochs give more.")),
        **{name: _config_field(path) for name, path in RL.items()},
    )


class JobLimits(Block):
    """What a job may take at most; its run then ends at its next checkpoint."""

    max_gpu_seconds: float | None = Field(None, gt=0)
    """How long its attempts may hold a GPU, together."""
    max_wall_seconds: float | None = Field(None, gt=0)
    """How long after its create, or its last resume, it may run."""
    on_limit: Literal["pause", "fail"] = "pause"
    """A paused job may be resumed with higher limits."""

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.max_gpu_seconds is None and self.max_wall_seconds is None:
            raise PydanticCustomError("no_limit", "give max_gpu_seconds or max_wall_seconds, or leave limits out")
        return self

    def stored(self) -> dict[str, Any]:
        """As the row has it."""
        return self.model_dump(mode="json", exclude_none=True)


class ResumeRequest(Block):
    """What may change when a job goes on."""

    limits: JobLimits | None = None
    """In place of those that it had."""


class JobRequest(Block):
    """A create: OpenAI's body, and our blocks `lora`, `rl` and `quantization` (the SDK's `extra_body`)."""

    model: str = Field(min_length=1, max_length=256)
    """A base model's id; `GET /v1/models` lists them."""
    training_file: str = Field(min_length=1, max_length=64)
    """The id of an uploaded file."""
    validation_file: str | None = Field(None, min_length=1, max_length=64)
    """The id of an uploaded file with held-out rows: the base and the adapter are evaluated on it."""
    suffix: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[^:/\\\x00-\x1f\x7f]*$")
    """Part of the fine-tuned model's name: no ":", "/", backslash or control character."""
    seed: int | None = Field(None, ge=0, lt=2**31)
    """The same job with the same seed on the same machine gives the same adapter. Drawn if absent."""
    metadata: dict[Key, Value] | None = Field(None, max_length=16)
    """Up to 16 pairs of strings, keys of up to 64 and values of up to 512 characters."""
    method: Method
    """`{"type": "reinforcement", "reinforcement": {"grader": ...}}`."""
    hyperparameters: Unsupported = None
    """Give them as `method.reinforcement.hyperparameters`."""
    integrations: Unsupported = None
    """Metrics are at `GET .../metrics`."""
    lora: LoraConfig = LoraConfig()
    rl: RlBlock = RlBlock()
    quantization: Quantization | None = None
    """Else as the operator's list of models says."""
    limits: JobLimits | None = None
    """What the job may take at most."""
    priority: int = Field(0, ge=-100, le=100)
    """Higher ones come first; among equals the owners take turns."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_stored(cls, body: Any) -> Any:
        """Refuse text that PostgreSQL or UTF-8 cannot hold."""
        rest: list[tuple[tuple[int | str, ...], Any]] = [((), body)]
        while rest:
            path, value = rest.pop()
            if isinstance(value, dict):
                rest.extend(((*path, key), item) for key, item in value.items())
                value = "".join(key for key in value if isinstance(key, str))
            elif isinstance(value, list):
                rest.extend(((*path, place), item) for place, item in enumerate(value))
            if isinstance(value, str) and any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value):
                message = "text may hold no NUL character and no unpaired surrogate"
                raise PydanticCustomError("unstorable_text", message, {"path": path})
        return body


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request comes to."""

    config: TrainConfig
    request: dict[str, Any]
    """The request's own blocks with resolved values, as they are echoed."""


def _base(block: Quantization | None, model: CatalogModel) -> ModelConfig:
    if block is None:
        return model.config(None, None)
    if block.format == "none" and block.method is not None:
        raise BadRequest(
            'quantization.method has no effect with quantization.format "none": leave it out.',
            param="quantization.method",
        )
    return model.config(block.format, block.method)


def resolve(request: JobRequest, *, model: CatalogModel, train: File, valid: File | None) -> Plan:
    """Fill in what the request leaves open. BadRequest names what cannot be, and a remedy."""
    hyper, rl = request.method.reinforcement.hyperparameters, request.rl.given()
    max_steps = rl.pop("max_steps", None)
    warnings: list[str] = []
    _check_limits(request, rl, model)
    batch_size = _batch_size(hyper.batch_size, rl.get("num_minibatches", 1), model, train.num_rows)
    n_epochs, num_steps = _length(hyper.n_epochs, max_steps, batch_size, model, train.num_rows, warnings)
    _check_effects(hyper, rl, num_steps=num_steps, has_valid=valid is not None, warnings=warnings)
    if request.validation_file == request.training_file:
        warnings.append("validation_file is the training_file: its scores say nothing of rows that were not seen.")
    rl["learning_rate"] = _learning_rate(hyper.learning_rate_multiplier, rl.get("learning_rate"))
    rl["noise"] = _noise(rl.get("noise", NoiseConfig()), num_steps, warnings)
    parts: dict[str, Any] = {
        "model": _base(request.quantization, model),
        "data": {"train_path": train.key, "valid_path": valid and valid.key},
        "grader": request.method.reinforcement.grader,
        "lora": request.lora,
        "rollout": {"num_prompts": batch_size},
        "evaluation": {"every": hyper.eval_interval, "samples": hyper.eval_samples or 1},
        "num_steps": num_steps,
        "seed": secrets.randbelow(2**31) if request.seed is None else request.seed,
    }
    for name, value in rl.items():
        section, _, field = RL[name].rpartition(".")
        target = parts.setdefault(section, {}) if section else parts
        target[field] = value
    config = _validated(parts)
    return Plan(config, _echo(request, config, n_epochs, warnings))


def _check_limits(request: JobRequest, rl: dict[str, Any], model: CatalogModel) -> None:
    limits, rank = model.limits, request.lora.rank
    if rank > limits.max_rank:
        raise BadRequest(f"lora.rank {rank} is above the {limits.max_rank} of {model.id}.", param="lora.rank")
    rollout = RolloutConfig()
    group_size = rl.get("group_size", rollout.group_size)
    if group_size > limits.max_group_size:
        raise BadRequest(
            f"rl.group_size {group_size} is above the {limits.max_group_size} of {model.id}.", param="rl.group_size"
        )
    prompt = rl.get("max_prompt_tokens", rollout.max_prompt_tokens)
    completion = rl.get("max_completion_tokens", rollout.max_completion_tokens)
    if prompt + completion > limits.context_tokens:
        param = "rl.max_prompt_tokens" if "max_completion_tokens" not in rl else "rl.max_completion_tokens"
        raise BadRequest(
            f"rl.max_prompt_tokens {prompt} and rl.max_completion_tokens {completion} together are above the context "
            f"of {model.id}, {limits.context_tokens} tokens: lower one of them.",
            param=param,
        )


def _batch_size(wanted: int | None, num_minibatches: int, model: CatalogModel, num_rows: int) -> int:
    param = "method.reinforcement.hyperparameters.batch_size"
    limit = min(num_rows, model.limits.max_batch_size)
    if wanted is None:
        if num_minibatches > limit:
            raise BadRequest(
                f"rl.num_minibatches {num_minibatches} is above the largest batch, {limit} prompts.",
                param="rl.num_minibatches",
            )
        auto = min(max(RolloutConfig().num_prompts, num_minibatches), limit)
        return auto - auto % num_minibatches
    if wanted > num_rows:
        raise BadRequest(
            f"batch_size {wanted} is above the {num_rows} rows of the training file: lower it or add rows.", param=param
        )
    if wanted > limit:
        raise BadRequest(f"batch_size {wanted} is above the {limit} of {model.id}.", param=param)
    if wanted % num_minibatches:
        raise BadRequest(
            f"batch_size {wanted} is not a multiple of rl.num_minibatches {num_minibatches}: change one of them.",
            param=param,
        )
    return wanted


def _length(
    wanted: int | None, max_steps: int | None, batch_size: int, model: CatalogModel, num_rows: int, warnings: list[str]
) -> tuple[int, int]:
    """Epochs and steps."""
    aim = max_steps or AUTO_STEPS
    n_epochs = wanted or min(MAX_EPOCHS, math.ceil(aim * batch_size / num_rows))
    num_steps = math.ceil(num_rows * n_epochs / batch_size)
    if max_steps is not None and num_steps < max_steps:
        warnings.append(
            f"rl.max_steps {max_steps} is not reached: {n_epochs} epochs of {num_rows} rows, {batch_size} a step, "
            f"are {num_steps} steps."
        )
    num_steps = min(num_steps, max_steps or num_steps)
    if num_steps > model.limits.max_steps:
        raise BadRequest(
            f"The job would take {num_steps} steps, above the {model.limits.max_steps} of {model.id}: "
            "set rl.max_steps or fewer epochs.",
            param="rl.max_steps",
        )
    return n_epochs, num_steps


def _check_effects(
    hyper: Hyperparameters, rl: dict[str, Any], *, num_steps: int, has_valid: bool, warnings: list[str]
) -> None:
    """Refuse a setting without effect."""
    prefix = "method.reinforcement.hyperparameters."
    settings = {f"{prefix}eval_interval": hyper.eval_interval, f"{prefix}eval_samples": hyper.eval_samples}
    settings["rl.eval_rows"] = rl.get("eval_rows")
    for param, value in settings.items():
        if value is not None and not has_valid:
            raise BadRequest(f"{param} has no effect without a validation_file: give one.", param=param)
    if hyper.eval_interval is not None and hyper.eval_interval > num_steps:
        warnings.append(f"eval_interval {hyper.eval_interval} is above the {num_steps} steps of the job.")
    correction = rl.get("correction", LossConfig().correction)
    for name, needed in (("tis_cap", "token_tis"), ("sequence_cap", "sequence_mask")):
        if name in rl and correction != needed:
            raise BadRequest(
                f'rl.{name} has no effect with rl.correction "{correction}": leave it out.', param=f"rl.{name}"
            )
    if "memory_fraction" in rl and rl.get("engine") == "hf":
        raise BadRequest(
            'rl.memory_fraction has no effect with rl.engine "hf": leave it out.', param="rl.memory_fraction"
        )
    if rl.get("warmup_steps", 0) > num_steps:
        raise BadRequest(
            f"rl.warmup_steps {rl['warmup_steps']} is above the {num_steps} steps of the job.", param="rl.warmup_steps"
        )


def _learning_rate(multiplier: float | None, rate: float | None) -> float:
    if multiplier is not None and rate is not None:
        raise BadRequest(
            "learning_rate_multiplier and rl.learning_rate both set the rate: give one of them.",
            param="rl.learning_rate",
        )
    if rate is not None:
        return rate
    return DEFAULT_RATE * (1.0 if multiplier is None else multiplier)


def _noise(noise: NoiseConfig | None, num_steps: int, warnings: list[str]) -> NoiseConfig | None:
    """The noise, with no more stages than steps unless the client asked for them."""
    if noise is None or noise.num_stages <= num_steps:
        return noise
    if "num_stages" in noise.model_fields_set:
        raise BadRequest(
            f"rl.noise.num_stages {noise.num_stages} is above the {num_steps} steps of the job: lower it, or set "
            "rl.noise to null.",
            param="rl.noise.num_stages",
        )
    if num_steps < MIN_STAGES:
        warnings.append(f"rl.noise is off: {num_steps} steps are too few for its {MIN_STAGES} stages.")
        return None
    warnings.append(f"rl.noise.num_stages is {num_steps}, the steps of the job, instead of {noise.num_stages}.")
    return noise.model_copy(update={"num_stages": num_steps})


def _validated(parts: dict[str, Any]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(parts)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(map(str, fault["loc"]))
        message, named = _in_the_requests_words(fault["msg"].removeprefix("Value error, "))
        raise BadRequest(message, param=REQUEST_NAMES.get(path, path) or named) from error


def _in_the_requests_words(message: str) -> tuple[str, str | None]:
    """A message of `TrainConfig` with the request's names of its fields, and the first of them."""
    found = [REQUEST_NAMES.get(match[0], f"rl.{match[0]}") for match in _CONFIG_NAME.finditer(message)]
    told = _CONFIG_NAME.sub(lambda match: REQUEST_NAMES.get(match[0], f"rl.{match[0]}"), message)
    return told, found[0] if found else None


def _echo(request: JobRequest, config: TrainConfig, n_epochs: int, warnings: list[str]) -> dict[str, Any]:
    evaluated = config.data.valid_path is not None
    shared = {
        "batch_size": config.rollout.num_prompts,
        "n_epochs": n_epochs,
        "learning_rate_multiplier": float(f"{config.optimizer.learning_rate / DEFAULT_RATE:.12g}"),
    }
    hyperparameters = {
        **shared,
        "compute_multiplier": 1,
        "eval_interval": config.evaluation.every,
        "eval_samples": config.evaluation.samples if evaluated else None,
        "reasoning_effort": "default",
    }
    grader = config.grader.model_dump(mode="json")
    return {
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": hyperparameters, "response_format": None},
        },
        "hyperparameters": shared,
        "metadata": request.metadata,
        "warnings": warnings,
    }
