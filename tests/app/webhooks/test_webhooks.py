"""From a job's move to a signed event on a real server's door, and what happens when that is closed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from sqlalchemy import select, update

from app.db import now, transaction
from app.jobs import service as jobs
from app.settings import Settings
from app.webhooks import delivery, outbox
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from tests.live import settings_of_process

EVENTS = ["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]
SDK = openai.OpenAI(api_key="unused")


class Receiver:
    """A server that keeps what it is sent and answers with the statuses it is given, then with 200."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.received.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *given: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def settings(tmp_path):
    made = Settings(
        home=tmp_path / "home", redis_url=f"memory://{tmp_path.name}", sweep_s=60.0, private_hosts=("127.0.0.1",)
    )
    made.home.mkdir()
    with settings_of_process(made) as settings:
        yield settings


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    """Nothing leaves before the test says so."""
    monkeypatch.setattr("app.main.WEBHOOKS_S", 3600.0)


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def endpoint(client, receiver):
    made = client.post("/v1/webhook_endpoints", json={"name": "ci", "url": receiver.url, "event_types": EVENTS})
    assert made.status_code == 200, made.text
    return made.json()


def deliveries(client, endpoint) -> list[dict]:
    return client.get(f"/v1/webhook_endpoints/{endpoint['id']}/deliveries").json()["data"]


def make_due() -> None:
    with transaction() as session:
        waiting = WebhookDelivery.next_at.is_not(None)
        session.execute(update(WebhookDelivery).where(waiting).values(next_at=now()))


def cancel(client, create) -> str:
    job_id = create()["id"]
    assert client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel").status_code == 200
    return job_id


def test_a_job_s_end_arrives_once_and_the_sdk_unwraps_it(client, create, endpoint, receiver):
    job_id = cancel(client, create)

    assert (delivery.deliver_due(), delivery.deliver_due()) == (1, 0)

    [(headers, body)] = receiver.received
    event = SDK.webhooks.unwrap(body, headers, secret=endpoint["signing_secret"])
    assert (event.type, event.data.id, event.object) == ("fine_tuning.job.cancelled", job_id, "event")
    assert headers["webhook-id"] == event.id
    with pytest.raises(openai.InvalidWebhookSignatureError):
        SDK.webhooks.unwrap(body + b" ", headers, secret=endpoint["signing_secret"])
    [log] = deliveries(client, endpoint)
    assert (log["status"], log["attempts"], log["status_code"], log["event_id"]) == ("delivered", 1, 200, event.id)


def test_every_event_type_is_told_of_the_move_it_names(client, create, receiver):
    names = client.get("/v1/webhook_event_types").json()["data"]
    client.post("/v1/webhook_endpoints", json={"name": "all", "url": receiver.url, "event_types": names})
    assert set(names) == set(outbox.JOB_EVENTS.values())
    job_id = create()["id"]

    with transaction() as session:
        lease = jobs.claim(session, job_id, "worker")
    with transaction() as session:
        jobs.fail(session, lease, "bad_data", "rows")
    delivery.deliver_due()

    types = {json.loads(body)["type"] for _, body in receiver.received}
    assert types == {"fine_tuning.job.running", "fine_tuning.job.failed"}


def test_a_move_that_is_rolled_back_is_not_told(client, create, endpoint):
    job_id = create()["id"]

    with pytest.raises(RuntimeError), transaction() as session:  # noqa: PT012 - it comes before the commit
        jobs.cancel(session, job_id)
        raise RuntimeError

    assert deliveries(client, endpoint) == []


def test_a_failed_try_is_repeated_with_the_same_id(client, create, endpoint, receiver):
    receiver.statuses = [500, 302]
    cancel(client, create)

    delivery.deliver_due()
    [log] = deliveries(client, endpoint)
    assert (log["status"], log["status_code"]) == ("pending", 500)
    assert delivery.deliver_due() == 0  # not before its time
    make_due()
    delivery.deliver_due()
    make_due()
    delivery.deliver_due()

    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
    [log] = deliveries(client, endpoint)
    assert (log["status"], log["attempts"], log["status_code"]) == ("delivered", 3, 200)


def test_tries_lie_further_and_further_apart():
    for attempt in range(1, 40):
        seconds = delivery.retry_in_s(attempt)
        middle = min(5.0 * 3.0 ** (attempt - 1), 21_600.0)
        assert 0.75 * middle <= seconds <= 1.25 * middle


def test_an_event_that_is_too_old_is_given_up_and_an_endpoint_that_fails_so_long_disabled(
    client, create, endpoint, receiver
):
    receiver.statuses = [500, 500, 500]
    cancel(client, create)
    delivery.deliver_due()
    with transaction() as session:
        session.execute(update(WebhookDelivery).values(created_at=now() - delivery.GIVE_UP_S, next_at=now()))
    delivery.deliver_due()
    [log] = deliveries(client, endpoint)
    assert log["status"] == "failed"
    assert client.get(f"/v1/webhook_endpoints/{endpoint['id']}").json()["enabled"]

    with transaction() as session:
        session.execute(update(WebhookEndpoint).values(failing_since=now() - delivery.GIVE_UP_S))
    cancel(client, create)
    delivery.deliver_due()

    path = f"/v1/webhook_endpoints/{endpoint['id']}"
    assert not client.get(path).json()["enabled"]
    cancel(client, create)
    assert delivery.deliver_due() == 0
    assert client.post(path, json={"enabled": True}).json()["enabled"]
    cancel(client, create)
    delivery.deliver_due()
    assert deliveries(client, endpoint)[0]["status"] == "delivered"


def test_an_endpoint_that_is_gone_is_told_nothing_more(client, create, endpoint, receiver):
    receiver.statuses = [410]
    cancel(client, create)

    delivery.deliver_due()

    assert not client.get(f"/v1/webhook_endpoints/{endpoint['id']}").json()["enabled"]
    assert deliveries(client, endpoint)[0]["status"] == "failed"


def test_what_a_process_took_to_its_grave_is_sent_by_another(client, create, endpoint, receiver):
    cancel(client, create)
    with transaction() as session:
        [lost] = delivery._take(session)
    assert delivery.deliver_due() == 0
    make_due()
    assert delivery.deliver_due() == 1

    with transaction() as session:  # it was only slow, and its word comes too late
        delivery._settle(session, lost, delivery.Outcome(error="slow"))
    assert deliveries(client, endpoint)[0]["status"] == "delivered"


def test_an_endpoint_deleted_while_it_is_told_is_no_error(client, create, endpoint):
    cancel(client, create)
    with transaction() as session:
        [taken] = delivery._take(session)
    assert client.delete(f"/v1/webhook_endpoints/{endpoint['id']}").json()["deleted"]

    with transaction() as session:
        delivery._settle(session, taken, delivery.Outcome(status_code=200))
        assert session.scalars(select(WebhookDelivery)).all() == []


@pytest.mark.parametrize("keep", [False, True])
def test_an_old_secret_is_valid_after_a_rotation_if_so_wished(client, create, endpoint, receiver, keep):
    path = f"/v1/webhook_endpoints/{endpoint['id']}/rotate_secret"
    new = client.post(path, json={"keep_old_secret_active_for_24_hours": keep}).json()["signing_secret"]
    cancel(client, create)
    delivery.deliver_due()

    [(headers, body)] = receiver.received
    assert new != endpoint["signing_secret"]
    SDK.webhooks.unwrap(body, headers, secret=new)
    if keep:
        SDK.webhooks.unwrap(body, headers, secret=endpoint["signing_secret"])
    else:
        with pytest.raises(openai.InvalidWebhookSignatureError):
            SDK.webhooks.unwrap(body, headers, secret=endpoint["signing_secret"])


def test_a_sample_tells_how_the_endpoint_answers(client, endpoint, receiver):
    receiver.statuses = [418]
    path = f"/v1/webhook_endpoints/{endpoint['id']}/test"

    result = client.post(path, json={"event_type": "fine_tuning.job.failed"}).json()

    assert (result["status_code"], result["success"]) == (418, True)
    [(headers, body)] = receiver.received
    assert SDK.webhooks.unwrap(body, headers, secret=endpoint["signing_secret"]).type == "fine_tuning.job.failed"
    receiver.close()
    refused = client.post(path, json={"event_type": "fine_tuning.job.failed"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "delivery_failed")


def test_the_secret_is_shown_when_it_is_made_and_never_again(client, endpoint):
    secret = endpoint["signing_secret"]
    path = f"/v1/webhook_endpoints/{endpoint['id']}"
    assert secret.startswith("whsec_")

    for response in (
        client.get(path), client.get("/v1/webhook_endpoints"), client.post(path, json={"name": "other"}),
        client.get(f"{path}/deliveries"),
    ):  # fmt: skip
        assert response.status_code == 200
        assert secret not in response.text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"url": "http://example.com/"}, "url"),
        ({"url": "https://127.1/"}, "url"),
        ({"url": "https://169.254.169.254/latest"}, "url"),
        ({"event_types": []}, "event_types"),
        ({"event_types": ["batch.completed"]}, "event_types.0"),
        ({"name": ""}, "name"),
        ({"secret": "mine"}, "secret"),
    ],
)
def test_a_faulty_endpoint_is_refused_by_field(client, endpoint, changes, param):
    whole = {"name": "ci", "url": "https://example.com/", "event_types": EVENTS, **changes}

    for response in (
        client.post("/v1/webhook_endpoints", json=whole),
        client.post(f"/v1/webhook_endpoints/{endpoint['id']}", json=changes),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(param.split(".")[0])


def test_the_app_delivers_by_itself(client, monkeypatch):
    from fastapi.testclient import TestClient

    from app import main

    tried = threading.Event()
    monkeypatch.setattr(main, "WEBHOOKS_S", 0.01)
    monkeypatch.setattr(main.delivery, "deliver_due", tried.set)

    with TestClient(main.create_app()):
        assert tried.wait(5)
