"""How one completion is graded. Runs in the helper's forks only: never in the API's or the trainer's process."""

import math
import numbers
import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from qerl_core.graders.template import Sample, TemplateError, render
from qerl_core.types import Item

Reply = dict[str, Any]
Spec = dict[str, Any]

MAX_ERROR_CHARS = 4000
SOURCE_NAME = "grader.py"


def reward(value: float) -> Reply:
    """A reply with a reward."""
    return {"reward": value}


def failure(error_type: str, error: str) -> Reply:
    """A reply with the reason that there is none."""
    if len(error) > MAX_ERROR_CHARS:
        error = error[: MAX_ERROR_CHARS // 2] + "\n...\n" + error[-MAX_ERROR_CHARS // 2 :]
    return {"reward": None, "error_type": error_type, "error": error}


def string_check(spec: Spec, item: Item, output_text: str) -> Reply:
    """1 or 0 for the operation on the two rendered texts."""
    sample = Sample(output_text)
    try:
        text, reference = render(spec["input"], item, sample), render(spec["reference"], item, sample)
    except TemplateError as error:
        return failure(error.error_type, str(error))
    return reward(float(_OPERATIONS[spec["operation"]](text, reference)))


_OPERATIONS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "neq": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def math_check(spec: Spec, item: Item, output_text: str) -> Reply:
    """1 if the answer's last expression equals the reference's; math-verify's own time limits (signals) are off."""
    from math_verify import parse, verify

    try:
        reference = render(spec["reference"], item, Sample(output_text))
    except TemplateError as error:
        return failure(error.error_type, str(error))
    bare = "$" not in reference and "\\boxed" not in reference
    gold = parse(f"${reference}$" if bare else reference, parsing_timeout=None)
    if not gold:
        return failure("other_error", f"the reference {reference[:200]!r} is not mathematics")
    answer = parse(output_text, parsing_timeout=None)
    return reward(float(verify(gold, answer, timeout_seconds=None)))


def compile_source(source: str) -> CodeType | Reply:
    """The user's module, compiled and not run; a failure if it does not compile."""
    try:
        return compile(source, SOURCE_NAME, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return failure("python_grader_server_error", f"the source does not compile: {error}")


def python_call(code: CodeType, item: Item, output_text: str) -> Reply:
    """What `grade(sample, item)` returns, if it is a finite number. Everything else is an error."""
    namespace: dict[str, Any] = {"__name__": "grader"}
    sample = {"output_text": output_text, "output_json": _json_or_none(output_text)}
    try:
        exec(code, namespace)
        grade = namespace.get("grade")
        if not callable(grade):
            return failure("python_grader_server_error", "the source defines no function grade(sample, item)")
        value = grade(sample, item)
    except BaseException:  # SystemExit too: it is the user's code
        return failure("python_grader_runtime_error", _user_traceback())
    # A bool is an int, and numpy's scalars are registered as numbers.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return failure("python_grader_runtime_error", f"grade returned {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        return failure("python_grader_runtime_error", f"grade returned {number}, which is not finite")
    return reward(number)


def _json_or_none(text: str) -> Any:
    try:
        return Sample(text).output_json
    except TemplateError:
        return None


def _user_traceback() -> str:
    kind, error, trace = sys.exc_info()
    theirs = [frame for frame in traceback.extract_tb(trace) if frame.filename == SOURCE_NAME][-20:]
    lines = [*traceback.format_list(theirs), *traceback.format_exception_only(kind, error)]
    return "".join(lines).strip()
