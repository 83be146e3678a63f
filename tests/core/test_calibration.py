"""The text that a job's base is calibrated on."""

import json

import pytest
import torch

from qerl_core import calibration
from qerl_core.calibration import calibration_text, choose
from qerl_core.errors import NotEnoughMemory
from qerl_core.loop import train
from qerl_core.observer import NullObserver
from qerl_core.policy.model import open_base
from qerl_core.quant.linear import quantizable_linears
from qerl_core.types import Prompt


@pytest.fixture
def make_calibrated(make_config, tiny_folder):
    """A config with `gptq`; keyword arguments replace its parts."""

    def make(**changes):
        model = {"id": "tiny", "source": str(tiny_folder), "quantization_method": "gptq"}
        return make_config(**{"model": model} | changes)

    return make


@pytest.fixture
def short(monkeypatch):
    """Little text, for a tiny model."""
    monkeypatch.setattr(calibration, "NUM_SEQUENCES", 24)
    monkeypatch.setattr(calibration, "NUM_TOKENS", 450)


def prompts_of(*lengths: int) -> list[Prompt]:
    return [Prompt(i, {}, (1,) * length) for i, length in enumerate(lengths)]


def test_the_text_is_the_jobs_prompts_with_what_the_base_answers(make_calibrated, tmp_path, short):
    config = make_calibrated()

    text = calibration_text(config, tmp_path)

    _, tokenizer = open_base(config.model.model_copy(update={"quantization": "none"}), tmp_path)
    shown = [tokenizer.decode(ids) for ids in text]
    assert all(each.startswith("<|im_start|>u") and "+1=<|im_end|><|im_start|>a" in each for each in shown)
    assert len(text) == len({tuple(ids) for ids in text}) == 24  # two completions for each of 12 rows
    assert sum(map(len, text)) <= 450


def test_it_is_sampled_once_and_again_for_other_rows(make_calibrated, tmp_path, short, monkeypatch):
    first = calibration_text(make_calibrated(), tmp_path)
    (folder,) = tmp_path.glob("calibration-*")
    sampled = calibration._sampled
    calls = []
    monkeypatch.setattr(calibration, "_sampled", lambda *args: calls.append(args) or sampled(*args))

    again = calibration_text(make_calibrated(seed=5, num_steps=7), tmp_path)
    config = make_calibrated()
    config.data.train_path.write_text(json.dumps({"messages": [{"role": "user", "content": "other"}], "answer": "1"}))
    other = calibration_text(config, tmp_path)

    assert first == again == json.loads((folder / "text.json").read_text())
    assert other != first
    assert len(calls) == 1


def test_the_same_seed_samples_the_same_text(make_calibrated, tmp_path, short):
    texts = [calibration_text(make_calibrated(), tmp_path / name) for name in "ab"]

    assert texts[0] == texts[1]


@pytest.mark.parametrize("change", [{"quantization": "none"}, {"quantization_method": "sweep"}])
def test_other_methods_have_no_text(make_config, tiny_folder, tmp_path, change):
    config = make_config(model={"id": "tiny", "source": str(tiny_folder), **change})

    assert calibration_text(config, tmp_path) is None
    assert not list(tmp_path.glob("calibration-*"))


def test_a_base_that_is_nvfp4_already_has_no_text(make_calibrated, cache, tiny_folder, tmp_path):
    from qerl_core.quant.checkpoint import cached_nvfp4

    packed = cached_nvfp4(tiny_folder, cache)
    config = make_calibrated(model={"id": "tiny", "source": str(packed), "quantization_method": "gptq"})

    assert calibration_text(config, tmp_path) is None
    assert open_base(config.model, tmp_path)


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([10] * 500, (123, 1)),  # 266 tokens each
        ([768] * 500, (32, 1)),
        ([8] * 40, (40, 3)),
        ([768] * 4, (4, 8)),
        ([40_000] * 3, (1, 1)),  # too long, and cut: better than none
    ],
)
def test_prompts_are_chosen_within_the_bounds(lengths, wanted):
    chosen, num_completions = choose(prompts_of(*lengths), 256)

    assert (len({prompt.index for prompt in chosen}), num_completions) == wanted
    assert len(chosen) == wanted[0]
    assert choose(prompts_of(*lengths), 256) == (chosen, num_completions)


class Phases(NullObserver):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_phase(self, phase: str) -> None:
        self.seen.append(phase)


def test_a_run_trains_on_the_calibrated_base_and_an_evaluation_opens_the_same(make_calibrated, tmp_path, short):
    config, observer, cache = make_calibrated(num_steps=4), Phases(), tmp_path / "cache"

    assert train(config, tmp_path / "run", observer, cache=cache)

    made = sorted(path.name for path in cache.glob("[!.]*"))
    base, _ = open_base(config.model, cache, calibration=calibration_text(config, cache))
    plain, _ = open_base(config.model.model_copy(update={"quantization_method": "rtn"}), cache)
    assert observer.seen[:3] == ["preparing", "quantizing", "training"]
    assert [name.split("-")[0] for name in made] == ["calibration", "nvfp4"]
    assert made[1].startswith("nvfp4-gptq-")
    assert set(made) < {path.name for path in cache.glob("[!.]*")}
    for name, layer in quantizable_linears(base).items():
        assert not torch.equal(layer.weight_packed, plain.get_submodule(name).weight_packed)


def test_a_base_too_large_to_sample_from_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)

    calibration._require_room(tmp_path, None)
    calibration._require_room(tmp_path, 1200)
    with pytest.raises(NotEnoughMemory, match=r"unquantized base.* set quantization\.method to rtn"):
        calibration._require_room(tmp_path, 1100)
