"""Which engine samples for a run: the fast one where it can, and the run says which and why."""

from importlib.util import find_spec

import torch

from qerl_core.config import TrainConfig
from qerl_core.errors import RolloutFailed
from qerl_core.kernels.nvfp4_matmul import RANKS, is_supported
from qerl_core.observer import Observer
from qerl_core.policy.model import PolicyModel
from qerl_core.rollout.engine import RolloutEngine
from qerl_core.rollout.hf_engine import HfEngine


def open_engine(config: TrainConfig, model: PolicyModel, observer: Observer) -> RolloutEngine:
    """The engine that the config asks for, over the policy's own tensors.

    RolloutFailed if vllm is asked for by name and cannot run.
    """
    wanted, obstacle = config.rollout.engine, why_not_vllm(config, model.device)
    if wanted == "vllm" and obstacle:
        raise RolloutFailed(f"rollout.engine is vllm, but {obstacle}; set it to auto or hf")
    if wanted == "hf" or obstacle:
        because = "as asked" if wanted == "hf" else f"since {obstacle}"
        observer.on_note(f"Rollouts by transformers, {because}.")
        return HfEngine(model)
    observer.on_note("Rollouts by vLLM, from the same 4-bit weights that train.")
    from qerl_core.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        model,
        rank=config.lora.rank,
        max_tokens=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        memory_fraction=config.rollout.memory_fraction,
    )


def takes_vllm(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run's rollouts will be vLLM's."""
    return config.rollout.engine != "hf" and why_not_vllm(config, device) is None


def why_not_vllm(config: TrainConfig, device: torch.device) -> str | None:
    """What keeps vllm from sampling for this run, as the rest of a sentence; None if nothing does."""
    if not is_supported(device):
        return "there is no Hopper GPU with Triton and the CUDA bindings"
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if config.model.quantization != "nvfp4":
        return "the base is not NVFP4"
    if config.dtype == "float32":
        return "the policy computes in float32"
    if config.lora.rank > RANKS[-1]:
        return f"LoRA has rank {config.lora.rank}, and {RANKS[-1]} is the most"
    return None
