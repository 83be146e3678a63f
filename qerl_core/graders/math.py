r"""`math`: does the completion's final answer equal the reference as mathematics? By math-verify.

A completion's answer is what math-verify finds: in `\boxed{}` (several close to each other are a set), after "the
final answer is", the last in LaTeX, the last plain number. A reference without LaTeX delimiters is one whole
expression, such as `x+1`, `\frac12` or `1,234`, unless it is prose, which is read like a completion; of GSM8K's
solutions what follows `####` counts.

math-verify's own time limits are off: they are SIGALRM's. The process of a call is killed from outside instead.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure

PROBE = "0"
"""A completion that hangs no checker: if this one takes too long, the reference is to blame."""

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[,:]?\s+[A-Za-z]{2,}")
_FAMILIAR = (
    r"\frac{1}{2}x^{2}+1", r"-\sqrt{2}", "x=5", "(1, 2)", r"\{1, 2\}", "[0, 3)", r"50\%", r"2\pi r", "(x+1)(x-1)",
    r"10\text{ cm}", r"x \le 3", "-8",
)  # fmt: skip


def warm() -> None:
    """Import math-verify and fill its parser's caches, so that forks share them. Reads nothing from outside."""
    logging.disable()
    for expression in _FAMILIAR:
        gold = _parse(rf"\boxed{{{expression}}}")
        _equal(gold, _parse(f"so ${expression}$"))
        _equal(gold, _parse(f"or {expression}, or 12"))


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """1.0 or 0.0; a completion without an answer is wrong.

    GradeFailure `other_error` if the reference is no mathematics, since then no completion could be right.
    """
    gold = _read(template.render(spec["reference"], item=item, output_text=output_text))
    return float(_equal(gold, _parse(output_text)))


def _read(reference: str) -> list[Any]:
    text = reference.rpartition("####")[2].strip()
    if any(mark in text for mark in _DELIMITERS):
        readings = [_parse(text)]
    elif _PROSE.search(text):
        readings = [_parse(text), _parse(rf"\boxed{{{text}}}")]
    else:
        readings = [_parse(rf"\boxed{{{text}}}"), _parse(text)]
    understood = [reading for reading in readings if any(not isinstance(part, str) for part in reading)]
    gold = next(iter(understood or filter(None, readings)), None)
    if gold is None:
        raise GradeFailure("other_error", f"the reference {reference[:80]!r} is not a mathematical expression")
    return gold


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))
