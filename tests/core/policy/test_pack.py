import json
from pathlib import Path

import pytest
import torch

from qerl_core.policy.pack import collate, length_mask, make_rows, micro_batches
from tests.core.conftest import group_of

CASES = json.loads((Path(__file__).parents[2] / "cases" / "training.json").read_text())
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [case for case in CASES if case["about"] == "mask"], ids=lambda case: case["why"])
def test_masks_come_from_lengths_and_never_from_token_ids(case):
    mask = length_mask([len(case["completion"]), case["padded_to"]], CPU)

    assert mask[0].int().tolist() == case["loss_mask"]


def test_a_row_by_hand():
    [row] = make_rows([group_of([10, 11], [20, 21], [30])], max_row_tokens=100)

    rows = collate([row], CPU)

    assert rows.token_ids_RL.tolist() == [[10, 11, 20, 21, 30]]
    assert rows.position_ids_RL.tolist() == [[0, 1, 2, 3, 2]]
    assert rows.attention_mask_R1LL[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # the second completion does not see the first
    ]
    assert rows.predictors.tolist() == [1, 2, 1]  # both first tokens are predicted by the prompt's last
    assert rows.targets.tolist() == [20, 21, 30]
    assert [place.tolist() for place in rows.where] == [[0, 0, 1], [0, 1, 0]]


def test_padding_sees_itself_alone_so_that_no_softmax_is_empty():
    short, long = make_rows([group_of([1], [2]), group_of([1, 1, 1], [2, 3])], max_row_tokens=100)

    rows = collate([long, short], CPU)

    mask = rows.attention_mask_R1LL[1, 0]
    assert mask[:2].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert mask.any(dim=1).all()


def test_completions_of_no_token_have_no_row_but_keep_their_number():
    rows = make_rows([group_of([1], [], [5], []), group_of([2], [6], [])], max_row_tokens=100)

    assert [row.sequences for row in rows] == [(1,), (3,)]


def test_a_row_grows_to_its_limit_and_then_another_starts():
    rows = make_rows([group_of([1, 2], [3] * 4, [4] * 4, [5] * 4)], max_row_tokens=10)

    assert [row.sequences for row in rows] == [(0, 1), (2,)]


def test_without_sharing_each_completion_has_a_row():
    rows = make_rows([group_of([1, 2], [3], [4, 4], [5])], max_row_tokens=0)

    assert [row.sequences for row in rows] == [(0,), (1,), (2,)]


def test_micro_batches_hold_every_row_once_within_the_tokens():
    groups = [group_of([1] * n, [2] * (n % 3 + 1)) for n in range(1, 20)]
    rows = make_rows(groups, max_row_tokens=100)

    parts = list(micro_batches(rows, max_tokens=40))

    assert sorted(row.sequences for part in parts for row in part) == [row.sequences for row in rows]
    assert all(len(part) * max(row.num_tokens for row in part) <= 40 for part in parts)


def test_a_row_over_the_limit_goes_alone():
    rows = make_rows([group_of([1] * 50, [2]), group_of([1], [2])], max_row_tokens=100)

    assert [len(part) for part in micro_batches(rows, max_tokens=10)] == [1, 1]
