"""A worker of `processes.py`: `python -m qerl_core.graders.serve`, which runs graders of ours and no user's code.

On stdin comes the spec, and then a message {item, output_text} for each call; on stdout goes {ready: true}, and then
{reward} or {error_type, error} for each. It ends with its stdin, or with the thread that started it.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Mapping
from typing import Any

from qerl_core.graders.failure import GradeFailure
from qerl_core.graders.wire import MAX_REQUEST_BYTES, Frames, pack, unpack

MEMORY_BYTES = 4 << 30
MAX_ERROR_CHARS = 10_000
PR_SET_PDEATHSIG = 1


def grader_of(spec: Mapping[str, Any]) -> Any:
    """The `grade` of a spec's type; what it needs is imported, and nothing else."""
    match spec["type"]:
        case "text_similarity":
            from qerl_core.graders import text_similarity

            text_similarity.warm(spec)
            return text_similarity.grade
        case "format":
            from qerl_core.graders import format as format_grader

            return format_grader.grade
        case "reasoning_gym":
            from qerl_core.graders import reasoning_gym

            reasoning_gym.warm(spec)
            return reasoning_gym.grade
    raise AssertionError(spec["type"])


def main() -> None:
    """See the module."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    frames = Frames(max_bytes=MAX_REQUEST_BYTES)
    spec: Mapping[str, Any] | None = None
    grade: Any = None
    while data := os.read(0, 1 << 18):
        for body in frames.feed(data):
            message = unpack(body)
            if spec is None:
                spec, grade = message, grader_of(message)
                reply: dict[str, Any] = {"ready": True}
            else:
                reply = _graded(grade, spec, message)
            rest = pack(reply)
            while rest:
                rest = rest[os.write(replies, rest) :]


def _graded(grade: Any, spec: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"reward": float(grade(spec, item=message["item"], output_text=message["output_text"]))}
    except GradeFailure as failure:
        return {"error_type": failure.error_type, "error": str(failure)[:MAX_ERROR_CHARS]}
    except Exception as error:
        return {"error_type": "other_error", "error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}


if __name__ == "__main__":
    main()
