"""A key's requests a minute."""

import pytest

from app import db
from app.callers import Caller, Scope
from app.errors import RateLimited
from app.keys import quotas, service
from app.migrate import upgrade
from tests.live import settings_of_process


@pytest.fixture
def limited(settings, database_url):
    """Three requests a minute, in either database."""
    changes = {"requests_per_minute": 3, "database_url": database_url}
    with settings_of_process(settings.model_copy(update=changes)):
        upgrade(database_url)
        yield


def at(monkeypatch, time: float) -> None:
    monkeypatch.setattr(quotas, "now", lambda: db.now() * 0 + time)


def test_a_key_has_so_many_requests_a_minute_and_then_waits_for_the_next(limited, monkeypatch):
    ada, bob = (Caller("default", Scope.WRITE, key) for key in ("key_a", "key_b"))
    at(monkeypatch, 6000.0)
    assert [quotas.count_request(ada).remaining for _ in range(3)] == [2, 1, 0]
    at(monkeypatch, 6018.5)

    with pytest.raises(RateLimited) as refused:
        quotas.count_request(ada)

    assert refused.value.headers["retry-after"] == "41"
    assert quotas.count_request(bob).remaining == 2
    at(monkeypatch, 6060.0)
    assert quotas.count_request(ada).remaining == 2


def test_the_limit_is_told_with_every_answer(limited):
    from fastapi.testclient import TestClient

    from app.main import create_app

    with db.transaction() as session:
        _, text = service.create(session, "test")
    headers = {"authorization": f"Bearer {text}"}
    with TestClient(create_app()) as client:
        answers = [client.get("/v1/files", headers=headers) for _ in range(8)]  # at most two minutes' worth pass

    good, refused = (next(a for a in answers if a.status_code == status) for status in (200, 429))
    assert good.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
