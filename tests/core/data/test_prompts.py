import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.data.prompts import PromptStream
from qerl_core.types import Prompt

PROMPTS = [Prompt(i, {}, (i,)) for i in range(7)]


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    stream = PromptStream(PROMPTS, shuffle=True, seed=0)

    epochs = [indices(stream.take(7)) for _ in range(3)]

    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


@given(st.integers(0, 40), st.integers(0, 30))
def test_a_position_is_all_that_is_needed_to_go_on(position, count):
    whole = PromptStream(PROMPTS, shuffle=True, seed=5)
    expected = indices(whole.take(position + count))[position:]

    resumed = PromptStream(PROMPTS, shuffle=True, seed=5, position=position)

    assert indices(resumed.take(count)) == expected
    assert resumed.position == position + count


def test_a_seed_names_an_order_for_good():
    assert indices(PromptStream(PROMPTS, shuffle=True, seed=1).take(7)) == [0, 1, 6, 4, 2, 3, 5]


def test_without_shuffling_rows_come_in_the_file_s_order():
    assert indices(PromptStream(PROMPTS, shuffle=False, seed=1).take(9)) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([], shuffle=True, seed=0)
