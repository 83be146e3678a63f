"""`format`: does a rendered text match a regular expression from its first to its last character?

To be called in a process that can be killed: a pattern such as `(a+)+b` takes time that doubles with each character.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from qerl_core.graders import template
from qerl_core.graders.failure import GradeFailure


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """1.0 or 0.0. GradeFailure `other_error` if the pattern is none, or as of a template."""
    pattern = compiled(spec["pattern"])
    return float(pattern.fullmatch(template.render(spec["input"], item=item, output_text=output_text)) is not None)


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern. GradeFailure `other_error` if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a nested set that will mean something one day
            return re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise GradeFailure("other_error", f"the pattern is not a regular expression: {error}") from None
