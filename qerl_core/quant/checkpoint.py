"""Base models on disk: plain safetensors folders, and NVFP4 ones, which vLLM loads too.

Per quantized linear layer [N, K] a compressed-tensors `nvfp4-pack-quantized` folder holds `weight_packed` uint8
[N, K/2], `weight_scale` float8_e4m3fn [N, K/16] and `weight_global_scale` float32 [1]. The last is the INVERSE of our
tensor scale: it multiplies when quantizing. Nothing outside this file knows that name. Reading inverts it in float32,
as vLLM does; compressed-tensors divides by it instead, so its float32 values differ from ours by two units in the last
place at most. This is what is written.

A folder that NVIDIA's ModelOpt exported is read too. There the same three are called `weight`, `weight_scale` and
`weight_scale_2`, which is our tensor scale as it is; config.json says `"quant_method": "modelopt"`, or
hf_quant_config.json beside it does. Only its weights are used: scales for 4-bit activations (`input_scale`) and for an
8-bit KV cache (`k_scale`, `v_scale`) are passed over, and both stay in the compute type.

What is read is checked against the model class before anything large is loaded: a tensor that is missing, left over,
of another shape or type, or not finite is a BadCheckpoint that names it. Messages carry the folder's name, no path.
"""

import contextlib
import fnmatch
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from qerl_core.config import RoundingMethod
from qerl_core.errors import BadCheckpoint
from qerl_core.folders import lone_maker, published
from qerl_core.kernels.nvfp4_dequant import BLOCK
from qerl_core.quant.calibration import Rounded, Text, round_layers
from qerl_core.quant.linear import NVFP4Linear, quantizable_linears, scale_groups
from qerl_core.quant.nvfp4 import Method, NVFP4Weight, encode_scale, largest_magnitude, quantize

"""The codec's own methods, and the one that looks at a layer's inputs too."""
FORMAT = "nvfp4-pack-quantized"
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": BLOCK,
    "symmetric": True,
    "dynamic": False,
}
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODELOPT_CONFIG = "hf_quant_config.json"
MODELOPT_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4", "NVFP4_W4A16"})
"""The last two leave activations alone, and so are the first one here."""
COPIED = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "chat_templates/*.jinja",
)
_VERSION = 1  # of what `quantize_folder` writes: a new one leaves older cache entries aside
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_FLOATS = frozenset(_BITS)
_HEADER_BYTES = 512  # more than what a tensor takes in a safetensors header, three times, and in the index
_LEFT_OVER = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"  # old checkpoints hold them; models compute them


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What `quantize_folder` did."""

    num_linears: int
    num_weights: int
    """Elements of the quantized layers."""
    relative_error: float
    """Norm of the rounding error over the norm of the weights, all quantized layers together."""
    layer_errors: Mapping[str, float]
    """The same for each quantized layer, in the model's order."""
    source_bytes: int
    packed_bytes: int
    """Size of the safetensors files, what is not quantized included."""


def load_model(
    folder: Path,
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    keep_decoded: bool = False,
) -> PreTrainedModel:
    """Open an NVFP4 folder as a frozen model in eval mode, its quantized layers `NVFP4Linear`.

    Embeddings, norms, biases and the output head become `compute_dtype`. Raises BadCheckpoint.
    """
    packing = _packing(folder, _read_config(folder))
    model = _skeleton(folder, compute_dtype)
    linears = {name: linear for name, linear in quantizable_linears(model).items() if not packing.leaves(name)}
    with _Tensors(folder) as tensors:
        specs = _specs(folder, model, linears, packing)
        _check_elsewhere(tensors, linears, packing, model)
        _check_layout(tensors, specs, model, packing.passed_over)
        _check_fused(tensors, linears, packing)
        for name, linear in linears.items():
            has_bias = linear.bias is not None
            bias = _read_dense(tensors, f"{name}.bias", device, compute_dtype) if has_bias else None
            weight = _read_packed(tensors, name, packing, device)
            layer = NVFP4Linear.from_weight(weight, bias, compute_dtype, keep_decoded=keep_decoded)
            model.set_submodule(name, layer)
        rest = [name for name in specs if name.rpartition(".")[0] not in linears]
        _fill(model, tensors, rest, device, compute_dtype)
    return _finish(folder, model, device)


def load_plain_model(
    folder: Path, *, compute_dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Open an unquantized folder as a frozen model in eval mode, every weight `compute_dtype`. Raises BadCheckpoint."""
    _require_plain(folder, _read_config(folder))
    model = _skeleton(folder, compute_dtype)
    with _Tensors(folder) as tensors:
        specs = _specs(folder, model)
        _check_layout(tensors, specs, model)
        _fill(model, tensors, specs, device, compute_dtype)
    return _finish(folder, model, device)


def is_quantized(folder: Path) -> bool:
    """Whether the folder says that it is, in whatever format. BadCheckpoint if it cannot be asked."""
    return _read_config(folder).get("quantization_config") is not None


def cached_nvfp4(
    source: Path,
    cache: Path,
    *,
    method: RoundingMethod = "rtn",
    calibration: Text | None = None,
    device: torch.device | str = "cpu",
) -> Path:
    """The NVFP4 twin of a folder, kept in `cache` under a hash of the source's contents; made if it is not there.

    A calibrated twin is that of its text too. A folder that is NVFP4 already is its own twin, whatever the method. Of
    two processes that ask at once one works and one waits; what a killed process left behind is thrown away. Raises
    BadCheckpoint, and ValueError as `quantize_folder` does.
    """
    raw = _read_config(source)
    if raw.get("quantization_config") is not None:
        _packing(source, raw)
        return source
    _check_calibration(method, calibration)
    names = ["nvfp4", method, _content_hash(source)]
    if calibration is not None:
        names.append(hashlib.sha256(json.dumps([list(ids) for ids in calibration]).encode()).hexdigest()[:16])
    out = cache / "-".join(names)
    with lone_maker(out) as is_wanted:
        if is_wanted:
            quantize_folder(source, out, method=method, calibration=calibration, device=device)
    return out


def quantize_folder(
    source: Path,
    out: Path,
    *,
    method: RoundingMethod = "rtn",
    calibration: Text | None = None,
    max_shard_bytes: int = 4 * 2**30,
    device: torch.device | str = "cpu",
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> QuantReport:
    """Write the NVFP4 twin of an unquantized folder: every linear layer but the output head, rounded.

    Layers that engines fuse share their scale. Tensors pass through memory a few at a time, a shard of output at
    most, and for `gptq` one of the decoder's layers with what calibration needs of it (`calibration.py`). `out`
    appears when it is complete and on disk, not before. Tokenizer, generation config, chat template and licence come
    along. `on_layer` hears how many layers are done, of how many. Raises BadCheckpoint if the source
    cannot be quantized, ValueError if `out` exists, if `gptq` lacks calibration text or another method has some.
    """
    _check_calibration(method, calibration)
    if out.exists():
        raise ValueError(f"{out.name} exists already")
    raw = _read_config(source)
    _require_plain(source, raw)
    model = _skeleton(source, torch.bfloat16)
    linears = quantizable_linears(model)
    if not linears:
        raise BadCheckpoint(f"{source.name}: {raw.get('model_type')} has no linear layers to quantize; train it plain")
    with _Tensors(source) as tensors, published(out) as partial:
        specs = _specs(source, model)
        _check_layout(tensors, specs, model)
        writer = _ShardWriter(partial, max_shard_bytes)
        for name in specs:
            if name.removesuffix(".weight") not in linears:
                writer.add(name, _finite(tensors, name, tensors.read(name)))
        squares: dict[str, tuple[float, float]] = {}
        if method == "gptq":
            assert calibration is not None
            groups = _round_calibrated(source, tensors, specs, calibration, device)
        else:
            groups = _round_each(tensors, linears, method, device)
        for weights, rounded, encode in groups:
            for name, weight_NK in weights.items():
                packed = rounded[name]
                writer.add(f"{name}.weight_packed", packed.packed_NJ)
                writer.add(f"{name}.weight_scale", packed.block_scale_NS)
                writer.add(f"{name}.weight_global_scale", encode.reshape(1).clone())
                error_NK = packed.decode(torch.float32) - weight_NK.float()
                squares[name] = error_NK.norm().item() ** 2, weight_NK.float().norm().item() ** 2
                on_layer(len(squares), len(linears))
        writer.close()
        _copy_companions(source, partial)
        config = raw | {"quantization_config": _quantization_config(_head_name(model))}
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return QuantReport(
        num_linears=len(linears),
        num_weights=sum(linear.weight.numel() for linear in linears.values()),
        relative_error=_relative(*(sum(column) for column in zip(*squares.values(), strict=True))),
        layer_errors={name: _relative(*squares[name]) for name in linears},
        source_bytes=sum(file.stat().st_size for file in _model_files(source)),
        packed_bytes=sum(file.stat().st_size for file in _model_files(out)),
    )


def _relative(squared_error: float, squared_norm: float) -> float:
    return (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0


def _round_each(
    tensors: "_Tensors", linears: Collection[str], method: Method, device: torch.device | str
) -> Iterator[Rounded]:
    for group in scale_groups(linears):
        weights = {name: tensors.read(f"{name}.weight").to(device) for name in group}
        amax = torch.stack([largest_magnitude(w, name=f"{n}.weight") for n, w in weights.items()]).amax()
        rounded = {n: quantize(w, name=f"{n}.weight", amax=amax, method=method) for n, w in weights.items()}
        yield weights, rounded, encode_scale(amax, method=method)


def _round_calibrated(
    source: Path, tensors: "_Tensors", names: Iterable[str], text: Text, device: torch.device | str
) -> Iterator[Rounded]:
    model = _skeleton(source, torch.float32)

    def load(prefix: str, module: nn.Module) -> None:
        _fill(model, tensors, [name for name in names if name.startswith(f"{prefix}.")], device, torch.float32)
        module.to(device)  # buffers, which no file holds

    return round_layers(model, text, load=load, device=device)


def _check_calibration(method: RoundingMethod, calibration: Text | None) -> None:
    if method == "gptq" and not any(calibration or ()):
        raise ValueError("gptq needs calibration text: give token ids, or choose a method without calibration")
    if method != "gptq" and calibration is not None:
        raise ValueError(f"{method} looks at no text, so calibration would have no effect")


def twin_bytes(source: Path) -> int:
    """How much disk the NVFP4 twin of an unquantized folder takes. BadCheckpoint if it can have none."""
    _require_plain(source, _read_config(source))
    model = _skeleton(source, torch.bfloat16)
    linears = quantizable_linears(model)
    with _Tensors(source) as tensors:
        specs = _specs(source, model)
        _check_layout(tensors, specs, model)
        total = sum(path.stat().st_size for path in _companions(source))
        for name in specs:
            shape, dtype = tensors.spec(name)
            bits = 4 + 8 / BLOCK if name.removesuffix(".weight") in linears else _BITS.get(dtype, 64)
            total += int(math.prod(shape) * bits) // 8 + _HEADER_BYTES
    return total


# What a folder claims to be


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, with ModelOpt's own file as its `quantization_config` where it has none."""
    if not (folder / CONFIG).is_file():
        raise BadCheckpoint(
            f"{folder.name}: there is no {CONFIG}; give a folder that transformers' save_pretrained wrote"
        )
    raw = _read_object(folder / CONFIG)
    if raw.get("quantization_config") is None and (folder / MODELOPT_CONFIG).is_file():
        quant = _read_object(folder / MODELOPT_CONFIG).get("quantization")
        if not isinstance(quant, dict):
            raise BadCheckpoint(f"{folder.name}: {MODELOPT_CONFIG} has no `quantization` object; fetch it again")
        raw["quantization_config"] = quant | {"quant_method": "modelopt"}
    return raw


def _read_object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(
            f"{file.parent.name}: {file.name} cannot be read ({type(error).__name__}); fetch it again"
        ) from error
    if not isinstance(raw, dict):
        raise BadCheckpoint(f"{file.parent.name}: {file.name} holds no JSON object; fetch it again")
    return raw


def _require_plain(folder: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise BadCheckpoint(f"{folder.name}: is quantized already ({_method(raw)}); give the unquantized model instead")


def _method(raw: Mapping[str, Any]) -> str:
    quant = raw["quantization_config"]
    keys = ("quant_method", "quant_algo", "format")
    names = [quant.get(key) for key in keys] if isinstance(quant, dict) else []
    return " ".join(str(name) for name in names if name) or "unknown method"


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a folder names the parts of its quantized layers, and which layers it leaves as they are."""

    parts: tuple[str, str, str]
    """Codes, block scales, tensor scale."""
    is_inverse: bool
    """Whether the last one multiplies when quantizing."""
    leaves: Callable[[str], bool]
    """Whether a layer of this name is not quantized."""
    passed_over: str
    """Matches tensors that are not needed."""


def _packing(folder: Path, raw: Mapping[str, Any]) -> _Packing:
    """What the folder claims to be; BadCheckpoint unless that is NVFP4 weights."""
    quant = raw.get("quantization_config")
    if isinstance(quant, dict) and (quant.get("quant_method") or quant.get("quant_library")) in _MODELOPT:
        ignore = _modelopt_ignore(folder, quant)
        return _Packing(
            ("weight", "weight_scale", "weight_scale_2"),
            is_inverse=False,
            leaves=lambda name: _is_excluded(name, ignore),
            passed_over=rf"{_LEFT_OVER}|\.(input|k|v)_scale$",
        )
    ignore = _nvfp4_ignore(folder, raw)
    return _Packing(
        ("weight_packed", "weight_scale", "weight_global_scale"),
        is_inverse=True,
        leaves=lambda name: _is_ignored(name, ignore),
        passed_over=_LEFT_OVER,
    )


_MODELOPT = ("modelopt", "modelopt_fp4")


def _modelopt_ignore(folder: Path, quant: Mapping[str, Any]) -> list[str]:
    """The wildcards of what ModelOpt left unquantized; BadCheckpoint unless the rest is NVFP4 in blocks of 16."""
    quant = quant["quantization"] if isinstance(quant.get("quantization"), dict) else quant
    algorithm = quant.get("quant_algo")
    if str(algorithm).upper() not in MODELOPT_ALGORITHMS:
        raise BadCheckpoint(
            f"{folder.name}: is quantized by modelopt with quant_algo {algorithm}, and of ModelOpt's folders only "
            f"those with {' or '.join(sorted(MODELOPT_ALGORITHMS))} can be trained on; give one of these "
            "(NVFP4_DEFAULT_CFG), or the unquantized model"
        )
    groups = quant.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    sizes = [quant.get("group_size"), *(part.get("group_size") for part in weights if isinstance(part, dict))]
    if wrong := [size for size in sizes if size not in (None, BLOCK)]:
        raise BadCheckpoint(
            f"{folder.name}: its weights are in blocks of {wrong[0]} (group_size), and NVFP4's are of {BLOCK}; "
            "give a folder with such, or the unquantized model"
        )
    ignore = quant.get("exclude_modules") or quant.get("ignore") or ()
    if not isinstance(ignore, list | tuple):
        raise BadCheckpoint(f"{folder.name}: exclude_modules is {ignore!r}, not a list of names; fetch it again")
    return [str(name) for name in ignore]


def _is_excluded(name: str, wildcards: Iterable[str]) -> bool:
    """A name without wildcards stands for the module and what is in it, wherever the module is."""
    return any(fnmatch.fnmatchcase(name, entry) or f".{entry}." in f".{name}." for entry in wildcards)


def _nvfp4_ignore(folder: Path, raw: Mapping[str, Any]) -> list[str]:
    """The layers that the folder says are not quantized; BadCheckpoint unless the others are NVFP4, weights only."""
    quant = raw.get("quantization_config")
    if quant is None:
        raise BadCheckpoint(f"{folder.name}: is not quantized; quantize it first, or train it unquantized")
    wrong = BadCheckpoint(
        f"{folder.name}: is quantized by {_method(raw)}, and only compressed-tensors {FORMAT} with weights of "
        "4 bits in blocks of 16 and activations left alone, or ModelOpt's NVFP4, can be trained on; give the "
        "unquantized model instead"
    )
    if not isinstance(quant, dict) or quant.get("quant_method") != "compressed-tensors":
        raise wrong
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise wrong
    (group,) = groups.values()
    if not isinstance(group, dict) or (group.get("format") or quant.get("format")) != FORMAT:
        raise wrong
    weights = group.get("weights")
    if not isinstance(weights, dict) or any(weights.get(key) != value for key, value in WEIGHTS.items()):
        raise wrong
    if group.get("targets") != ["Linear"] or quant.get("kv_cache_scheme"):
        raise wrong
    if group.get("input_activations") or group.get("output_activations"):
        raise wrong
    return [str(name) for name in quant.get("ignore") or ()]


def _is_ignored(name: str, ignore: Iterable[str]) -> bool:
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def _quantization_config(head: str) -> dict[str, Any]:
    group = {
        "format": FORMAT,
        "targets": ["Linear"],
        "weights": WEIGHTS,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [head],
    }


# The model class, without weights


def _skeleton(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model that config.json describes: parameters on the meta device, computed buffers real."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # in memory it is plain modules and ours
        # Not `torch.device("meta")`: rotary frequencies are in no checkpoint, so they must be computed now.
        hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # may return a value
        try:
            from_config: Any = AutoModelForCausalLM.from_config
            model: PreTrainedModel = from_config(config, dtype=dtype, trust_remote_code=False)
        finally:
            hook.remove()
    except Exception as error:  # whatever transformers raises for a config that it does not understand
        raise BadCheckpoint(
            f"{folder.name}: transformers cannot make a causal language model of {CONFIG} "
            f"({type(error).__name__}); a supported architecture is needed, without code of its own"
        ) from error
    return model


def _to_meta(module: nn.Module, name: str, parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def _head_name(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


@dataclass(frozen=True, slots=True)
class _Spec:
    """What a tensor on disk must be."""

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    """Safetensors' names; empty for any."""


def _specs(
    folder: Path, model: PreTrainedModel, packed: Collection[str] = (), packing: _Packing | None = None
) -> dict[str, _Spec]:
    """Every tensor that must be on disk: the model's state, tied copies left out, `packed` layers in three parts."""
    specs = {
        name: _Spec(tuple(tensor.shape), _FLOATS if tensor.is_floating_point() else frozenset())
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    for name in packed:
        assert packing is not None
        rows, cols = specs.pop(f"{name}.weight").shape
        if cols % BLOCK:
            raise BadCheckpoint(f"{folder.name}: {name} has {cols} input features, which NVFP4 cannot hold")
        codes, block_scale, tensor_scale = packing.parts
        specs[f"{name}.{codes}"] = _Spec((rows, cols // 2), frozenset({"U8"}))
        specs[f"{name}.{block_scale}"] = _Spec((rows, cols // BLOCK), frozenset({"F8_E4M3"}))
        specs[f"{name}.{tensor_scale}"] = _Spec((1,), frozenset({"F32"}))
    return specs


# Reading


class _Tensors:
    """The tensors in a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.name
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        for file in _model_files(folder):
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(
                    f"{folder.name}: {file.name} is missing, cut short or damaged ({type(error).__name__}); "
                    "fetch it again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - a handle is no dict
                if name in self._files:
                    raise BadCheckpoint(f"{folder.name}: {name} is in two files; save the model again")
                self._files[name] = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def spec(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype, from the header alone."""
        part = self._files[name].get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def read(self, name: str) -> Tensor:
        """The tensor, backed by the file until it is copied."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _model_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{folder.name}: there is neither {SINGLE} nor {INDEX}; only safetensors are read, so save the model "
            "with transformers' save_pretrained"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"{folder.name}: {INDEX} cannot be read ({type(error).__name__}); fetch it again"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise BadCheckpoint(f"{folder.name}: {INDEX} names {name!r}, which is no file of the folder")
    return [folder / name for name in names]


def _check_elsewhere(tensors: _Tensors, linears: Collection[str], packing: _Packing, model: PreTrainedModel) -> None:
    """BadCheckpoint if more is quantized than the `linears`, or by more than three tensors a layer."""
    model_type, scale = model.config.model_type, packing.parts[-1]
    scaled = {name.rpartition(".")[0] for name in tensors if name.endswith(f".{scale}")} - set(linears)
    if scaled:
        head = _head_name(model)
        name, is_module = min(scaled), min(scaled) in dict(model.named_modules())
        if head in scaled:
            why, remedy = "is the output head, which is read unquantized only", "leave it out when quantizing"
        elif is_module:
            why, remedy = "is left out of quantization by the config", "mend the list of excluded modules"
        else:
            why = f"is no linear layer of a {model_type} here (experts of a mixture are none)"
            remedy = "give a dense model"
        name = head if head in scaled else name
        others = f" (and {len(scaled) - 1} more)" if len(scaled) > 1 else ""
        raise BadCheckpoint(
            f"{tensors.folder}: {name}.{scale}{others} says that {name} is quantized, and it {why}; {remedy}, or "
            "give the unquantized model"
        )
    if awq := sorted(name for name in tensors if name.endswith(".pre_quant_scale")):
        raise BadCheckpoint(
            f"{tensors.folder}: {awq[0]} scales a layer's input (AWQ), which is not done here; quantize again "
            "without AWQ, or give the unquantized model"
        )


def _check_layout(
    tensors: _Tensors, specs: Mapping[str, _Spec], model: PreTrainedModel, passed_over: str = _LEFT_OVER
) -> None:
    """BadCheckpoint unless the files hold the tensors of `specs`, as they should be, and nothing else."""
    found = set(tensors)
    for copy, original in model.all_tied_weights_keys.items():
        if copy not in found or original not in found:
            continue
        if not torch.equal(tensors.read(copy), tensors.read(original)):
            raise BadCheckpoint(
                f"{tensors.folder}: {copy} differs from {original}, which {CONFIG} ties to it; "
                "set tie_word_embeddings to false or drop the tensor"
            )
        found.discard(copy)
    patterns = "|".join([passed_over, *(model._keys_to_ignore_on_load_unexpected or ())])
    found = {name for name in found if not re.search(patterns, name)}
    for what, names in (("missing", specs.keys() - found), ("not a part of the model", found - specs.keys())):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            verb = "are" if len(names) > 1 else "is"
            raise BadCheckpoint(
                f"{tensors.folder}: {min(names)}{others} {verb} {what} ({model.config.model_type}, as {CONFIG} says); "
                f"fetch the folder again, or mend {CONFIG}"
            )
    for name, spec in specs.items():
        shape, dtype = tensors.spec(name)
        if shape != spec.shape and not (shape == () and spec.shape == (1,)):
            raise BadCheckpoint(
                f"{tensors.folder}: {name} is {list(shape)}, and {CONFIG} asks for {list(spec.shape)}; "
                "weights and config are of different models"
            )
        if spec.dtypes and dtype not in spec.dtypes:
            raise BadCheckpoint(
                f"{tensors.folder}: {name} is stored as {dtype}, not {' or '.join(sorted(spec.dtypes))}; "
                "give a checkpoint that is unquantized, or NVFP4 by compressed-tensors or ModelOpt"
            )


def _check_fused(tensors: _Tensors, linears: Collection[str], packing: _Packing) -> None:
    part = packing.parts[-1]
    for group in scale_groups(linears):
        scale = tensors.read(f"{group[0]}.{part}").item()
        for name in group[1:]:
            other = tensors.read(f"{name}.{part}").item()
            if other != scale:
                raise BadCheckpoint(
                    f"{tensors.folder}: {name}.{part} is {other}, and that of {group[0]} is {scale}; "
                    "engines fuse the two under one scale, so quantize the model again with a shared one"
                )


def _read_packed(tensors: _Tensors, name: str, packing: _Packing, device: torch.device | str) -> NVFP4Weight:
    packed, block_scale, stored = (tensors.read(f"{name}.{part}") for part in packing.parts)
    tensor_scale = (1 / stored if packing.is_inverse else stored).reshape(())
    smallest = torch.finfo(torch.float32).tiny
    if not (torch.isfinite(stored) and torch.isfinite(tensor_scale) and tensor_scale >= smallest):
        raise BadCheckpoint(
            f"{tensors.folder}: {name}.{packing.parts[-1]} is {stored.item()}, which scales no weight; "
            "quantize the model again"
        )
    if not (block_scale.float() >= 0).all():
        raise BadCheckpoint(
            f"{tensors.folder}: {name}.weight_scale holds NaN or negative scales; quantize the model again"
        )
    return NVFP4Weight(*(part.to(device, copy=True) for part in (packed, block_scale, tensor_scale)))


def _read_dense(tensors: _Tensors, name: str, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    stored = tensors.read(name)
    if not stored.is_floating_point():
        return stored.to(device, copy=True)
    return _finite(tensors, name, stored.to(device, dtype, copy=True))


def _finite(tensors: _Tensors, name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise BadCheckpoint(
            f"{tensors.folder}: {name} holds NaN, or numbers beyond {str(tensor.dtype).removeprefix('torch.')}; "
            "the folder is damaged or of a run that diverged: fetch it again, or take an earlier one"
        )
    return tensor


def _fill(
    model: PreTrainedModel,
    tensors: _Tensors,
    names: Iterable[str],
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module, tensor = model.get_submodule(parent), _read_dense(tensors, name, device, dtype)
        is_parameter = leaf in dict(module.named_parameters(recurse=False))
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _finish(folder: Path, model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    model.tie_weights()
    model.to(device)  # type: ignore[arg-type]
    model.requires_grad_(False)
    model.eval()  # type: ignore[no-untyped-call]
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise BadCheckpoint(f"{folder.name}: generation_config.json cannot be read; mend or drop it") from error
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


# Writing


class _ShardWriter:
    """Safetensors files of at most a given size, and their index if there is more than one."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._total_bytes = 0
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it is on disk at the latest when the writer is closed."""
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.cpu().contiguous()

    def close(self) -> None:
        """Write what is left, and give the files their names."""
        if self._pending:
            self._flush()
        if len(self._shards) == 1:
            self._part(0).rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        part = self._part(len(self._shards))
        try:
            save_file(self._pending, part, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, mostly
            raise OSError(str(error)) from error
        part.chmod(0o644)  # safetensors lets nobody else read it
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._shards.append(list(self._pending))
        self._pending = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _companions(folder: Path) -> list[Path]:
    """What belongs to a model besides config and weights: tokenizer, chat template, generation config, licence."""
    found = {path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}
    others = (CONFIG, INDEX, "pytorch_model.bin.index.json")
    return sorted(path for path in found if path.name not in others and not path.name.startswith("."))


def _copy_companions(source: Path, out: Path) -> None:
    for path in _companions(source):
        target = out / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256(f"nvfp4 {_VERSION}".encode())
    for path in (folder / CONFIG, *_model_files(folder), *_companions(folder)):
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BadCheckpoint(f"{folder.name}: {path.name} cannot be read; fetch it again") from error
        digest.update(f"\n{path.relative_to(folder).as_posix()} {content}".encode())
    return digest.hexdigest()[:32]
