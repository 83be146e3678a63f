"""The decoder walked a layer at a time. T = tokens."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM

from qerl_core.errors import BadCheckpoint
from qerl_core.quant import checkpoint
from qerl_core.quant.calibration import _HiddenStates, _shift, round_layers
from qerl_core.quant.checkpoint import cached_nvfp4, load_model, load_plain_model, quantize_folder
from qerl_core.quant.linear import quantizable_linears, scale_groups
from tests.tiny import make_model


def token_ids(num_sequences: int, num_tokens: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(250, (num_sequences, num_tokens), generator=generator).tolist()


TEXT = token_ids(40, 32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Three layers, to have one between two others."""
    return make_model(tmp_path_factory.mktemp("llama") / "model", num_hidden_layers=3)


@pytest.fixture(scope="module")
def calibrated(llama):
    out = llama.with_name("calibrated")
    quantize_folder(llama, out, method="gptq", calibration=TEXT)
    return out


@torch.no_grad()
def kl(base, folder) -> float:
    """To the base, a token, on text that was not calibrated on."""
    ids = torch.tensor(token_ids(8, 32, seed=1))
    wanted, got = (model(ids).logits.log_softmax(-1) for model in (base, load_model(folder, compute_dtype=base.dtype)))
    return kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean().item()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_calibrated_model_is_nearer_to_the_base(architecture, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture)
    base = load_plain_model(source, compute_dtype=torch.float32)

    for method in ("rtn", "gptq"):
        quantize_folder(source, tmp_path / method, method=method, calibration=TEXT if method == "gptq" else None)

    assert kl(base, tmp_path / "gptq") < 0.85 * kl(base, tmp_path / "rtn")


def test_layers_that_engines_fuse_share_their_scale_and_the_report_covers_all(llama, calibrated, tmp_path):
    layers = quantizable_linears(load_model(calibrated))

    report = quantize_folder(llama, tmp_path / "out", method="gptq", calibration=TEXT)

    for group in scale_groups(layers):
        assert len({layers[name].tensor_scale.item() for name in group}) == 1
    assert list(report.layer_errors) == list(layers)
    assert all(0.05 < error < 0.5 for error in report.layer_errors.values())


def test_the_same_text_gives_the_same_bits(llama, calibrated, tmp_path):
    quantize_folder(llama, tmp_path / "out", method="gptq", calibration=[tuple(ids) for ids in TEXT])

    first, again = (load_file(folder / "model.safetensors") for folder in (calibrated, tmp_path / "out"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].view(torch.uint8), again[name].view(torch.uint8)) for name in first)


def test_what_is_rounded_is_what_serves(llama, calibrated):
    """The walk puts each linear's input through the very layers that are written."""
    served = load_model(calibrated, compute_dtype=torch.float32)
    plain = load_plain_model(llama, compute_dtype=torch.float32)

    for name, layer in quantizable_linears(served).items():
        weight = plain.get_submodule(name).weight
        assert 0 < (layer.decode() - weight).norm() < 0.5 * weight.norm()


def halves(input_TK: torch.Tensor, missing_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of each half of the tokens."""
    parts = list(zip(input_TK.chunk(2), missing_TN.chunk(2), strict=True))
    return torch.stack([x.T @ x for x, _ in parts]), torch.stack([m.T @ x for x, m in parts])


def test_the_shift_is_what_the_inputs_foretell_of_what_is_missing():
    generator = torch.Generator().manual_seed(0)
    input_TK, true_NK = torch.randn(2000, 32, generator=generator), torch.randn(8, 32, generator=generator)
    noise_TN = torch.randn(2000, 8, generator=generator)

    found_NK = _shift(*halves(input_TK, input_TK @ true_NK.T + noise_TN))

    assert (found_NK - true_NK).norm() < 0.05 * true_NK.norm()


def test_accidents_of_little_text_shift_next_to_nothing():
    generator = torch.Generator().manual_seed(0)
    input_TK, noise_TN = torch.randn(50, 32, generator=generator), torch.randn(50, 8, generator=generator)

    fitted_NK = torch.linalg.lstsq(input_TK, noise_TN).solution.T

    assert _shift(*halves(input_TK, noise_TN)).norm() < 0.1 * fitted_NK.norm()
    assert not _shift(*halves(torch.zeros(4, 32), torch.zeros(4, 8))).any()


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [("llama", ["o_proj", "down_proj"]), ("qwen3", ["o_proj", "down_proj"]), ("gemma2", [])],  # gemma2 norms answers
)
def test_the_walk_sees_which_answers_are_added_to_the_hidden_states(tmp_path, architecture, wanted):
    model = load_plain_model(make_model(tmp_path / "m", architecture=architecture), compute_dtype=torch.float32)
    states, layer = _HiddenStates(model.model, TEXT[:1], "cpu"), model.model.layers[0]
    linears = list(quantizable_linears(layer).items())

    with torch.no_grad():
        added = [name for place, (name, _) in enumerate(linears) if states.adds(layer, [v for _, v in linears[place:]])]

    assert [name.rpartition(".")[2] for name in added] == wanted


def test_one_layer_has_weights_at_a_time(llama, tmp_path, monkeypatch):
    seen = []
    fill = checkpoint._fill

    def watched(model, tensors, names, device, dtype):
        fill(model, tensors, names, device, dtype)
        whole = [not any(p.is_meta for p in layer.parameters()) for layer in model.model.layers]
        empty = [all(p.is_meta for p in layer.parameters()) for layer in model.model.layers]
        seen.append((sum(whole), len(empty) - sum(empty), model.model.embed_tokens.weight.is_meta))

    monkeypatch.setattr(checkpoint, "_fill", watched)

    quantize_folder(llama, tmp_path / "out", method="gptq", calibration=TEXT[:2])

    of_layers = [(whole, touched) for whole, touched, _ in seen if touched]
    assert of_layers == [(1, 1)] * 3
    assert [is_meta for _, touched, is_meta in seen if touched] == [True] * 3


def test_a_method_and_its_text_belong_together(llama, tmp_path):
    cache = tmp_path / "cache"
    for nothing in (None, [], [[]]):
        with pytest.raises(ValueError, match="gptq needs calibration text"):
            quantize_folder(llama, tmp_path / "out", method="gptq", calibration=nothing)
        with pytest.raises(ValueError, match="gptq needs calibration text"):
            cached_nvfp4(llama, cache, method="gptq", calibration=nothing)
    with pytest.raises(ValueError, match="sweep looks at no text"):
        quantize_folder(llama, tmp_path / "out", method="sweep", calibration=TEXT)
    with pytest.raises(ValueError, match="rtn looks at no text"):
        cached_nvfp4(llama, cache, calibration=TEXT)
    assert not (tmp_path / "out").exists()
    assert not cache.exists()


def test_each_text_has_a_folder_of_its_own(llama, tmp_path):
    cache = tmp_path / "cache"
    texts = ([[1, 2], [3]], [[1], [2, 3]], ((1, 2), (3,)))

    folders = [cached_nvfp4(llama, cache, method="gptq", calibration=text) for text in texts]

    assert folders[0] == folders[2] != folders[1]
    assert load_model(folders[1])


def test_a_folder_that_is_nvfp4_already_needs_no_text(calibrated, tmp_path):
    assert cached_nvfp4(calibrated, tmp_path / "cache", method="gptq") == calibrated


def test_two_that_ask_at_once_work_once(llama, tmp_path, monkeypatch):
    made, found = [], []
    quantize = checkpoint.quantize_folder

    def counted(source, out, **kwargs):
        made.append(out)
        return quantize(source, out, **kwargs)

    monkeypatch.setattr(checkpoint, "quantize_folder", counted)

    def ask() -> None:
        found.append(cached_nvfp4(llama, tmp_path / "cache", method="gptq", calibration=TEXT[:2]))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert made == found[:1] == found[1:]


def test_a_layer_whose_inputs_are_not_finite_is_named(tmp_path):
    source = make_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(3e38)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(BadCheckpoint, match=r"layers\.1\.self_attn\.q_proj: .* not finite"):
        quantize_folder(source, tmp_path / "out", method="gptq", calibration=TEXT[:2])

    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_named(tmp_path):
    source = make_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        quantize_folder(source, tmp_path / "out", method="gptq", calibration=TEXT[:2])


def test_a_decoder_without_a_list_of_layers_is_refused():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=0, num_attention_heads=1))

    with pytest.raises(BadCheckpoint, match=r"LlamaModel has no list of layers to calibrate; .*without calibration"):
        next(round_layers(model, TEXT, load=lambda *_: None, device="cpu"))
