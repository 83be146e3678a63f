"""Keys over HTTP: who gets in, how far, and what is told to those who do not."""

import asyncio
import json
import logging
import time

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app import cli, logs
from app.callers import Scope
from app.db import now, transaction
from app.embedded import environment
from app.keys import service
from app.keys.models import ApiKey
from app.main import create_app
from app.settings import Settings
from tests.app.conftest import sums
from tests.live import settings_of_process

ADMIN = "admin-key-of-this-test-0123456789"


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.fixture
def make(database):
    """Make a key; returns its id and text."""

    def make(**options) -> tuple[str, str]:
        with transaction() as session:
            key, text = service.create(session, "test", **options)
            return key.id, text

    return make


def test_a_key_is_shown_once_and_kept_as_a_hash(client, make):
    _, admin = make(scope=Scope.ADMIN)

    made = client.post("/v1/api_keys", json={"name": "ci", "owner": "ada"}, headers=bearer(admin)).json()
    listed = client.get("/v1/api_keys", headers=bearer(admin)).json()["data"]

    assert made["value"].startswith("qerl-")
    assert len(made["value"]) == 5 + 43
    assert made["scopes"] == ["read", "write"]
    assert client.get("/v1/files", headers=bearer(made["value"])).status_code == 200
    assert listed[0]["id"] == made["id"]
    assert made["value"] not in json.dumps(listed)
    with transaction(read_only=True) as session:
        columns = [value for row in session.scalars(select(ApiKey)) for value in vars(row).values()]
    assert made["value"] not in columns
    assert service._digest(made["value"]) in columns


@pytest.mark.parametrize(
    ("why", "header"),
    [
        ("missing", None),
        ("malformed", "Basic abc"),
        ("empty", "Bearer "),
        ("not ASCII", "Bearer qerl-\xe9".encode("latin-1")),
        ("endless", "Bearer qerl-" + "x" * 10_000),
        ("unknown", "Bearer qerl-unknown"),
    ],
)
def test_whatever_is_wrong_with_a_key_is_told_alike(client, make, why, header):
    make()

    response = client.get("/v1/files", headers={"authorization": header} if header else {})

    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


def test_a_key_that_was_revoked_or_has_expired_is_like_one_that_never_was(client, make):
    make()
    texts = {}
    for why, column in (("revoked", "revoked_at"), ("expired", "expires_at")):
        key_id, texts[why] = make(scope=Scope.ADMIN)
        assert client.get("/v1/files", headers=bearer(texts[why])).status_code == 200
        with transaction() as session:
            session.execute(update(ApiKey).where(ApiKey.id == key_id).values({column: now()}))
    unknown = client.get("/v1/files", headers=bearer("qerl-unknown")).json()

    for text in texts.values():
        response = client.get("/v1/files", headers=bearer(text))
        assert (response.status_code, response.json()) == (401, unknown)


def test_a_service_whose_keys_are_all_revoked_is_not_open(client, make):
    key_id, _ = make()
    with transaction() as session:
        service.revoke(session, key_id)

    assert client.get("/v1/files").status_code == 401


def test_what_is_not_public_wants_a_key_even_where_there_is_nothing(client, make):
    make()

    routes = {
        (method, path) for path, methods in client.get("/openapi.json").json()["paths"].items() for method in methods
    }
    assert len(routes) > 15
    answers = {(m, p): client.request(m, p).status_code for m, p in routes | {("get", "/v1/nothing"), ("get", "/ui")}}

    assert {route for route, status in answers.items() if status != 401} == {("get", "/livez"), ("get", "/readyz")}


@pytest.mark.parametrize(
    ("scope", "method", "path", "status"),
    [
        (Scope.READ, "GET", "/v1/files", 200),
        (Scope.READ, "POST", "/v1/fine_tuning/jobs", 403),
        (Scope.READ, "DELETE", "/v1/files/file-1", 403),
        (Scope.READ, "GET", "/v1/api_keys", 403),
        (Scope.WRITE, "GET", "/v1/files", 200),
        (Scope.WRITE, "DELETE", "/v1/files/file-1", 404),
        (Scope.WRITE, "GET", "/v1/api_keys", 403),
        (Scope.WRITE, "POST", "/v1/api_keys", 403),
        (Scope.ADMIN, "GET", "/v1/api_keys", 200),
        (Scope.ADMIN, "DELETE", "/v1/files/file-1", 404),
    ],
)
def test_a_scope_reaches_so_far(client, make, scope, method, path, status):
    _, text = make(scope=scope)

    response = client.request(
        method, path, headers=bearer(text), **({"json": {"name": "x"}} if method == "POST" else {})
    )

    assert response.status_code == status, response.text
    if status == 403:
        assert response.json()["error"]["code"] == "insufficient_permissions"
        assert scope in response.json()["error"]["message"]


def test_a_body_without_a_key_is_not_even_read(client, make):
    make()
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [], "query_string": b""}
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))

    assert sent[0]["status"] == 401


def test_the_last_use_is_written_once_a_minute(client, make):
    key_id, text = make()

    def last_used(age_s: float | None = None) -> float:
        with transaction() as session:
            if age_s is not None:
                session.execute(update(ApiKey).where(ApiKey.id == key_id).values(last_used_at=now() - age_s))
        client.get("/v1/files", headers=bearer(text))
        with transaction(read_only=True) as session:
            return service.get(session, key_id).last_used_at

    first = last_used()
    assert last_used() == first
    assert last_used(age_s=30) < time.time() - 20
    assert last_used(age_s=61) > time.time() - 20


def test_a_revoked_key_stays_in_the_list_and_may_be_revoked_again(client, make):
    _, admin = make(scope=Scope.ADMIN)
    key_id, _ = make()

    for _ in range(2):
        answer = client.delete(f"/v1/api_keys/{key_id}", headers=bearer(admin))
        assert answer.json() == {"id": key_id, "object": "api_key", "deleted": True}
    assert client.get(f"/v1/api_keys/{key_id}", headers=bearer(admin)).json()["revoked_at"] is not None
    assert client.get("/v1/api_keys/key_none", headers=bearer(admin)).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "x", "owner": "a b"}, "owner"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["all"]}, "scopes"),
        ({"name": "x", "expires_at": 1000}, "expires_at"),
        ({"name": "x", "scope": "read"}, "scope"),
    ],
)
def test_a_key_that_cannot_be_names_its_field(client, make, body, param):
    _, admin = make(scope=Scope.ADMIN)

    response = client.post("/v1/api_keys", json=body, headers=bearer(admin))

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_without_keys_the_service_is_open_but_makes_none(client):
    assert client.get("/v1/files", headers=bearer("none")).status_code == 200

    response = client.post("/v1/api_keys", json={"name": "first"})

    assert response.status_code == 403
    assert "qerl keys create" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("/run/qerl.sock", 200),
     ("192.0.2.7", 401), ("10.0.0.1", 401), ("2001:db8::1", 401), ("0.0.0.0", 401)],
)  # fmt: skip
def test_without_keys_nobody_is_served_at_an_address_that_others_reach(database, host, status):
    with TestClient(create_app(), base_url="http://testserver") as client:
        app = client.app

        async def at_host(scope, receive, send):
            await app(scope | {"server": (host, 8000)}, receive, send)

        assert TestClient(at_host).get("/v1/files").status_code == status


def test_the_key_of_the_variable_is_an_admin_and_no_default(settings, database):
    with_key = settings.model_copy(update={"admin_key": Settings(admin_key=ADMIN).admin_key})
    with settings_of_process(with_key), TestClient(create_app()) as client:
        assert client.get("/v1/files").status_code == 401
        assert client.post("/v1/api_keys", json={"name": "a"}, headers=bearer(ADMIN)).status_code == 200
        assert client.get("/v1/files", headers=bearer(ADMIN + "x")).status_code == 401
    assert ADMIN not in repr(Settings(admin_key=ADMIN))
    assert environment(Settings(admin_key=ADMIN))["QERL_ADMIN_KEY"] == ADMIN
    with pytest.raises(ValueError, match="at least 24"):
        Settings(admin_key="short")


def test_the_command_makes_lists_and_revokes_keys(settings, capsys, client):
    assert cli.main(["keys", "create", "ci", "--owner", "ada", "--scope", "read", "--expires-days", "7"]) == 0
    text = capsys.readouterr().out.strip()
    assert client.get("/v1/files", headers=bearer(text)).status_code == 200
    assert cli.main(["keys", "list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["ID", "KEY", "NAME"]
    assert text not in row
    assert {"ci", "ada", "read", "expires"} <= set(row.split())

    assert cli.main(["keys", "revoke", row.split()[0]]) == 0

    assert client.get("/v1/files", headers=bearer(text)).status_code == 401
    assert cli.main(["keys", "revoke", "key_none"]) == 2
    assert "key_none" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--owner", "a b"], ["--scope", "all"], ["--expires-days", "0"]])
def test_an_option_that_cannot_be_is_a_line(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["keys", "create", "ci", *options])

    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize("line", ["key %s was used", "Authorization: Bearer %s", "{'authorization': 'bearer %s'}"])
def test_a_key_never_reaches_the_log(line):
    text = "qerl-" + "aB3_-" * 8 + "xyz"

    written = logs.JsonFormatter().format(logging.LogRecord("app", logging.INFO, "", 0, line, (text,), None))

    assert text[5:] not in written
    assert "[redacted]" in json.loads(written)["message"]


def test_a_key_that_may_only_read_uploads_nothing(client, make):
    _, read = make(scope=Scope.READ)
    upload = {"files": {"file": ("a.jsonl", sums(2))}, "data": {"purpose": "fine-tune"}}

    assert client.post("/v1/files", headers=bearer(read), **upload).status_code == 403
    assert client.get("/v1/files", headers=bearer(read)).json()["data"] == []
