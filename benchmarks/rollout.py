"""`python -m benchmarks.rollout`: tokens a second of vLLM with our linears, against vLLM as it comes, on one GPU.

Random weights on real shapes: an NVFP4 folder is written once and read by all who can; BF16 makes its own. Every way
has LoRA of rank 32 on the seven projections, log-probs of the tokens drawn, the same prompts and lengths, CUDA graphs,
and a process of its own. Writes `baselines/<machine>/rollout.json`.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.record import Row, write

SIZES: dict[str, dict[str, int]] = {
    "3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "32b": {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("ours", "vllm_bf16_lora", "vllm_marlin_lora", "vllm_humming_lora")
BATCHES = (1, 8, 64, 256, 512)
PROMPT, COMPLETION, RANK = 128, 256, 32
GOALS = {"7b": {1: 2.5, 8: 2.0, 64: 2.0, 256: 1.5, 512: 1.5}, "32b": {1: 2.0, 8: 2.0, 64: 2.0, 256: 1.3}}
"""Times `vllm_bf16_lora`."""


# Models of random weights


def write_config(folder: Path, size: str, quantization: dict[str, Any] | None) -> None:
    """A Qwen2 config, and nothing else."""
    from transformers import Qwen2Config

    sizes: dict[str, Any] = dict(SIZES[size])
    config = Qwen2Config(**sizes, tie_word_embeddings=False, max_position_embeddings=32768)
    made = config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
    if quantization:
        made["quantization_config"] = quantization
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made, default=str))


def linears_of(size: str) -> dict[str, tuple[int, int]]:
    """Out and in features of every projection of a block, by its name in the block."""
    shape = SIZES[size]
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip


def write_nvfp4(folder: Path, size: str) -> None:
    """A folder as `quantize_folder` writes it, of random codes."""
    from qerl_core.quant.checkpoint import _quantization_config

    def linear(rows: int, cols: int) -> dict[str, torch.Tensor]:
        scale = (torch.rand(rows, cols // 16, device=DEVICE) * 320 + 64).to(torch.float8_e4m3fn)
        return {
            "weight_packed": torch.randint(256, (rows, cols // 2), dtype=torch.uint8, device=DEVICE),
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([192 * 2.6 / 0.02]),
        }

    write_config(folder, size, _quantization_config("lm_head"))
    write_weights(folder, size, linear)


def write_bf16(folder: Path, size: str) -> None:
    """A folder as `save_pretrained` writes it, of random BF16 weights."""
    write_config(folder, size, None)
    write_weights(folder, size, lambda rows, cols: {"weight": normal(rows, cols)})


def write_weights(folder: Path, size: str, linear: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
    """Random weights made on the GPU, a file a block; `linear` makes a projection's tensors but for its bias."""
    from safetensors.torch import save_file

    shape, weight_map = SIZES[size], {}
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        made = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(made, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    for layer in range(shape["num_hidden_layers"]):
        tensors: dict[str, torch.Tensor] = {}
        prefix = f"model.layers.{layer}."
        for name, (rows, cols) in linears_of(size).items():
            tensors |= {f"{prefix}{name}.{part}": tensor for part, tensor in linear(rows, cols).items()}
            if name[-6] in "qkv" and "self_attn" in name:
                tensors[f"{prefix}{name}.bias"] = normal(rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden).bfloat16()
        save(f"layer-{layer}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": normal(vocabulary, hidden), "lm_head.weight": normal(vocabulary, hidden)}
    save("ends.safetensors", ends | {"model.norm.weight": torch.ones(hidden).bfloat16()})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def normal(*sizes: int) -> torch.Tensor:
    """Random BF16 of the size that weights have."""
    return (torch.randn(*sizes, device=DEVICE) * 0.02).bfloat16()


def write_adapter(folder: Path, size: str) -> None:
    """A PEFT adapter of random weights."""
    from safetensors.torch import save_file

    tensors = {}
    for layer in range(SIZES[size]["num_hidden_layers"]):
        for name, (rows, cols) in linears_of(size).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, cols).bfloat16() * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK).bfloat16() * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(name.split(".")[1] for name in linears_of(size))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))


# One way, in a process of its own


def measure(way: str, size: str, root: Path, batches: list[int]) -> Iterator[tuple[int, float]]:
    """Batch and tokens a second: the median of three, after one that is not counted."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": PROMPT + COMPLETION, "max_num_seqs": max(batches), "seed": 0,
        "gpu_memory_utilization": 0.85, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True,
    }  # fmt: skip
    lora: dict[str, Any] = {}
    if way == "ours":
        from qerl_core.rollout import vllm_plugin

        vllm_plugin.register()
        vllm_plugin.use_float32_norms()
        settings |= {
            "model": str(root / "nvfp4"), "quantization": vllm_plugin.NAME, "additional_config": {"qerl_rank": RANK},
        }  # fmt: skip
    else:
        settings |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
        lora = {"lora_request": LoRARequest("policy", 1, str(root / "adapter"))}
        if way == "vllm_bf16_lora":
            settings |= {"model": str(root / "bf16"), "load_format": "dummy"}
        else:
            settings |= {"model": str(root / "nvfp4"), "linear_backend": way.split("_")[1]}
    llm: Any = LLM(**settings)
    if way == "ours":
        (inside,) = llm.apply_model(lambda model: model)
        with torch.no_grad():
            for name, buffer in inside.named_buffers():
                if name.endswith(("lora_a", "lora_b")):
                    buffer.normal_(std=0.02)
    wanted = SamplingParams(
        max_tokens=COMPLETION, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
    )
    draw = random.Random(0)
    for batch in batches:
        times = []
        for _ in range(4):
            prompts = [{"prompt_token_ids": [draw.randrange(1000, 90000) for _ in range(PROMPT)]} for _ in range(batch)]
            started = time.monotonic()
            outputs = llm.generate(prompts, wanted, use_tqdm=False, **lora)
            times.append(time.monotonic() - started)
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            if lengths != {COMPLETION}:
                raise RuntimeError(f"{way} gave completions of {lengths} tokens")
            if not all(value == value and value <= 0 for o in outputs for value in o.outputs[0].logprobs.logprobs):
                raise RuntimeError(f"{way} gave log-probs that are none")
        yield batch, batch * COMPLETION / median(times[1:])


def measured(way: str, size: str, root: Path, batches: list[int]) -> dict[int, float]:
    """What `measure` finds in a process of its own, printed as it comes; what it had found if it fails."""
    command = [sys.executable, "-m", "benchmarks.rollout", "--child", way, size, str(root), "--batches"]
    found: dict[int, float] = {}
    with (
        (root / f"{way}.log").open("w+") as log,
        subprocess.Popen([*command, *map(str, batches)], stdout=subprocess.PIPE, stderr=log, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("FOUND "):
                batch, tokens_per_s = json.loads(line.removeprefix("FOUND "))
                found[batch] = tokens_per_s
                print(f"{size} {way} batch {batch}: {tokens_per_s:.0f} tokens/s", flush=True)  # noqa: T201
        if child.wait():
            log.seek(0)
            print(way, "failed:", log.read()[-1500:], flush=True)  # noqa: T201
    return found


def main() -> None:
    """Measure every way, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["7b"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, size, folder = args.child
        for batch, tokens_per_s in measure(way, size, Path(folder), args.batches):
            print("FOUND", json.dumps([batch, tokens_per_s]), flush=True)  # noqa: T201
        return
    for size in args.sizes:
        found: dict[str, dict[int, float]] = {}
        with TemporaryDirectory() as temporary:
            root = Path(temporary)
            write_nvfp4(root / "nvfp4", size)
            write_config(root / "bf16", size, None)
            write_adapter(root / "adapter", size)
            for way in args.ways:
                found[way] = measured(way, size, root, args.batches)
        print(write("rollout", args.machine, rows_of(size, found)))  # noqa: T201


def rows_of(size: str, found: dict[str, dict[int, float]]) -> list[Row]:
    """Ours by batch beside what the others did."""
    rows = []
    for batch, ours in found["ours"].items():
        peers = {way: values[batch] for way, values in found.items() if way != "ours" and batch in values}
        factor = GOALS.get(size, {}).get(batch, 1.0)
        goal = f"{factor} x vllm_bf16_lora, above vllm_humming_lora"
        row = Row(f"{size}/batch{batch}", "tokens_per_s", "higher", ours, peers, goal=goal)
        if {"vllm_bf16_lora", "vllm_humming_lora"} <= peers.keys():
            met = ours >= factor * peers["vllm_bf16_lora"] and ours > peers["vllm_humming_lora"]
            row = replace(row, met=met)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
