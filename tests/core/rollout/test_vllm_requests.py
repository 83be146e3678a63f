"""What vLLM is asked for and when its answers are passed on, with a vLLM that does as it is told. No GPU."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qerl_core.errors import RolloutFailed
from qerl_core.rollout.engine import Sampling, completion_seed
from qerl_core.rollout.vllm_engine import StockVllmEngine
from qerl_core.types import Prompt

DRAWN = Sampling(num_completions=3, max_tokens=9)
PROMPTS = [Prompt(i, {}, (1, 2, i)) for i in range(2)]


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class LLMEngine:
    """A token a step for every request, the first its seed's; later ones end earlier. Fails in step `fails_at`."""

    def __init__(self):
        self.asked, self.open, self.steps, self.fails_at = [], {}, 0, None

    def add_request(self, request_id, prompt, params, *, lora_request=None):
        assert request_id not in self.open
        assert params.n == 1
        self.asked.append((request_id, prompt, params, lora_request))
        self.open[request_id] = [params.seed % 251, len(self.asked)]

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("out of memory")
        ended = [name for name, (_, order) in self.open.items() if self.steps + order == len(self.asked) + 1]
        return [self.output(name, self.open.pop(name)[0]) for name in ended]

    def output(self, name, token):
        tokens = [token] * self.steps
        reason = "length" if self.steps == DRAWN.max_tokens else "stop"
        output = SimpleNamespace(
            token_ids=tokens, logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)), finish_reason=reason
        )
        return SimpleNamespace(request_id=name, outputs=[output], finished=True)

    def abort_request(self, request_ids):
        for name in request_ids:
            self.open.pop(name, None)


class LLM:
    def __init__(self):
        self.llm_engine, self.holds_on = LLMEngine(), False

    def reset_prefix_cache(self):
        return not self.holds_on


class Engine(StockVllmEngine):
    """Of the real one, all but vLLM and the model."""

    def __init__(self):
        tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: f"{len(tokens)}")
        self.model = SimpleNamespace(eos_ids=frozenset({7, 3}), tokenizer=tokenizer)
        self._llm = LLM()
        self._norms = {"layers.0.input_layernorm": torch.ones(4)}
        self._clean = {name: weight.clone() for name, weight in self._norms.items()}
        self._request = "the adapter"

    def _write_adapter(self):
        pass

    def is_clean(self):
        return all(torch.equal(weight, self._clean[name]) for name, weight in self._norms.items())


@pytest.fixture
def engine(monkeypatch):
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.inputs", "vllm.sampling_params")}
    modules["vllm"].SamplingParams = lambda n=1, **settings: SimpleNamespace(n=n, **settings)
    modules["vllm.inputs"].tokens_input = lambda tokens: {"type": "token", "prompt_token_ids": tokens}
    modules["vllm.sampling_params"].RequestOutputKind = Kind
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return Engine()


def test_each_completion_is_a_request_with_the_seed_of_its_place(engine):
    engine.rollout(PROMPTS, DRAWN, sigma=0.1, seed=4, first=5)

    asked = engine._llm.llm_engine.asked
    assert [name for name, *_ in asked] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert [prompt["prompt_token_ids"] for _, prompt, _, _ in asked] == [[1, 2, 0]] * 3 + [[1, 2, 1]] * 3
    seeds = [completion_seed(4, place, 0) + number for place in (5, 6) for number in range(3)]  # as vLLM adds numbers
    assert [params.seed for _, _, params, _ in asked] == seeds
    assert {params.output_kind for _, _, params, _ in asked} == {Kind.FINAL_ONLY}
    assert {lora for *_, lora in asked} == {"the adapter"}


def test_completions_are_told_of_as_they_end_and_grouped_by_place(engine):
    told = []

    groups = engine.rollout(
        PROMPTS, DRAWN, sigma=0.0, seed=4, first=5,
        on_completion=lambda place, number, completion: told.append(
            (place, number, completion, engine._llm.llm_engine.steps)
        ),
    )  # fmt: skip

    assert [(place, number) for place, number, *_ in told] == [(6, 2), (6, 1), (6, 0), (5, 2), (5, 1), (5, 0)]
    assert [when for *_, when in told] == [1, 2, 3, 4, 5, 6]
    assert [group.prompt for group in groups] == PROMPTS
    assert {(place, number): c for place, number, c, _ in told} == {
        (5 + p, number): c for p, group in enumerate(groups) for number, c in enumerate(group.completions)
    }
    assert [c.token_ids[0] for group in groups for c in group.completions] == [
        completion_seed(4, place, number) % 251 for place in (5, 6) for number in range(3)
    ]


def test_an_error_of_the_engine_s_leaves_no_request_and_no_noise(engine):
    engine._llm.llm_engine.fails_at = 3

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.rollout(PROMPTS, DRAWN, sigma=0.1, seed=4)

    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.is_clean()


def test_an_error_of_a_listener_s_leaves_no_request_and_no_noise(engine):
    seen = []

    def refuse(place, number, completion):
        seen.append(engine.is_clean())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.rollout(PROMPTS, DRAWN, sigma=0.1, seed=4, on_completion=refuse)

    assert seen == [False]
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.is_clean()


def test_weights_that_cannot_be_loaded_leave_no_noise(engine):
    engine._llm.holds_on = True

    with pytest.raises(RolloutFailed, match="older weights"):
        engine.rollout(PROMPTS, DRAWN, sigma=0.1, seed=4)

    assert not engine._llm.llm_engine.asked
    assert engine.is_clean()
