import warnings

import pytest
from pydantic import TypeAdapter, ValidationError

from qerl_core.graders.check import Problem, check_grader, item_paths
from qerl_core.graders.spec import GraderSpec, MathSpec, PythonSpec, StringCheckSpec


def python(source):
    return PythonSpec(type="python", source=source)


def string_check(text, reference):
    return StringCheckSpec(type="string_check", input=text, reference=reference, operation="eq")


@pytest.mark.parametrize(
    "source",
    [
        "def grade(sample, item):\n    return 1.0\n",
        "def grade(s, /, i): return 1",
        "def grade(*args): return 1",
        "def grade(sample, *rest): return 1",
        "def grade(sample, item, scale=2, *, strict=False): return 1",
        "grade = lambda sample, item: 1",
        "from math import hypot as grade",
        "try:\n    import numpy\nexcept ImportError:\n    pass\nelse:\n    def grade(a, b): return 1",
        "def grade(a): return 0\ndef grade(a, b): return 1",
        "import re\nPATTERN = '\\d'\ndef grade(a, b): return 1",
    ],
)
def test_a_source_that_defines_grade_is_accepted(source):
    assert check_grader(python(source)) == []


@pytest.mark.parametrize(
    ("source", "about"),
    [
        ("def score(sample, item): return 1.0", "does not define grade"),
        ("class A:\n    def grade(self, item): return 1", "does not define grade"),
        ("def f():\n    def grade(a, b): return 1", "does not define grade"),
        ("def grade(sample): return 1", "two positional arguments"),
        ("def grade(a, b, c): return 1", "two positional arguments"),
        ("def grade(a, *, b): return 1", "two positional arguments"),
        ("def grade(a, b, *, c): return 1", "two positional arguments"),
        ("async def grade(a, b): return 1", "not async"),
        ("class grade: pass", "not a class"),
        ("def grade(sample, item)\n    return 1", r"does not compile.*line 1"),
        ("def grade(a, b): return 1\nreturn 2", r"does not compile.*line 2"),
        ("a\0b", "null bytes"),
        ("x = " + "-" * 100_000 + "1", "nested too deeply"),
        ("x = a" + ".b" * 100_000, "nested too deeply"),
        ("x = " + "9" * 5000, "does not compile"),
    ],
)
def test_a_source_that_cannot_grade_is_a_problem(source, about):
    [problem] = check_grader(python(source))

    assert problem.field == "source"
    with pytest.raises(ValueError, match=about):
        raise ValueError(problem.message.replace("\n", " "))


def test_checking_runs_nothing_of_the_source(tmp_path):
    flag = tmp_path / "ran"

    check_grader(python(f"open({str(flag)!r}, 'w')\ndef grade(a, b): return 1"))

    assert not flag.exists()


def test_checking_says_nothing_on_the_side():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_grader(python("x = '\\d'\ndef grade(a, b): return 1 is 1"))

    assert caught == []


def test_templates_are_checked_field_by_field():
    problems = check_grader(string_check("{{ sample.outputtext }}", "{{ item.answer"))

    assert [problem.field for problem in problems] == ["input", "reference"]
    assert "sample.outputtext" in problems[0].message
    assert check_grader(MathSpec(type="math", reference="{{ answer }}"))[0].field == "reference"
    assert check_grader(string_check("{{ sample.output_text }}", "{{ item.a }}")) == []


def test_problems_are_sentences_without_a_full_stop():
    problem = check_grader(python("x = 1"))[0]

    assert problem == Problem("source", "the source does not define grade(sample, item) at its top level")


def test_the_fields_that_a_grader_reads_are_known():
    spec = string_check("{{ sample.output_text }} {{ item.b[0] }}", "{{ item.answer }} {{ item.b.0 }} {{ item }}")

    assert item_paths(spec) == {"b.0": "input", "answer": "reference"}
    assert item_paths(python("def grade(a, b): return 1")) == {}


def test_a_grader_s_bounds_are_the_spec_s():
    adapter = TypeAdapter(GraderSpec)
    for bad in (
        {"type": "python", "source": "x" * 256_001},
        {"type": "python", "source": ""},
        {"type": "python", "source": "x", "timeout_s": 0},
        {"type": "string_check", "input": "a", "reference": "b", "operation": "regex"},
        {"type": "math", "reference": "1", "tolerance": 1},
        {"type": "nonsense"},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(bad)
