"""A run that goes wrong is stopped with the reason; one that learns never is, however its metrics move."""

import pytest

from qerl_core.config import SafeguardsConfig
from qerl_core.safeguards import WINDOW, Watch

HEALTHY = {
    "reward/mean": 0.3, "grader/error_frac": 0.0, "mismatch/kl": 0.01, "policy/entropy": 1.0,
    "completion/mean_tokens": 100.0,
}  # fmt: skip


def first_fault(*rows: dict[str, float], **config: float | None) -> tuple[int, str] | None:
    watch = Watch(SafeguardsConfig(**config))
    for step, row in enumerate(rows, start=1):
        if fault := watch.take(step, HEALTHY | row):
            return step, fault
    return None


def test_a_healthy_run_is_left_alone():
    assert first_fault(*[{}] * 50) is None


@pytest.mark.parametrize(
    ("row", "told", "setting"),
    [
        ({"grader/error_frac": 0.06}, "6.0% of the grades", "max_grader_error_frac"),
        ({"mismatch/kl": 3.0}, "KL(rollout || policy) was 1.21 nats", "max_kl"),
        ({"policy/entropy": 0.01}, "the policy's entropy fell from 1 to 0.01", "min_entropy_ratio"),
        ({"completion/mean_tokens": 2.0}, "the completions' mean length fell from 100 to 2", "min_length_ratio"),
    ],
)
def test_each_sign_stops_a_run_within_a_window_and_can_be_turned_off(row, told, setting):
    found = first_fault(*[{}] * WINDOW, *[row] * WINDOW)

    assert found is not None
    assert found[0] <= 2 * WINDOW
    assert told in found[1]
    assert first_fault(*[{}] * WINDOW, *[row] * 20, **{setting: None}) is None


@pytest.mark.parametrize("row", [{"policy/entropy": 0.01}, {"completion/mean_tokens": 2.0}])
def test_a_collapse_that_the_reward_paid_for_is_learning(row):
    assert first_fault(*[{}] * WINDOW, *[{**row, "reward/mean": 0.9}] * 20) is None


def test_one_bad_step_is_no_sign():
    assert first_fault(*[{}] * WINDOW, {"mismatch/kl": 4.9}, *[{}] * 20) is None


def test_before_a_window_is_full_and_from_what_is_not_measured_nothing_is_told():
    watch = Watch(SafeguardsConfig())
    assert [watch.take(step, {"mismatch/kl": 9.0}) for step in range(WINDOW)] == [None] * WINDOW
    assert "KL" in (watch.take(WINDOW, {"mismatch/kl": 9.0}) or "")
    bare = Watch(SafeguardsConfig())
    assert [bare.take(step, {"reward/mean": 0.1}) for step in range(20)] == [None] * 20
