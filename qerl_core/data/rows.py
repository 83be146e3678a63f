"""JSONL rows, checked so that every fault of a file is known at once. Torch-free; memory does not grow with the file.

A line ends at the byte 0x0A and nowhere else: U+2028, U+2029 and U+0085 are text. Lines are counted from 1, blank
ones too. An item stays the JSON object that it was.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from qerl_core.errors import BadData
from qerl_core.types import Item

MAX_LINE_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_FAULTS = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")

_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLANK = b" \t\r"
_SHOWN = 40


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
    """Check a stream of JSONL to its end. Never raises for what the bytes are.

    A file that is not JSONL at all (UTF-16, JSON over several lines) is one fault, and is not read on.
    """
    num_rows = num_faults = 0
    faults: list[RowFault] = []
    for line, raw in _lines(stream):
        found, whole_file = [], False
        try:
            if not num_rows and not num_faults and (mistaken := _mistaken_file(raw)):
                found, whole_file = [mistaken], True
            else:
                found = _faults_of(_parse(raw))
        except _Fault as fault:
            found = [fault]
        if not found:
            num_rows += 1
            continue
        num_faults += len(found)
        faults += [RowFault(line, fault.field, fault.reason) for fault in found[: MAX_FAULTS - len(faults)]]
        if whole_file:
            break
    if not num_rows and not num_faults:
        return RowsReport(0, 1, (RowFault(None, None, "the file has no rows"),))
    return RowsReport(num_rows, num_faults, tuple(faults))


def iterate_rows(stream: BinaryIO) -> Iterator[tuple[int, Item]]:
    """Each row with its line. BadData at the first fault: the file was to be validated before."""
    for line, raw in _lines(stream):
        try:
            item = _parse(raw)
            found = _faults_of(item)
        except _Fault as fault:
            found = [fault]
        if found:
            raise BadData(f"line {line}: {found[0].reason}")
        yield line, item


def read_rows(path: Path) -> list[Item]:
    """All rows of a file. BadData at its first fault, or if it has none."""
    with path.open("rb") as file:
        items = [item for _, item in iterate_rows(file)]
    if not items:
        raise BadData("the file has no rows")
    return items


def messages_of(item: Item) -> list[dict[str, Any]]:
    """A valid row's messages as chat templates know them: content is text, a developer is the system."""
    return [
        {**message, "role": _role(message["role"]), "content": _text(message.get("content"))}
        for message in item["messages"]
    ]


def first_without(rows: Iterable[tuple[int, Item]], paths: Iterable[str]) -> dict[str, int]:
    """For each dotted path that some row lacks, the line of the first such row.

    Reads on until every path is found lacking.
    """
    wanted = {path: path.split(".") for path in paths}
    lacking: dict[str, int] = {}
    for line, item in rows:
        for path in [path for path, keys in wanted.items() if not _has(item, keys)]:
            lacking[path] = line
            del wanted[path]
        if not wanted:
            break
    return lacking


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; one that is too long is cut where that still shows."""
    number, rest = 0, b""
    while chunk := stream.read(_CHUNK_BYTES):
        lines = chunk.split(b"\n")
        lines[0] = rest + lines[0]
        rest = lines.pop()[: MAX_LINE_BYTES + 1]
        for line in lines:
            number += 1
            if stripped := _stripped(line, number):
                yield number, stripped
    if stripped := _stripped(rest, number + 1):
        yield number + 1, stripped


def _stripped(line: bytes, number: int) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip(_BLANK)


def _mistaken_file(raw: bytes) -> _Fault | None:
    """What a file whose first row is `raw` is, if it is no JSONL in a way that would make every line a fault."""
    if raw.startswith(_UTF16):
        return _Fault("the file is UTF-16; save it as UTF-8")
    if raw == b"[":
        return _Fault(_ARRAY)
    if raw == b"{":
        return _Fault("the file has JSON over several lines; one object a line is wanted (jq -c . converts)")
    return None


def _parse(raw: bytes) -> Any:
    if len(raw) > MAX_LINE_BYTES:
        raise _Fault(_ARRAY if raw[:1] == b"[" else f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _Fault(f"the line is not UTF-8 (byte {error.start + 1})") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(raw):
        raise _Fault(f"the row is nested too deeply; {MAX_DEPTH} levels are allowed")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _Fault(_json_reason(text, error)) from None
    except ValueError:  # from int(): a defence of Python's against quadratic time
        raise _Fault("invalid JSON: an integer has too many digits") from None
    except RecursionError:  # of brackets that never close
        raise _Fault(f"the row is nested too deeply; {MAX_DEPTH} levels are allowed") from None
    if "\\u" in text and _SUSPECT_ESCAPE.search(text):
        _refuse_unstorable(value, ())
    return value


def _json_reason(text: str, error: json.JSONDecodeError) -> str:
    if text[0] == "[":
        return _ARRAY
    if "\0" in text:
        return "invalid JSON: there is a NUL character in the line"
    if text[0] == "\ufeff":
        return "invalid JSON: there is a byte-order mark inside the file"
    hint = "; one object a line is wanted" if error.msg == "Extra data" else ""
    return f"invalid JSON: {error.msg} at column {error.colno}{hint}"


_ARRAY = "this is a JSON array; one object a line is wanted, without brackets around them (jq -c '.[]' converts)"


def _no_constant(name: str) -> NoReturn:
    raise _Fault(f"{name} is not JSON; use null or leave the field out")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Fault(f"the number {_shown(text)} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Fault(f"duplicate key {_shown(twice)}", _printable(twice))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _is_too_deep(raw: bytes) -> bool:
    brackets = _STRING.sub(b"", raw).translate(_SQUARED, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        inner, brackets = brackets, brackets.replace(b"[]", b"")  # a level a turn
        if len(inner) == len(brackets):
            return brackets.count(b"[") > MAX_DEPTH
    return bool(brackets)


# Possessive, and content with an unclosed last string: linear in whatever it is given.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SQUARED = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_INDEX = re.compile(r"[0-9]{1,9}")
_SUSPECT_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse_unstorable(value: Any, path: tuple[str, ...]) -> None:
    """Refuse what UTF-8 or PostgreSQL cannot hold, in any string of the row."""
    if isinstance(value, str):
        field = _printable(".".join(path)) or None
        if "\0" in value:
            raise _Fault("the text has a NUL character, which cannot be stored", field)
        if _SURROGATE.search(value):
            raise _Fault("the text has an unpaired surrogate, which UTF-8 cannot hold", field)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unstorable(key, path)
            _refuse_unstorable(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _refuse_unstorable(inner, (*path, str(i)))


def _faults_of(item: Any) -> list[_Fault]:
    """Everything that is wrong with a row that is JSON."""
    if not isinstance(item, dict):
        return [_Fault(_ARRAY if isinstance(item, list) else f"the row is {_kind(item)}, not an object")]
    messages = item.get("messages", item)
    if messages is item:
        return [_Fault(f"messages is missing{_hint(item)}", "messages")]
    if not isinstance(messages, list):
        return [_Fault(f"messages is {_kind(messages)}, not a list", "messages")]
    if not messages:
        return [_Fault("messages is empty", "messages")]
    faults: list[_Fault] = []
    for i, message in enumerate(messages):
        if fault := _message_fault(message, f"messages.{i}"):
            faults.append(fault)
    last = messages[-1].get("role") if isinstance(messages[-1], dict) else None
    if last != "user" and last in ROLES:
        reason = f"the last message must be from the user, not from the {last}"
        if last == "assistant":
            reason += ": the model writes the answer; keep a reference answer in a field of its own"
        faults.append(_Fault(reason, f"messages.{len(messages) - 1}.role"))
    tools = item.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        faults.append(_Fault("tools is not a list of objects", "tools"))
    return faults


def _hint(item: Item) -> str:
    if {"chosen", "rejected"} <= item.keys() or {"preferred_output", "non_preferred_output"} <= item.keys():
        return "; this looks like preference (DPO) data, and a reinforcement job takes prompts to answer"
    if "prompt" in item:
        return '; a prompt is written {"messages": [{"role": "user", "content": "..."}]}'
    return ""


def _message_fault(message: Any, field: str) -> _Fault | None:
    if not isinstance(message, dict):
        return _Fault(f"a message is {_kind(message)}, not an object", field)
    role = message.get("role")
    if not isinstance(role, str):
        return _Fault("role is missing" if role is None else f"role is {_kind(role)}, not text", f"{field}.role")
    if role not in ROLES:
        return _Fault(f"unknown role {_shown(role)}; known are {', '.join(ROLES)}", f"{field}.role")
    content = message.get("content")
    if isinstance(content, list):
        if not all(map(_is_text_part, content)):
            return _Fault('content has a part that is not {"type": "text", "text": "..."}', f"{field}.content")
        content = _text(content)
    if isinstance(content, str):
        return _Fault("content is empty", f"{field}.content") if not content or content.isspace() else None
    if content is not None:
        return _Fault(f"content is {_kind(content)}, not text", f"{field}.content")
    if role == "assistant" and message.get("tool_calls"):
        return None
    return _Fault("content is missing", f"{field}.content")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(content: str | list[dict[str, str]] | None) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _has(value: Any, keys: list[str]) -> bool:
    for key in keys:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return False
    return True


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {str: "text", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return names[type(value)]


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _printable(text: str) -> str:
    """A path for a report, which UTF-8 and PostgreSQL can hold."""
    return text[:200].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
