"""What a grader is on the wire and in a config: OpenAI's shapes, plus `math`. Torch-free.

How one is run is `runner.py`'s affair: never in the process that reads this.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field("grader", min_length=1, max_length=64)
    """What metrics call it."""


class StringCheckSpec(_Spec):
    """1 if `input` stands in `operation` to `reference`, else 0."""

    type: Literal["string_check"]
    input: str
    """Template, such as `{{ sample.output_text }}`."""
    reference: str
    """Template, such as `{{ item.answer }}`; its text is literal, never a pattern."""
    operation: Literal["eq", "ne", "neq", "like", "ilike"]
    """Equal, not equal (twice: Azure writes `neq`), contains, contains in any case."""


class MathSpec(_Spec):
    """1 if the completion's final answer equals `reference` as mathematics (math-verify), else 0."""

    type: Literal["math"]
    reference: str
    """Template, such as `{{ item.answer }}`."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """After this many seconds the completion counts as wrong; a reference that alone takes as long is an error."""


class PythonSpec(_Spec):
    """The number that `grade(sample, item)` returns."""

    type: Literal["python"]
    source: str = Field(min_length=1, max_length=256_000)
    """Python source that defines `grade(sample: dict, item: dict) -> float`; it is run anew for each call.

    `sample` has `output_text`, and `output_json`, which is None unless the text is JSON.
    """
    timeout_s: float = Field(10.0, gt=0, le=120)
    """After this many seconds the call is killed: an error, not a zero."""


GraderSpec = Annotated[StringCheckSpec | MathSpec | PythonSpec, Field(discriminator="type")]
