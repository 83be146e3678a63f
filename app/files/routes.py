"""`/v1/files`: upload, list, read, download, delete."""

from typing import Annotated, Literal

from fastapi import APIRouter, Form, Header, Query, UploadFile
from sqlalchemy import select
from starlette.responses import Response

from app.db import transaction
from app.downloads import attachment
from app.errors import BadRequest
from app.files import service
from app.files.models import File
from app.files.schemas import FileDeleted, FileObject, file_object
from app.paging import ListObject, PagingDep, page
from app.storage import get_store

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("")
def create_file(
    file: UploadFile,
    purpose: Annotated[str, Form()],
    expires_after: Annotated[str | None, Form(alias="expires_after[anchor]")] = None,
) -> FileObject:
    """Upload a data set (JSONL). Every bad line is reported at once, and then nothing is kept."""
    if expires_after is not None:
        raise BadRequest("Files do not expire here: leave it out, and delete the file.", param="expires_after")
    return file_object(service.add(file.file, filename=file.filename or "", purpose=purpose))


@router.get("")
def list_files(
    paging: PagingDep,
    purpose: str | None = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By time; `desc` is newest first.")] = "desc",
) -> ListObject[FileObject]:
    """A page of files."""
    query = select(File) if purpose is None else select(File).where(File.purpose == purpose)
    with transaction(read_only=True) as session:
        return page(session, query, File.id, paging, shown=file_object, ascending=order == "asc")


@router.get("/{file_id}")
def retrieve_file(file_id: str) -> FileObject:
    """A file."""
    with transaction(read_only=True) as session:
        return file_object(service.get(session, file_id))


@router.get("/{file_id}/content", response_class=Response)
def download_file(file_id: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """A file's content as it was uploaded."""
    with transaction(read_only=True) as session:
        file = service.get(session, file_id)
    return attachment(
        file.key, file.filename, num_bytes=file.num_bytes, sha256=file.sha256,
        media_type="application/jsonl", if_none_match=if_none_match,
    )  # fmt: skip


@router.delete("/{file_id}")
def delete_file(file_id: str) -> FileDeleted:
    """Delete a file that no queued or running job uses."""
    with transaction() as session:
        key = service.remove(session, file_id)
    get_store().delete(key)
    return FileDeleted(id=file_id)
