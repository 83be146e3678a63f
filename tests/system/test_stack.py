"""`qerl up`: everything under one command, and nothing left of it however that ends."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import redis
from sqlalchemy import create_engine, text

from app import cli
from app.embedded import EmbeddedStack, StackError, environment
from app.guard import descendants
from app.migrate import upgrade
from app.settings import Settings
from tests.live import command_line, free_port, gone, processes, settings_of_process, wait_until
from tests.system.conftest import RUN_TOY, Service

ROOT = Path(__file__).parents[2]
PARTS = ("redis-server", "app.serve", "celery")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home for `qerl up`, by the environment."""
    for name in [name for name in os.environ if name.startswith("QERL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    made = Settings(home=tmp_path / "home", port=0, run_command=RUN_TOY, heartbeat_s=0.2, sweep_s=0.5)
    variables = environment(made)
    del variables["QERL_REDIS_URL"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return made.home


@pytest.fixture
def qerl_up(home):
    """Start `qerl up` in a process of its own."""
    started = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "app.cli", "up"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def await_ready(up: subprocess.Popen[str]) -> str:
    """The address that it says it is ready at."""
    line = up.stdout.readline()
    assert line.startswith("QeRL is ready at http://127.0.0.1:"), up.stderr.read()
    return line.split()[4]


def test_it_runs_a_job_and_a_signal_ends_all_of_it(qerl_up, home):
    up = qerl_up()
    url = await_ready(up)
    assert httpx.get(url.removesuffix("/v1") + "/livez", trust_env=False).status_code == 200
    running = descendants(up.pid)
    for part in PARTS:
        assert processes(up.pid, part), part

    with settings_of_process(Settings(home=home, redis_url="redis://127.0.0.1:1/0")) as settings:
        service = Service(settings)
        job_id = service.submit(
            num_steps=1000, checkpoint_every=1000, step_s=0.1, ring=False
        )  # rung for by the stack's sweep
        service.wait_for_step(job_id, 2)
        up.send_signal(signal.SIGTERM)
        assert up.wait(30) == 0, up.stderr.read()
        # The run stopped at a checkpoint.
        assert service.job(job_id).state == "queued"
        assert [checkpoint.step for checkpoint in service.checkpoints(job_id)] == [service.job(job_id).step]
    assert gone(running)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["api.log", "redis.log", "worker.log"]
    assert up.stderr.read() == ""


def test_nothing_is_left_when_it_is_killed(qerl_up):
    up = qerl_up()
    await_ready(up)
    running = descendants(up.pid)
    assert len(running) >= 7  # three guards, what they guard, and the pool

    up.kill()

    wait_until(lambda: gone(running), timeout_s=5)


def test_a_second_signal_does_not_wait_for_the_run(qerl_up, home):
    up = qerl_up()
    await_ready(up)
    with settings_of_process(Settings(home=home, redis_url="redis://127.0.0.1:1/0")) as settings:
        service = Service(settings)
        job_id = service.submit(step_s=1000, ring=False)
        wait_until(lambda: service.job(job_id).phase == "training", what="a run")
    running = descendants(up.pid)

    up.send_signal(signal.SIGINT)
    assert up.stdout.readline().startswith("stopping;")
    up.send_signal(signal.SIGINT)

    assert up.wait(10) == 0, up.stderr.read()
    assert gone(running)
    assert up.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_it_starts_leaves_nothing(qerl_up, number):
    up = qerl_up()
    running = wait_until(lambda: processes(up.pid, "celery") and descendants(up.pid))

    up.send_signal(number)

    assert up.wait(10) == 0, up.stderr.read()
    assert gone(running)
    assert "Traceback" not in up.stderr.read()


def test_a_part_that_ends_is_an_error_and_ends_the_rest(home):
    with EmbeddedStack() as stack:
        [server] = [pid for pid in processes(os.getpid(), "redis-server") if "guard.py" not in command_line(pid)]
        os.kill(server, signal.SIGKILL)
        with pytest.raises(StackError, match="redis ended with status -9"):
            stack.wait()

    assert not [pid for part in PARTS for pid in processes(os.getpid(), part)]


def test_the_bundled_redis_is_closed_to_others(home):
    with EmbeddedStack() as stack:
        port = int((home / "redis" / "redis.conf").read_text().split("port ")[1].split()[0])
        assert (home / "redis" / "redis.conf").stat().st_mode & 0o077 == 0
        with redis.Redis(port=port, retry=None) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        # A second stack would run the first one's jobs.
        with pytest.raises(StackError, match="is in use by another stack"):
            EmbeddedStack().start()
        assert httpx.get(f"{stack.base_url}/livez", trust_env=False).status_code == 200


@pytest.fixture
def refusal(home, capfd):
    """What `qerl up` says as it refuses to start."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def get(*options: str) -> str:
        assert cli.main(["up", *options]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("qerl: ")
        assert err.count("\n") == 1
        assert not [pid for part in PARTS for pid in processes(os.getpid(), part)]
        return err

    yield get
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_port_that_is_taken_is_said(refusal):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is taken" in refusal("--port", str(port))


def test_a_redis_that_is_away_is_said_without_its_password(refusal, monkeypatch):
    monkeypatch.setenv("QERL_REDIS_URL", f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "check QERL_REDIS_URL" in (said := refusal())
    assert "secret" not in said


def test_a_redis_that_cannot_start_is_said(refusal, monkeypatch, tmp_path):
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\necho 'Fatal error: no memory'\nexit 1\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "redis ended with status 1: Fatal error: no memory" in refusal()


def test_a_home_that_cannot_be_written_to_is_said(refusal, home):
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file")
    assert "QERL_HOME cannot be written to" in refusal()


def test_a_full_disk_is_said(refusal, home):
    (home / "redis").mkdir(parents=True)
    (home / "redis" / "redis.conf").symlink_to("/dev/full")
    assert "the disk is full" in refusal()


def test_a_database_of_newer_code_is_said(refusal, home):
    home.mkdir()
    url = f"sqlite:///{home / 'qerl.db'}"
    upgrade(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'ffff'"))
    engine.dispose()
    assert "is newer than this code" in refusal()


def test_a_file_that_is_no_database_is_said(refusal, home):
    home.mkdir()
    (home / "qerl.db").write_text("not a database, for sure" * 100)
    assert "cannot be used: file is not a database" in refusal()


@pytest.mark.parametrize("url", ["nonsense", "oracle://x/y", "postgresql+psycopg://ada:secret@127.0.0.1:1/qerl"])
def test_a_database_url_that_leads_nowhere_is_said(refusal, monkeypatch, url):
    monkeypatch.setenv("QERL_DATABASE_URL", url)
    assert "cannot be used: " in (said := refusal())
    assert "secret" not in said


def test_a_store_of_an_unknown_kind_is_said(refusal, monkeypatch):
    monkeypatch.setenv("QERL_STORE_URL", "gopher://x")
    assert "QERL_STORE_URL cannot be used" in refusal()


def test_an_address_that_others_reach_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("QERL_HOST", "0.0.0.0")
    assert "is not loopback, and there is no API key yet" in refusal()


def test_a_faulty_list_of_models_is_said(refusal, monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_MODELS_FILE", str(tmp_path / "none.toml"))
    assert "none.toml" in refusal()


def test_a_setting_out_of_bounds_is_said(refusal, monkeypatch):
    monkeypatch.setenv("QERL_SWEEP_S", "-1")
    assert "QERL_SWEEP_S: Input should be greater than 0" in refusal()


def test_the_doctor_finds_what_is_missing(home, capsys, monkeypatch, tmp_path):
    assert cli.main(["doctor"]) == 0
    monkeypatch.setenv("QERL_MODELS_FILE", str(tmp_path / "none.toml"))
    assert cli.main(["doctor"]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if "MISSING" in line] == [["models", "MISSING"]]
