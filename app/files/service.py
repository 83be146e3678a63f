"""Uploads: checked, stored under a name of ours, and kept while a job needs them."""

import io
import re
from dataclasses import asdict
from typing import BinaryIO

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from app.db import transaction
from app.errors import BadRequest, NotFound, TooLarge
from app.files.models import File
from app.ids import new_id
from app.jobs.models import Job
from app.jobs.state import ENDED
from app.settings import get_settings
from app.storage import get_store
from qerl_core.data.rows import RowFault, RowsReport, validate_rows

PURPOSE = "fine-tune"
MAX_FAULTS = 1000
"""So many are listed; all are counted."""
SHOWN_FAULTS = 3
"""So many are in the message."""


def add(stream: BinaryIO, *, filename: str, purpose: str) -> File:
    """Check a data set and keep it. BadRequest lists every bad line, and then nothing is kept."""
    if purpose != PURPOSE:
        raise BadRequest(f"The purpose {purpose!r} is not supported: use {PURPOSE!r}.", param="purpose")
    if stream.seek(0, io.SEEK_END) > (limit := get_settings().max_upload_bytes):
        raise TooLarge(f"The file is above the limit of {limit} bytes.", param="file")
    stream.seek(0)
    report = validate_rows(stream)
    if report.num_faults:
        raise _bad_file(report)
    stream.seek(0)
    file_id = new_id("file-")
    key = f"files/{file_id}.jsonl"
    num_bytes, sha256 = get_store().write(key, stream)
    file = File(
        id=file_id, filename=_plain_name(filename), purpose=purpose, num_bytes=num_bytes,
        num_rows=report.num_rows, sha256=sha256, key=key,
    )  # fmt: skip
    try:
        with transaction() as session:
            session.add(file)
    except BaseException:
        get_store().delete(key)
        raise
    return file


def get(session: Session, file_id: str) -> File:
    """The file; NotFound if there is none."""
    file = session.get(File, file_id)
    if file is None:
        raise NotFound(f"No file has the id {file_id!r}.", param="file_id")
    return file


def remove(session: Session, file_id: str) -> str:
    """Delete a file's row; BadRequest while a job needs it. Returns the key that may go once this is committed."""
    # The row is locked by a job that is being made with it.
    file = session.scalar(select(File).where(File.id == file_id).with_for_update())
    if file is None:
        raise NotFound(f"No file has the id {file_id!r}.", param="file_id")
    uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
    if job_id := session.scalar(select(Job.id).where(uses, Job.state.not_in(ENDED)).limit(1)):
        raise BadRequest(
            f"The file is in use by the job {job_id}: cancel it, or wait until it has ended.",
            param="file_id",
            code="file_in_use",
        )
    session.execute(delete(File).where(File.id == file_id))
    return file.key


def _bad_file(report: RowsReport) -> BadRequest:
    count = "a fault" if report.num_faults == 1 else f"{report.num_faults} faults"
    shown = " ".join(_told(fault) for fault in report.faults[:SHOWN_FAULTS])
    rest = f" And {report.num_faults - SHOWN_FAULTS} more, in `errors`." if report.num_faults > SHOWN_FAULTS else ""
    return BadRequest(
        f"The file has {count}. {shown}{rest}",
        param="file",
        code="invalid_file",
        errors=[asdict(fault) for fault in report.faults[:MAX_FAULTS]],
        num_errors=report.num_faults,
    )


def _told(fault: RowFault) -> str:
    where = f"Line {fault.line}" + (f", {fault.field}" if fault.field else "") + ": " if fault.line else ""
    return f"{where}{fault.reason.rstrip('.')}."


def _plain_name(filename: str) -> str:
    """The last part of a client's name for a file, without control characters; never used as a path."""
    name = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "", re.split(r"[/\\]", filename)[-1])[:255]
    return name or "data.jsonl"
