import pytest

from qerl_core.graders.runner import GradeRequest, GraderPool
from qerl_core.graders.spec import MathSpec


@pytest.fixture(scope="module")
def grade():
    """Grades (reference, completion) pairs in one pool."""
    with GraderPool(MathSpec(type="math", reference="{{ item.answer }}", timeout_s=1.5), num_workers=2) as pool:
        yield lambda *pairs: pool.grade([GradeRequest({"answer": answer}, text) for answer, text in pairs])


PAIRS = [
    ("42", "The answer is \\boxed{42}.", 1.0),
    ("42", "first 7, then 42", 1.0),
    ("42", "first 42, then 7", 0.0),
    ("42", "$\\boxed{7}$ no, $\\boxed{42}$", 1.0),
    ("42", "\\boxed{7} or \\boxed{42}", 0.0),
    (42, "42", 1.0),
    (0.5, "1/2", 1.0),
    ("\\frac12", "0.5", 1.0),
    ("$\\frac{1}{2}$", "\\boxed{0.5}", 1.0),
    ("\\boxed{3}", "3", 1.0),
    ("x^2-1", "$(x-1)(x+1)$", 1.0),
    ("x^2-1", "$(x-1)(x-1)$", 0.0),
    ("sqrt(2)", "$\\sqrt{2}$", 1.0),
    ("(1, 2)", "\\boxed{(1, 2)}", 1.0),
    ("(1, 2)", "\\boxed{(2, 1)}", 0.0),
    ("1,234", "1234", 1.0),
    ("10 square meters", "10", 1.0),
    ("The answer is 42.", "\\boxed{42}", 1.0),
    ("So 3 * 14 = 42 dollars.\n#### 42", "42", 1.0),
    ("So 3 * 14 = 42 dollars.\n#### 42", "14", 0.0),
    ("no solution", "\\boxed{no solution}", 1.0),
    ("7", "(" * 3000, 0.0),
    ("7", "$" + "{" * 2000, 0.0),
    ("7", "\0\ud800 \\boxed{\\undefined{7}}", 0.0),
]


def test_answers_are_compared_as_mathematics(grade):
    found = grade(*[(reference, text) for reference, text, _ in PAIRS])

    wrong = [(pair, g) for pair, g in zip(PAIRS, found, strict=True) if g.reward != pair[2]]
    assert wrong == []


def test_an_expression_that_hangs_is_wrong_and_harms_no_other(grade):
    found = grade(("7", "\\boxed{9^{9^{9^{9}}}}"), ("7", "7"), ("7", "\\boxed{100000000!}"), ("7", "8"))

    assert [g.reward for g in found] == [0.0, 1.0, 0.0, 0.0]


def test_a_reference_that_hangs_is_an_error_and_not_everybody_s_zero(grade):
    [found] = grade(("9^{9^{9^{9}}}", "7"))

    assert found.reward is None
    assert found.error_type == "unresponsive_reward_error"


@pytest.mark.parametrize("reference", ["", "  ", "#### "])
def test_a_reference_without_mathematics_is_an_error(reference, grade):
    [found] = grade((reference, "7"))

    assert found.error_type == "other_error"
    assert "reference" in found.error


def test_an_unknown_field_is_named():
    with GraderPool(MathSpec(type="math", reference="{{ item.anwser }}"), num_workers=1) as pool:
        [found] = pool.grade([GradeRequest({"answer": "4"}, "4")])

    assert found.error_type == "invalid_variable_error"
    assert "item.anwser" in found.error
