import json
import logging
import subprocess
import sys
import threading

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from app import broker, db, health, middleware
from app.jobs import routes
from app.main import create_app
from tests.app.conftest import MODEL

ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "param", "code"),
    [
        ("GET", "/v1/nothing", {}, 404, None, "unknown_url"),
        ("PATCH", "/v1/files", {}, 405, None, "invalid_request"),
        ("GET", "/v1/files/file-none", {}, 404, "file_id", "not_found"),
        ("GET", "/v1/files/file-%00", {}, 404, "file_id", "not_found"),
        ("GET", "/v1/fine_tuning/jobs/none", {}, 404, "fine_tuning_job_id", "not_found"),
        ("GET", "/v1/models/none", {}, 404, "model", "model_not_found"),
        ("GET", "/v1/fine_tuning/jobs?limit=101", {}, 400, "limit", "invalid_value"),
        ("GET", "/v1/fine_tuning/jobs?limit=x", {}, 400, "limit", "invalid_type"),
        ("GET", "/v1/files?order=up", {}, 400, "order", "invalid_value"),
        ("POST", "/v1/files", {"data": {"purpose": "fine-tune"}}, 400, "file", "missing_required_parameter"),
        ("POST", "/v1/fine_tuning/jobs", {}, 400, None, "missing_required_parameter"),
        ("POST", "/v1/fine_tuning/jobs", {"json": [1]}, 400, None, "invalid_type"),
        ("POST", "/v1/fine_tuning/jobs", {"json": {}}, 400, "model", "missing_required_parameter"),
    ],
)
def test_every_error_has_openai_s_body(client, method, path, options, status, param, code):
    response = client.request(method, path, **options)

    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() >= ERROR_KEYS
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]
    assert response.headers["x-request-id"]


def test_a_body_that_is_not_json_is_told_what_is_wrong_with_it(client):
    response = client.post("/v1/fine_tuning/jobs", content=b'{"model": ', headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_an_error_that_nobody_expected_tells_nothing_of_itself(client, monkeypatch, caplog):
    def fail(*given: object) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr(routes.service, "get", fail)

    response = client.get("/v1/fine_tuning/jobs/some", headers={"x-request-id": "mine-1"})

    assert response.status_code == 500
    assert response.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine-1"
    assert "secret /etc/passwd" in caplog.text


def test_a_database_that_is_away_is_a_503_to_be_tried_again(client, monkeypatch):
    def fail(*given: object) -> None:
        raise OperationalError("SELECT", {}, Exception("connection refused by 10.0.0.7"))

    monkeypatch.setattr(routes.service, "get", fail)

    response = client.get("/v1/fine_tuning/jobs/some")

    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert int(response.headers["retry-after"]) > 0
    assert "10.0.0.7" not in response.text


@pytest.mark.parametrize("given", ["", "x" * 129, "new\tline", 'quote"'])
def test_a_strange_request_id_is_replaced(client, given):
    found = client.get("/livez", headers={"x-request-id": given}).headers["x-request-id"]

    assert found != given
    assert found.startswith("req_")


def test_a_body_above_the_limit_is_refused_whatever_length_it_claims(client, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_JSON_BYTES", 1000)
    pieces = (b" " * 100 for _ in range(11))

    claimed = client.post("/v1/fine_tuning/jobs", json={"model": "x" * 1000})
    streamed = client.post("/v1/fine_tuning/jobs", content=pieces, headers={"content-type": "application/json"})

    for response in (claimed, streamed):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "file_too_large"
        assert response.headers["x-request-id"]


def test_every_log_line_of_a_request_names_it(client, caplog):
    from app import logs

    lines = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(logs.JsonFormatter().format(record)))

    logging.getLogger("app").addHandler(keep := Keep())
    try:
        with caplog.at_level(logging.INFO):
            client.get("/v1/models", headers={"x-request-id": "abc"})
    finally:
        logging.getLogger("app").removeHandler(keep)

    [line] = [line for line in lines if line["message"].startswith("GET /v1/models 200")]
    assert line["request_id"] == "abc"


def test_a_ready_service_says_so_part_by_part(client):
    assert client.get("/livez").json() == {"status": "ok"}
    response = client.get("/readyz")

    assert response.status_code == 200
    assert response.json()["parts"].keys() == {"database", "redis", "store", "models"}
    assert response.json()["ok"]


def test_a_part_that_is_away_is_a_503_that_names_it_and_no_path(client, settings, monkeypatch, tmp_path):
    monkeypatch.setattr(broker, "waiting", lambda: None)
    monkeypatch.setattr(
        health, "get_settings", lambda: settings.model_copy(update={"models_file": tmp_path / "m.toml"})
    )
    monkeypatch.setattr(health, "get_engine", lambda: db.make_engine(f"sqlite:///{tmp_path / 'empty.db'}"))

    response = client.get("/readyz")

    assert response.status_code == 503
    parts = response.json()["parts"]
    assert [name for name, part in parts.items() if part["ok"]] == ["store"]
    assert "behind this code" in parts["database"]["error"]
    assert "m.toml" in parts["models"]["error"]
    assert str(tmp_path) not in response.text


def test_the_app_sweeps_and_stops_at_once(database, monkeypatch):
    swept = threading.Event()

    def sweep() -> None:
        swept.set()
        raise RuntimeError("a sweep that fails is no end of sweeping")

    monkeypatch.setattr(broker, "sweep", sweep)
    monkeypatch.setenv("QERL_SWEEP_S", "0.01")
    from app.settings import get_settings

    get_settings.cache_clear()
    with TestClient(create_app()):
        assert swept.wait(5)
        swept.clear()
        assert swept.wait(5)

    assert not [thread for thread in threading.enumerate() if thread.name == "sweep"]


def test_a_faulty_list_of_models_ends_the_start_in_a_line(settings, tmp_path, monkeypatch):
    faulty = tmp_path / "models.toml"
    faulty.write_text('[[models]]\nid = "x"\nsource = "owner/name"\n[models.limits]\ncontext_tokens = 100\n')
    monkeypatch.setenv("QERL_MODELS_FILE", str(faulty))
    from app.settings import get_settings

    get_settings.cache_clear()

    with pytest.raises(SystemExit, match=r"^qerl: models.toml: models.0: source 'owner/name' is a hub id: pin"):
        create_app()


IMPORT = """
import sys, time
started = time.monotonic()
import app.main
taken = time.monotonic() - started
app.main.create_app()
heavy = {"torch", "transformers", "numpy", "sympy", "math_verify", "peft", "matplotlib"} & sys.modules.keys()
[rss] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")]
print(taken, int(rss) // 1024, sorted(heavy))
"""


def test_the_api_starts_fast_small_and_without_torch(settings):
    best = min(_imported() for _ in range(3))  # others work on this machine too

    seconds, megabytes, heavy = best
    assert heavy == "[]"
    assert seconds < 1.5
    assert megabytes < 150


def _imported() -> tuple[float, int, str]:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    seconds, megabytes, heavy = done.stdout.split(maxsplit=2)
    return float(seconds), int(megabytes), heavy.strip()


def test_the_openapi_document_has_the_knobs_with_their_documentation(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]

    rl = schemas["RlBlock"]["properties"]
    assert rl["group_size"]["description"] == "Completions a prompt: a group of one has no spread."
    assert rl["group_size"]["minimum"] == 2
    assert MODEL not in json.dumps(schemas)
