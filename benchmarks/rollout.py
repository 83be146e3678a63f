"""`python -m benchmarks.rollout`: tokens a second of vLLM with our linears, against vLLM as it comes, on one GPU.

Random weights on real shapes: an NVFP4 folder is written once and read by all who can; BF16 makes its own. Every way
has LoRA of rank 32 on the seven projections, log-probs of the tokens drawn, the same prompts and lengths, CUDA graphs,
and a process of its own. Writes `baselines/<machine>/rollout.json`.
"""

import argparse
import faulthandler
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self

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
PROMPT, RANK = 128, 32
CASES = ("1x256", "8x256", "64x256", "256x256", "512x256", "64x2048")
GOALS = {
    "7b": {"1x256": 2.0, "8x256": 2.0, "64x256": 2.0, "256x256": 1.5, "512x256": 1.5, "64x2048": 2.0},
    "32b": {"1x256": 2.0, "8x256": 2.0, "64x256": 2.0, "256x256": 1.3},
}
"""Times `vllm_bf16_lora`."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many completions at once, of so many tokens each."""

    batch: int
    completion: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of `64x256`."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.batch}x{self.completion}"

    @property
    def repeats(self) -> int:
        """One where it is long."""
        return 3 if self.completion <= 512 else 1


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


def kv_bytes(size: str, cases: Sequence["Case"]) -> int:
    """Room for the keys and values of the largest case, the same for every way."""
    shape = SIZES[size]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    a_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return int(1.05 * a_token * max(case.batch * (PROMPT + case.completion + 16) for case in cases))


def load(way: str, size: str, root: Path, cases: Sequence["Case"]) -> tuple[Any, dict[str, Any]]:
    """vLLM with the model and a LoRA in it, and what `generate` is told besides."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": PROMPT + max(case.completion for case in cases), "seed": 0,
        "max_num_seqs": max(case.batch for case in cases), "kv_cache_memory_bytes": kv_bytes(size, cases),
        "gpu_memory_utilization": 0.1, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True,
    }  # fmt: skip
    if way == "ours":
        from qerl_core.rollout import vllm_plugin

        vllm_plugin.register()
        vllm_plugin.use_float32_norms()
        ours = {"quantization": vllm_plugin.NAME, "additional_config": {"qerl_rank": RANK}}
        llm: Any = LLM(model=str(root / "nvfp4"), **settings, **ours)
        (inside,) = llm.apply_model(lambda model: model)
        with torch.no_grad():
            for name, buffer in inside.named_buffers():
                if name.endswith(("lora_a", "lora_b")):
                    buffer.normal_(std=0.02)
        return llm, {}
    settings |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    if way == "vllm_bf16_lora":
        settings |= {"model": str(root / "bf16"), "load_format": "dummy"}
    else:
        settings |= {"model": str(root / "nvfp4"), "linear_backend": way.split("_")[1]}
    return LLM(**settings), {"lora_request": LoRARequest("policy", 1, str(root / "adapter"))}


def measure(way: str, llm: Any, extra: dict[str, Any], case: "Case") -> float:
    """Tokens a second: the median of the case's repeats, after one that is not counted and may be short."""
    from vllm import SamplingParams

    draw = random.Random(0)
    times = []
    for length in (min(case.completion, 256), *[case.completion] * case.repeats):
        wanted = SamplingParams(
            max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": [draw.randrange(1000, 90000) for _ in range(PROMPT)]} for _ in range(case.batch)
        ]
        started = time.monotonic()
        outputs = llm.generate(prompts, wanted, use_tqdm=False, **extra)
        times.append(time.monotonic() - started)
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {length}:
            raise RuntimeError(f"{way} gave completions of {lengths} tokens")
        if not all(value == value and value <= 0 for o in outputs for value in o.outputs[0].logprobs.logprobs):
            raise RuntimeError(f"{way} gave log-probs that are none")
    return case.batch * case.completion / median(times[1:])


def child(way: str, size: str, root: Path, cases: Sequence["Case"]) -> None:
    """Load, say so, and measure once the parent says that it is this way's turn."""
    started = time.monotonic()
    faulthandler.dump_traceback_later(60, repeat=True)  # into the log: what takes so long
    llm, extra = load(way, size, root, cases)
    faulthandler.cancel_dump_traceback_later()
    print("LOADED", round(time.monotonic() - started), flush=True)  # noqa: T201
    if not sys.stdin.readline():
        return
    for case in cases:
        print("FOUND", case, measure(way, llm, extra, case), flush=True)  # noqa: T201


class Way:
    """A way's process. They load side by side, and are measured one at a time."""

    def __init__(self, way: str, size: str, root: Path, cases: Sequence["Case"]) -> None:
        self.way, self.size, self.log = way, size, root / f"{way}.log"
        command = [sys.executable, "-m", "benchmarks.rollout", "--child", way, size, str(root), "--cases"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *map(str, cases)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def wait(self) -> None:
        """Until it has loaded, or failed to."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("LOADED"):
                print(self.size, self.way, line.strip().lower(), "s", flush=True)  # noqa: T201
                return

    def measure(self) -> dict[str, float]:
        """Tokens a second by case, printed as they come; those that it had if it fails. Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        found: dict[str, float] = {}
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("FOUND "):
                _, case, tokens_per_s = line.split()
                found[case] = float(tokens_per_s)
                print(f"{self.size} {self.way} {case}: {found[case]:.0f} tokens/s", flush=True)  # noqa: T201
        if self.process.wait():
            print(self.way, "failed:", self.log.read_text()[-1500:], flush=True)  # noqa: T201
        return found


def main() -> None:
    """Measure every way, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["7b"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(case) for case in CASES])
    parser.add_argument("--together", type=int, default=1, help="so many ways share the GPU while they load")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, size, folder = args.child
        child(way, size, Path(folder), args.cases)
        return
    for size in args.sizes:
        found: dict[str, dict[str, float]] = {}
        with TemporaryDirectory() as temporary:
            root = Path(temporary)
            write_nvfp4(root / "nvfp4", size)
            write_config(root / "bf16", size, None)
            write_adapter(root / "adapter", size)
            for some in batched(args.ways, args.together):
                ways = [Way(way, size, root, args.cases) for way in some]
                for way in ways:
                    way.wait()
                for way in ways:
                    found[way.way] = way.measure()
                    if "ours" in found:
                        write("rollout", args.machine, rows_of(size, found))


def batched(ways: Sequence[str], number: int) -> Iterator[Sequence[str]]:
    """Parts of `number` each."""
    for first in range(0, len(ways), number):
        yield ways[first : first + number]


def rows_of(size: str, found: dict[str, dict[str, float]]) -> list[Row]:
    """Ours by case beside what the others did."""
    rows = []
    for case, ours in found["ours"].items():
        peers = {way: values[case] for way, values in found.items() if way != "ours" and case in values}
        factor = GOALS.get(size, {}).get(case, 1.0)
        goal = f"{factor} x vllm_bf16_lora, above vllm_humming_lora"
        row = Row(f"{size}/{case}", "tokens_per_s", "higher", ours, peers, goal=goal)
        if {"vllm_bf16_lora", "vllm_humming_lora"} <= peers.keys():
            met = ours >= factor * peers["vllm_bf16_lora"] and ours > peers["vllm_humming_lora"]
            row = replace(row, met=met)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
