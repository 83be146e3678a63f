"""Messages between a grader pool, its zygote and the zygote's forks: JSON, with its length before it.

Standard library only: the zygote imports this.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

MAX_REQUEST_BYTES = 64 << 20
MAX_REPLY_BYTES = 256 << 10

_LENGTH = struct.Struct(">I")


def pack(message: object) -> bytes:
    """A message as it travels. ValueError, TypeError or RecursionError if it is no JSON."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Whole messages out of a stream of bytes that arrives in pieces."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with `data`. ValueError at one of more than `max_bytes`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise ValueError(f"a message of {length} bytes; {self._max_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def unpack(body: bytes) -> dict[str, Any]:
    """The object that a body holds. ValueError if it holds anything else."""
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
