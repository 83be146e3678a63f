"""Templates: text with `{{ item.a.b }}`, `{{ sample.output_text }}` and `{{ sample.output_json.k }}` in it.

    name = item [.key]* | sample.output_text | sample.output_json [.key]*        a[0] is another way to write a.0

A string renders as it is and anything else as compact JSON: `4`, `4.5`, `true`, `null`, `{"v":4}`. Text that was put
in is never looked at again, so a template in the data is text. `{{` always opens a name; a `}}` without one is text,
as LaTeX has it. Standard library only: the zygote imports this.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from qerl_core.graders.failure import GradeFailure

Path = tuple[str, ...]

_NAME = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_BRACKETED = re.compile(r"\[([0-9]{1,9})\]")
_INDEX = re.compile(r"[0-9]{1,9}")
_KEY = re.compile(r"[^\s.\[\]{}|()'\"]+")
_SHOWN = 80


def variables(template: str) -> list[str]:
    """The dotted names in a template, each once, in order. GradeFailure `invalid_variable_error` if one is none."""
    return list(dict.fromkeys(".".join(part) for part in _parse(template) if isinstance(part, tuple)))


def render(template: str, *, item: Mapping[str, Any], output_text: str) -> str:
    """The text of a template.

    GradeFailure: `invalid_variable_error` names what the row or the sample does not have, `sample_parse_error` says
    that a completion whose JSON was asked for is none.
    """
    parts = _parse(template)
    output_json: Any = None
    if any(isinstance(part, tuple) and part[:2] == ("sample", "output_json") for part in parts):
        output_json = parse_output(output_text)
    roots = {"item": item, "sample": {"output_text": output_text, "output_json": output_json}}
    return "".join(part if isinstance(part, str) else _text(_resolve(part, roots)) for part in parts)


def parse_output(output_text: str) -> Any:
    """A completion's JSON value. GradeFailure `sample_parse_error` if it is none; NaN and Infinity are none."""
    try:
        return _STRICT.decode(output_text)
    except (ValueError, RecursionError) as error:
        raise GradeFailure("sample_parse_error", f"the completion is not JSON: {error}") from error


@lru_cache(maxsize=256)
def _parse(template: str) -> tuple[str | Path, ...]:
    parts: list[str | Path] = []
    end = 0
    for match in _NAME.finditer(template):
        parts += [template[end : match.start()], _path(match[1].strip())]
        end = match.end()
    rest = template[end:]
    if "{{" in rest:
        shown = rest[rest.index("{{") :][:_SHOWN]
        raise GradeFailure("invalid_variable_error", f"{shown!r} is not closed by '}}}}'")
    return (*parts, rest)


def _path(name: str) -> Path:
    path = tuple(_BRACKETED.sub(r".\1", name).split("."))
    if not all(_KEY.fullmatch(key) for key in path):
        _refuse(name, "is not a name such as item.answer; filters and expressions are not supported")
    if path[0] == "item" or path[:2] == ("sample", "output_json") or path == ("sample", "output_text"):
        return path
    _refuse(name, "is unknown; names start with item., or are sample.output_text or sample.output_json")


def _resolve(path: Path, roots: Mapping[str, Any]) -> Any:
    value: Any = roots
    for i, key in enumerate(path):
        try:
            value = _step(value, key)
        except LookupError:
            name, holder = ".".join(path), ".".join(path[:i])
            holder = "the row" if holder == "item" else holder
            if not isinstance(value, Mapping):
                _refuse(name, f"is unknown: {holder[:_SHOWN]} has no {key[:_SHOWN]!r}")
            known = ", ".join(list(value)[:20])
            _refuse(name, f"is unknown: {holder[:_SHOWN]} has {known[:400] or 'no fields'}")
    return value


def _step(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value[key]
    if isinstance(value, list) and _INDEX.fullmatch(key):
        return value[int(key)]
    raise LookupError(key)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse(name: str, why: str) -> NoReturn:
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "..."
    raise GradeFailure("invalid_variable_error", f"{shown!r} {why}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
