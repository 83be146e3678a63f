"""OpenAI's shapes of a grader's dry run."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from app.jobs.schemas import Block
from qerl_core.graders.spec import GraderSpec
from qerl_core.types import Grade


class RunRequest(Block):
    """A completion to grade."""

    grader: GraderSpec
    model_sample: str
    """The completion."""
    item: dict[str, Any] | None = None
    """The row that it answers."""


class ValidateRequest(Block):
    """A grader to check."""

    grader: GraderSpec


class ValidateAnswer(BaseModel):
    """The grader as it is understood."""

    grader: dict[str, Any]


class RunMetadata(BaseModel):
    """How the run went."""

    name: str
    type: str
    errors: dict[str, bool | str | None]
    execution_time: float
    scores: dict[str, float | None]
    token_usage: int | None
    sampled_model_name: str | None


class RunAnswer(BaseModel):
    """OpenAI's answer, but that `reward` is null where there is none: an error is never a 0."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    reward: float | None
    """null if the grader failed: `metadata.errors` says how."""
    sub_rewards: dict[str, float | None]
    metadata: RunMetadata
    model_grader_token_usage_per_model: dict[str, int]


FLAGS = (
    "formula_parse_error", "sample_parse_error", "truncated_observation_error", "unresponsive_reward_error",
    "invalid_variable_error", "other_error", "python_grader_server_error", "python_grader_runtime_error",
    "model_grader_server_error", "model_grader_refusal_error", "model_grader_parse_error",
)  # fmt: skip


def run_answer(spec: GraderSpec, grade: Grade, *, seconds: float) -> RunAnswer:
    """What a client sees of a grade."""
    kinds = {grade.error_type: grade.error} if grade.reward is None else {}
    errors: dict[str, bool | str | None] = {flag: flag in kinds for flag in FLAGS}
    errors["other_error"] = bool(kinds.keys() - set(FLAGS)) or "other_error" in kinds
    errors["python_grader_runtime_error_details"] = kinds.get("python_grader_runtime_error")
    errors["python_grader_server_error_type"] = kinds.get("python_grader_server_error")
    errors["model_grader_server_error_details"] = kinds.get("model_grader_server_error")
    errors["details"] = next(iter(kinds.values()), None)
    scores = {name: part.reward for name, part in grade.parts.items()}
    metadata = RunMetadata(
        name=spec.name, type=spec.type, errors=errors, execution_time=seconds, scores=scores,
        token_usage=sum(grade.num_tokens.values()) or None, sampled_model_name=next(iter(grade.num_tokens), None),
    )  # fmt: skip
    return RunAnswer(
        reward=grade.reward, sub_rewards=scores, metadata=metadata,
        model_grader_token_usage_per_model=dict(grade.num_tokens),
    )  # fmt: skip
