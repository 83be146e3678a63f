"""N = out features, K = in features."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qerl_core.errors import BadCheckpoint
from qerl_core.quant.checkpoint import cached_nvfp4, load_model, load_plain_model, quantize_folder
from qerl_core.quant.linear import NVFP4Linear, quantizable_linears, scale_groups
from qerl_core.quant.nvfp4 import encode_scale, quantize, shared_amax
from tests.tiny import make_model

TOKENS = torch.arange(34).view(2, 17)
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
KINDS = {
    "llama tied": {"architecture": "llama", "tied": True},
    "llama untied": {"architecture": "llama", "tied": False},
    "qwen2 with biases": {"architecture": "qwen2", "tied": True},
}


@pytest.fixture(scope="module", params=KINDS)
def plain(request, tmp_path_factory) -> Path:
    """An unquantized folder of each kind."""
    return make_model(tmp_path_factory.mktemp("plain") / "model", **KINDS[request.param])


@pytest.fixture(scope="module")
def packed(plain) -> Path:
    """Its NVFP4 twin."""
    out = plain.with_name("packed")
    quantize_folder(plain, out)
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """One unquantized folder, untied."""
    return make_model(tmp_path_factory.mktemp("llama") / "model", tied=False)


@pytest.fixture(scope="module")
def llama_packed(llama) -> Path:
    out = llama.with_name("packed")
    quantize_folder(llama, out)
    return out


@pytest.fixture
def copied(llama, tmp_path) -> Path:
    """The unquantized folder, to be damaged."""
    return shutil.copytree(llama, tmp_path / "model")


@pytest.fixture
def copied_packed(llama_packed, tmp_path) -> Path:
    """The NVFP4 folder, to be damaged."""
    return shutil.copytree(llama_packed, tmp_path / "packed")


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = read(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def split(folder: Path, max_shard_size: str = "60KB") -> Path:
    """The same model in several files and an index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def test_a_layer_reads_back_as_what_the_codec_made_of_it(plain, packed):
    source, model = read(plain), load_model(packed, compute_dtype=torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Linear)}

    for group in scale_groups(layers):
        weights = {name: source[f"{name}.weight"] for name in group}
        amax = shared_amax(weights.values())
        for name, weight in weights.items():
            expected = quantize(weight, amax=amax).decode(torch.float32)
            assert torch.equal(layers[name].decode(), expected)
    assert len(layers) == 2 * 7


def test_what_is_not_quantized_reads_back_as_it_was(plain, packed):
    source, model = read(plain), load_model(packed, compute_dtype=torch.float32)

    state = {name: tensor for name, tensor in model.state_dict().items() if name in source}

    assert state.keys() == {name for name in source if "_proj.weight" not in name}
    assert all(torch.equal(tensor, source[name].float()) for name, tensor in state.items())


def test_a_loaded_model_is_frozen_in_eval_mode_and_whole(packed, plain):
    model, stock = load_model(packed), AutoModelForCausalLM.from_pretrained(plain)
    expected = dict(stock.named_buffers())

    assert not model.training
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == stock.config.tie_word_embeddings
    computed = {name: tensor for name, tensor in model.named_buffers() if name in expected}
    assert computed.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in computed.items())
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("keep_decoded", [False, True])
def test_logits_are_those_of_the_decoded_weights_in_a_plain_model(plain, packed, keep_decoded):
    model = load_model(packed, compute_dtype=torch.float32, keep_decoded=keep_decoded)
    expected = load_plain_model(plain, compute_dtype=torch.float32)
    for name, linear in quantizable_linears(expected).items():
        linear.weight.data = model.get_submodule(name).decode()

    assert torch.equal(logits(model), logits(expected))


def test_transformers_with_compressed_tensors_reads_the_same_logits(packed):
    stock = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)

    assert torch.equal(logits(load_model(packed, compute_dtype=torch.bfloat16)), logits(stock))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unquantized_folder_loads_as_transformers_loads_it(plain, dtype):
    model, stock = (
        load_plain_model(plain, compute_dtype=dtype),
        AutoModelForCausalLM.from_pretrained(plain, dtype=dtype),
    )

    assert torch.equal(logits(model), logits(stock))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == stock.config.tie_word_embeddings
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_loaded_model_does_not_hang_on_its_files(copied_packed):
    model = load_model(copied_packed)
    expected = logits(model)

    file = copied_packed / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))

    assert torch.equal(logits(model), expected)


def test_the_config_is_the_one_that_vllm_loads(llama, llama_packed):
    config = json.loads((llama_packed / "config.json").read_text())

    assert config.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }
    assert config == json.loads((llama / "config.json").read_text())


def test_the_global_scale_on_disk_is_448_times_6_over_the_largest_weight_of_a_fused_group(llama, llama_packed):
    source, tensors = read(llama), read(llama_packed)
    group = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    expected = encode_scale(shared_amax(source[f"{name}.weight"] for name in group)).reshape(1)

    assert all(torch.equal(tensors[f"{name}.weight_global_scale"], expected) for name in group)
    assert tensors[f"{Q}.weight_packed"].dtype == torch.uint8
    assert tensors[f"{Q}.weight_scale"].dtype == torch.float8_e4m3fn
    assert not any(name.endswith("_proj.weight") for name in tensors)


def test_the_report_says_what_was_done(llama, tmp_path):
    report = quantize_folder(llama, tmp_path / "out")

    weights = [tensor for name, tensor in read(llama).items() if "_proj.weight" in name]
    assert report.num_linears == len(weights) == 14
    assert report.num_weights == sum(weight.numel() for weight in weights)
    assert 0.05 < report.relative_error < 0.12
    assert report.source_bytes == (llama / "model.safetensors").stat().st_size
    assert report.packed_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_tokenizer_template_and_licence_come_along_and_weights_do_not(copied, tmp_path):
    for name in (
        "LICENSE",
        "NOTICE.txt",
        "merges.txt",
        "README.md",
        "pytorch_model.bin",
        "modeling_x.py",
        ".secret.json",
    ):
        (copied / name).write_text(name)
    (copied / "chat_templates").mkdir()
    (copied / "chat_templates" / "tools.jinja").write_text("{{ tools }}")

    quantize_folder(copied, tmp_path / "out")

    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "chat_templates/tools.jinja", "LICENSE", "NOTICE.txt", "merges.txt", "README.md",
    }  # fmt: skip
    assert (tmp_path / "out" / "LICENSE").read_text() == "LICENSE"


def test_a_folder_in_shards_is_read_and_written_as_one_in_a_single_file(copied, llama_packed, tmp_path):
    quantize_folder(split(copied), tmp_path / "out", max_shard_bytes=20_000)

    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(list(copied.glob("model-*.safetensors"))) > 1
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(load_model(llama_packed)))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(load_model(llama_packed)))


def test_the_same_source_gives_the_same_bytes(llama, llama_packed, tmp_path):
    quantize_folder(llama, tmp_path / "again")

    for file in llama_packed.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_layers_that_a_folder_leaves_unquantized_stay_plain(llama, copied_packed):
    source, skipped = read(llama), f"{DOWN}.weight"

    def leave(tensors: dict[str, Tensor]) -> None:
        for part in ("packed", "scale", "global_scale"):
            del tensors[f"{DOWN}.weight_{part}"]
        tensors[skipped] = source[skipped]

    change_tensors(copied_packed, leave)
    change_config(
        copied_packed, lambda c: c["quantization_config"].update(ignore=["lm_head", r"re:.*1\.mlp\.down_proj$"])
    )

    layer = load_model(copied_packed).get_submodule(DOWN)

    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, source[skipped])


def test_a_copy_of_a_tied_tensor_does_no_harm_and_another_tensor_under_its_name_does(tmp_path):
    folder = make_model(tmp_path / "model", tied=True)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load_plain_model(folder)
    quantize_folder(folder, tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in read(tmp_path / "out")

    change_tensors(folder, lambda t: t["lm_head.weight"].add_(1))

    with pytest.raises(BadCheckpoint, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_plain_model(folder)


def test_rotary_frequencies_in_an_old_checkpoint_are_passed_over(copied):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(copied, lambda t: t.update({name: torch.zeros(8)}))

    assert load_plain_model(copied).model.rotary_emb.inv_freq.all()


# PEFT, unpatched


def test_stock_peft_trains_saves_and_loads_an_adapter_over_the_packed_model(packed, tmp_path):
    torch.manual_seed(0)
    base = load_model(packed, compute_dtype=torch.float32)
    clean = logits(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert torch.equal(logits(model), clean)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    losses = []
    for _ in range(4):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = PeftModel.from_pretrained(load_model(packed, compute_dtype=torch.float32), tmp_path)

    wrapped = [m for m in loaded.modules() if hasattr(m, "lora_A") and isinstance(m.base_layer, NVFP4Linear)]
    assert losses[-1] < losses[0]
    assert len(wrapped) == 14
    assert torch.equal(logits(loaded), logits(model.eval()))
    with model.disable_adapter():
        assert torch.equal(logits(model), clean)


def test_gradients_of_an_adapter_equal_those_over_the_decoded_weights(plain, packed):
    def gradients(base: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model(TOKENS, labels=TOKENS).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    decoded, ours = (
        load_plain_model(plain, compute_dtype=torch.float32),
        load_model(packed, compute_dtype=torch.float32),
    )
    for name, linear in quantizable_linears(decoded).items():
        linear.weight.data = ours.get_submodule(name).decode()

    got, expected = gradients(ours), gradients(decoded)

    assert got.keys() == expected.keys()
    assert all(torch.equal(grad, expected[name]) for name, grad in got.items())


@pytest.mark.parametrize("safe_merge", [False, True])
def test_peft_cannot_merge_an_adapter_and_lose_it(llama_packed, safe_merge):
    model = get_peft_model(load_model(llama_packed), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    with pytest.raises(RuntimeError, match="frozen"):
        model.merge_and_unload(safe_merge=safe_merge)


# Whole or not at all


def test_a_failure_leaves_nothing_behind(copied, tmp_path):
    change_tensors(copied, lambda t: t[f"{DOWN}.weight"].fill_(float("nan")))

    with pytest.raises(BadCheckpoint, match=f"{DOWN}.weight: holds nan"):
        quantize_folder(copied, tmp_path / "out" / "packed")

    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_exists_is_not_written_over(llama, tmp_path):
    (tmp_path / "out").mkdir()

    with pytest.raises(ValueError, match="out exists already"):
        quantize_folder(llama, tmp_path / "out")


def test_a_source_is_quantized_once_and_again_when_it_changes(copied, tmp_path):
    cache = tmp_path / "cache"

    first = cached_nvfp4(copied, cache)
    made = (first / "model.safetensors").stat().st_mtime_ns
    again = cached_nvfp4(shutil.copytree(copied, tmp_path / "elsewhere"), cache)
    (copied / "chat_template.jinja").write_text("{{ other }}")
    other = cached_nvfp4(copied, cache)

    assert first == again != other
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert (other / "chat_template.jinja").read_text() == "{{ other }}"
    assert load_model(first).get_submodule(Q)


@pytest.mark.parametrize("method", ["four_over_six", "sweep"])
def test_each_method_has_a_folder_of_its_own_that_the_library_reads_alike(copied, tmp_path, method):
    cache = tmp_path / "cache"

    folders = {name: cached_nvfp4(copied, cache, method=name) for name in ("rtn", method)}

    assert folders["rtn"] != folders[method]
    ours = load_model(folders[method])
    theirs = AutoModelForCausalLM.from_pretrained(folders[method], dtype=torch.bfloat16)
    logits(theirs)  # it decodes at its first forward
    for name, layer in quantizable_linears(ours).items():
        # It divides by the global scale where we and vLLM multiply by the inverse: a tie may fall to the other side.
        torch.testing.assert_close(layer.decode(), theirs.get_submodule(name).weight.data, rtol=2**-7, atol=0)


def test_a_folder_that_is_nvfp4_is_its_own_twin(llama_packed, tmp_path):
    assert cached_nvfp4(llama_packed, tmp_path / "cache") == llama_packed


@pytest.mark.filterwarnings("default")
def test_two_processes_that_ask_at_once_work_once_and_a_killed_one_is_cleaned_up_after(llama, tmp_path):
    cache = tmp_path / "cache"
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from qerl_core.quant import checkpoint
if sys.argv[1] == "killed":
    checkpoint._copy_companions = lambda *_: os.kill(os.getpid(), 9)
print(checkpoint.cached_nvfp4(Path({str(llama)!r}), Path({str(cache)!r})))
"""
    start = lambda how: subprocess.Popen([sys.executable, "-c", script, how], stdout=subprocess.PIPE, text=True)  # noqa: E731

    killed = start("killed")
    assert killed.wait() == -9
    killed.stdout.close()
    left = [path.suffix for path in cache.iterdir()]
    both = [start("whole"), start("whole")]
    said = {process.communicate()[0].strip() for process in both}

    (out,) = said
    assert sorted(left) == [".lock", ".partial"]
    assert {path.name for path in cache.iterdir()} == {Path(out).name, f".{Path(out).name}.lock"}
    assert load_model(Path(out)).get_submodule(Q)


# What is refused


def refused(folder: Path, *needles: str, load: Callable[..., Any] = load_model) -> None:
    """Loading says what is wrong: each needle, the folder's name, no path."""
    with pytest.raises(BadCheckpoint) as caught:
        load(folder)
    message = str(caught.value)
    assert caught.value.code == "bad_checkpoint"
    assert all(needle in message for needle in (folder.name, *needles)), message
    assert str(folder.parent) not in message


PARTS = {"packed": f"{Q}.weight_packed", "scale": f"{Q}.weight_scale", "global": f"{Q}.weight_global_scale"}


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (lambda t: t.pop(PARTS["packed"]), (PARTS["packed"], "missing")),
        (lambda t: t.pop(PARTS["global"]), (PARTS["global"], "missing")),
        (lambda t: t.pop("model.norm.weight"), ("model.norm.weight", "missing")),
        (lambda t: t.update(extra=torch.ones(1)), ("extra", "not a part of the model")),
        (lambda t: t.update({f"{Q}.input_global_scale": torch.ones(1)}), ("input_global_scale", "not a part")),
        (
            lambda t: t.update({PARTS["packed"]: t[PARTS["packed"]][:, :16].clone()}),
            (PARTS["packed"], "[64, 16]", "[64, 32]"),
        ),
        (lambda t: t.update({PARTS["packed"]: t[PARTS["packed"]].view(torch.int8)}), (PARTS["packed"], "I8", "U8")),
        (lambda t: t.update({PARTS["scale"]: t[PARTS["scale"]].float()}), (PARTS["scale"], "F32", "F8_E4M3")),
        (lambda t: t.update({PARTS["global"]: torch.ones(2)}), (PARTS["global"], "[2]")),
        (lambda t: t.update({PARTS["global"]: torch.ones(1).double()}), (PARTS["global"], "F64")),
        (lambda t: t[PARTS["scale"]].view(torch.uint8).fill_(0x7F), (PARTS["scale"], "NaN")),
        (lambda t: t[PARTS["global"]].mul_(2), (Q, "k_proj.weight_global_scale", "fuse")),
        (lambda t: t["model.norm.weight"].fill_(float("inf")), ("model.norm.weight", "NaN, or numbers beyond")),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), ("model.norm.weight", "I32")),
    ],
)
def test_a_folder_whose_tensors_are_not_what_they_should_be_is_refused(copied_packed, change, needles):
    change_tensors(copied_packed, change)

    refused(copied_packed, *needles)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0, 3e38])
def test_a_global_scale_that_scales_nothing_is_refused(copied_packed, value):
    change_tensors(copied_packed, lambda t: t[f"{DOWN}.weight_global_scale"].fill_(value))

    refused(copied_packed, f"{DOWN}.weight_global_scale", "scales no weight")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("size", [0, 6, 1000, -1])
def test_a_file_that_is_cut_short_is_refused(copied, copied_packed, size, quantized):
    folder = copied_packed if quantized else copied
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])

    refused(folder, "model.safetensors", "fetch it again", load=load_model if quantized else load_plain_model)


def test_a_shard_that_is_gone_or_cut_short_is_refused(copied):
    shard = min(split(copied).glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    refused(copied, shard.name, load=load_plain_model)
    shard.unlink()
    refused(copied, shard.name, load=load_plain_model)


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x.safetensors"}}'],
)
def test_an_index_that_names_no_files_of_the_folder_is_refused(copied, index):
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors.index.json").write_text(index)

    refused(copied, "model.safetensors.index.json", load=load_plain_model)


def test_a_tensor_in_two_shards_is_refused(copied):
    shards = sorted(split(copied).glob("model-*.safetensors"))
    save_file(load_file(shards[0]) | load_file(shards[1]), shards[1])

    refused(copied, "is in two files", load=load_plain_model)


def test_a_folder_without_safetensors_is_refused(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")

    refused(copied, "only safetensors are read", load=load_plain_model)


@pytest.mark.parametrize("load", [load_model, load_plain_model, lambda f: cached_nvfp4(f, f.parent / "cache")])
@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model_type": "llama"', b"\xff\xfe"])
def test_a_folder_without_a_readable_config_is_refused(copied, content, load):
    (copied / "config.json").unlink()
    if content is not None:
        (copied / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    refused(copied, "config.json", load=load)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "no-such-thing"},
        {"model_type": "llama", "hidden_size": "many"},
        {"model_type": "clip"},
        {"model_type": "custom", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}},
    ],
)
def test_a_config_of_no_known_language_model_is_refused(copied, config):
    (copied / "config.json").write_text(json.dumps(config))

    refused(copied, "config.json", "supported architecture", load=load_plain_model)


def test_a_config_of_another_size_is_refused(copied):
    change_config(copied, lambda c: c.update(intermediate_size=128))

    refused(copied, "model.layers.0.mlp", "[96, 64]", "[128, 64]", load=load_plain_model)


OTHERS = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "fp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    },
    {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "nonsense",
]


@pytest.mark.parametrize("quantization", OTHERS)
def test_another_way_of_quantizing_is_refused_by_name(copied, tmp_path, quantization):
    change_config(copied, lambda c: c.update(quantization_config=quantization))
    method = quantization["quant_method"] if isinstance(quantization, dict) else "unknown"

    refused(copied, method, "unquantized")
    refused(copied, method, "unquantized", load=load_plain_model)
    refused(copied, method, "unquantized", load=lambda f: quantize_folder(f, tmp_path / "out"))
    if method != "compressed-tensors" or quantization["format"] != "nvfp4-pack-quantized":
        refused(copied, method, "unquantized", load=lambda f: cached_nvfp4(f, tmp_path / "cache"))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32),
        lambda q: q["config_groups"]["group_0"]["weights"].update(type="int"),
        lambda q: q["config_groups"]["group_0"].update(input_activations={"num_bits": 4}),
        lambda q: q["config_groups"]["group_0"].update(targets=["re:.*mlp.*"]),
        lambda q: q["config_groups"].update(group_1={}),
        lambda q: q.update(kv_cache_scheme={"num_bits": 8}),
    ],
)
def test_nvfp4_that_is_more_than_packed_weights_is_refused(copied_packed, change):
    change_config(copied_packed, lambda c: change(c["quantization_config"]))

    refused(copied_packed, "nvfp4-pack-quantized", "unquantized")


def test_a_plain_folder_is_not_taken_for_a_quantized_one(llama):
    refused(llama, "is not quantized")


@pytest.mark.parametrize(
    ("name", "value"), [(f"{Q}.weight", "nan"), (f"{DOWN}.weight", "inf"), ("model.norm.weight", "nan")]
)
def test_weights_that_are_not_finite_are_not_quantized(copied, tmp_path, name, value):
    change_tensors(copied, lambda t: t[name].view(-1)[7].fill_(float(value)))

    with pytest.raises(BadCheckpoint, match=name):
        quantize_folder(copied, tmp_path / "out")
    with pytest.raises(BadCheckpoint, match=name):
        load_plain_model(copied)


def test_layers_that_do_not_divide_into_blocks_are_refused_by_name(tmp_path):
    folder = make_model(tmp_path / "model", intermediate_size=100)

    with pytest.raises(BadCheckpoint, match=r"mlp.down_proj.weight: .*multiple of 16 input features, not 100"):
        quantize_folder(folder, tmp_path / "out")


def test_a_packed_folder_that_claims_such_layers_is_refused(copied_packed):
    change_config(copied_packed, lambda c: c.update(intermediate_size=100))

    refused(copied_packed, "mlp.down_proj", "100 input features")


def test_a_model_without_linear_layers_is_refused(tmp_path):
    folder = make_model(tmp_path / "model", architecture="gpt2", n_embd=64, n_head=4, n_layer=1)

    refused(folder, "no linear layers", load=lambda f: quantize_folder(f, tmp_path / "out"))


def test_others_may_read_what_is_written(tiny_folder, tmp_path):
    quantize_folder(tiny_folder, tmp_path / "out")

    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").glob("*.safetensors"))
