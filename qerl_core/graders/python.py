"""`python`: the number that the user's `grade(sample, item)` returns. To be called in a process of its own.

The source is compiled and run anew for every call, so a call sees nothing of the others. `sample` holds `output_text`
and `output_json`: the completion, and its JSON value or None. Standard library only: the zygote imports this.
"""

import importlib
import linecache
import math
import numbers
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure

FILENAME = "<grader>"
MODULE = "grader"
MAX_TRACEBACK = 8_000
MAX_FRAMES = 20

# Well-known modules whose import is slow and starts nothing. Their names are all that is taken from the source.
_PRELOADED = frozenset({
    "collections", "dataclasses", "datetime", "decimal", "difflib", "fractions", "functools", "itertools", "json",
    "math", "math_verify", "nltk", "numpy", "pandas", "random", "rapidfuzz", "re", "scipy", "sklearn", "statistics",
    "string", "sympy", "typing", "unicodedata",
})  # fmt: skip
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)


def preload(source: str) -> None:
    """Import the well-known modules that a source names, so that forks share them.

    Runs nothing of the source: code of the user's in the zygote could spoil every later grade.
    """
    importlib.import_module("ast")  # tracebacks use it
    for name in sorted(set(_IMPORT.findall(source)) & _PRELOADED):
        with suppress(ImportError):
            importlib.import_module(name)


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """The number that the user's function returns; finite.

    GradeFailure: `python_grader_server_error` if the source defines no such function, and with the user's traceback
    `python_grader_runtime_error` if it raises or returns anything but a number.
    """
    source: str = spec["source"]
    function = _load(source)
    sample = {"output_text": output_text, "output_json": _json_or_none(output_text)}
    try:
        return _number(function(sample, item))
    except GradeFailure:
        raise
    except BaseException as error:
        raise GradeFailure("python_grader_runtime_error", explain(error)) from None


def _load(source: str) -> Any:
    try:
        code = compile(source, FILENAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GradeFailure("python_grader_server_error", f"the source does not compile: {error}") from None
    linecache.cache[FILENAME] = (len(source), None, source.splitlines(keepends=True), FILENAME)
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module  # where dataclasses and pickle look
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        raise GradeFailure("python_grader_runtime_error", explain(error)) from None
    function = module.__dict__.get("grade")
    if not callable(function):
        raise GradeFailure("python_grader_server_error", "the source does not define grade(sample, item)")
    return function


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # numpy's scalars are registered as Real
        raise GradeFailure(
            "python_grader_runtime_error", f"grade() returned {_kind(value)}, not a number; return a float"
        )
    number = float(value)
    if not math.isfinite(number):
        raise GradeFailure("python_grader_runtime_error", f"grade() returned {number}; return a finite number")
    return number


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _json_or_none(text: str) -> Any:
    try:
        return template.parse_output(text)
    except GradeFailure:
        return None


def explain(error: BaseException) -> str:
    """A traceback from the user's first frame on, without local folders, cut to a bound."""
    told = traceback.TracebackException.from_exception(error)
    _trim(told, set())
    text = "".join(told.format()).strip()
    with suppress(OSError):
        text = text.replace(os.getcwd() + "/", "")  # noqa: PTH109
    for folder in _FOLDERS:
        text = text.replace(folder, "")
    if len(text) > MAX_TRACEBACK:
        text = f"{text[: MAX_TRACEBACK // 2]}\n...\n{text[-MAX_TRACEBACK // 2 :]}"
    return text


_FOLDERS = sorted((f"{folder}/" for folder in {*sys.path, sys.prefix, sys.base_prefix} if folder), key=len)[::-1]


def _trim(told: traceback.TracebackException | None, seen: set[int]) -> None:
    if told is None or id(told) in seen:
        return
    seen.add(id(told))
    frames = list(told.stack)
    first = next((i for i, frame in enumerate(frames) if frame.filename == FILENAME), len(frames))
    told.stack = traceback.StackSummary.from_list(frames[first:][-MAX_FRAMES:])
    for inner in (told.__cause__, told.__context__, *(told.exceptions or ())):
        _trim(inner, seen)
