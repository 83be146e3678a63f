import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_core.data.prompts import PromptStream
from qerl_core.types import Prompt


def prompts(num):
    return [Prompt(i, {}, (1,)) for i in range(num)]


def taken(stream, num):
    return [prompt.index for prompt in stream.take(num)]


def test_without_shuffling_the_order_is_the_file_s():
    assert taken(PromptStream(prompts(3), shuffle=False, seed=0), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_every_epoch_has_every_prompt_once_and_an_order_of_its_own():
    stream = PromptStream(prompts(20), shuffle=True, seed=0)
    epochs = [taken(stream, 20) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream.position == 60


def test_the_seed_decides_the_order():
    def order(seed):
        return taken(PromptStream(prompts(20), shuffle=True, seed=seed), 20)

    assert order(1) == order(1) != order(2)


def test_the_order_is_the_same_in_every_version():
    assert taken(PromptStream(prompts(8), shuffle=True, seed=0), 16) == [3, 5, 7, 1, 2, 0, 4, 6, 5, 7, 0, 1, 6, 4, 3, 2]


@given(st.integers(1, 7), st.integers(0, 30), st.lists(st.integers(0, 10), max_size=5), st.booleans())
def test_a_position_is_all_that_is_needed_to_go_on(num, position, sizes, shuffle):
    whole = taken(PromptStream(prompts(num), shuffle=shuffle, seed=3), position + sum(sizes))
    resumed = PromptStream(prompts(num), shuffle=shuffle, seed=3, position=position)

    assert [index for size in sizes for index in taken(resumed, size)] == whole[position:]
    assert resumed.position == position + sum(sizes)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([], shuffle=True, seed=0)
    with pytest.raises(ValueError, match="-1"):
        PromptStream(prompts(1), shuffle=True, seed=0, position=-1)
    with pytest.raises(ValueError, match="-2"):
        PromptStream(prompts(1), shuffle=True, seed=0).take(-2)
