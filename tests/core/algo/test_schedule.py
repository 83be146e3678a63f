import pytest

from qerl_core.algo.schedule import learning_rate_at
from qerl_core.config import OptimizerConfig


def test_warm_up_rises_from_above_zero_to_the_peak():
    config = OptimizerConfig(learning_rate=4e-4, warmup_steps=3)

    assert [learning_rate_at(step, 10, config) for step in range(5)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4])


def test_cosine_halves_in_the_middle_and_ends_near_zero():
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine")

    rates = [learning_rate_at(step, 100, config) for step in range(100)]

    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.000247, abs=1e-6)


def test_a_rate_of_zero_stays_zero():
    assert learning_rate_at(3, 10, OptimizerConfig(learning_rate=0.0, warmup_steps=5)) == 0.0
