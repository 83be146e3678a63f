import hashlib
import json
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from app import db, storage
from app.files import service
from app.files.models import File
from app.settings import get_settings
from tests.app.conftest import sums

CASES = Path(__file__).parents[2] / "cases"
CASES_OF_FILES = json.loads((CASES / "datasets.json").read_text())


def post(client, content: bytes, *, name: str = "data.jsonl", **fields: str):
    return client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune", **fields})


def stored() -> tuple[int, list[str]]:
    """Rows of files, and files of the store."""
    with db.transaction(read_only=True) as session:
        rows = session.scalars(select(func.count()).select_from(File)).one()
    root = Path(storage.get_store().root)
    return rows, [path.name for path in root.rglob("*") if path.is_file()]


def test_a_good_file_is_processed_at_once_and_comes_back_as_it_was(client):
    content = sums(3)

    made = post(client, content, name="sums.jsonl").json()

    assert made["id"].startswith("file-")
    assert made | {"id": "", "created_at": 0} == {
        "id": "",
        "object": "file",
        "bytes": len(content),
        "created_at": 0,
        "filename": "sums.jsonl",
        "purpose": "fine-tune",
        "status": "processed",
        "status_details": None,
        "expires_at": None,
        "num_rows": 3,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert client.get(f"/v1/files/{made['id']}").json() == made
    answer = client.get(f"/v1/files/{made['id']}/content")
    assert answer.content == content
    assert answer.headers["content-length"] == str(len(content))
    assert answer.headers["content-disposition"] == 'attachment; filename="sums.jsonl"'
    again = client.get(f"/v1/files/{made['id']}/content", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", CASES_OF_FILES)
def test_files_that_broke_other_products(client, name):
    case = CASES_OF_FILES[name]

    response = post(client, (CASES / "datasets" / name).read_bytes())

    if case["accepted"]:
        assert response.json()["num_rows"] == case["rows"]
    else:
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "file", "invalid_file")
        assert [fault["line"] for fault in error["errors"]] == [fault["line"] for fault in case["errors"]]
        assert error["num_errors"] == len(case["errors"])
        assert error["errors"][0]["reason"] in error["message"]
        assert stored() == (0, [])


def test_a_thousand_faults_are_listed_and_all_are_counted(client):
    error = post(client, b"{}\n" * 1200).json()["error"]

    assert len(error["errors"]) == 1000
    assert error["num_errors"] == 1200
    assert error["message"].startswith("The file has 1200 faults. Line 1, messages: messages is missing.")
    assert error["message"].endswith("And 1197 more, in `errors`.")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\a.jsonl", "a.jsonl"),
        ('quo"te.jsonl', "quo%22te.jsonl"),  # as browsers and the SDK send it
        ("größe.jsonl", "größe.jsonl"),
    ],
)
def test_a_client_s_name_for_a_file_is_never_a_path(client, name, kept):
    made = post(client, sums(1), name=name).json()

    assert made["filename"] == kept
    assert stored() == (1, [f"{made['id']}.jsonl"])
    assert client.get(f"/v1/files/{made['id']}/content").headers["content-disposition"].isascii()


def test_another_purpose_or_an_expiry_is_refused(client):
    purpose = client.post("/v1/files", files={"file": ("a", sums(1))}, data={"purpose": "batch"}).json()["error"]
    expiry = post(client, sums(1), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"})

    assert purpose["param"] == "purpose"
    assert expiry.json()["error"]["param"] == "expires_after"
    assert stored() == (0, [])


def test_a_file_above_the_limit_is_a_413_and_not_kept(client, monkeypatch):
    monkeypatch.setenv("QERL_MAX_UPLOAD_BYTES", "2000")
    get_settings.cache_clear()

    slightly = post(client, sums(100))
    vastly = post(client, sums(2000))

    for response in (slightly, vastly):
        assert response.status_code == 413
        assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("file_too_large", "file")
    assert stored() == (0, [])


def test_a_full_disk_is_a_503_and_leaves_nothing(client, monkeypatch):
    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device", "/secret/path")

    monkeypatch.setattr(storage.get_store().fs, "mv", full)

    response = post(client, sums(2))

    assert (response.status_code, response.json()["error"]["code"]) == (503, "disk_full")
    assert "secret" not in response.text
    assert stored() == (0, [])


def test_a_disk_that_is_full_while_an_upload_arrives_is_the_same_503(client, monkeypatch):
    async def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlette.datastructures.UploadFile.write", full)

    response = post(client, sums(2))

    assert (response.status_code, response.json()["error"]["code"]) == (503, "disk_full")


def test_a_row_that_cannot_be_written_leaves_no_file(client, monkeypatch):
    def fail() -> None:
        raise OperationalError("BEGIN", {}, Exception("gone"))

    monkeypatch.setattr(service, "transaction", fail)

    response = post(client, sums(2))

    assert response.status_code == 503
    assert stored() == (0, [])


def test_lists_are_newest_first_and_go_on_after_an_id(client, upload):
    ids = [upload(1) for _ in range(5)]

    first = client.get("/v1/files?limit=2").json()
    second = client.get(f"/v1/files?limit=3&after={first['last_id']}").json()
    oldest = client.get("/v1/files?order=asc&limit=1").json()

    assert [file["id"] for file in first["data"]] == ids[:2:-1]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[4], ids[3])
    assert [file["id"] for file in second["data"]] == ids[2::-1]
    assert second["has_more"] is False
    assert oldest["data"][0]["id"] == ids[0]
    assert client.get(f"/v1/files?order=asc&after={ids[0]}").json()["first_id"] == ids[1]
    assert client.get("/v1/files?purpose=batch").json() == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip


def test_an_unknown_after_is_a_404_and_not_the_first_page_again(client, upload):
    upload(1)

    response = client.get("/v1/files?after=file-none")

    assert (response.status_code, response.json()["error"]["param"]) == (404, "after")


def test_a_deleted_file_is_gone(client, upload):
    file_id = upload(1)

    assert client.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}

    assert client.get(f"/v1/files/{file_id}").status_code == 404
    assert client.delete(f"/v1/files/{file_id}").status_code == 404
    assert stored() == (0, [])


def test_a_file_is_kept_while_a_job_needs_it(client, create):
    job = create()

    refused = client.delete(f"/v1/files/{job['training_file']}")
    client.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
    assert job["id"] in refused.json()["error"]["message"]
    assert client.delete(f"/v1/files/{job['training_file']}").status_code == 200


def test_content_that_the_store_has_lost_is_a_404(client, upload):
    file_id = upload(1)
    storage.get_store().delete(f"files/{file_id}.jsonl")

    response = client.get(f"/v1/files/{file_id}/content")

    assert (response.status_code, response.json()["error"]["code"]) == (404, "content_gone")
