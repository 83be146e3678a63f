"""`POST /v1/fine_tuning/jobs/validate`: what a create would come to, without one."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db import transaction
from app.jobs.creation import planned
from app.jobs.models import Job
from app.jobs.objects import public_config
from app.jobs.schemas import JobRequest
from app.jobs.state import JobState

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"])

RECENT_JOBS = 20


class Estimate(BaseModel):
    """How much the job would be."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    total_steps: int
    completions: int
    """Of all training steps, without dynamic sampling's further rounds."""
    max_completion_tokens: int
    """If every completion were as long as it may be."""
    gpu_seconds: float | None
    """From the caller's last jobs that succeeded with this model, in proportion to `max_completion_tokens`; null
    without one."""
    from_jobs: int
    """So many jobs."""


class Validation(BaseModel):
    """A create that would be accepted. One that would not is answered with its error."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["fine_tuning.job.validation"] = "fine_tuning.job.validation"
    valid: Literal[True] = True
    model: str
    method: dict[str, Any]
    hyperparameters: dict[str, Any]
    resolved_config: dict[str, Any]
    """Every setting, those that were left open included. Without a seed, one is drawn anew at each create."""
    warnings: list[str]
    estimate: Estimate


@router.post("/jobs/validate")
def validate_job(request: JobRequest) -> Validation:
    """Check a create as `POST /v1/fine_tuning/jobs` would, and say what it comes to. Nothing is stored or queued."""
    plan, _ = planned(request)
    config = plan.config.model_dump(mode="json")
    with transaction(read_only=True) as session:
        estimate = _estimate(session, request.model, config)
    return Validation(
        model=request.model, method=plan.request["method"], hyperparameters=plan.request["hyperparameters"],
        resolved_config=public_config(config), warnings=plan.request["warnings"], estimate=estimate,
    )  # fmt: skip


def _estimate(session: Session, model: str, config: dict[str, Any]) -> Estimate:
    done = select(Job.gpu_seconds, Job.config).where(Job.model == model, Job.state == JobState.SUCCEEDED)
    jobs = session.execute(done.where(Job.gpu_seconds > 0).order_by(Job.id.desc()).limit(RECENT_JOBS)).all()
    tokens = sum(_max_tokens(job.config) for job in jobs)
    seconds = sum(job.gpu_seconds for job in jobs)
    return Estimate(
        total_steps=config["num_steps"],
        completions=_completions(config),
        max_completion_tokens=_max_tokens(config),
        gpu_seconds=round(_max_tokens(config) * seconds / tokens, 1) if tokens else None,
        from_jobs=len(jobs),
    )


def _completions(config: dict[str, Any]) -> int:
    rollout = config["rollout"]
    return int(config["num_steps"] * rollout["num_prompts"] * rollout["group_size"])


def _max_tokens(config: dict[str, Any]) -> int:
    return int(_completions(config) * config["rollout"]["max_completion_tokens"])
