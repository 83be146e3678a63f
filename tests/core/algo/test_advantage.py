import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.algo.advantage import group_advantages, has_signal, overlong_penalty
from qerl_core.config import OverlongConfig

CASES = json.loads((Path(__file__).parents[2] / "cases" / "training.json").read_text())
ADVANTAGES = [case for case in CASES if case["about"] == "advantages"]


@pytest.mark.parametrize("case", ADVANTAGES, ids=lambda case: case["why"])
def test_known_cases(case):
    rewards, size = case["rewards"], case.get("group_size", len(case["rewards"][0]))
    if case.get("raises"):
        with pytest.raises(ValueError, match="a group of 4 completions has 3 rewards"):
            group_advantages(rewards, group_size=size, scale_by_std=True)
        return

    advantages = group_advantages(rewards, group_size=size, scale_by_std=case["scale_by_std"], eps=0.0)

    torch.testing.assert_close(advantages, torch.tensor(case["advantages"]).float())


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=2, max_size=16), st.booleans())
def test_every_row_sums_to_zero_and_is_finite(rewards, scale_by_std):
    advantages = group_advantages([rewards], group_size=len(rewards), scale_by_std=scale_by_std)

    assert advantages.isfinite().all()
    assert abs(advantages.double().sum()) <= 1e-5 * max(1.0, advantages.abs().max().item()) * len(rewards)


def test_a_group_with_a_single_graded_completion_has_no_signal():
    advantages = group_advantages([[None, 1.0, None], [None, None, None]], group_size=3, scale_by_std=True)

    assert not has_signal(advantages).any()


def test_no_groups_are_an_empty_batch():
    assert group_advantages([], group_size=4, scale_by_std=True).shape == (0, 4)


def test_only_groups_with_spread_have_signal():
    advantages = group_advantages([[1, 1], [0, 1], [0, 0]], group_size=2, scale_by_std=True)

    assert has_signal(advantages).tolist() == [False, True, False]


def test_the_overlong_penalty_grows_over_the_buffer():
    """DAPO, eq. 13, with L_max 100 and a buffer of 20."""
    config = OverlongConfig(buffer_tokens=20, penalty=0.5)

    found = [overlong_penalty(n, config, max_tokens=100) for n in (10, 80, 85, 90, 100)]

    assert found == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.5])
    assert overlong_penalty(100, None, max_tokens=100) == 0.0
