"""The metadata filter of the list of jobs: `metadata[key]=value`, or `metadata=null`."""

import re

from sqlalchemy import Select
from starlette.datastructures import QueryParams

from app.errors import BadRequest
from app.jobs.models import Job

PAIR = re.compile(r"metadata\[(.*)\]", re.DOTALL)


def with_metadata(query: Select[Job], params: QueryParams) -> Select[Job]:
    """Keep the jobs that have every pair asked for, or that have no metadata."""
    for name, value in params.multi_items():
        if match := PAIR.fullmatch(name):
            query = query.where(Job.request["metadata"][_plain(match[1])].as_string() == value)
        elif name == "metadata":
            if value != "null":
                raise BadRequest("metadata is null, or metadata[key]=value for each pair.", param="metadata")
            query = query.where(Job.request["metadata"].as_string().is_(None))
    return query


def _plain(key: str) -> str:
    if '"' in key or "\\" in key:  # SQLite has no way to quote them in a path
        raise BadRequest("A key with a quotation mark or a backslash cannot be searched for.", param=f"metadata[{key}]")
    return key
