import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.data import rows
from qerl_core.data.rows import first_without, iterate_rows, messages_of, read_rows, validate_rows
from qerl_core.errors import BadData

CASES = Path(__file__).parents[2] / "cases"
DATASETS = json.loads((CASES / "datasets.json").read_text())
GOOD = '{"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}'
ABOUT = {  # what a message must be about, in our words
    "no rows": "no rows",
    "an array: one object a line is wanted": "is an array",
    "messages is missing; this looks like preference (DPO) data": "preference (DPO)",
    "the last message must be from the user": "last message must be from the user",
    "unpaired surrogate": "unpaired surrogate",
    "NUL character": "NUL character",
    "duplicate key answer": "duplicate key 'answer'",
    "not UTF-8": "not UTF-8",
    "nested too deeply": "nested too deeply",
    "unknown role robot": "unknown role 'robot'",
}


def report_of(text: str | bytes):
    return validate_rows(io.BytesIO(text if isinstance(text, bytes) else text.encode()))


@pytest.mark.parametrize("name", DATASETS)
def test_files_that_broke_other_products(name):
    case = DATASETS[name]

    report = report_of((CASES / "datasets" / name).read_bytes())

    if case["accepted"]:
        assert (report.num_rows, report.faults) == (case["rows"], ())
    else:
        assert [fault.line for fault in report.faults] == [error["line"] for error in case["errors"]]
        for fault, error in zip(report.faults, case["errors"], strict=True):
            assert ABOUT.get(error["about"], error["about"]) in fault.reason


@pytest.mark.parametrize("name", [name for name, case in DATASETS.items() if case["accepted"]])
def test_what_is_accepted_is_read_as_it_was_written(name):
    path = CASES / "datasets" / name
    lines = path.read_bytes().decode("utf-8-sig").split("\n")

    assert read_rows(path) == [json.loads(line) for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ('{"messages": {}}', "messages", "not a list"),
        ('{"messages": [3]}', "messages.0", "not an object"),
        ('{"messages": [{"content": "x"}]}', "messages.0.role", "role is missing"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content", "content is missing"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages.0.content", "not text"),
        ('{"messages": [{"role": "user", "content": []}]}', "messages.0.content", "empty"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "messages.0.content", "not text"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "tools", "not a list"),
        ('{"messages": [{"role": "user", "content": "x"}], "v": 1e999}', None, "too large"),
        ('{"messages": [{"role": "user", "content": "x"}], "v": -Infinity}', None, "-Infinity is not JSON"),
        ('{"messages": [{"role": "user", "content": "x"}], "v": [{"k": "\\ud800"}]}', "v.0.k", "surrogate"),
        ('{"messages": [{"role": "user", "content": "x"}], "v": ' + "9" * 5000 + "}", None, "too many digits"),
        ("3", None, "not an object"),
    ],
)
def test_a_fault_names_its_field(row, field, reason):
    [fault] = report_of(f"{GOOD}\n{row}\n").faults

    assert fault.line == 2
    assert fault.field == field
    assert reason in fault.reason


def test_escapes_that_only_look_like_nul_or_surrogates_are_text():
    text = GOOD.replace("2 + 2?", r"\\u0000 and \ud83d\ude00")

    assert report_of(text).num_rows == 1


def test_sixty_four_levels_are_allowed_and_brackets_in_strings_do_not_count():
    deep = GOOD.replace('"4"', "[" * 63 + "]" * 63)
    text = GOOD.replace('"4"', json.dumps("[" * 500))

    assert report_of(f"{deep}\n{text}").num_rows == 2
    assert "nested" in report_of(GOOD.replace('"4"', "[" * 64 + "]" * 64)).faults[0].reason


def test_a_line_that_is_too_long_is_one_fault_and_the_next_is_read(monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 64)

    report = report_of(f"{GOOD}\n{'x' * 5000}\n{GOOD}")

    assert report.num_rows == 2
    assert [(fault.line, fault.reason) for fault in report.faults] == [(2, "the line is longer than 1000 bytes")]


def test_faults_beyond_the_limit_are_counted_but_not_kept(monkeypatch):
    monkeypatch.setattr(rows, "MAX_FAULTS", 3)

    report = report_of("x\n" * 10)

    assert report.num_faults == 10
    assert len(report.faults) == 3


@given(st.binary(max_size=300))
def test_no_bytes_raise(data):
    report = report_of(data)

    assert report.num_rows + report.num_faults >= 1


@given(st.lists(st.sampled_from([GOOD, "", "  ", "{", "[1]", '{"messages": []}']), max_size=20))
def test_every_line_is_a_row_a_fault_or_blank(lines):
    report = report_of("\n".join(lines))

    blank = sum(not line.strip() for line in lines)
    assert report.num_rows == lines.count(GOOD)
    if blank < len(lines):
        assert report.num_rows + report.num_faults == len(lines) - blank


@given(st.integers(1, 200))
def test_where_chunks_end_makes_no_difference(size):
    data = (f"{GOOD}\r\n\n{{\n" * 3).encode()
    whole = report_of(data)
    before, rows.CHUNK_BYTES = rows.CHUNK_BYTES, size
    try:
        assert report_of(data) == whole
    finally:
        rows.CHUNK_BYTES = before


def test_reading_a_bad_file_names_the_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n\nx\n")

    with pytest.raises(BadData, match="line 3: invalid JSON"):
        read_rows(tmp_path / "rows.jsonl")


def test_messages_become_what_chat_templates_know():
    item = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}], "name": "x"},
        ]
    }

    assert messages_of(item) == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "user", "content": "2+2", "name": "x"},
    ]


def test_the_first_row_without_a_field_is_found():
    row = json.loads(GOOD)
    lines = [row | {"a": {"b": [1]}}, row | {"a": {"b": []}}, row]
    stream = io.BytesIO("\n".join(map(json.dumps, lines)).encode())

    assert first_without(iterate_rows(stream), ["a.b.0", "answer", "a"]) == {"a.b.0": 2, "a": 3}
