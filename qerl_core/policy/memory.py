"""What a run will need of a GPU's memory, reckoned before anything large is loaded.

Sizes follow from the model's config; what cannot be known ahead, fragments and the libraries' own, is a flat amount.
Models without the usual sizes in their config are not reckoned. T = tokens of a micro-batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from qerl_core.config import TrainConfig
from qerl_core.errors import NotEnoughMemory
from qerl_core.kernels.token_logprob import CHUNK_BYTES
from qerl_core.policy.recompute import CHUNK_TOKENS

GIB = 2**30
LIBRARIES = 1.0 * GIB
"""CUDA, cuBLAS, fragments."""
ENGINE = 1.5 * GIB
"""vLLM's own: graphs, sampler, activations of a prefill."""
BF16, ADAM = 2, 16  # bytes a parameter: float32 with gradient and two moments


@dataclass(frozen=True, slots=True)
class Sizes:
    """The matrices of a decoder."""

    linears: dict[str, tuple[int, int]]
    """Of a block: out and in features by module name."""
    num_layers: int
    hidden: int
    intermediate: int
    kv_width: int
    """Of keys, or of values, a token."""
    vocabulary: int
    num_embeddings: int
    """1 if the head is tied to the embedding, else 2."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by what they are for."""

    base: float
    adapter: float
    activations: float
    cache: float
    """Keys and values of the longest sequence: the least that an engine can work with."""

    @property
    def training(self) -> float:
        """Beside the base."""
        return self.adapter + self.activations + LIBRARIES


def sizes_of(config: Any) -> Sizes | None:
    """Of a transformers config; None if it has not the usual fields."""
    config = config.get_text_config()
    try:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        linears = {
            "q_proj": (heads * head_dim, hidden), "k_proj": (kv_heads * head_dim, hidden),
            "v_proj": (kv_heads * head_dim, hidden), "o_proj": (hidden, heads * head_dim),
            "gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate),
        }  # fmt: skip
        embeddings = 1 if config.tie_word_embeddings else 2
        return Sizes(
            linears, config.num_hidden_layers, hidden, intermediate, kv_heads * head_dim, config.vocab_size, embeddings
        )
    except (AttributeError, TypeError):
        return None


def estimate(sizes: Sizes, config: TrainConfig, *, micro_batch_tokens: int | None = None) -> Need:
    """What a run needs, activations checkpointed."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    tokens = max(micro_batch_tokens or config.micro_batch_tokens, longest)
    elements = {name: rows * cols for name, (rows, cols) in sizes.linears.items()}
    bytes_each = 9 / 16 if config.model.quantization == "nvfp4" else BF16
    embeddings = sizes.num_embeddings * sizes.vocabulary * sizes.hidden * BF16
    low_rank = sum(sum(sizes.linears[name]) for name in config.lora.target_modules if name in sizes.linears)
    attention = 2 * sizes.hidden + 3 * (sizes.linears["q_proj"][0] + 2 * sizes.kv_width)
    block = 6 * min(tokens, CHUNK_TOKENS) * sizes.intermediate + tokens * attention + max(elements.values())
    return Need(
        base=sum(elements.values()) * sizes.num_layers * bytes_each + embeddings,
        adapter=low_rank * config.lora.rank * sizes.num_layers * (ADAM + BF16),
        activations=(tokens * sizes.hidden * (sizes.num_layers + 2) + block) * BF16 + CHUNK_BYTES,
        cache=2 * longest * sizes.kv_width * sizes.num_layers * BF16,
    )


def read_config(folder: Path) -> Any:
    """A folder's transformers config."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def require_memory(config: TrainConfig, sizes: Sizes | None, *, total_bytes: float, engine: str) -> None:
    """NotEnoughMemory, with what is needed for what and a setting that would fit, if a GPU is too small for a run.

    `engine` is hf, vllm or vllm_stock: vLLM holds the base in its part of the memory, for both or for itself.
    """
    if sizes is None:
        return
    need, fraction = estimate(sizes, config), config.rollout.memory_fraction
    has_engine = engine != "hf"
    room = (total_bytes * (1 - fraction) if has_engine else total_bytes) - (0 if engine == "vllm" else need.base)
    if has_engine and need.base + need.cache + ENGINE > total_bytes * fraction:
        raise NotEnoughMemory(
            f"vLLM's {fraction:.0%} of the GPU's {_gib(total_bytes)} do not hold the base ({_gib(need.base)}), keys "
            f"and values of one sequence ({_gib(need.cache)}) and its own {_gib(ENGINE)}; "
            + _larger_fraction(need, total_bytes)
        )
    if need.training > room:
        parts = f"adapter and optimizer {_gib(need.adapter)}, activations {_gib(need.activations)}, {_gib(LIBRARIES)}"
        beside = " and ".join(
            [f"vLLM's {fraction:.0%}"] * has_engine + [f"the base ({_gib(need.base)})"] * (engine != "vllm")
        )
        raise NotEnoughMemory(
            f"training needs about {_gib(need.training)} ({parts} for libraries), and beside {beside} the GPU has "
            f"{_gib(max(room, 0))} of its {_gib(total_bytes)}; {_smaller_batch(sizes, config, room)}"
        )


def _larger_fraction(need: Need, total_bytes: float) -> str:
    wanted = (need.base + need.cache + ENGINE) / total_bytes
    if wanted + need.training / total_bytes > 1:
        return "take a smaller model, shorter sequences, or a larger GPU"
    return f"set rollout.memory_fraction to {wanted + 0.01:.2f} or more"


def _smaller_batch(sizes: Sizes, config: TrainConfig, room: float) -> str:
    tokens = config.micro_batch_tokens // 2
    while tokens >= 256:
        if estimate(sizes, config, micro_batch_tokens=tokens).training <= room:
            return f"set micro_batch_tokens to {tokens}"
        tokens //= 2
    return "take shorter sequences, a smaller model, or a larger GPU"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def gpu_bytes(device: torch.device) -> int | None:
    """A GPU's memory; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
