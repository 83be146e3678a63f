"""The MLP of a block in chunks of tokens: what its backward pass needs is made anew a chunk at a time, never whole.

With checkpointed activations the largest thing alive in a training step is the inside of one MLP: gate, up and their
product, LoRA's temporaries and the gradients of them all, each [T, I]. An MLP works token by token, so all of it can
be had for a few thousand tokens at a time. Two functions do it: the first keeps the MLP's input where checkpointing
sees it, the second runs the MLP without a graph and keeps nothing. So the input is the last tensor of the block that
is saved, and the block's recomputation, which stops at the last one, ends before the MLP: the MLP runs twice a step,
as without chunks. Where a norm follows it (Gemma 2 and later) it runs a third time, for that norm's input.

The price is that each chunk decodes the weights again. T = tokens of a micro-batch, H = hidden size, I = width of
the MLP.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

CHUNK_TOKENS = 4096
"""A tensor [chunk, I] of a 7B model is 0.15 GiB then, and a product takes several times as long as its decoding."""


def chunk_mlps(causal: Any, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Let each block's MLP train in chunks of at most `chunk_tokens` tokens; returns how many blocks have such an MLP.

    Has effect in training mode with gradients on, and saves memory beside checkpointed activations only. A mixture of
    experts, or whatever else does not look like a plain MLP, stays as it is. Parameters keep their names.
    """
    if chunk_tokens < 1:
        raise ValueError(f"a chunk has 1 token or more, not {chunk_tokens}")
    mlps = [getattr(layer, "mlp", None) for layer in getattr(causal.get_decoder(), "layers", ())]
    plain = [mlp for mlp in mlps if isinstance(mlp, nn.Module) and is_plain_mlp(mlp)]
    for mlp in plain:
        if not isinstance(mlp, ChunkedMLP):
            mlp.__class__ = _chunked(cast(Any, type(mlp)))
        cast(ChunkedMLP, mlp).chunk_tokens = chunk_tokens
    return len(plain)


def is_plain_mlp(module: nn.Module) -> bool:
    """Whether it takes one tensor, and its parameters are those of linears, LoRA on them or not."""
    children = [child.get_base_layer() if isinstance(child, BaseTunerLayer) else child for child in module.children()]
    others = [child for child in children if not isinstance(child, nn.Linear)]
    arguments = [argument.kind for argument in inspect.signature(module.forward).parameters.values()]
    return (
        arguments == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        and len(others) < len(children)
        and not any(True for _ in module.parameters(recurse=False))
        and not any(True for other in others for _ in other.parameters())
    )


class ChunkedMLP(nn.Module):
    """What goes before an MLP's own class: same parameters, same results."""

    chunk_tokens: int

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        learns = self.training and torch.is_grad_enabled() and (input.requires_grad or trained)
        if not learns or input.numel() <= self.chunk_tokens * input.shape[-1]:
            return self.whole(input)
        # With a parameter beside it the kept input is part of the graph even where nothing before the MLP trains.
        kept: Tensor = _Keep.apply(input, *list(trained.values())[:1])  # type: ignore[no-untyped-call]
        inputs = (kept, kept.grad_fn, self, tuple(trained), *trained.values())
        output: Tensor = _Run.apply(*inputs)  # type: ignore[no-untyped-call]
        return output

    def whole(self, input: Tensor) -> Tensor:
        """The MLP's own forward."""
        output: Tensor = super().forward(input)
        return output

    def chunks(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views [1, tokens, H] of a tensor [..., H], their sizes nearly the same."""
        flat = tensor.reshape(1, -1, tensor.shape[-1])
        return flat.tensor_split(-(-flat.shape[1] // self.chunk_tokens), dim=1)


@cache
def _chunked(cls: Any) -> Any:
    return type(f"Chunked{cls.__name__}", (ChunkedMLP, cls), {})


class _Keep(torch.autograd.Function):
    """The input as it is, saved where checkpointing sees it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *anchor: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in ctx.needs_input_grad[1:])


class _Run(torch.autograd.Function):
    """The MLP without a graph. If it saved a tensor itself, the block's recomputation would run the MLP to get it.

    Parameters are inputs, so that their gradients arrive once a backward pass, whole, and hooks see them so.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, keep: Any, mlp: ChunkedMLP, names: Sequence[str], *trained: Tensor) -> Tensor:
        ctx.keep, ctx.mlp, ctx.names, ctx.trained = keep, mlp, names, trained
        ctx.surroundings = _Surroundings(input)
        with ctx.surroundings.autocast():
            outputs = [mlp.whole(chunk) for chunk in mlp.chunks(input)]
        return torch.cat(outputs, dim=1).view(*input.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (input,) = ctx.keep.saved_tensors
        wants_input = ctx.needs_input_grad[0]
        # Leaves of their own: on the parameters themselves hooks would see the gradient of every chunk.
        leaves = [parameter.detach().requires_grad_() for parameter in ctx.trained]
        named = {f"mlp.{name}": leaf for name, leaf in zip(ctx.names, leaves, strict=True)}
        body = _Body(ctx.mlp)
        sums: list[Tensor | None] = [None] * len(leaves)
        grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        parts = zip(*map(ctx.mlp.chunks, (input, grad, grad_input)), strict=True)
        with ctx.surroundings.random_state():
            for chunk, grad_chunk, place in parts:
                chunk = chunk.detach().requires_grad_(wants_input)
                with torch.enable_grad(), ctx.surroundings.autocast():
                    output = functional_call(body, named, (chunk,))
                wanted = [chunk, *leaves] if wants_input else leaves
                found = list(torch.autograd.grad(output, wanted, grad_chunk, allow_unused=True))
                if wants_input:
                    place.copy_(found.pop(0))
                sums = [part if sum is None else sum + part for sum, part in zip(sums, found, strict=True)]
        return grad_input if wants_input else None, None, None, None, *sums


class _Body(nn.Module):
    """An MLP without its hooks, which have seen the whole of its input."""

    def __init__(self, mlp: ChunkedMLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, input: Tensor) -> Tensor:
        return self.mlp.whole(input)


class _Surroundings:
    """What a forward pass depends on besides its input: autocast and the random state, to have them once more."""

    def __init__(self, input: Tensor) -> None:
        self.device = input.device.type
        self.dtype, self.enabled = torch.get_autocast_dtype(self.device), torch.is_autocast_enabled(self.device)
        self.state = torch.get_rng_state()
        self.devices, self.device_states = get_device_states(input)

    def autocast(self) -> torch.autocast:
        # Its cache keeps parameters that were cast without a graph: older torch gives them to those who want one.
        return torch.autocast(self.device, self.dtype, enabled=self.enabled, cache_enabled=False)

    @contextmanager
    def random_state(self) -> Iterator[None]:
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.state)
            set_device_states(self.devices, self.device_states)
            yield
