from concurrent.futures import Future

import pytest

from qerl_core.errors import GraderFailed
from qerl_core.scoring import Scorer, by_grader, summarize
from qerl_core.types import Completion, Grade, Group, Prompt


class FakePool:
    """Answers at once with the grades it was given, in order; without any, never."""

    def __init__(self, grades=None):
        self.grades = iter(grades or ())
        self.asked, self.futures = [], []

    def submit(self, request):
        self.asked.append((request.item, request.output_text))
        self.futures.append(Future())
        if (grade := next(self.grades, None)) is not None:
            self.futures[-1].set_result(grade)
        return self.futures[-1]


def score(scorer, groups):
    """Rewards of groups whose completions end in order."""
    with scorer.grading([group.prompt for group in groups]) as grading:
        for place, group in enumerate(groups):
            for number, completion in enumerate(group.completions):
                grading.take(place, number, completion)
        return grading.rewards()


def groups_of(*texts):
    made = [tuple(Completion((1,) * len(text), (-1.0,) * len(text), text, "stop") for text in group) for group in texts]
    return [Group(Prompt(i, {"row": i}, (1,)), completions) for i, completions in enumerate(made)]


def test_rewards_keep_the_places_of_their_completions():
    pool = FakePool([Grade(0.1), Grade(0.2), Grade(0.3), Grade(0.4)])

    rewards = score(Scorer(pool), groups_of(["a", "b"], ["c", "d"]))

    assert rewards == [[0.1, 0.2], [0.3, 0.4]]
    assert pool.asked == [({"row": 0}, "a"), ({"row": 0}, "b"), ({"row": 1}, "c"), ({"row": 1}, "d")]


def test_rewards_have_the_same_places_whatever_ends_first():
    [first, second] = groups_of(["a", "b"], ["c", "d"])
    pool = FakePool([Grade(0.4), Grade(0.2), Grade(0.3), Grade(0.1)])
    scorer = Scorer(pool)

    with scorer.grading([first.prompt, second.prompt]) as grading:
        for place, number, group in ((1, 1, second), (0, 1, first), (1, 0, second), (0, 0, first)):
            grading.take(place, number, group.completions[number])
        rewards = grading.rewards()

    assert rewards == [[0.1, 0.2], [0.3, 0.4]]
    assert [grade.reward for grade in scorer.recent] == [0.1, 0.2, 0.3, 0.4]


def test_an_error_while_sampling_cancels_what_has_no_grade():
    [group] = groups_of(["a", "b"])
    pool = FakePool([Grade(1.0)])

    def sample():
        with Scorer(pool).grading([group.prompt]) as grading:
            for number, completion in enumerate(group.completions):
                grading.take(0, number, completion)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sample()

    assert [future.cancelled() for future in pool.futures] == [False, True]


def test_a_failed_grader_is_no_reward():
    pool = FakePool([Grade(1.0)] * 19 + [Grade(None, "python_grader_runtime_error", "boom")])

    [rewards] = score(Scorer(pool), groups_of(["a"] * 20))

    assert rewards == [1.0] * 19 + [None]


def test_more_than_a_tenth_of_errors_ends_the_run_with_each_kind_once():
    bad = [Grade(None, "python_grader_runtime_error", "KeyError: 'x'"), Grade(None, "other_error", "gone")]
    scorer = Scorer(FakePool([*bad, bad[0], *[Grade(1.0)] * 17]))

    with pytest.raises(GraderFailed, match="3 of the last 20") as caught:
        score(scorer, groups_of(["a"] * 20))

    assert str(caught.value).count("KeyError") == 1
    assert "other_error: gone" in str(caught.value)


def test_old_errors_leave_the_window():
    grades = [Grade(None, "other_error", "gone")] * 40 + [Grade(1.0)] * 460 + [Grade(1.0)] * 500
    grades += [Grade(None, "other_error", "gone")] * 40 + [Grade(1.0)] * 460
    scorer = Scorer(FakePool(grades))

    for _ in range(3):
        assert len(score(scorer, groups_of(["a"] * 500))[0]) == 500


def test_a_batch_s_summary_by_hand():
    groups = groups_of(["aa", "bbbb"], ["", "cc"])
    object.__setattr__(groups[0].completions[1], "finish_reason", "length")

    found = summarize(groups, [[1.0, 0.0], [None, 0.5]])

    assert found == pytest.approx({
        "grader/error_frac": 0.25,
        "completion/mean_tokens": 2.0,
        "completion/truncated_frac": 0.25,
        "tokens/rollout": 8.0,
        "reward/mean": 0.5,
        "reward/std": (0.5 / 3) ** 0.5,
    })  # fmt: skip


def test_a_batch_without_any_reward_has_no_mean():
    assert "reward/mean" not in summarize(groups_of(["a", "b"]), [[None, None]])


def test_each_grader_of_a_multi_has_its_mean_and_its_errors_by_hand():
    good, bad = Grade(0.5), Grade(None, "other_error", "gone")
    grades = [
        Grade(1.0, parts={"a": Grade(1.0), "b": good}, num_tokens={"judge": 3}),
        Grade(None, "other_error", "b: gone", parts={"a": Grade(0.5), "b": bad}, num_tokens={"judge": 4}),
    ]

    assert by_grader(grades) == {
        "grader/a/mean": 0.75, "grader/a/error_frac": 0.0, "grader/b/mean": 0.5, "grader/b/error_frac": 0.5,
        "tokens/judge": 7.0,
    }  # fmt: skip
    assert by_grader([good]) == {}
