"""What pydantic finds wrong with a request, told as OpenAI tells it: the field as the client wrote it, and a remedy."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from app.errors import BadRequest

Schema = dict[str, Any]
Location = Sequence[int | str]

CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
}
NOT_IN_BODY = frozenset(CODES)
"""Errors about a key that the client has left out, or that the model has not."""
OBJECTS = frozenset({"model_type", "model_attributes_type", "dict_type"})
BLOCKS = ("body", "query", "path", "header")
"""Where FastAPI says that a field is from; not part of its name."""


def bad_request(errors: Sequence[Any], body: Any = None, model: type[BaseModel] | None = None) -> BadRequest:
    """The 400 for pydantic's errors about `body`, which was to be a `model`. With several, the first is the message.

    Unknown keys come first: what is missing is most often missing because it was misspelt.
    """
    schema = model.model_json_schema() if model else {}
    faults: list[dict[str, str | None]] = []
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
        fault = _fault(error, body, schema)
        if all(fault["param"] != other["param"] for other in faults):  # a union complains once for each of its members
            faults.append(fault)
    first = faults[0]
    more = {"errors": faults} if len(faults) > 1 else {}
    rest = f" ({len(faults) - 1} more in `errors`)" if more else ""
    return BadRequest(f"{first['message']}{rest}", param=first["param"], code=first["code"], **more)


def _fault(error: Mapping[str, Any], body: Any, schema: Schema) -> dict[str, str | None]:
    kind: str = error["type"]
    context: Mapping[str, Any] = error.get("ctx") or {}
    where: list[int | str] = list(error["loc"])
    if where and where[0] in BLOCKS:
        where = where[1:]
    if kind == "json_invalid":
        reason = context.get("error", error["msg"])
        return {"message": f"The body is not valid JSON: {reason}.", "param": None, "code": "invalid_json"}
    where += context.get("path", ())
    if kind.startswith("union_tag"):
        where.append(context["discriminator"].strip("'"))
    path = _as_written(where, body, missing=kind in NOT_IN_BODY) if isinstance(body, dict) else where
    param = ".".join(map(str, path)) or None
    message = f"{param or 'The body'}: {_reason(error, where, schema)}"
    return {"message": message, "param": param, "code": _code(kind)}


def _code(kind: str) -> str:
    if kind in CODES:
        return CODES[kind]
    if kind.startswith("unsupported_"):
        return kind
    return "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"


def _reason(error: Mapping[str, Any], where: Location, schema: Schema) -> str:
    kind: str = error["type"]
    context: Mapping[str, Any] = error.get("ctx") or {}
    if kind == "missing":
        return _sentence("this is required", _description(schema, where))
    if kind == "union_tag_not_found":
        return _sentence("this is required", _description(schema, where[:-1]))
    if kind == "union_tag_invalid":
        return f"unknown {context['tag']!r}; known are {context['expected_tags']}."
    if kind == "extra_forbidden":
        known = _keys(schema, where[:-1])
        near = difflib.get_close_matches(str(where[-1]), known, n=1, cutoff=0.5)
        if near:
            return f"unknown key; did you mean {near[0]!r}?"
        return f"unknown key; known are {', '.join(sorted(known))}." if known else "unknown key."
    text = "input should be an object" if kind in OBJECTS else str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    shown = f", not {given!r}" if isinstance(given, int | float) else ""
    return _sentence(text[:1].lower() + text[1:] + shown, _description(schema, where))


def _sentence(text: str, hint: str) -> str:
    return f"{text}{'' if text.endswith('.') else '.'}{f' ({hint})' if hint else ''}"


def _as_written(where: Location, body: Any, *, missing: bool) -> list[int | str]:
    """The keys of `where` that are in the client's JSON: pydantic adds the names of union members and of checks."""
    path: list[int | str] = []
    value = body
    for place, key in enumerate(where):
        inside = key in value if isinstance(value, dict) else isinstance(value, list) and key in range(len(value))
        if inside:
            value = value[key]
            path.append(key)
        elif missing and place == len(where) - 1:
            path.append(key)
    return path


def _node(schema: Schema, where: Location) -> tuple[Schema, str]:
    """The schema at `where`, as far as it goes, and the description of the field that leads there."""
    definitions: Schema = schema.get("$defs", {})
    node, hint = schema, ""
    for key in where:
        node = _deref(node, definitions, key)
        found = node.get("properties", {}).get(key)
        if isinstance(found, dict):
            node, hint = found, found.get("description", "")
    return _deref(node, definitions, None), hint


def _deref(node: Schema, definitions: Schema, key: int | str | None) -> Schema:
    """Follow references and unions to the object that `key` is in or, for a tagged union, is the tag of."""
    while True:
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]]
        elif key in node.get("discriminator", {}).get("mapping", {}):
            node = {"$ref": node["discriminator"]["mapping"][key]}
        elif objects := [member for member in node.get("anyOf", ()) if "$ref" in member or "oneOf" in member]:
            node = objects[0]
        else:
            return node


def _keys(schema: Schema, where: Location) -> list[str]:
    return list(_node(schema, where)[0].get("properties", {}))


def _description(schema: Schema, where: Location) -> str:
    return " ".join(_node(schema, where)[1].split()).rstrip(".")
