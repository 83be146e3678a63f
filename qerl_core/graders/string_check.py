"""`string_check`: how two rendered texts stand to each other. No user code and no loops, so it needs no fork."""

from collections.abc import Callable, Mapping
from typing import Any

from qerl_core.graders import template

OPERATIONS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "neq": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def grade(spec: Mapping[str, Any], *, item: Mapping[str, Any], output_text: str) -> float:
    """1.0 or 0.0. GradeFailure if a template cannot be rendered."""
    text = template.render(spec["input"], item=item, output_text=output_text)
    reference = template.render(spec["reference"], item=item, output_text=output_text)
    return float(OPERATIONS[spec["operation"]](text, reference))
