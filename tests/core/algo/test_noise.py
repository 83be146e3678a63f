import pytest

from qerl_core.algo.noise import next_sigma, sigma_at
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


def test_linear_and_cosine_go_from_start_to_end_over_the_noisy_stages():
    linear, cosine = (
        [
            sigma_at(step, 6, NoiseConfig(schedule=schedule, sigma_start=0.05, sigma_end=0.01, num_stages=6))
            for step in range(6)
        ]
        for schedule in ("linear", "cosine")
    )

    assert linear == pytest.approx([0.0, 0.05, 0.04, 0.03, 0.02, 0.01])
    assert cosine == pytest.approx([0.0, 0.05, 0.03 + 0.02 * 0.5**0.5, 0.03, 0.03 - 0.02 * 0.5**0.5, 0.01])


ADAPTIVE = NoiseConfig(schedule="adaptive", sigma_start=0.05, sigma_end=0.01, num_stages=5, set_point=0.002)


def test_the_controller_begins_after_the_quiet_stage_from_the_smallest():
    assert sigma_at(0, 10, ADAPTIVE, controlled=0.03) == 0.0
    assert sigma_at(2, 10, ADAPTIVE) == 0.01
    assert sigma_at(2, 10, ADAPTIVE, controlled=0.03) == 0.03


@pytest.mark.parametrize(
    ("sigma", "kl", "wanted"),
    [
        (0.02, 0.001, 0.022),  # too quiet
        (0.022, 0.003, 0.02),  # too loud
        (0.049, 0.001, 0.05),  # no further than the largest
        (0.0101, 0.003, 0.01),  # nor than the smallest
    ],
)
def test_the_controller_holds_the_kl(sigma, kl, wanted):
    assert next_sigma(sigma, {"mismatch/kl": kl, "policy/entropy": 9.0}, ADAPTIVE) == pytest.approx(wanted)


def test_the_controller_holds_the_entropy():
    config = ADAPTIVE.model_copy(update={"hold": "entropy", "set_point": 0.5})

    assert next_sigma(0.02, {"policy/entropy": 0.4}, config) == pytest.approx(0.022)
    assert next_sigma(0.02, {"policy/entropy": 0.6}, config) == pytest.approx(0.02 / 1.1)


def test_a_step_that_trained_on_nothing_moves_no_controller():
    assert next_sigma(0.02, {}, ADAPTIVE) == 0.02
    assert next_sigma(0.0, {"mismatch/kl": 1.0}, ADAPTIVE) is None
    assert next_sigma(0.02, {"mismatch/kl": 1.0}, NoiseConfig()) is None


@pytest.mark.parametrize(
    ("changes", "words"), [({"schedule": "adaptive"}, "wants a set_point"), ({"set_point": 0.1}, "has no use")]
)
def test_a_set_point_belongs_to_the_controller(changes, words):
    with pytest.raises(ValueError, match=words):
        NoiseConfig(**changes)
