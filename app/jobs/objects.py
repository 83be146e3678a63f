"""What a client sees of the rows: OpenAI's objects, and what we add to them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.jobs.models import Checkpoint, Event, Job, StepMetrics
from app.jobs.state import JobState
from app.jobs.turns import Turn
from app.settings import get_settings

CHECKPOINT_MARK = ":ckpt-step-"
"""Between a fine-tuned model's name and the step of one of its checkpoints."""


class JobError(BaseModel):
    """Why a job failed."""

    code: str
    message: str
    param: str | None


class Failure(BaseModel):
    """What kind of failure it was, and what helps."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    category: Literal["input", "grader", "training", "resources", "limit", "service"]
    retryable: bool
    """Whether the same job may succeed if it is retried as it is."""
    hint: str


class Queue(BaseModel):
    """Where a job that waits stands."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    position: int | None
    """1 is the next; null for a job that is paused."""
    reason: str


class Usage(BaseModel):
    """What a job has taken, in all its attempts."""

    gpu_seconds: float
    tokens: int


class Progress(BaseModel):
    """How far a job is."""

    step: int
    total_steps: int
    percent: float


class JobObject(BaseModel):
    """OpenAI's fine-tuning job, and what we add from `phase` on. Times are seconds since 1970."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    model: str
    organization_id: str
    status: JobState
    training_file: str
    validation_file: str | None
    fine_tuned_model: str | None
    """Its name, once the job has succeeded."""
    finished_at: int | None
    estimated_finish: int | None
    trained_tokens: int | None
    """Completion tokens that were trained on; null until some were."""
    result_files: list[str]
    """Always empty: metrics are at `GET .../metrics`, the adapter at `GET .../adapter`."""
    seed: int
    hyperparameters: dict[str, Any]
    method: dict[str, Any] | None
    metadata: dict[str, str] | None
    integrations: list[Any]
    error: JobError | None
    suffix: str | None

    phase: str | None
    """What a running job is at: preparing, evaluating, training, pausing, publishing."""
    progress: Progress
    attempt: int
    """How often a worker took the job."""
    priority: int
    queue: Queue | None
    """Null unless the job is queued or paused."""
    usage: Usage
    limits: dict[str, Any] | None
    retried_from: str | None
    """The job that this one does again."""
    failure: Failure | None
    resolved_config: dict[str, Any]
    """Every setting of the run, those that were left open included."""
    warnings: list[str]
    """What was settled other than a default would have it."""


def job_object(job: Job, turn: Turn | None) -> JobObject:
    """What a client sees of a row, and of its place in the queue (`turns.py`)."""
    request, config = job.request, job.config
    failed = job.state == JobState.FAILED and job.error_code is not None
    return JobObject(
        id=job.id,
        created_at=int(job.created_at),
        model=job.model,
        organization_id=get_settings().organization,
        status=JobState(job.state),
        training_file=job.training_file,
        validation_file=job.validation_file,
        fine_tuned_model=job.fine_tuned_model if job.state == JobState.SUCCEEDED else None,
        finished_at=_seconds(job.finished_at),
        estimated_finish=_seconds(job.estimated_finish),
        trained_tokens=job.trained_tokens or None,
        result_files=[],
        seed=config.get("seed", 0),
        hyperparameters=request.get("hyperparameters", {}),
        method=request.get("method"),
        metadata=request.get("metadata"),
        integrations=[],
        error=JobError(code=job.error_code or "", message=job.error_message or "", param=job.error_param)
        if failed
        else None,
        suffix=job.suffix,
        phase=job.phase,
        progress=Progress(
            step=job.step, total_steps=job.total_steps, percent=round(100 * job.step / job.total_steps, 1)
        ),
        attempt=job.attempt,
        priority=job.priority,
        queue=turn and Queue(position=turn.position, reason=turn.reason),
        usage=Usage(gpu_seconds=round(job.gpu_seconds, 3), tokens=job.trained_tokens),
        limits=job.limits or None,
        retried_from=job.retried_from,
        failure=_failure(job.error_code or "") if failed else None,
        resolved_config=public_config(config),
        warnings=request.get("warnings", []),
    )


FAILURES = {
    "bad_checkpoint": Failure(category="input", retryable=False, hint="Mend the base model that the message names."),
    "bad_data": Failure(category="input", retryable=False, hint="Mend the rows that the message names."),
    "disk_full": Failure(category="resources", retryable=True, hint="Make room on the worker's disk, then retry."),
    "grader_failed": Failure(category="grader", retryable=False, hint="Run the grader on a sample: graders/run."),
    "limit_reached": Failure(category="limit", retryable=False, hint="Create the job anew with higher limits."),
    "no_learning_signal": Failure(
        category="training", retryable=False, hint="Use easier or harder rows, a finer grader or a larger group."
    ),
    "not_enough_memory": Failure(
        category="resources", retryable=False, hint="Lower what the message names, or use a larger GPU."
    ),
    "training_diverged": Failure(
        category="training", retryable=False, hint="Lower rl.learning_rate, or rl.max_grad_norm."
    ),
}
UNKNOWN_FAILURE = Failure(
    category="service", retryable=True, hint="Retry it; if it fails again, the worker's log has the details."
)


def _failure(code: str) -> Failure:
    return FAILURES.get(code, UNKNOWN_FAILURE)


def public_config(config: dict[str, Any]) -> dict[str, Any]:
    """A row's config without where things lie on the server."""
    hidden = {"model": ("source", "gguf_file"), "data": ("train_path", "valid_path")}
    shown = dict(config)
    for section, names in hidden.items():
        shown[section] = {name: value for name, value in config.get(section, {}).items() if name not in names}
    return shown


class EventObject(BaseModel):
    """OpenAI's event."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: dict[str, Any]


def event_object(event: Event) -> EventObject:
    """What a client sees of a row."""
    return EventObject(
        id=event.id, created_at=int(event.created_at), level=event.level, message=event.message,
        type=event.type, data=event.data,
    )  # fmt: skip


class CheckpointObject(BaseModel):
    """OpenAI's checkpoint."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float]
    sha256: str
    bytes: int


def checkpoint_object(checkpoint: Checkpoint, job: Job) -> CheckpointObject:
    """What a client sees of a row. Metrics have OpenAI's names, and ours."""
    metrics = {"step": float(checkpoint.step), **checkpoint.metrics}
    for theirs, ours in (("train_loss", "loss"), ("reward", "reward/mean"), ("valid_reward", "eval/reward_mean")):
        if ours in metrics:
            metrics[theirs] = metrics[ours]
    return CheckpointObject(
        id=checkpoint.id, created_at=int(checkpoint.created_at), step_number=checkpoint.step,
        fine_tuned_model_checkpoint=f"{job.fine_tuned_model}{CHECKPOINT_MARK}{checkpoint.step}",
        fine_tuning_job_id=job.id, metrics=metrics, sha256=checkpoint.sha256, bytes=checkpoint.num_bytes,
    )  # fmt: skip


class MetricsObject(BaseModel):
    """The metrics of a step; their names are keys beside these three."""

    model_config = ConfigDict(extra="allow")

    step: int
    attempt: int
    created_at: int


def metrics_object(row: StepMetrics) -> MetricsObject:
    """What a client sees of a row."""
    return MetricsObject(step=row.step, attempt=row.attempt, created_at=int(row.created_at), **row.values)


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
