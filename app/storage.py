"""One store for uploads and artifacts, by URL through fsspec: a folder by default. What has a key is whole."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

import fsspec

from app.ids import new_id
from app.settings import get_settings

CHUNK = 1 << 20


class Store:
    """Files by key under a URL."""

    def __init__(self, url: str) -> None:
        self.fs, root = fsspec.url_to_fs(url)
        self.root = root.rstrip("/")

    def _path(self, key: str) -> str:
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"not a key: {key!r}")
        return f"{self.root}/{key}"

    def put(self, key: str, source: Path) -> None:
        """Publish a file under a key: readers see all of it or nothing."""
        with self._publishing(key) as partial:
            self.fs.put_file(str(source), partial)

    def write(self, key: str, source: BinaryIO) -> tuple[int, str]:
        """Publish the rest of a stream under a key. Returns its size and the hex digest of its sha256."""
        digest, num_bytes = hashlib.sha256(), 0
        with self._publishing(key) as partial, self.fs.open(partial, "wb") as file:
            while chunk := source.read(CHUNK):
                file.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
        return num_bytes, digest.hexdigest()

    @contextmanager
    def _publishing(self, key: str) -> Iterator[str]:
        target = self._path(key)
        partial = f"{self.root}/partial/{new_id('')}"
        self.fs.makedirs(f"{self.root}/partial", exist_ok=True)
        self.fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        try:
            yield partial
            self.fs.mv(partial, target)
        except BaseException:
            if self.fs.exists(partial):
                self.fs.rm_file(partial)
            raise

    def fetch(self, key: str, target: Path) -> None:
        """Copy a key's file to a local path. FileNotFoundError if there is none."""
        with self.open(key) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK)

    def exists(self, key: str) -> bool:
        """Whether a key has a file."""
        return bool(self.fs.exists(self._path(key)))

    def open(self, key: str) -> BinaryIO:
        """A key's file for reading. FileNotFoundError if there is none."""
        return cast(BinaryIO, self.fs.open(self._path(key), "rb"))

    def chunks(self, key: str) -> Iterator[bytes]:
        """A key's bytes, a chunk at a time."""
        with self.open(key) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def delete(self, key: str) -> None:
        """Forget a key; none is no error."""
        if self.fs.exists(self._path(key)):
            self.fs.rm_file(self._path(key))

    def check(self) -> None:
        """OSError unless the store can be written to."""
        probe = f"{self.root}/partial/{new_id('probe-')}"
        self.fs.makedirs(f"{self.root}/partial", exist_ok=True)
        self.fs.pipe_file(probe, b"")
        self.fs.rm_file(probe)


@cache
def get_store() -> Store:
    """This process's store."""
    return Store(get_settings().store_url)


def file_sha256(path: Path) -> str:
    """The hex digest of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
