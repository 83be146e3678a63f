"""What a grader is on the wire and in a config: OpenAI's shapes, plus `math`, `format`, `reasoning_gym`. Torch-free.

How one is run is `pools.py`'s affair: no code and no pattern of a user's runs in the process that reads this.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qerl_core.graders.formula import FUNCTIONS


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


class TextSimilaritySpec(_Spec):
    """How alike `input` and `reference` are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: str
    """Template, such as `{{ sample.output_text }}`."""
    reference: str
    """Template, such as `{{ item.answer }}`."""
    evaluation_metric: Literal[
        "fuzzy_match", "bleu", "gleu", "meteor", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]
    """What is measured: see docs/graders.md for the library and the variant behind each name."""
    pass_threshold: float | None = Field(None, ge=0, le=1)
    """The reward is 1 from this similarity on, and 0 below it. None: the similarity itself."""
    timeout_s: float = Field(10.0, gt=0, le=60)
    """After this many seconds the call is killed: an error, not a zero."""


class FormatSpec(_Spec):
    """1 if all of `input` matches a regular expression, else 0."""

    type: Literal["format"]
    pattern: str = Field(min_length=1, max_length=10_000)
    """Python's `re`, matched from the first to the last character; begin with `(?s)` to let `.` match line ends."""
    input: str = "{{ sample.output_text }}"
    """Template of the text."""
    timeout_s: float = Field(1.0, gt=0, le=60)
    """After this many seconds the call is killed: an error, not a zero. A pattern may take exponential time."""


class ReasoningGymSpec(_Spec):
    """What reasoning_gym's own scorer of a data set says of an answer. The row has the entry's answer and metadata."""

    type: Literal["reasoning_gym"]
    dataset: str = Field(min_length=1, max_length=128)
    """The name in reasoning_gym, such as `leg_counting`."""
    input: str = "{{ sample.output_text }}"
    """Template of the answer; what stands in its last `<answer>...</answer>` counts, if there is one."""
    timeout_s: float = Field(10.0, gt=0, le=120)
    """After this many seconds the call is killed: an error, not a zero."""


SingleSpec = Annotated[
    StringCheckSpec | TextSimilaritySpec | FormatSpec | MathSpec | PythonSpec | ReasoningGymSpec,
    Field(discriminator="type"),
]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class MultiSpec(_Spec):
    """A formula over other graders' rewards."""

    type: Literal["multi"]
    graders: dict[str, SingleSpec] = Field(min_length=1, max_length=32)
    """Name to grader. A list, each by its `name`, and a single grader are read too."""
    calculate_output: str = Field(min_length=1, max_length=4_000)
    """Formula over the names: numbers, + - * / ^, min max abs floor ceil exp sqrt log, parentheses."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        graders = raw.get("graders")
        if isinstance(graders, Mapping) and isinstance(graders.get("type"), str):
            graders = [graders]
        if isinstance(graders, list | tuple):
            named: dict[str, Any] = {}
            for grader in graders:
                name = grader.get("name") if isinstance(grader, Mapping) else getattr(grader, "name", None)
                if not isinstance(name, str):
                    raise ValueError("graders: each of a list needs a name, which calculate_output uses")
                if name in named:
                    raise ValueError(f"graders: two have the name {name!r}: rename one")
                named[name] = grader
            graders = named
        return {**raw, "graders": graders} if "graders" in raw else raw

    @model_validator(mode="after")
    def _names_are_usable(self) -> Self:
        for name in self.graders:
            if not NAME.fullmatch(name) or name in FUNCTIONS:
                raise ValueError(
                    f"graders: {name!r} is no name for a formula: use ASCII letters, digits and _, not a digit first, "
                    f"and not {', '.join(FUNCTIONS)}"
                )
        return self


GraderSpec = Annotated[
    StringCheckSpec | TextSimilaritySpec | FormatSpec | MathSpec | PythonSpec | ReasoningGymSpec | MultiSpec,
    Field(discriminator="type"),
]
