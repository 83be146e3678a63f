"""Noise on RMSNorm weights: always a clean copy plus a fresh draw, in float32, on norms picked by their role.

As `(w + z) * x_hat` the noise is multiplicative on the rows of the next linears, which is why it costs no memory and
no kernel (QeRL, arXiv:2510.11696). Below sigma of about 1e-3 it would vanish in bfloat16, whose step at 1 is 2^-7.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qerl_core.errors import BadCheckpoint

ROLES = ("input_layernorm", "post_attention_layernorm")
"""The norms whose output q, k, v and gate, up read."""


def noisy_norms(causal: Any) -> dict[str, nn.Module]:
    """The norms that carry noise, by name: two a block. BadCheckpoint if the architecture has others."""
    layers = causal.get_decoder().layers
    norms = {
        f"layers.{i}.{role}": norm
        for i, layer in enumerate(layers)
        for role in ROLES
        if isinstance(norm := getattr(layer, role, None), nn.Module) and isinstance(norm.weight, nn.Parameter)
    }
    wanted = len(ROLES) * causal.config.num_hidden_layers
    if len(norms) != wanted:
        raise BadCheckpoint(
            f"{causal.config.model_type} has {len(norms)} norms named {' or '.join(ROLES)}, {wanted} are wanted for "
            "noise. Turn noise off (noise: null) for this architecture."
        )
    return norms


class NormNoise:
    """The norms of one model, clean but for the inside of `applied`."""

    def __init__(self, causal: Any) -> None:
        self.norms = noisy_norms(causal)
        self.clean = {name: _weight(norm).data for name, norm in self.norms.items()}
        for norm in self.norms.values():
            norm.register_forward_hook(_keep_dtype)

    @contextmanager
    def applied(self, sigma: float, seed: int) -> Iterator[None]:
        """Let each weight be clean + N(0, sigma^2) inside; after it, the clean tensors themselves are back."""
        if sigma < 0:
            raise ValueError(f"sigma {sigma} is below 0")
        if sigma == 0:
            yield
            return
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draw on every device
        try:
            for name, norm in self.norms.items():
                clean = self.clean[name]
                draw = torch.randn(clean.shape, generator=generator, dtype=torch.float32).to(clean.device)
                _weight(norm).data = clean.float() + sigma * draw
            yield
        finally:
            for name, norm in self.norms.items():
                _weight(norm).data = self.clean[name]


def _weight(norm: nn.Module) -> nn.Parameter:
    assert isinstance(norm.weight, nn.Parameter)
    return norm.weight


def _keep_dtype(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    # A float32 weight would make a bfloat16 model's norm float32.
    return output.to(inputs[0].dtype)
