"""Files of the store as attachments."""

from urllib.parse import quote

from fastapi.responses import StreamingResponse
from starlette.responses import Response

from app.errors import NotFound
from app.storage import get_store


def attachment(
    key: str, filename: str, *, num_bytes: int, sha256: str, media_type: str, if_none_match: str | None = None
) -> Response:
    """A key's file, a chunk at a time; its ETag is the sha256. 304 if the client has it. NotFound if it is gone."""
    etag = f'"{sha256}"'
    if if_none_match is not None and etag in [tag.strip() for tag in if_none_match.split(",")]:
        return Response(status_code=304, headers={"etag": etag})
    store = get_store()
    if not store.exists(key):
        raise NotFound(f"The content of {filename} is no longer in the store.", code="content_gone")
    quoted = quote(filename)
    headers = {
        "etag": etag,
        "content-length": str(num_bytes),
        "content-disposition": "attachment; "
        + (f'filename="{filename}"' if quoted == filename else f"filename*=utf-8''{quoted}"),
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(store.chunks(key), headers=headers, media_type=media_type)
