"""`reasoning_gym`: the score that reasoning_gym's own `score_answer` of a data set gives (extra `reasoning`).

The row is the entry: its `answer` and `metadata` are as reasoning_gym made them. To be called in a process of its
own: the package is large, and a scorer may take long over a strange answer.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure

INSTALL = "reasoning_gym is not installed on this machine: pip install 'qerl[reasoning]'"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def warm(spec: Mapping[str, Any]) -> None:
    """Import the package."""
    try:
        _scorer(spec["dataset"])
    except GradeFailure:
        return  # every call says it


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """What the data set's scorer returns; finite.

    GradeFailure `invalid_variable_error` if the row is no entry of reasoning_gym, `other_error` if the package or the
    data set is not there, or the scorer fails.
    """
    score = _scorer(spec["dataset"])
    for field, kind in (("answer", str), ("metadata", dict)):
        if not isinstance(item.get(field), kind) and not (field == "answer" and field in item):
            raise GradeFailure(
                "invalid_variable_error",
                f"the row has no {field!r} of a reasoning_gym entry: give it question, answer and metadata",
            )
    text = template.render(spec["input"], item=item, output_text=output_text)
    answers = _ANSWER.findall(text)
    answer = (answers[-1] if answers else text).strip()
    try:
        value = float(score(answer, dict(item)))
    except Exception as error:
        raise GradeFailure("other_error", f"reasoning_gym's scorer failed: {type(error).__name__}: {error}") from None
    if not math.isfinite(value):
        raise GradeFailure("other_error", f"reasoning_gym's scorer returned {value}")
    return value


@cache
def datasets() -> tuple[str, ...]:
    """The names of all data sets. GradeFailure `other_error` if the package is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise GradeFailure("other_error", INSTALL) from None
    return tuple(sorted(DATASETS))


@cache
def _scorer(dataset: str) -> Any:
    if dataset not in datasets():
        raise GradeFailure("other_error", f"reasoning_gym has no data set {dataset!r}")
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(dataset)
