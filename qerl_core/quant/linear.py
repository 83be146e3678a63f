"""A frozen linear layer over packed NVFP4 weights: y = x @ W.T + b with gradient to x, and W nowhere but packed.

The backward pass is dx = dy @ W, with W decoded a second time: what autograd keeps between the passes is the packed
weight, 4.5 bits each (QeRL, arXiv:2510.11696). To PEFT the layer is an `nn.Linear`, so stock `get_peft_model` puts
LoRA over it.

N = out features, K = in features, J = K / 2 bytes, S = K / 16 blocks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from qerl_core.kernels import nvfp4_matmul
from qerl_core.kernels.nvfp4_dequant import BLOCK, dequantize
from qerl_core.kernels.nvfp4_matmul import TiledWeight
from qerl_core.quant.nvfp4 import NVFP4Weight

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that inference engines fuse into one matrix, which then has one tensor scale."""
_FROZEN = "an NVFP4 weight is frozen: LoRA cannot be merged into it; keep the adapter beside it"


class NVFP4Linear(nn.Linear):
    """A linear layer whose weight is frozen in NVFP4.

    Takes input of any float type, computes and returns `compute_dtype`, whatever autocast says. `.to(dtype)` changes
    `compute_dtype` and the bias; the packed weight keeps its bits. The bias is frozen too, unless a caller asks for
    its gradient.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    tensor_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_decoded: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with uninitialized weights, to be loaded. ValueError if K is no multiple of 16.

        `keep_decoded` decodes the weight once and keeps it beside the packed one: the results are the same to the
        bit, and on a CPU, where decoding costs more than a small product, they come sooner.
        """
        nn.Module.__init__(self)  # nn.Linear's would make a weight
        if in_features % BLOCK:
            raise ValueError(f"NVFP4 needs a multiple of {BLOCK} input features, not {in_features}")
        self.in_features, self.out_features = in_features, out_features
        self.compute_dtype, self.keep_decoded = compute_dtype, keep_decoded
        packed_NJ = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device)
        scale_NS = torch.empty(out_features, in_features // BLOCK, dtype=torch.float8_e4m3fn, device=device)
        self.register_buffer("weight_packed", packed_NJ)
        self.register_buffer("weight_scale", scale_NS)
        self.register_buffer("tensor_scale", torch.empty((), dtype=torch.float32, device=device))
        frozen = torch.empty(out_features, dtype=compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if frozen is None else nn.Parameter(frozen, requires_grad=False))
        self._decoded: Tensor | None = None
        self._tiled: TiledWeight | None = None

    @classmethod
    def from_weight(
        cls,
        weight: NVFP4Weight,
        bias: Tensor | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        *,
        keep_decoded: bool = False,
    ) -> Self:
        """A layer over a quantized matrix, whose tensors it takes without copying."""
        num_rows, num_cols = weight.shape
        layer = cls(num_cols, num_rows, compute_dtype=compute_dtype, keep_decoded=keep_decoded, device="meta")
        layer.weight_packed, layer.weight_scale = weight.packed_NJ, weight.block_scale_NS
        layer.tensor_scale = weight.tensor_scale
        if bias is not None:
            if bias.shape != (num_rows,):
                raise ValueError(f"a bias {tuple(bias.shape)} does not fit a weight {weight.shape}")
            layer.bias = nn.Parameter(bias.detach().to(compute_dtype), requires_grad=False)
        return layer

    @property
    def packed(self) -> NVFP4Weight:
        """The weight as the codec knows it."""
        if self._tiled is not None:
            return NVFP4Weight(*nvfp4_matmul.untile(self._tiled), self._tiled.tensor_scale)
        return NVFP4Weight(self.weight_packed, self.weight_scale, self.tensor_scale)

    def adopt(self, tiled: TiledWeight) -> None:
        """Read the weight from tiles that another holds, a rollout engine, and let go of the layer's own copy.

        The tiles must hold the same weight. The layer stays on their device. ValueError for another shape.
        """
        if (tiled.num_rows, tiled.num_cols) != (self.out_features, self.in_features):
            raise ValueError(f"tiles of {tiled.num_rows} x {tiled.num_cols} do not fit {self}")
        device = tiled.tiles_TUB.device
        self._tiled, self._decoded = tiled, None
        self.weight_packed = torch.empty(0, self.in_features // 2, dtype=torch.uint8, device=device)
        self.weight_scale = torch.empty(0, self.in_features // BLOCK, dtype=torch.float8_e4m3fn, device=device)
        self.tensor_scale = tiled.tensor_scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # nn.Linear has a parameter here
        """The weight [N, K], read-only, decoded by the first operation that reads it.

        Its shape, type and device cost nothing: PEFT asks for them a dozen times a layer.
        """
        return _ReadOnlyWeight(self)

    def decode(self) -> Tensor:
        """The weight [N, K] in `compute_dtype`. With `keep_decoded` always the same tensor: not to be written to."""
        if self._decoded is not None:
            return self._decoded
        with torch.inference_mode(False):  # or a weight kept from a rollout could not be trained through
            if self._tiled is not None and self.compute_dtype == torch.bfloat16:
                decoded = nvfp4_matmul.decode(self._tiled)
            else:
                packed = self.packed
                decoded = dequantize(packed.packed_NJ, packed.block_scale_NS, packed.tensor_scale, self.compute_dtype)
        if self.keep_decoded:
            self._decoded = decoded
        return decoded

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        output: Tensor = _FrozenProduct.apply(input.to(self.compute_dtype), self.bias, self)  # type: ignore[no-untyped-call]
        return output

    def extra_repr(self) -> str:
        """What `print(model)` shows in the brackets."""
        return f"{super().extra_repr()}, nvfp4, compute_dtype={self.compute_dtype}"

    def reset_parameters(self) -> None:
        """Nothing: the weight is frozen."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(torch.bfloat16)` would round the scales, which are floats too: they follow the device alone.
        kept = {id(self.weight_packed), id(self.weight_scale), id(self.tensor_scale)}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        self._decoded = None
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_packed.device)).dtype
        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self._decoded = None
        super()._load_from_state_dict(*args)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, layer: NVFP4Linear) -> Tensor:
        ctx.layer = layer
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input, layer.decode(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        wants_input, wants_bias, _ = ctx.needs_input_grad
        with torch.autocast(grad.device.type, enabled=False):
            grad_input = grad @ ctx.layer.decode() if wants_input else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wants_bias else None
        return grad_input, grad_bias, None


class _ReadOnlyWeight(Tensor):
    """Knows shape, type and device; decodes when an operation reads it, and refuses to be written to.

    Without the refusal PEFT's `merge` would add LoRA to a copy, report success and lose it.
    """

    _layer: NVFP4Linear

    @staticmethod
    def __new__(cls, layer: NVFP4Linear) -> "_ReadOnlyWeight":
        size, device = (layer.out_features, layer.in_features), layer.weight_packed.device
        made: _ReadOnlyWeight = Tensor._make_wrapper_subclass(cls, size, dtype=layer.compute_dtype, device=device)
        made._layer = layer
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so; its stub forgets `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._layer)
        schema = func._schema.arguments
        named = {spec.name: arg for spec, arg in zip(schema, args, strict=False)} | (kwargs or {})
        written = [named.get(spec.name) for spec in schema if spec.alias_info and spec.alias_info.is_write]
        if any(isinstance(arg, cls) for arg in written):
            # No TypeError: Tensor.__iadd__ would take that for "not implemented" and go on out of place.
            raise RuntimeError(_FROZEN)
        args, kwargs = tree_map_only(
            cls, lambda weight: weight._layer.packed.decode(weight.dtype), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        return _ReadOnlyWeight(self._layer)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(_FROZEN)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NVFP4 weight {tuple(self.shape)}, {self.dtype}, on {self.device}"


def quantizable_linears(model: nn.Module, *, ignore: Collection[str] = ("lm_head",)) -> dict[str, nn.Linear]:
    """Every linear layer by name, in the model's order, but the ignored ones and the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in ignore
    }


def scale_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layers in groups that must share a tensor scale: `FUSED` siblings together, each other layer alone."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        fused = next((members[0] for members in FUSED if leaf in members), leaf)
        groups.setdefault((parent, fused), []).append(name)
    return [tuple(members) for members in groups.values()]


def replace_linears(
    model: nn.Module,
    weights: Mapping[str, NVFP4Weight],
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    keep_decoded: bool = False,
    ignore: Collection[str] = ("lm_head",),
) -> None:
    """Put an NVFP4Linear in place of every linear layer but the output head and those ignored, with its bias.

    ValueError, and the model unchanged, unless `weights` names just these layers and has their shapes.
    """
    linears = quantizable_linears(model, ignore=ignore)
    if linears.keys() != weights.keys():
        raise ValueError(f"linear layers and weights do not match: {sorted(linears.keys() ^ weights.keys())[:5]}")
    for name, linear in linears.items():
        if weights[name].shape != (linear.out_features, linear.in_features):
            raise ValueError(f"{name} is {linear.out_features} x {linear.in_features}, not {weights[name].shape}")
    for name, linear in linears.items():
        made = NVFP4Linear.from_weight(weights[name], linear.bias, compute_dtype, keep_decoded=keep_decoded)
        model.set_submodule(name, made.train(linear.training))
