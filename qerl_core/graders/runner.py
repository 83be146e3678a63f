"""Grades batches in a helper process (`zygote.py`), which forks for each call. Nothing is graded in this process."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from qerl_core.graders.spec import GraderSpec
from qerl_core.graders.zygote import HEADER, frame
from qerl_core.types import Grade, Item

PATIENCE_S = 20.0
"""Beyond a call's own time limit: the helper kills late calls itself."""


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """A completion of a row."""

    item: Item
    output_text: str


class GraderPool:
    """A context in which completions can be graded, several at once. Its helper ends with it, or with this process."""

    def __init__(self, spec: GraderSpec, *, num_workers: int | None = None) -> None:
        self.spec = spec.model_dump(mode="json")
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._helper: _Helper | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """A grade for each request, in order. A helper that dies is replaced once; then what is left is an error."""
        grades: dict[int, Grade] = {}
        for _ in range(2):
            waiting = {i: request for i, request in enumerate(requests) if i not in grades}
            if not waiting:
                break
            self._helper = self._helper or _Helper(self.spec, self.num_workers)
            if not self._helper.serve(waiting, grades):
                self._stop()
        lost = Grade(None, "other_error", "the grader's process died")
        return [grades.get(i, lost) for i in range(len(requests))]

    def _stop(self) -> None:
        if self._helper is not None:
            self._helper.stop()
            self._helper = None


class _Helper:
    def __init__(self, spec: dict[str, Any], num_workers: int) -> None:
        self.patience_s = PATIENCE_S + float(spec.get("timeout_s", 0.0))
        self.folder = tempfile.TemporaryDirectory(prefix="qerl-grader-")
        self.reply_fd, write_fd = os.pipe()
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "qerl_core.graders.zygote", str(write_fd), str(num_workers), str(os.getpid())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[write_fd],
            cwd=self.folder.name, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(write_fd)
        self.buffer = bytearray()
        self._send([frame(spec)])

    def serve(self, requests: dict[int, GradeRequest], grades: dict[int, Grade]) -> bool:
        """Add a grade for every request. False if the helper died, or hangs, before the last."""
        frames = [frame({"id": i, "item": r.item, "output_text": r.output_text}) for i, r in requests.items()]
        sender = threading.Thread(target=self._send, args=(frames,), daemon=True)
        sender.start()  # apart, since both pipes may be full
        waiting = set(requests)
        last = time.monotonic()
        while waiting:
            ready, _, _ = select.select([self.reply_fd], [], [], max(0.0, last + self.patience_s - time.monotonic()))
            part = os.read(self.reply_fd, 1 << 20) if ready else b""
            if not part:
                return False
            last = time.monotonic()
            self.buffer += part
            for reply in self._messages():
                waiting.discard(reply["id"])
                grades[reply["id"]] = Grade(reply["reward"], reply.get("error_type"), reply.get("error"))
        sender.join()
        return True

    def _messages(self) -> list[dict[str, Any]]:
        found = []
        while len(self.buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack(self.buffer[: HEADER.size])[0]
            if len(self.buffer) < end:
                break
            found.append(json.loads(self.buffer[HEADER.size : end]))
            del self.buffer[:end]
        return found

    def _send(self, frames: list[bytes]) -> None:
        assert self.process.stdin is not None
        try:
            for data in frames:
                self.process.stdin.write(data)
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it died, or was stopped: the reader learns it from its end of file
            return

    def stop(self) -> None:
        """End the helper and what it started."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.reply_fd)
        self.folder.cleanup()
