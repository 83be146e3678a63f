"""Our linears inside vLLM: NVFP4 tiles with one resident LoRA, by vLLM's own registries. Loaded by vLLM only.

vLLM's `vllm.general_plugins` entry point calls `register`, which adds the quantization method `qerl_nvfp4`; nothing
changes for whoever does not ask for it by name. Each (fused) linear then holds its weight in the tiles of
`kernels/nvfp4_matmul.py`, and one LoRA in two buffers that stay where they are: whoever writes them in place changes
the next rollout, CUDA graphs included. There are no adapter files, no adapter ids, no kernels for many adapters.

N = out features, K = in features, R = LoRA rank, F = linears fused along N.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_core.kernels.nvfp4_dequant import BLOCK
from qerl_core.kernels.nvfp4_matmul import RANKS, TILE, Lora, TiledWeight, matmul, tile

NAME = "qerl_nvfp4"
_LIBRARY = torch.library.Library("qerl", "FRAGMENT")  # type: ignore[no-untyped-call]


def register() -> None:
    """Make `quantization="qerl_nvfp4"` known to vLLM. Once is enough, more does no harm."""
    if not hasattr(torch.ops.qerl, "nvfp4_linear"):
        direct_register_custom_op("nvfp4_linear", _linear, fake_impl=_linear_fake, target_lib=_LIBRARY)
        register_quantization_config(NAME)(NVFP4Config)


def use_float32_norms() -> None:
    """Keep the weights of RMSNorms in float32 in models that vLLM makes from now on: noise of 1e-3 must not vanish."""
    from vllm.model_executor.custom_op import op_registry_oot

    if RMSNorm.__name__ not in op_registry_oot:
        RMSNorm.register_oot(Float32Norm, name=RMSNorm.__name__)


class Float32Norm(RMSNorm):  # type: ignore[misc]  # vLLM's classes are untyped here
    """RMSNorm with a float32 weight, whatever the model's type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "dtype": torch.float32})


class NVFP4Config(QuantizationConfig):  # type: ignore[misc]
    """The quantization method: compressed-tensors `nvfp4-pack-quantized`, weights only."""

    def __init__(self, ignore: list[str]) -> None:
        super().__init__()
        self.ignore = ignore

    @classmethod
    def get_name(cls) -> str:
        """Its name."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The kernel multiplies bfloat16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The kernel is Hopper's."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says it all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NVFP4Config":
        """Of a checkpoint's `quantization_config`."""
        return cls(list(config.get("ignore") or ()))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Read compressed-tensors folders, but only for those who ask for this method."""
        return NAME if user_quant == NAME else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """Ours for linears; vLLM's own for those that the checkpoint leaves alone, and for embeddings."""
        if not isinstance(layer, LinearBase):
            return None
        if prefix in self.ignore:
            return UnquantizedLinearMethod()
        return ResidentLinear()


@register_weight_loader_v2_supported_method
class ResidentLinear(LinearMethodBase):  # type: ignore[misc]
    """A (fused) linear: `tiles`, `tensor_scale`, `lora_a` [F R, K] and `lora_b` [N, R]."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Room for what the checkpoint holds."""
        num_rows, num_cols, loader = sum(output_partition_sizes), input_size_per_partition, extra["weight_loader"]
        starts = [0, *accumulate(output_partition_sizes[:-1])]
        if any(start % TILE for start in starts) or len(starts) > 3:
            raise ValueError(f"linears of {output_partition_sizes} rows cannot be fused in tiles of {TILE}")
        layer.starts, layer.num_rows, layer.num_cols = starts, num_rows, num_cols
        packed = torch.empty(num_rows, num_cols // 2, dtype=torch.uint8)
        scale = torch.empty(num_rows, num_cols // BLOCK, dtype=torch.float8_e4m3fn)
        divisor = torch.empty(len(starts), dtype=torch.float32)
        for name, parameter in {
            "weight_packed": ModelWeightParameter(data=packed, input_dim=1, output_dim=0, weight_loader=loader),
            "weight_scale": GroupQuantScaleParameter(data=scale, input_dim=1, output_dim=0, weight_loader=loader),
            "weight_global_scale": PerTensorScaleParameter(data=divisor, weight_loader=loader),
        }.items():
            layer.register_parameter(name, parameter)
        layer.rank = lora_rank(get_current_vllm_config().additional_config["qerl_rank"])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Tiles in place of the checkpoint's rows, and a LoRA of zeros."""
        scale = 1 / layer.weight_global_scale.data
        if not (scale == scale[0]).all():
            raise ValueError("linears that are fused have different global scales; quantize the model again")
        tiled = tile(layer.weight_packed.data, layer.weight_scale.data, scale[0].clone())
        for name in ("weight_packed", "weight_scale", "weight_global_scale"):
            delattr(layer, name)
        device, fused = tiled.tiles_TUB.device, len(layer.starts)
        for name, tensor in {
            "tiles": tiled.tiles_TUB,
            "tensor_scale": tiled.tensor_scale,
            "lora_a": torch.zeros(fused * layer.rank, layer.num_cols, dtype=torch.bfloat16, device=device),
            "lora_b": torch.zeros(layer.num_rows, layer.rank, dtype=torch.bfloat16, device=device),
        }.items():
            layer.register_buffer(name, tensor, persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] to [..., N]."""
        y: Tensor = torch.ops.qerl.nvfp4_linear(
            x, layer.tiles, layer.tensor_scale, layer.lora_a, layer.lora_b, layer.starts, layer.num_cols
        )
        return y if bias is None else y + bias


def lora_rank(rank: int) -> int:
    """The smallest rank that the kernel has and that holds `rank`; what is above is zeros. ValueError beyond 64."""
    found = next((wide for wide in RANKS if rank <= wide), None)
    if found is None:
        raise ValueError(f"the engine holds LoRA of rank {RANKS[-1]} at most, not {rank}")
    return found


def _linear(x: Tensor, tiles: Tensor, tensor_scale: Tensor, a: Tensor, b: Tensor, starts: list[int], K: int) -> Tensor:
    weight = TiledWeight(tiles, tensor_scale, b.shape[0], K)
    rows = x.reshape(-1, K)
    y = matmul(rows, weight, Lora(a, b, tuple(starts)))
    return y.view(*x.shape[:-1], b.shape[0])


def _linear_fake(
    x: Tensor, tiles: Tensor, tensor_scale: Tensor, a: Tensor, b: Tensor, starts: list[int], K: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], b.shape[0])
