"""Folders as NVIDIA's ModelOpt exports them: the names and configs of modelopt 0.29 to 0.45."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qerl_core.errors import BadCheckpoint
from qerl_core.quant.checkpoint import cached_nvfp4, load_model, load_plain_model, quantize_folder
from qerl_core.quant.linear import NVFP4Linear
from tests.tiny import make_model

TOKENS = torch.arange(34).view(2, 17)
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
INLINE = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_method": "modelopt",
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def packed(request, tmp_path_factory) -> Path:
    """A compressed-tensors folder."""
    folder = tmp_path_factory.mktemp("modelopt")
    quantize_folder(make_model(folder / "plain", architecture=request.param, tied=False), folder / "packed")
    return folder / "packed"


@pytest.fixture
def exported(packed, tmp_path) -> Path:
    """The same as ModelOpt exports it, to be changed."""
    return as_modelopt(packed, tmp_path / "exported")


def as_modelopt(packed: Path, out: Path) -> Path:
    """Rewrite a compressed-tensors folder into ModelOpt's names, with the scales of a W4A4 export and an FP8 cache."""
    shutil.copytree(packed, out)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]:
            tensors[f"{name}.weight"] = tensors.pop(f"{name}.weight_packed")
            tensors[f"{name}.weight_scale_2"] = (1 / tensors.pop(f"{name}.weight_global_scale")).reshape(())
            tensors[f"{name}.input_scale"] = torch.tensor(0.01)
            if name.endswith(("k_proj", "v_proj")):
                tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(1.0)

    change_tensors(out, rename)
    change_config(out, lambda config: config.pop("quantization_config"))
    (out / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    return out


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("said", ["hf_quant_config.json", "config.json", "both", "nested"])
def test_a_folder_loads_to_the_same_bits_and_logits_as_its_compressed_tensors_twin(packed, exported, said):
    if said != "hf_quant_config.json":
        inline = {**HF_QUANT_CONFIG, "quant_method": "modelopt"} if said == "nested" else INLINE
        change_config(exported, lambda config: config.update(quantization_config=inline))
    if said in ("config.json", "nested"):
        (exported / "hf_quant_config.json").unlink()

    ours, theirs = load_model(packed, compute_dtype=torch.float32), load_model(exported, compute_dtype=torch.float32)

    layers = {name: layer for name, layer in ours.named_modules() if isinstance(layer, NVFP4Linear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        other = theirs.get_submodule(name)
        assert torch.equal(layer.weight_packed, other.weight_packed)
        assert torch.equal(layer.weight_scale.view(torch.uint8), other.weight_scale.view(torch.uint8))
        assert torch.equal(layer.tensor_scale, other.tensor_scale)
    assert torch.equal(logits(ours), logits(theirs))


def test_it_is_its_own_twin(exported, tmp_path):
    assert cached_nvfp4(exported, tmp_path / "cache") == exported


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4_W4A16", "nvfp4"])
def test_weight_only_algorithms_and_lower_case_are_read_too(exported, algorithm):
    change_config(exported, lambda c: c["quantization"].update(quant_algo=algorithm), "hf_quant_config.json")
    change_tensors(exported, lambda t: [t.pop(name) for name in list(t) if name.endswith(".input_scale")])

    assert isinstance(load_model(exported).get_submodule(Q), NVFP4Linear)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.1.mlp*",
        "model.layers.1.mlp",
        "mlp",
        "*.mlp.*",
        "model.layers.?.mlp.*_proj",
        "layers.1.mlp.down_proj",
    ],
)
def test_layers_that_are_excluded_stay_plain(packed, exported, tmp_path, entry):
    plain = load_file(packed.with_name("plain") / "model.safetensors")
    covered = [
        f"model.layers.{i}.mlp.{leaf}"
        for i in (0, 1)
        for leaf in ("gate_proj", "up_proj", "down_proj")
        if (i == 1 or "1" not in entry) and ("down" not in entry or leaf == "down_proj")
    ]

    def leave(tensors: dict[str, Tensor]) -> None:
        for name in covered:
            for part in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{name}.{part}"]
            tensors[f"{name}.weight"] = plain[f"{name}.weight"]

    change_tensors(exported, leave)
    change_config(
        exported, lambda c: c["quantization"].update(exclude_modules=["lm_head*", entry]), "hf_quant_config.json"
    )

    model = load_model(exported)

    kinds = {name: type(layer) for name, layer in model.named_modules() if name.endswith("_proj")}
    assert {name for name, kind in kinds.items() if kind is nn.Linear} == set(covered)
    assert torch.equal(model.get_submodule(DOWN).weight, plain[f"{DOWN}.weight"])


# What is refused


def refused(folder: Path, *needles: str, load: Callable[..., Any] = load_model) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        load(folder)
    message = str(caught.value)
    assert all(needle in message for needle in (folder.name, *needles)), message
    assert str(folder.parent) not in message


@pytest.mark.parametrize(
    "algorithm",
    ["FP8", "FP8_PB_WO", "NVFP4_AWQ", "W4A8_AWQ", "MXFP8", "MIXED_PRECISION", "W4A8_NVFP4_FP8", None],
)
@pytest.mark.parametrize("inline", [False, True])
def test_another_algorithm_is_refused_by_name(exported, tmp_path, algorithm, inline):
    change_config(exported, lambda c: c["quantization"].update(quant_algo=algorithm), "hf_quant_config.json")
    if inline:
        change_config(exported, lambda c: c.update(quantization_config={**INLINE, "quant_algo": algorithm}))

    refused(exported, f"modelopt with quant_algo {algorithm}", "NVFP4", "unquantized")
    refused(exported, str(algorithm), load=lambda folder: cached_nvfp4(folder, tmp_path / "cache"))


def test_another_group_size_is_refused(exported):
    change_config(exported, lambda c: c["quantization"].update(group_size=32), "hf_quant_config.json")

    refused(exported, "blocks of 32", "16")


def test_it_is_not_quantized_again_nor_taken_for_plain(exported, tmp_path):
    refused(exported, "modelopt NVFP4", load=lambda folder: quantize_folder(folder, tmp_path / "out"))
    refused(exported, "modelopt NVFP4", load=load_plain_model)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"quantization": 4}', b"\xff\xfe"])
def test_a_damaged_hf_quant_config_is_refused(exported, content):
    content = content if isinstance(content, bytes) else content.encode()
    (exported / "hf_quant_config.json").write_bytes(content)

    refused(exported, "hf_quant_config.json")


def test_an_exclusion_list_that_is_none_is_refused(exported):
    change_config(exported, lambda c: c["quantization"].update(exclude_modules={"a": 1}), "hf_quant_config.json")

    refused(exported, "exclude_modules")


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (lambda t: t[f"{Q}.weight_scale_2"].mul_(2), (Q, "k_proj.weight_scale_2", "fuse")),
        (lambda t: t.pop(f"{Q}.weight_scale_2"), (f"{Q}.weight_scale_2", "missing")),
        (lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(64)}), (f"{Q}.pre_quant_scale", "AWQ", "again")),
        (
            lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].view(torch.float8_e4m3fn)}),
            (f"{DOWN}.weight", "F8_E4M3", "U8"),
        ),
        (
            lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 96)}),
            (f"{DOWN}.weight", "[64, 96]", "[64, 48]"),
        ),
        (
            lambda t: t.update({"lm_head.weight_scale_2": torch.ones(()), "lm_head.weight_scale": torch.ones(1)}),
            ("lm_head.weight_scale_2", "output head", "unquantized"),
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight_scale_2": torch.ones(())}),
            ("model.layers.0.mlp.experts.3.up_proj", "no linear layer", "experts", "dense"),
        ),
        (lambda t: t[f"{DOWN}.weight_scale_2"].fill_(0), (f"{DOWN}.weight_scale_2", "scales no weight")),
        (lambda t: t[f"{DOWN}.weight_scale_2"].fill_(float("nan")), (f"{DOWN}.weight_scale_2", "scales no weight")),
        (lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8).fill_(0x7F), (f"{DOWN}.weight_scale", "NaN")),
    ],
)
def test_tensors_that_are_not_what_they_should_be_are_refused(exported, change, needles):
    change_tensors(exported, change)

    refused(exported, *needles)


def test_a_layer_that_is_quantized_although_excluded_is_refused(exported):
    change_config(exported, lambda c: c["quantization"].update(exclude_modules=[DOWN]), "hf_quant_config.json")

    refused(exported, f"{DOWN}.weight_scale_2", "left out of quantization by the config", "excluded modules")
