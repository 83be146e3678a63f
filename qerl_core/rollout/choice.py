"""Which engine samples for a run: the fastest that can, and the run says which and why."""

from importlib.util import find_spec

import torch

from qerl_core.config import TrainConfig
from qerl_core.errors import RolloutFailed
from qerl_core.kernels.nvfp4_matmul import RANKS, TILE, is_supported
from qerl_core.observer import Observer
from qerl_core.policy.memory import Sizes, sizes_of
from qerl_core.policy.model import PolicyModel
from qerl_core.quant.linear import FUSED
from qerl_core.rollout.engine import RolloutEngine
from qerl_core.rollout.hf_engine import HfEngine


def open_engine(config: TrainConfig, model: PolicyModel, observer: Observer) -> RolloutEngine:
    """The engine that the config asks for.

    RolloutFailed if one is asked for by name and cannot run.
    """
    name, reason = chosen(config, model.device, sizes_of(model.causal.config))
    if name == "hf":
        observer.on_note(f"Rollouts by transformers, {reason}.")
        return HfEngine(model)
    from qerl_core.rollout.vllm_engine import StockVllmEngine, VllmEngine

    kind = VllmEngine if name == "vllm" else StockVllmEngine
    base = "from the same 4-bit weights that train" if name == "vllm" else "from a base of its own"
    observer.on_note(f"Rollouts by vLLM, {base}, {reason}.")
    return kind(
        model,
        rank=config.lora.rank,
        max_tokens=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        memory_fraction=config.rollout.memory_fraction,
    )


def chosen(config: TrainConfig, device: torch.device, sizes: Sizes | None) -> tuple[str, str]:
    """hf, vllm or vllm_stock, and why. RolloutFailed if one is asked for by name and cannot run."""
    wanted = config.rollout.engine
    obstacles = {"vllm": why_not_vllm(config, device, sizes), "vllm_stock": why_not_stock(config, device)}
    if wanted != "auto":
        obstacle = obstacles.get(wanted)
        if obstacle:
            raise RolloutFailed(f"rollout.engine is {wanted}, but {obstacle}; set it to auto or hf")
        return wanted, "as asked"
    if obstacles["vllm"] is None:
        return "vllm", "the fastest there is"
    if obstacles["vllm_stock"] is None:
        return "vllm_stock", f"since {obstacles['vllm']}"
    return "hf", f"since {obstacles['vllm_stock']}"


def why_not_vllm(config: TrainConfig, device: torch.device, sizes: Sizes | None) -> str | None:
    """What keeps `vllm` from sampling for this run, as the rest of a sentence; None if nothing does."""
    obstacle = why_not_stock(config, device)
    if obstacle:
        return obstacle
    if not is_supported(device):
        return "there is no Hopper GPU with Triton and the CUDA bindings"
    if config.model.quantization != "nvfp4":
        return "the base is not NVFP4"
    if config.lora.rank > RANKS[-1]:
        return f"LoRA has rank {config.lora.rank}, and {RANKS[-1]} is the most"
    if sizes is None:
        return "the model's config has not the usual sizes"
    return _why_not_fused(sizes)


def _why_not_fused(sizes: Sizes) -> str | None:
    for members in FUSED:
        for name in members[:-1]:  # the next begins where a tile does
            rows = sizes.linears[name][0]
            if rows % TILE:
                return f"{name} has {rows} out features, which is no multiple of {TILE}"
    return None


def why_not_stock(config: TrainConfig, device: torch.device) -> str | None:
    """The same of `vllm_stock`."""
    if device.type != "cuda":
        return "there is no GPU"
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if config.dtype == "float32":
        return "the policy computes in float32"
    return None
