"""`python -m benchmarks.kernels [SECTION ...]`: the NVFP4 training path on one GPU against its peers.

Every path is checked against a float32 reference first; a wrong one is never timed. Sections: decode, matmul (rollout
products at 1 to 8192 rows, see `matmul.py`), train (the linears of one layer, forward and backward), logprob
(chosen-token log-prob), step (a whole LoRA training step of a 7B- and a 32B-shaped policy). Weights are random, on real
shapes. Writes `baselines/<machine>/kernels.json`; wants a GPU, and vLLM, humming-kernels, bitsandbytes and
liger-kernel for its peers.
"""

import argparse
import gc
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.matmul import LAYERS, ROWS, decode_rows, eager_decode, matmul_rows, random_nvfp4, tune
from benchmarks.record import Row, write
from benchmarks.rollout import SIZES
from benchmarks.timing import gpu_milliseconds, require_close
from qerl_core.config import LoraConfig as OurLoraConfig
from qerl_core.kernels import nvfp4_matmul
from qerl_core.kernels.token_logprob import reference as logprob_reference
from qerl_core.kernels.token_logprob import token_logprob
from qerl_core.policy.model import checkpoint_activations, follow_autocast, peft_config
from qerl_core.policy.recompute import chunk_mlps
from qerl_core.quant.linear import NVFP4Linear, quantizable_linears

BF16 = torch.bfloat16


class EagerLinear(NVFP4Linear):
    """QeRL's release, rebuilt from its description: the weight decoded by eager passes with an int64 index."""

    def decode(self) -> Tensor:
        """The weight, in about ten full-size passes."""
        return eager_decode(self.packed)


def nf4(weight_NK: Tensor) -> nn.Module:
    """bitsandbytes NF4 with double quantization."""
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(
        weight_NK.shape[1],
        weight_NK.shape[0],
        bias=False,
        compute_dtype=BF16,
        compress_statistics=True,
        quant_type="nf4",
    )
    made.weight = bnb.nn.Params4bit(weight_NK.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    module: nn.Module = made.cuda()
    return module


def train_rows() -> Iterator[Row]:
    """Forward and backward of the four fused linears of one 7B layer, LoRA apart."""
    shapes = [(num_out, num_in) for num_out, num_in, _ in LAYERS["7b"].values()]
    packed = [random_nvfp4(*shape) for shape in shapes]
    decoded = [weight.decode(BF16) for weight in packed]
    layers: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "ours": [NVFP4Linear.from_weight(weight) for weight in packed],
        "bf16": [partial(F.linear, weight=weight) for weight in decoded],
        "eager": [EagerLinear.from_weight(weight) for weight in packed],
        "nf4": [nf4(weight) for weight in decoded],
    }
    for num_tokens in (4096, 16384):
        inputs = [torch.randn(num_tokens, k, device="cuda", dtype=BF16, requires_grad=True) for _, k in shapes]
        grads = [torch.randn(num_tokens, n, device="cuda", dtype=BF16) for n, _ in shapes]
        for x, grad, layer, weight in zip(inputs, grads, layers["ours"], packed, strict=True):
            exact, rows = weight.decode(torch.float32), slice(0, 64)
            y = layer(x)
            (dx,) = torch.autograd.grad(y, x, grad)
            require_close("forward", y[rows], x[rows].float() @ exact.T, 5e-3)
            require_close("backward", dx[rows], grad[rows].float() @ exact, 5e-3)
            del exact, y, dx

        def run(name: str, inputs: list[Tensor] = inputs, grads: list[Tensor] = grads) -> None:
            for x, grad, layer in zip(inputs, grads, layers[name], strict=True):
                torch.autograd.grad(layer(x), x, grad)

        found = gpu_milliseconds({name: partial(run, name) for name in layers}, rounds=11, at_once=81920 // num_tokens)
        limit = 1.12 if num_tokens == 4096 else 1.05
        row = Row(f"7b/train/{num_tokens}", "ms", "lower", found.pop("ours"), found, goal=f"{limit} x bf16, below nf4")
        yield replace(row, met=row.ours <= min(limit * found["bf16"], found["nf4"]))


def logprob_rows() -> Iterator[Row]:
    """Chosen-token log-prob of 16k tokens, vocabulary 152k, with the gradient of any weighted sum of them."""
    tokens, hidden, vocabulary = 16384, 3584, 152064
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16, requires_grad=True)
    head = (torch.randn(vocabulary, hidden, device="cuda") * 0.02).to(BF16)
    target, weight = torch.randint(vocabulary, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")

    def ours() -> tuple[Tensor, Tensor]:
        logprob, _ = token_logprob(x, head, target)
        return logprob.detach(), torch.autograd.grad(logprob, x, weight)[0]

    logprob, grad = ours()
    some = slice(0, 512)
    exact = x.detach()[some].float().requires_grad_(True)
    wanted, _ = logprob_reference(exact, head.float(), target[some])
    require_close("log-prob", logprob[some], wanted, 1e-4)
    require_close("its gradient", grad[some], torch.autograd.grad(wanted, exact, weight[some])[0], 2**-7)
    del exact, wanted, logprob, grad

    chunked = torch.compile(lambda h, t: -F.cross_entropy((h @ head.T).float(), t, reduction="none"))

    def cut(tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor, 1024)

    def compiled() -> None:
        parts = [checkpoint(chunked, h, t, use_reentrant=False) for h, t in zip(cut(x), cut(target), strict=True)]
        torch.autograd.grad(torch.cat(parts), x, weight)

    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = {kind: LigerFusedLinearCrossEntropyLoss(reduction=kind) for kind in ("sum", "none")}

    def liger_sum() -> None:  # cannot weigh tokens: what it would take at best
        torch.autograd.grad(fused["sum"](head, x, target), x)

    def liger_weighted() -> None:
        torch.autograd.grad((fused["none"](head, x, target) * weight).sum(), x)

    calls: dict[str, Callable[[], object]] = {
        "ours": ours, "compiled_chunks": compiled, "liger_weighted": liger_weighted, "liger_unweighted": liger_sum,
    }  # fmt: skip
    found = gpu_milliseconds(calls, rounds=9)
    memory = {name: extra_gib(call) for name, call in calls.items()}
    yield Row("logprob/16384x152064", "ms", "lower", found.pop("ours"), found, goal="best of the peers").judged(
        lambda ours, peers: ours <= min(peers.values())
    )
    yield Row("logprob/16384x152064", "extra_gib", "lower", memory.pop("ours"), memory, goal="< 1 GiB").judged(
        lambda ours, peers: ours < 1
    )


def extra_gib(call: Callable[[], object]) -> float:
    """Memory that a call takes beyond what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def step_rows() -> Iterator[Row]:
    """Forward, backward and AdamW of a LoRA policy, rank 32, 8 sequences of 2048, gradient checkpointing."""
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    ways: dict[str, tuple[Callable[[nn.Linear], nn.Module], bool]] = {
        "ours": (random_layer, True),
        "bf16_lora": (bf16_layer, False),  # as PEFT has it: LoRA products in float32
        "bf16_lora_autocast": (bf16_layer, True),
        "qlora": (nf4_layer, False),
        "qlora_autocast": (nf4_layer, True),
    }
    for name, (make, autocast) in ways.items():
        times[name], memory[name] = training_step("7b", make, autocast=autocast)
    yield Row("7b/step/8x2048", "ms", "lower", times.pop("ours"), times, goal="1.05 x bf16_lora*, below qlora*").judged(
        lambda ours, peers: (
            ours <= 1.05 * min(peers["bf16_lora"], peers["bf16_lora_autocast"])
            and ours <= min(peers["qlora"], peers["qlora_autocast"])
        )
    )
    yield Row("7b/step/8x2048", "peak_gib", "lower", memory.pop("ours"), memory, goal="half of bf16_lora").judged(
        lambda ours, peers: ours <= 0.5 * peers["bf16_lora"]
    )
    milliseconds, gib = training_step("32b", random_layer, autocast=True)
    yield Row("32b/step/8x2048", "ms", "lower", milliseconds)
    yield Row("32b/step/8x2048", "peak_gib", "lower", gib, goal="< 80 GB").judged(lambda ours, _: ours * 2**30 < 80e9)


def random_layer(linear: nn.Linear) -> nn.Module:
    """NVFP4, with the layer's bias."""
    bias = None if linear.bias is None else torch.zeros(linear.out_features, device="cuda", dtype=BF16)
    return NVFP4Linear.from_weight(random_nvfp4(linear.out_features, linear.in_features), bias)


def bf16_layer(linear: nn.Linear) -> nn.Module:
    """BF16."""
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="cuda", dtype=BF16)
    nn.init.normal_(made.weight, std=0.02)
    return made


def nf4_layer(linear: nn.Linear) -> nn.Module:
    """NF4."""
    import bitsandbytes as bnb

    has_bias = linear.bias is not None
    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=has_bias, compute_dtype=BF16, quant_type="nf4"
    )
    weight = torch.randn(linear.out_features, linear.in_features, device="cuda", dtype=BF16) * 0.02
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    module: nn.Module = made.cuda()
    return module


@contextmanager
def policy(size: str, make: Callable[[nn.Linear], nn.Module]) -> Iterator[tuple[Any, Any]]:
    """A Qwen2-shaped model with LoRA on its seven projections, random; yields (PEFT model, causal model).

    Over NVFP4 as a run of ours has it; over others as PEFT and transformers have it, activations checkpointed too.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = SIZES[size]
    config = Qwen2Config(**sizes, tie_word_embeddings=False, max_position_embeddings=4096)
    with torch.device("meta"):
        causal: Any = Qwen2ForCausalLM(config)
    causal = causal.to(BF16)
    for name, linear in quantizable_linears(causal).items():
        causal.set_submodule(name, make(linear))
    for module in causal.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                filled = torch.randn(parameter.shape, device="cuda", dtype=BF16) * 0.02
                setattr(module, name, nn.Parameter(filled + (1 if parameter.dim() == 1 else 0)))
    with torch.device("cuda"):
        causal.model.rotary_emb = type(causal.model.rotary_emb)(config)
    causal.requires_grad_(False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if make is random_layer:
        peft = get_peft_model(causal, peft_config(OurLoraConfig(rank=32, alpha=64)))
    else:
        peft = get_peft_model(causal, LoraConfig(r=32, lora_alpha=64, target_modules=targets, task_type="CAUSAL_LM"))
    checkpoint_activations(causal)
    if make is random_layer:
        chunk_mlps(causal)
    peft.train()
    yield peft, causal
    del peft, causal
    gc.collect()
    torch.cuda.empty_cache()


def training_step(size: str, make: Callable[[nn.Linear], nn.Module], *, autocast: bool) -> tuple[float, float]:
    """Milliseconds and peak GiB of a step."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with policy(size, make) as (peft, causal):
        if autocast:
            follow_autocast(peft)
        optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-5)
        ids = torch.randint(150_000, (8, 2048), device="cuda")
        head = causal.get_output_embeddings().weight

        def step() -> None:
            with torch.autocast("cuda", BF16, enabled=autocast):
                hidden = causal.get_decoder()(ids, use_cache=False).last_hidden_state
            logprob, _ = token_logprob(hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten())
            (-logprob.mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        milliseconds = gpu_milliseconds({"step": step}, rounds=3)["step"]
    return milliseconds, torch.cuda.max_memory_allocated() / 2**30


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "decode": decode_rows, "matmul": matmul_rows, "train": train_rows, "logprob": logprob_rows, "step": step_rows,
}  # fmt: skip


def main() -> None:
    """Run the sections and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all if none is named")
    parser.add_argument("--machine", default=torch.cuda.get_device_name().split()[-1].lower())
    parser.add_argument("--tune", type=Path, help="only measure configurations of the product, and write them here")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows of the section matmul, and of --tune")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if args.tune:
        tune(args.tune, args.rows or nvfp4_matmul.ROWS)
        return
    sections = args.sections or list(SECTIONS)
    if len(sections) > 1:  # a process each: what one leaves in memory must not count in the next
        options = ["--machine", args.machine, *(["--rows", *map(str, args.rows)] if args.rows else [])]
        for section in sections:
            subprocess.run([sys.executable, "-m", "benchmarks.kernels", section, *options], check=True)
        return
    (section,) = sections
    torch.manual_seed(0)
    random.seed(0)
    rows = []
    for row in matmul_rows(args.rows or ROWS) if section == "matmul" else SECTIONS[section]():
        print(row, flush=True)  # noqa: T201
        rows.append(row)
        path = write("kernels", args.machine, rows)  # at once: a run that is cut short keeps what it has
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
