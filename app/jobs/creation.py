"""A create from start to end: every check first, then the row, in one transaction; and never two for one."""

import hashlib
import json
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.callers import current_owner
from app.db import now, transaction
from app.errors import BadRequest, JobConflict
from app.files.models import File
from app.jobs import service
from app.jobs.models import Job
from app.jobs.schemas import JobRequest, Plan, resolve
from app.jobs.state import JobState
from app.models.catalog import CatalogModel, get_catalog
from app.storage import get_store
from qerl_core.data.rows import first_without, iterate_rows
from qerl_core.graders.check import check_grader, item_paths
from qerl_core.graders.spec import GraderSpec

RETRY_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Repeat:
    """How a create is known again."""

    fingerprint: str
    """sha256 of its body."""
    key: str | None
    """The client's `Idempotency-Key`."""
    retried: bool
    """The client says that it has sent this before, and got no answer."""


def fingerprint(request: JobRequest) -> str:
    """The sha256 of what the client sent, however it was spaced or ordered."""
    sent = request.model_dump(mode="json", exclude_unset=True)
    return hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()


def create(request: JobRequest, repeat: Repeat) -> tuple[Job, bool]:
    """Queue a job. False if it is one that the same create has made before. BadRequest leaves nothing behind."""
    with transaction(read_only=True) as session:
        arrived_at = session.scalars(select(now())).one()
        if known := _known(session, repeat, arrived_at):
            return known, False
    plan, files = planned(request)
    job = Job(
        model=request.model, training_file=request.training_file, validation_file=request.validation_file,
        suffix=request.suffix,
        request=plan.request, config=plan.config.model_dump(mode="json"), total_steps=plan.config.num_steps,
        idempotency_key=repeat.key, fingerprint=repeat.fingerprint, retried=repeat.retried,
        priority=request.priority, limits=request.limits.stored() if request.limits else {},
    )  # fmt: skip
    return _add(job, {param: file.id for param, file in files.items()}, repeat, arrived_at)


def planned(request: JobRequest) -> tuple[Plan, dict[str, File]]:
    """What a create would come to, and its files by parameter. Every check of a create, and no side effect."""
    with transaction(read_only=True) as session:
        model = _base_model(request.model)
        train = _file(session, request.training_file, "training_file")
        valid = None
        if request.validation_file is not None:
            valid = _file(session, request.validation_file, "validation_file")
    files = {"training_file": train} | ({"validation_file": valid} if valid else {})
    plan = resolve(request, model=model, train=train, valid=valid)
    _check_grader(plan.config.grader, files)
    return plan, files


def retry(job_id: str, repeat: Repeat) -> tuple[Job, bool]:
    """Queue a job that has failed or was cancelled once more, as a new one from its first step, with the same seed.

    False if the same retry has made it before. BadRequest if the job has not ended so, or what it needs is gone.
    """
    with transaction(read_only=True) as session:
        arrived_at = session.scalars(select(now())).one()
        if known := _known(session, repeat, arrived_at):
            return known, False
        old = service.get(session, job_id)
    if old.state not in (JobState.FAILED, JobState.CANCELLED):
        remedy = "create a new one" if old.state == JobState.SUCCEEDED else "only one that has ended can be"
        raise JobConflict(f"Job {job_id} is {old.state} and cannot be retried: {remedy}.", param="fine_tuning_job_id")
    _base_model(old.model)
    files = {"training_file": old.training_file}
    if old.validation_file is not None:
        files["validation_file"] = old.validation_file
    job = Job(
        model=old.model, training_file=old.training_file, validation_file=old.validation_file, suffix=old.suffix,
        request=old.request, config=old.config, total_steps=old.total_steps,
        idempotency_key=repeat.key, fingerprint=repeat.fingerprint, retried=repeat.retried,
        priority=old.priority, limits=old.limits, retried_from=old.id, owner=old.owner,
    )  # fmt: skip
    return _add(job, files, repeat, arrived_at)


def _add(job: Job, files: dict[str, str], repeat: Repeat, arrived_at: float) -> tuple[Job, bool]:
    """Queue a job whose files, by parameter, are still there; False and the job of its twin if that came first."""
    with transaction() as session:
        _one_at_a_time(session, repeat)
        if known := _known(session, repeat, arrived_at):
            return known, False
        for param, file_id in files.items():
            _file(session, file_id, param, lock=True)
        return service.submit(session, job), True


def _base_model(model_id: str) -> CatalogModel:
    catalog = get_catalog()
    model = catalog.find(model_id)
    if model is None:
        allowed = ", ".join(catalog.ids())
        raise BadRequest(
            f"The model {model_id!r} does not exist or cannot be fine-tuned here: use one of {allowed}.",
            param="model",
            code="model_not_found",
        )
    return model


def _file(session: Session, file_id: str, param: str, *, lock: bool = False) -> File:
    """An uploaded file; with `lock` it cannot be deleted before this transaction ends."""
    query = select(File).where(File.id == file_id)
    file = session.scalar(query.with_for_update(read=True) if lock else query)
    if file is None:
        raise BadRequest(
            f"{param}: no file has the id {file_id!r}: upload it with POST /v1/files.",
            param=param,
            code="file_not_found",
        )
    return file


def _check_grader(spec: GraderSpec, files: dict[str, File]) -> None:
    """Refuse a grader whose every grade would be an error, or that names what some row has not."""
    where = "method.reinforcement.grader"
    for problem in check_grader(spec):
        param = f"{where}.{problem.field}"
        raise BadRequest(f"{param}: {problem.message}.", param=param, code="invalid_grader")
    fields = item_paths(spec)
    for name, file in files.items() if fields else ():
        try:
            with get_store().open(file.key) as stream:
                lacking = first_without(iterate_rows(stream), fields)
        except FileNotFoundError as error:
            raise BadRequest(
                f"{name}: the content of {file.id} is no longer in the store: upload it again.",
                param=name,
                code="file_not_found",
            ) from error
        for path, line in lacking.items():
            param = f"{where}.{fields[path]}"
            raise BadRequest(
                f"{param}: line {line} of the {name} has no item.{path}: mend the name, or give it to every row.",
                param=param,
                code="invalid_grader",
            )


def _known(session: Session, repeat: Repeat, arrived_at: float) -> Job | None:
    """The job that the same create of the same owner has made before; an admin sees others' too, and repeats none."""
    own = Job.owner == current_owner()
    if repeat.key is not None:
        job = session.scalar(select(Job).where(own, Job.idempotency_key == repeat.key))
        if job is not None and job.fingerprint != repeat.fingerprint:
            raise BadRequest(
                "This Idempotency-Key was used for another body: use a new key for a new job.",
                code="idempotency_key_reused",
            )
        return job
    same = select(Job).where(own, Job.fingerprint == repeat.fingerprint, Job.idempotency_key.is_(None))
    if repeat.retried:
        same = same.where(Job.created_at >= now() - RETRY_WINDOW_S)
    else:  # it may itself be the one that was given up: then its retry has come first
        same = same.where(Job.created_at >= arrived_at, Job.retried)
    return session.scalar(same.order_by(Job.id.desc()).limit(1))


def _one_at_a_time(session: Session, repeat: Repeat) -> None:
    """Let the same create wait for its twin. On SQLite whoever writes is alone already."""
    if session.get_bind().dialect.name == "postgresql":
        digest = hashlib.sha256((repeat.key or repeat.fingerprint).encode()).digest()
        session.execute(select(func.pg_advisory_xact_lock(int.from_bytes(digest[:8], signed=True))))
