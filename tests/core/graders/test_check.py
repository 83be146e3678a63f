import pytest
from pydantic import TypeAdapter

from qerl_core.graders.check import check_grader, item_paths
from qerl_core.graders.spec import GraderSpec

TO_SPEC = TypeAdapter(GraderSpec)


def python(source):
    return TO_SPEC.validate_python({"type": "python", "source": source})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(sample, item)\n    return 1", "line 1: expected ':'"),
        ("def score(sample, item):\n    return 1", "defines no function grade"),
        ("async def grade(sample, item):\n    return 1", "grade is async"),
        ("def grade(sample):\n    return 1", "must take two arguments"),
        ("def grade(sample, item, more):\n    return 1", "must take two arguments"),
        ("def grade(sample, item, *, more):\n    return 1", "must take two arguments"),
        ("if True:\n    def grade(sample, item):\n        return 1", "defines no function grade"),
        ("x = '\0'", "does not compile"),
        ("return 1", "'return' outside function"),
        ("(" * 5000, "too many nested parentheses"),
    ],
)
def test_a_source_that_can_never_grade_is_told_before_it_runs(source, message):
    [problem] = check_grader(python(source))

    assert problem.field == "source"
    assert message in problem.message


@pytest.mark.parametrize(
    "source",
    [
        "def grade(sample, item):\n    return 1",
        "def grade(*arguments):\n    return 1",
        "def grade(sample, item, weight=2.0, *, more=1):\n    return 1",
        "grade = lambda sample, item: 1.0",
        "from math import hypot as grade",
    ],
)
def test_a_source_that_may_grade_is_accepted(source):
    assert check_grader(python(source)) == []


def test_the_source_is_not_run():
    assert check_grader(python("raise SystemExit\ndef grade(sample, item):\n    return 1")) == []


@pytest.mark.parametrize("template", ["{{ answer }}", "{{ item.a | upper }}", "{{ sample.text }}", "{{ item.a"])
def test_a_template_that_names_nothing_is_told_with_its_field(template):
    spec = TO_SPEC.validate_python(
        {"type": "string_check", "input": "{{ sample.output_text }}", "reference": template, "operation": "eq"}
    )

    [problem] = check_grader(spec)

    assert problem.field == "reference"


def test_the_fields_of_a_row_that_templates_read():
    spec = TO_SPEC.validate_python(
        {
            "type": "string_check",
            "input": "{{ item.a.0.b }}{{sample.output_text}}",
            "reference": "{{item.c}}",
            "operation": "eq",
        }
    )

    assert item_paths(spec) == {"a.0.b": "input", "c": "reference"}
