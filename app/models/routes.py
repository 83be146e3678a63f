"""`/v1/models`: the base models that jobs may name, and what succeeded jobs made of them."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import select

from app.db import transaction
from app.errors import NotFound
from app.jobs.models import Job
from app.jobs.state import JobState
from app.models.catalog import get_catalog
from app.paging import ListObject
from app.settings import get_settings

router = APIRouter(prefix="/v1/models", tags=["models"])

BASE_OWNER = "base"


class ModelObject(BaseModel):
    """OpenAI's model object."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


def _base_models() -> list[ModelObject]:
    catalog = get_catalog()
    return [ModelObject(id=name, created=catalog.created, owned_by=BASE_OWNER) for name in catalog.ids()]


def _fine_tuned(job: Job) -> ModelObject:
    return ModelObject(
        id=job.fine_tuned_model, created=int(job.finished_at or job.created_at), owned_by=get_settings().organization
    )


@router.get("")
def list_models() -> ListObject[ModelObject]:
    """Every base model, then fine-tuned ones, newest first."""
    with transaction(read_only=True) as session:
        query = select(Job).where(Job.state == JobState.SUCCEEDED).order_by(Job.id.desc())
        data = _base_models() + [_fine_tuned(job) for job in session.scalars(query)]
    return ListObject(data=data, first_id=data[0].id, last_id=data[-1].id)


@router.get("/{model:path}")
def retrieve_model(model: str) -> ModelObject:
    """A base or fine-tuned model."""
    if found := next((entry for entry in _base_models() if entry.id == model), None):
        return found
    with transaction(read_only=True) as session:
        query = select(Job).where(Job.fine_tuned_model == model, Job.state == JobState.SUCCEEDED)
        job = session.scalar(query)
        if job is None:
            raise NotFound(f"The model {model!r} does not exist.", param="model", code="model_not_found")
        return _fine_tuned(job)
