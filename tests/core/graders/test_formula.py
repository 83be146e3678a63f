import math

import pytest

from qerl_core.graders import formula
from qerl_core.graders.failure import GradeFailure

VALUES = {"a": 0.5, "b": -2.0, "zero": 0.0, "big": 1e300}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.75 * a + 0.25 * b", -0.125), ("a - b / 4", 1.0), ("-b ^ 2", -4.0), ("(-2)^2", 4.0), ("2^3^2", 512.0),
        ("2 ** 0.5", math.sqrt(2)), ("1 + 2^2", 5.0), ("min(a, b, 3)", -2.0), ("max(a, b)", 0.5), ("abs(b)", 2.0),
        ("floor(a)", 0.0), ("ceil(a)", 1.0), ("exp(zero)", 1.0), ("sqrt(4)", 2.0), ("log(exp(1))", 1.0),
        ("+a", 0.5), (" (a)\n", 0.5), ("max(a)", 0.5), ("(a + b)/2", -0.75), ("1e2 * a", 50.0),
    ],
)  # fmt: skip
def test_a_formula_by_hand(text, value):
    assert formula.evaluate(text, VALUES) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "a.real", "a[0]", "lambda: a", "[a]", "(a, b)", "a if a else b", "a and b",
        "not a", "a == b", "a < b", "~a", "a // b", "a % b", "a @ b", "a | b", "a << 2", "'a'", "True", "None", "1j",
        "...", "f'{a}'", "(x := 1)", "a; b", "import os", "a = 1", "", "a +", "pow(a, 2)", "eval(a)", "min()",
        "min(*a)", "max(a, key=b)", "abs(a, b)", "exp", "a(1)", "min(a)(b)", "9" * 400, "1e999", "a\0b",
        "{a: b}", "[x for x in a]", "await a", "yield a", "+".join(["a"] * 600), "(" * 60 + "a" + ")" * 60 + "(",
        "-" * 60 + "a", "(" * 5000 + "a" + ")" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_an_error_and_is_never_run(text):
    with pytest.raises(GradeFailure) as caught:
        formula.names(text)

    assert caught.value.error_type == "formula_parse_error"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("1 / zero", "divides by zero"), ("zero ^ -1", "no finite value"), ("b ^ 0.5", "no finite value"),
        ("sqrt(b)", "no finite value"), ("log(zero)", "no finite value"), ("exp(1000)", "no finite value"),
        ("big * big", "no finite value"), ("-big * big + big * big", "no finite value"), ("2 ^ 101", "exponent 101"),
        ("9^9^9^9", "exponent"), ("a + other", "other is not a grader"),
    ],
)  # fmt: skip
def test_a_formula_without_a_finite_value_is_an_error_never_a_zero(text, about):
    with pytest.raises(GradeFailure, match=about) as caught:
        formula.evaluate(text, VALUES)

    assert caught.value.error_type == "formula_parse_error"


def test_a_formula_names_the_graders_that_it_reads():
    assert formula.names("min(a, 2 * b) + exp(a)") == {"a", "b"}
    assert formula.names("1") == set()
