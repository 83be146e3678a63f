import json
import time
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qerl_core.data.rows import (
    MAX_DEPTH,
    MAX_FAULTS,
    MAX_LINE_BYTES,
    first_without,
    iterate_rows,
    messages_of,
    read_rows,
    validate_rows,
)
from qerl_core.errors import BadData

CASES_FOLDER = Path(__file__).parents[2] / "cases"
CASES = json.loads((CASES_FOLDER / "datasets.json").read_text())
# What a message must say for the shared case's `about`.
WORDS = {
    "no rows": ["no rows"],
    "an array: one object a line is wanted": ["array", "one object a line is wanted", "jq"],
    "messages is missing; this looks like preference (DPO) data": ["messages is missing", "preference (DPO)"],
    "unknown role robot": ["unknown role", "robot"],
    "duplicate key answer": ["duplicate key", "answer"],
}
GOOD = b'{"messages": [{"role": "user", "content": "q"}], "answer": "1"}'


def row(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "q"}], **fields}).encode()


def messages(*pairs):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]}).encode()


def check(data):
    return validate_rows(BytesIO(data))


def reason_of(data):
    report = check(data)
    assert report.num_faults == len(report.faults) == 1, report
    return report.faults[0].reason


@pytest.mark.parametrize("name", CASES)
def test_shared_case(name):
    case = CASES[name]
    with (CASES_FOLDER / "datasets" / name).open("rb") as stream:
        report = validate_rows(stream)

    assert (report.num_faults == 0) == case["accepted"]
    if case["accepted"]:
        assert report.num_rows == case["rows"]
        assert len(read_rows(CASES_FOLDER / "datasets" / name)) == case["rows"]
    assert [fault.line for fault in report.faults] == [error["line"] for error in case.get("errors", [])]
    for fault, error in zip(report.faults, case.get("errors", []), strict=True):
        for word in WORDS.get(error["about"], [error["about"]]):
            assert word in fault.reason


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name]["accepted"]])
def test_reading_what_is_not_valid_is_bad_data(name):
    with pytest.raises(BadData):
        read_rows(CASES_FOLDER / "datasets" / name)


def test_an_item_stays_the_object_that_it_was():
    text = "one\u2028two\u2029three\x85four \U0001f469 שלום"
    item = {"messages": [{"role": "user", "content": text}], "answer": [1, 2.5, None, True, {"a": "b"}], "n": 10**30}
    data = json.dumps(item, ensure_ascii=False).encode()

    assert list(iterate_rows(BytesIO(b"\n" + data))) == [(2, item)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"null", "row is null"),
        (b"1", "row is a number"),
        (b'"text"', "row is text"),
        (b"true", "row is a boolean"),
        (b"[1", "array"),
        (b"[\n" + GOOD + b",\n" + GOOD + b"\n]", "array"),
        (b'{\n"messages": []\n}', "over several lines"),
        (GOOD + GOOD, "one object a line"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (GOOD + b"\n" + b"\xef\xbb\xbf" + GOOD, "byte-order mark"),
        (b'{"messages": "q"}', "messages is text, not a list"),
        (b'{"messages": null}', "messages is null, not a list"),
        (b'{"messages": ["q"]}', "a message is text"),
        (b'{"messages": [{"content": "q"}]}', "role is missing"),
        (b'{"messages": [{"role": 1, "content": "q"}]}', "role is a number"),
        (b'{"messages": [{"role": "User", "content": "q"}]}', "unknown role 'User'"),
        (b'{"messages": [{"role": "user"}]}', "content is missing"),
        (b'{"messages": [{"role": "user", "content": null}]}', "content is missing"),
        (b'{"messages": [{"role": "user", "content": {"a": 1}}]}', "content is an object, not text"),
        (b'{"messages": [{"role": "user", "content": " \\n"}]}', "content is empty"),
        (b'{"messages": [{"role": "user", "content": []}]}', "content is empty"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}', "part that is not"),
        (messages(("system", "s")), "last message must be from the user, not from the system"),
        (messages(("user", "q"), ("assistant", "a")), "a field of its own"),
        (row(tools={}), "tools is not a list"),
        (row(tools=["f"]), "tools is not a list of objects"),
        (b'{"prompt": "q", "answer": "1"}', '"role": "user"'),
        (b'{"input": {}, "preferred_output": [], "non_preferred_output": []}', "preference (DPO)"),
        (GOOD[:-1] + b', "a": 1e999}', "too large"),
        (GOOD[:-1] + b', "a": -1e999}', "too large"),
        (GOOD[:-1] + b', "a": -Infinity}', "-Infinity is not JSON"),
        (GOOD[:-1] + b', "a": ' + b"9" * 5000 + b"}", "too many digits"),
        (GOOD[:-1] + b', "a": {"b": {"k": 1, "k": 1}}}', "duplicate key 'k'"),
        (GOOD[:-1] + b', "a": 1, "\\u0061": 1}', "duplicate key 'a'"),
        (GOOD[:-1] + b', "a\\u0000": 1}', "NUL"),
        (GOOD[:-1] + b', "a": ["\\udc00"]}', "unpaired surrogate"),
        (GOOD[:-1] + b', "a": "\xed\xa0\x80"}', "not UTF-8"),
        (GOOD[:-1] + b', "a": "\0"}', "NUL"),
        (GOOD[:-1] + b', "a": "\t"}', "Invalid control character"),
        (GOOD + b"\0", "NUL"),
    ],
)
def test_a_fault_is_told_in_words(data, words):
    assert words in reason_of(data)


@pytest.mark.parametrize(
    "data",
    [
        messages(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q")),
        row(tools=None),
        row(tools=[]),
        row(tools=[{"type": "function", "function": {"name": "f"}}]),
        row(answer="\\u0000 and \\ud83d are how these are written"),
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}',
        b'{"messages": [{"role": "user", "content": "q", "name": "n"}], "answer": ' + b"9" * 300 + b"}",
        b"  " + GOOD + b"\t\r",
        json.dumps({
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
                {"role": "user", "content": "q"},
            ]
        }).encode(),
    ],
)  # fmt: skip
def test_good_rows_are_accepted(data):
    report = check(data)

    assert (report.num_rows, report.num_faults) == (1, 0)


def test_every_fault_of_a_row_is_reported_with_its_field():
    data = b'{"messages": [{"role": "robot", "content": "q"}, {"role": "user", "content": ""}, 1], "tools": 1}'

    assert [(fault.line, fault.field) for fault in check(b"\n" + data).faults] == [
        (2, "messages.0.role"),
        (2, "messages.1.content"),
        (2, "messages.2"),
        (2, "tools"),
    ]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_has_a_bound_and_brackets_in_text_do_not_count(opening, closing):
    def nested(depth):
        value = opening * depth + "1" + closing * depth
        return f'{{"messages": [{{"role": "user", "content": "{{[(\\"{{"}}], "a": {value}}}'.encode()

    assert check(nested(MAX_DEPTH - 1)).num_rows == 1
    assert "too deeply" in reason_of(nested(MAX_DEPTH))
    assert check(row(answer="[{" * 10_000)).num_rows == 1
    assert check(row(answer=[{}] * 10_000)).num_rows == 1


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"{" * 70 + b'"' + b'\\"' * 100_000])
def test_brackets_that_never_close_overflow_nothing(data):
    assert check(data).num_faults == 1


def test_a_line_has_a_longest_length():
    fitting = row(answer="x" * (MAX_LINE_BYTES - len(row(answer=""))))

    assert len(fitting) == MAX_LINE_BYTES
    assert check(fitting + b"\n" + GOOD).num_rows == 2
    report = check(fitting.replace(b"x", b"xx", 1) + b"\n" + GOOD + b"\nx")
    assert [fault.line for fault in report.faults] == [1, 3]
    assert "longer than 4 MiB" in report.faults[0].reason
    assert report.num_rows == 1


def test_an_array_too_long_for_a_line_is_still_called_one():
    assert "array" in reason_of(b"[" + b"1," * MAX_LINE_BYTES)


class Repeated:
    """A stream that gives `data` so many times."""

    def __init__(self, data, times):
        self.data, self.left = data, times

    def read(self, size):
        self.left -= 1
        return self.data if self.left >= 0 else b""


def test_memory_does_not_grow_with_the_file():
    many, long = Repeated(b"x\n" * 500 + GOOD, 60), Repeated(b"x" * (1 << 20), 64)
    tracemalloc.start()
    try:
        faulty, endless = validate_rows(many), validate_rows(long)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert endless.num_faults == 1
    assert faulty.num_faults > 2 * MAX_FAULTS
    assert len(faulty.faults) == MAX_FAULTS
    assert peak < 24 << 20


def test_twenty_thousand_rows_take_a_second_or_so():
    data = (row(answer="x" * 400) + b"\n") * 20_000
    started = time.perf_counter()

    assert check(data).num_rows == 20_000

    assert time.perf_counter() - started < 3.0


@given(st.lists(st.sampled_from([GOOD, b"", b" \r", b"x", b"{}", GOOD + b"\r", b"\xff"])), st.integers(1, 30))
def test_every_line_is_counted_once_however_the_stream_is_cut(lines, size):
    data = b"\n".join(lines)

    class Cut(BytesIO):
        def read(self, _size=-1):
            return super().read(size)

    report = validate_rows(Cut(data))

    bad = [i for i, line in enumerate(lines, 1) if line.strip() in (b"x", b"{}", b"\xff")]
    good = sum(line.strip() == GOOD for line in lines)
    assert report.num_rows == good
    assert [fault.line for fault in report.faults] == (bad if good or bad else [None])


@given(st.binary() | st.text().map(str.encode))
@example(b"\xef\xbb\xbf")
@example(b'{"messages": [{"role": []}]}')
@example(b'{"messages": [[], {}]}')
def test_no_bytes_make_it_raise(data):
    report = check(data)

    assert report.num_faults == len(report.faults)
    assert report.num_rows + report.num_faults > 0
    assert {fault.line for fault in report.faults} <= {None, *range(1, data.count(b"\n") + 2)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
ODD = st.one_of(
    JSON,
    st.fixed_dictionaries({}, optional={"role": JSON | st.sampled_from(["user", "system"]), "content": JSON}),
)


@given(st.fixed_dictionaries({}, optional={"messages": st.lists(ODD) | JSON, "tools": JSON, "prompt": JSON}))
def test_no_json_makes_it_raise_and_what_it_accepts_can_be_rendered(item):
    data = json.dumps(item).encode()

    if check(data).num_faults == 0:
        [(_, read)] = iterate_rows(BytesIO(data))
        assert read == item
        assert all(message["content"].strip() for message in messages_of(read) if message["role"] == "user")


def test_messages_are_normalized_for_chat_templates():
    item = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}, {"type": "text", "text": " Now."}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "user", "content": "q"},
        ]
    }

    assert messages_of(item) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2? Now."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "q"},
    ]


def test_the_first_line_that_lacks_a_field_is_found():
    rows = [(1, {"a": 1, "b": {"c": [1]}}), (3, {"a": 1, "b": {"c": []}}), (4, {"b": {"c": [2]}}), (5, {})]

    assert first_without(rows, ["a", "b.c.0", "b", "d"]) == {"d": 1, "b.c.0": 3, "a": 4, "b": 5}
    assert first_without(rows[:1], ["a", "b.c.0"]) == {}


def test_rows_are_read_no_further_than_needed():
    def rows():
        yield 1, {}
        raise AssertionError

    assert first_without(rows(), ["a"]) == {"a": 1}
