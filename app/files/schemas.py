"""OpenAI's file object."""

from typing import Literal

from pydantic import BaseModel

from app.files.models import File


class FileObject(BaseModel):
    """An uploaded data set. It was checked while it was uploaded, so it is always `processed`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None
    expires_at: None = None
    num_rows: int
    """Ours: rows of the data set."""
    sha256: str
    """Ours: the content's hash, which is its ETag too."""


class FileDeleted(BaseModel):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def file_object(file: File) -> FileObject:
    """What a client sees of a row."""
    return FileObject(
        id=file.id, bytes=file.num_bytes, created_at=int(file.created_at), filename=file.filename,
        purpose=file.purpose, num_rows=file.num_rows, sha256=file.sha256,
    )  # fmt: skip
