"""JSONL rows, checked so that every fault of a file is known at once. Torch-free; memory does not grow with the file.

A line ends at the byte 0x0A and nowhere else: U+2028, U+2029 and U+0085 are text. Lines are counted from 1, blank ones
too. An item stays the JSON object that it was.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qerl_core.errors import BadData
from qerl_core.types import Item

MAX_LINE_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_FAULTS = 10_000
ROLES = {"system", "developer", "user", "assistant", "tool"}
CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r"

_SUSPECT_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


@dataclass(frozen=True, slots=True)
class RowFault:
    """What is wrong with a line."""

    line: int | None
    """From 1; None if it is the whole file."""
    field: str | None
    """Dotted path into the row, if it is one field."""
    reason: str


@dataclass(frozen=True, slots=True)
class RowsReport:
    """What a file holds."""

    num_rows: int
    """Good rows."""
    num_faults: int
    faults: tuple[RowFault, ...]
    """The first `MAX_FAULTS` of them."""


class _Fault(Exception):
    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.field = reason, field


def validate_rows(stream: BinaryIO) -> RowsReport:
    """Check a stream of JSONL to its end. Never raises for what the bytes are."""
    num_rows = num_faults = 0
    faults: list[RowFault] = []

    def note(line: int | None, fault: _Fault) -> None:
        nonlocal num_faults
        num_faults += 1
        if len(faults) < MAX_FAULTS:
            faults.append(RowFault(line, fault.field, fault.reason))

    for line, raw in _lines(stream):
        try:
            _check(_parse(raw))
            num_rows += 1
        except _Fault as fault:
            note(line, fault)
    if not num_rows and not num_faults:
        note(None, _Fault("the file has no rows"))
    return RowsReport(num_rows, num_faults, tuple(faults))


def iterate_rows(stream: BinaryIO) -> Iterator[tuple[int, Item]]:
    """Each row with its line. BadData at the first fault: the file was to be validated before."""
    for line, raw in _lines(stream):
        try:
            item = _parse(raw)
            _check(item)
        except _Fault as fault:
            raise BadData(f"line {line}: {fault.reason}") from fault
        yield line, item


def read_rows(path: Path) -> list[Item]:
    """All rows of a file. BadData at its first fault, or if it has none."""
    with path.open("rb") as file:
        items = [item for _, item in iterate_rows(file)]
    if not items:
        raise BadData("the file has no rows")
    return items


def messages_of(item: Item) -> list[dict[str, Any]]:
    """A row's messages as chat templates know them: content is text, a developer is the system."""
    return [
        {**message, "role": "system" if message["role"] == "developer" else message["role"], "content": _text(message)}
        for message in item["messages"]
    ]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; one that is too long is cut where that shows."""
    number, rest = 0, b""
    first = True
    for chunk in _chunks(stream):
        if first:
            chunk, first = chunk.removeprefix(BOM), False
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            if stripped := line.strip(BLANK):
                yield number, stripped
        if len(rest) > MAX_LINE_BYTES + CHUNK_BYTES:
            rest = rest[: MAX_LINE_BYTES + 1]
    if stripped := rest.strip(BLANK):
        yield number + 1, stripped


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _refuse_constant(name: str) -> Any:
    raise _Fault(f"{name} is not JSON; leave the field out or use null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Fault(f"the number {text[:32]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Fault(f"duplicate key {twice!r}", twice)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)


def _parse(raw: bytes) -> Any:
    if len(raw) > MAX_LINE_BYTES:
        raise _Fault(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _Fault(f"the line is not UTF-8 (byte {error.start + 1})") from error
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise _Fault(f"the line is nested too deeply; {MAX_DEPTH} levels are allowed")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if text.startswith("["):
            raise _Fault(_ARRAY) from error
        raise _Fault(f"invalid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _Fault("invalid JSON: a number has too many digits") from error
    if _SUSPECT_ESCAPE.search(text):
        _check_text(value)
    return value


def _depth(text: str) -> int:
    deepest = depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        mark = match[0]
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def _check_text(value: Any, path: str = "") -> None:
    """Refuse what UTF-8 or PostgreSQL cannot hold, in any string of the row."""
    if isinstance(value, str):
        if "\0" in value:
            raise _Fault("a NUL character cannot be stored", path or None)
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _Fault("an unpaired surrogate cannot be stored as UTF-8", path or None)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, path)
            _check_text(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_text(inner, f"{path}.{i}" if path else str(i))


_ARRAY = "this is an array; JSONL wants one object a line, without brackets around them (jq -c '.[]' converts)"


def _check(item: Any) -> None:
    if isinstance(item, list):
        raise _Fault(_ARRAY)
    if not isinstance(item, dict):
        raise _Fault("the line is not an object")
    if "messages" not in item:
        preference = {"chosen", "rejected"} <= item.keys() or "preferred_output" in item
        hint = "; this looks like preference (DPO) data, which a reinforcement job does not take" if preference else ""
        raise _Fault(f"messages is missing{hint}", "messages")
    messages = item["messages"]
    if not isinstance(messages, list):
        raise _Fault("messages is not a list", "messages")
    if not messages:
        raise _Fault("messages is empty", "messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages.{i}")
    if messages[-1]["role"] != "user":
        raise _Fault("the last message must be from the user: its answer is what is trained", "messages")
    tools = item.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _Fault("tools is not a list of objects", "tools")


def _check_message(message: Any, field: str) -> None:
    if not isinstance(message, dict):
        raise _Fault("a message is not an object", field)
    role = message.get("role")
    if not isinstance(role, str):
        raise _Fault("role is missing", f"{field}.role")
    if role not in ROLES:
        raise _Fault(f"unknown role {role[:32]!r}; known are {', '.join(sorted(ROLES))}", f"{field}.role")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if isinstance(content, list):
        if not all(_is_text_part(part) for part in content):
            raise _Fault("a content part is not text", f"{field}.content")
    elif not isinstance(content, str):
        raise _Fault("content is missing" if content is None else "content is not text", f"{field}.content")
    if not _text(message).strip():
        raise _Fault("content is empty", f"{field}.content")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def first_without(rows: Iterable[tuple[int, Item]], paths: Iterable[str]) -> dict[str, int]:
    """For each dotted path that some row lacks, the line of the first such row. Stops once all paths are lacking."""
    wanted = {path: path.split(".") for path in paths}
    lacking: dict[str, int] = {}
    for line, item in rows:
        for path in [path for path, keys in wanted.items() if not _has(item, keys)]:
            lacking[path] = line
            del wanted[path]
        if not wanted:
            break
    return lacking


def _has(value: Any, keys: list[str]) -> bool:
    for key in keys:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return False
    return True
