"""Products of the fused linears of a layer with packed weights, against every other way: rows of `benchmarks.kernels`.

Times are of CUDA graphs that run through copies of the weights, so that each call finds them outside the cache, in a
new order each round. Each way is checked at each number of rows first. Weights are those of `random_nvfp4`; NF4's are
the same, rounded again.
"""

import functools
import gc
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import Row
from benchmarks.timing import require_close
from qerl_core.kernels import nvfp4_dequant, nvfp4_matmul
from qerl_core.kernels.nvfp4_dequant import BLOCK, E2M1
from qerl_core.kernels.nvfp4_matmul import Config, Lora, TiledWeight, matmul
from qerl_core.quant.nvfp4 import NVFP4Weight

BF16 = torch.bfloat16
LAYERS = {  # the fused linears of one block: out features, in features, where each fused layer starts
    "3b": {
        "qkv": (2560, 2048, (0, 2048, 2304)), "o": (2048, 2048, (0,)),
        "gate_up": (22016, 2048, (0, 11008)), "down": (2048, 11008, (0,)),
    },
    "7b": {
        "qkv": (4608, 3584, (0, 3584, 4096)), "o": (3584, 3584, (0,)),
        "gate_up": (37888, 3584, (0, 18944)), "down": (3584, 18944, (0,)),
    },
    "32b": {
        "qkv": (7168, 5120, (0, 5120, 6144)), "o": (5120, 5120, (0,)),
        "gate_up": (55296, 5120, (0, 27648)), "down": (5120, 27648, (0,)),
    },
}  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
RANK = 32
CACHE_BYTES = 120e6  # twice an H200's


def random_nvfp4(num_rows: int, num_cols: int) -> NVFP4Weight:
    """Any codes; scales that give weights of about 0.02."""
    packed = torch.randint(256, (num_rows, num_cols // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(num_rows, num_cols // 16, device="cuda") * 320 + 64).to(torch.float8_e4m3fn)
    return NVFP4Weight(packed, scale, torch.tensor(0.02 / (192 * 2.6), device="cuda"))


def parts(weight: NVFP4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels take."""
    return weight.packed_NJ, weight.block_scale_NS, weight.tensor_scale


def random_lora(num_out: int, num_in: int, starts: tuple[int, ...]) -> Lora:
    """Rank 32."""
    a = (torch.randn(len(starts) * RANK, num_in, device="cuda") * 0.02).to(BF16)
    return Lora(a, (torch.randn(num_out, RANK, device="cuda") * 0.02).to(BF16), starts)


def graph_microseconds(
    calls: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int = 7
) -> dict[str, tuple[float, float]]:
    """Median time of a call of each kind, and its spread; all kinds in a new order each round."""
    graphs = {}
    for name, some in calls.items():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in some[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in some:
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, graph in random.sample(list(graphs.items()), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if number:
                times[name].append(start.elapsed_time(end) * 1e3 / len(calls[name]))
    return {name: (float(median(found)), max(found) - min(found)) for name, found in times.items()}


def copies(bytes_each: float) -> int:
    """How many weights a graph runs through."""
    return max(2, min(24, round(CACHE_BYTES / bytes_each) + 1))


# The peers


def humming(weight: NVFP4Weight) -> list[Callable[[Tensor], Tensor]]:
    """humming-kernels, BF16 activations, over copies of a weight; without multicast, with which it is wrong."""
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayerMethod
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.tune import get_heuristics_config

    num_rows, num_cols = weight.shape
    compute: dict[str, Any] = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "dense"}
    layer: Any = torch.nn.Module()
    tensors = {
        "weight": weight.packed_NJ.view(torch.int32), "weight_scale": weight.block_scale_NS,
        "global_scale": weight.tensor_scale.reshape(1),
    }  # fmt: skip
    for name, tensor in tensors.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    schema = HummingWeightSchema(
        b_dtype="float4e2m1", bs_dtype="float8e4m3", weight_scale_group_size=16, weight_scale_type="group_tensor"
    )
    HummingLayerMethod.prepare_layer_meta(
        layer, num_rows, num_cols, schema, HummingInputSchema(a_dtype="bfloat16"), torch_dtype=BF16
    )
    HummingLayerMethod.transform_humming_layer(layer)
    meta = layer.humming_metas[""]
    configs = get_heuristics_config(meta, **compute)
    locks = torch.zeros(1024, dtype=torch.int32, device="cuda")
    kernels: dict[int, Any] = {}

    def call(x: Tensor, packed: Tensor) -> Tensor:
        rows = len(x)
        if rows not in kernels:
            config = next(config for low, high, config in configs if low < rows <= high)
            config = config | {"multi_cast_size_a": 1, "multi_cast_size_b": 1}
            kernels[rows] = HummingKernel.prepare_kernels(meta.to_str(), json.dumps(compute), json.dumps(config))
        product: Tensor = torch.ops.humming.launch_kernel(
            kernels[rows], x, packed, None, None, layer.weight_scale.data, None, None, layer.global_scale.data,
            None, None, None, None, locks, 1, 0,
        )  # fmt: skip
        return product

    packed = [layer.weight.data] + [layer.weight.data.clone() for _ in range(copies(weight.packed_NJ.numel()) - 1)]
    return [partial(call, packed=one) for one in packed]


def marlin(weight: NVFP4Weight) -> list[Callable[[Tensor], Tensor]]:
    """vLLM's Marlin, which QeRL uses, over copies of a weight."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.packed_NJ.clone(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight.block_scale_NS.clone(), requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(weight.tensor_scale.reshape(1).clone(), requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
    layer.params_dtype = BF16
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)

    def call(x: Tensor, packed: Tensor) -> Tensor:
        product: Tensor = marlin_utils_fp4.apply_fp4_marlin_linear(
            input=x, weight=packed, weight_scale=layer.weight_scale, weight_global_scale=layer.weight_global_scale,
            workspace=layer.workspace, size_n=layer.output_size_per_partition, size_k=layer.input_size_per_partition,
        )  # fmt: skip
        return product

    packed = [layer.weight] + [layer.weight.clone() for _ in range(copies(weight.packed_NJ.numel()) - 1)]
    return [partial(call, packed=one) for one in packed]


def nf4(decoded_NK: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """bitsandbytes NF4, double quantization, over copies of a weight."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(decoded_NK, quant_type="nf4", compress_statistics=True)
    some = [packed] + [packed.clone() for _ in range(copies(packed.numel()) - 1)]
    return [lambda x, one=one: bnb.matmul_4bit(x, one.t(), quant_state=state) for one in some]  # type: ignore[misc]


def bf16(decoded_NK: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """cuBLAS, over copies of a weight."""
    some = [decoded_NK] + [decoded_NK.clone() for _ in range(copies(decoded_NK.numel() * 2) - 1)]
    return [partial(F.linear, weight=one) for one in some]


def eager(weight: NVFP4Weight) -> list[Callable[[Tensor], Tensor]]:
    """QeRL's training path: decoded by eager passes, then cuBLAS. Too large for the cache by itself."""
    return [lambda x: F.linear(x, eager_decode(weight))]


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(E2M1 + tuple(-magnitude for magnitude in E2M1), device=device)


def eager_decode(weight: NVFP4Weight) -> Tensor:
    """QeRL's release, rebuilt from its description: about ten full-size passes, with an int64 index."""
    packed = weight.packed_NJ
    code = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).long()
    scale = weight.block_scale_NS.float() * weight.tensor_scale
    return (_table(code.device)[code] * scale.repeat_interleave(BLOCK, dim=-1)).to(BF16)


# What is measured


def matmul_rows(all_rows: Sequence[int] = ROWS) -> Iterator[Row]:
    """The four fused linears of a 7B and of a 32B layer at 1 to 8192 rows, and what LoRA adds."""
    for size in ("7b", "32b"):
        total: dict[int, dict[str, float]] = {rows: {} for rows in all_rows}
        spread = dict.fromkeys(all_rows, 0.0)
        for name, (num_out, num_in, starts) in LAYERS[size].items():
            weight = random_nvfp4(num_out, num_in)
            decoded, exact = weight.decode(BF16), weight.decode(torch.float32)
            tiled = nvfp4_matmul.tile(*parts(weight))
            some = [
                TiledWeight(tiled.tiles_TUB.clone(), tiled.tensor_scale, num_out, num_in)
                for _ in range(copies(tiled.tiles_TUB.numel()))
            ]
            loras = [random_lora(num_out, num_in, starts) for _ in some]
            ways: dict[str, list[Callable[[Tensor], Tensor]]] = {
                "ours": [partial(matmul, weight=one) for one in some],
                "ours_lora": [partial(matmul, weight=one, lora=lora) for one, lora in zip(some, loras, strict=True)],
                "bf16": bf16(decoded), "marlin": marlin(weight), "humming": humming(weight), "nf4": nf4(decoded),
                "eager": eager(weight),
            }  # fmt: skip
            for rows in all_rows:
                x = torch.randn(rows, num_in, device="cuda", dtype=BF16)
                wanted = x.float() @ exact.T
                for way, calls in ways.items():
                    if way not in ("ours_lora", "nf4"):
                        bound = 3e-3 if way == "ours" else 6e-3
                        require_close(f"{way}, {size} {name}, {rows} rows", calls[0](x), wanted, bound)
                lora = loras[0]
                with_lora = nvfp4_matmul.reference(x, *parts(weight), lora)
                require_close(f"ours with LoRA, {name}, {rows} rows", ways["ours_lora"][0](x), with_lora, 3e-3)
                del wanted, with_lora
                some_calls = None if rows <= 256 else 3  # as many of each way: a long graph heats the card
                bound_calls = {way: [partial(call, x) for call in calls[:some_calls]] for way, calls in ways.items()}
                for way, (time, range_) in graph_microseconds(bound_calls).items():
                    total[rows][way] = total[rows].get(way, 0.0) + time
                    spread[rows] += range_ if way == "ours" else 0
            del ways, weight, decoded, exact, tiled, some, loras
            gc.collect()
            torch.cuda.empty_cache()
        for rows in all_rows:
            yield from _judged(size, rows, total[rows], spread[rows])


def _judged(size: str, rows: int, times: dict[str, float], spread: float) -> Iterator[Row]:
    ours, with_lora = times.pop("ours"), times.pop("ours_lora")
    goal = "within 3% of the best" + (", 1.7 x bf16" if rows <= 16 else "")

    def is_met(ours: float, peers: dict[str, float]) -> bool:
        return ours <= 1.03 * min(peers.values()) and (rows > 16 or ours * 1.7 <= peers["bf16"])

    case = f"{size}/layer/rows{rows}"
    yield Row(case, "us", "lower", ours, dict(times), spread, goal=goal).judged(is_met)
    share = Row(case, "lora_share", "lower", (with_lora - ours) / with_lora)
    if rows <= 64:
        share = Row(case, "lora_share", "lower", share.ours, goal="< 0.15").judged(lambda ours, _: ours < 0.15)
    yield share


def decode_rows() -> Iterator[Row]:
    """Decoding the largest linear of a 7B layer: bytes read and written a second, beside a plain copy."""
    num_out, num_in, _ = LAYERS["7b"]["gate_up"]
    weight = random_nvfp4(num_out, num_in)
    tiled = nvfp4_matmul.tile(*parts(weight))
    wanted = nvfp4_dequant.reference(*parts(weight), BF16)
    for found in (weight.decode(BF16), nvfp4_matmul.decode(tiled)):
        if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
            raise RuntimeError("decoding differs from the definition")
    moved = num_out * num_in * (9 / 16 + 2)
    source = torch.randn(num_out, num_in, device="cuda").to(BF16)
    target = torch.empty_like(source)
    found_us = graph_microseconds(
        {
            "rows": [lambda: weight.decode(BF16)] * 4,
            "tiles": [lambda: nvfp4_matmul.decode(tiled)] * 4,
            "copy": [lambda: target.copy_(source)] * 4,
            "eager": [lambda: eager_decode(weight)] * 4,
        }
    )
    copied = source.numel() * 4 / found_us["copy"][0] / 1e6
    for layout in ("rows", "tiles"):
        time = found_us[layout][0]
        yield Row(f"7b/decode/{layout}", "us", "lower", time, {"eager": found_us["eager"][0]})
        yield Row(f"7b/decode/{layout}", "tb_per_s", "higher", moved / time / 1e6, {"copy": copied})


def tune(path: Path, all_rows: Sequence[int]) -> None:
    """Measure every candidate configuration, and write the fastest for each shape and number of rows.

    Of other numbers of rows than those given, what the file holds stays.
    """
    before = json.loads(path.read_text())["configs"] if path.exists() else []
    shapes = {shape[:2]: shape[2] for layer in LAYERS.values() for shape in layer.values()}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    configs = {
        config
        for num_out, _ in shapes
        for rows in all_rows
        for config in nvfp4_matmul.candidates(rows, num_out, processors)
    }
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                nvfp4_matmul.compiled, *zip(*((config, rank) for config in configs for rank in (0, RANK)), strict=True)
            )
        )
    best = []
    for (num_out, num_in), starts in shapes.items():
        weight = random_nvfp4(num_out, num_in)
        tiled = nvfp4_matmul.tile(*parts(weight))
        some = [
            TiledWeight(tiled.tiles_TUB.clone(), tiled.tensor_scale, num_out, num_in)
            for _ in range(copies(tiled.tiles_TUB.numel()))
        ]
        loras = [random_lora(num_out, num_in, starts) for _ in some]
        exact = weight.decode(torch.float32)
        for rows in all_rows:
            x = torch.randn(rows, num_in, device="cuda", dtype=BF16)
            reference = x.float() @ exact.T
            named: dict[str, Config] = {}
            calls: dict[str, dict[str, list[Callable[[], object]]]] = {"plain": {}, "lora": {}}
            for config in nvfp4_matmul.candidates(rows, num_out, processors):
                name = str(config)
                require_close(name, matmul(x, tiled, config=config), reference, 3e-3)
                named[name] = config
                calls["plain"][name] = [partial(matmul, x, one, config=config) for one in some]
                calls["lora"][name] = [
                    partial(matmul, x, one, lora, config=config) for one, lora in zip(some, loras, strict=True)
                ]
            chosen: dict[str, Any] = {"shape": [num_out, num_in], "rows": rows}
            for kind in calls:
                times = graph_microseconds(calls[kind], rounds=5)
                chosen[kind] = list(astuple(named[min(times, key=lambda name: times[name][0])]))
            best.append(chosen)
            print(chosen, flush=True)  # noqa: T201
        del weight, tiled, some, loras, exact
        gc.collect()
        torch.cuda.empty_cache()
    made = [(one["shape"], one["rows"]) for one in best]
    best += [one for one in before if (one["shape"], one["rows"]) not in made]
    best.sort(key=lambda one: (one["shape"], one["rows"]))
    lines = ",\n".join(f"  {json.dumps(one)}" for one in best)
    path.write_text(f'{{"device": "{torch.cuda.get_device_name()}", "configs": [\n{lines}\n]}}\n')
