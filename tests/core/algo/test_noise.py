import pytest

from qerl_core.algo.noise import sigma_at
from qerl_core.config import NoiseConfig


def test_the_paper_s_schedule_by_hand():
    """QeRL, eq. 9: K = 10 stages, the first without noise, then 1e-2 to 5e-4 in eight equal ratios."""
    config = NoiseConfig(sigma_start=1e-2, sigma_end=5e-4, num_stages=10)

    sigmas = [sigma_at(step, 100, config) for step in range(100)]

    assert sigmas[:10] == [0.0] * 10
    assert sigmas[10:20] == pytest.approx([1e-2] * 10)
    assert sigmas[20] == pytest.approx(1e-2 * (0.05) ** (1 / 8))  # 6.8766e-3
    assert sigmas[20] == pytest.approx(6.8766e-3, rel=1e-4)
    assert sigmas[50] == pytest.approx(1e-2 * 0.05**0.5)  # the middle is the geometric mean
    assert sigmas[90:] == pytest.approx([5e-4] * 10)


def test_three_stages_are_none_start_and_end():
    config = NoiseConfig(sigma_start=1e-2, sigma_end=1e-4, num_stages=3)

    assert [sigma_at(step, 3, config) for step in range(3)] == pytest.approx([0.0, 1e-2, 1e-4])


def test_stages_of_a_run_that_does_not_divide_fall_and_cover_it():
    config = NoiseConfig(num_stages=10)
    sigmas = [sigma_at(step, 37, config) for step in range(37)]

    assert len(set(sigmas)) == 10
    assert sigmas[4:] == sorted(sigmas[4:], reverse=True)


def test_no_config_is_no_noise():
    assert sigma_at(5, 10, None) == 0.0


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match="not one of the run's 10"):
        sigma_at(step, 10, NoiseConfig())
