"""Dynamic sampling and the overlong penalty, with an engine and a scorer that do as they are told."""

from concurrent.futures import Future

import pytest
import torch

from qerl_core.batch import sample_batch
from qerl_core.config import OverlongConfig
from qerl_core.data.prompts import PromptStream
from qerl_core.scoring import Scorer
from qerl_core.types import Completion, Grade, Group, Prompt


class Engine:
    """Completions as long as the prompt's index; remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def rollout(self, prompts, sampling, *, sigma, seed, first=0, on_completion=None):
        self.calls.append(([prompt.index for prompt in prompts], sigma, seed))
        made = [
            tuple(
                Completion((5,) * (prompt.index + g), (-1.0,) * (prompt.index + g), str(g), "stop")
                for g in range(sampling.num_completions)
            )
            for prompt in prompts
        ]
        for p, group in enumerate(made):
            for g, completion in enumerate(group):
                on_completion(first + p, g, completion)
        return [Group(prompt, group) for prompt, group in zip(prompts, made, strict=True)]


class Pool:
    """Rows with an even number teach: their completions differ in reward."""

    def submit(self, request):
        future = Future()
        future.set_result(Grade(float(request.output_text) if request.item["i"] % 2 == 0 else 1.0))
        return future


def scorer():
    return Scorer(Pool())


def stream(start=0, end=20):
    return PromptStream([Prompt(i, {"i": i}, (1,)) for i in range(start, end)], shuffle=False, seed=0)


@pytest.fixture
def config_of(make_config):
    def make(**rollout):
        sizes = {"num_prompts": 4, "group_size": 2, "max_completion_tokens": 64, "max_prompt_tokens": 64}
        return make_config(rollout=sizes | rollout)

    return make


def test_one_round_takes_what_comes(config_of):
    engine = Engine()

    batch = sample_batch(engine, scorer(), stream(), config_of(), sigma=0.01, seed=7)

    assert [group.prompt.index for group in batch.groups] == [0, 2, 1, 3]
    assert engine.calls == [([0, 1, 2, 3], 0.01, 7)]
    assert batch.advantages_PG.shape == (4, 2)
    assert batch.metrics["groups/sampled"] == 4


def test_groups_without_signal_are_replaced_until_the_batch_teaches(config_of):
    engine, prompts = Engine(), stream()

    batch = sample_batch(engine, scorer(), prompts, config_of(max_rounds=5), sigma=0.0, seed=7)

    assert [group.prompt.index for group in batch.groups] == [0, 2, 4, 6]
    assert [call[0] for call in engine.calls] == [[0, 1, 2, 3], [4, 5], [6]]
    assert len({seed for _, _, seed in engine.calls}) == 3
    assert prompts.position == 7
    assert (batch.advantages_PG != 0).all()
    assert batch.metrics["groups/rounds"] == 3
    assert batch.metrics["groups/sampled"] == 7


def test_when_rounds_run_out_the_last_groups_fill_the_batch(config_of):
    batch = sample_batch(Engine(), scorer(), stream(), config_of(max_rounds=2), sigma=0.0, seed=7)

    assert [group.prompt.index for group in batch.groups] == [0, 2, 4, 5]
    assert batch.advantages_PG[3].tolist() == [0.0, 0.0]


def test_the_overlong_penalty_shapes_advantages_and_leaves_the_reward_as_it_is(config_of):
    config = config_of().model_copy(update={"overlong": OverlongConfig(buffer_tokens=60, penalty=100.0)})

    batch = sample_batch(Engine(), scorer(), stream(), config, sigma=0.0, seed=0)

    # Completions of 4 tokens and fewer are free; group 2's longer answer (3 tokens) keeps its lead.
    assert batch.metrics["reward/mean"] == pytest.approx((0 + 1 + 1 + 1 + 0 + 1 + 1 + 1) / 8)
    by_index = dict(zip([group.prompt.index for group in batch.groups], batch.advantages_PG, strict=True))
    assert by_index[2][1] > 0
    assert batch.metrics["reward/overlong_penalty"] == 0.0
    shaped = sample_batch(Engine(), scorer(), stream(10, 14), config, sigma=0.0, seed=0)
    assert all(row[0] > 0 > row[1] for row in shaped.advantages_PG)  # the longer one loses more than it won
    assert shaped.metrics["reward/overlong_penalty"] > 0
    assert torch.isfinite(shaped.advantages_PG).all()
