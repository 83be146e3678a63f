"""Noise on RMSNorm weights: always a clean copy plus a fresh draw, in float32, on norms picked by their role.

As `(w + z) * x_hat` the noise is multiplicative on the rows of the next linears, which is why it costs no memory and
no kernel (QeRL, arXiv:2510.11696). Gemma's norms are `(1 + w) * x_hat`, to which the same z does the same. Below sigma
of about 1e-3 it would vanish in bfloat16, whose step at 1 is 2^-7.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qerl_core.errors import BadCheckpoint

ROLES = (("input_layernorm",), ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm"))
"""The norms whose output q, k, v and gate, up read: of each, the first name that a block has.

Where there is a norm of its own before the MLP (Gemma 2 and later), `post_attention_layernorm` is one of attention's
output, which no linear reads.
"""


def noisy_norms(decoder: Any, config: Any) -> dict[str, nn.Module]:
    """The norms that carry noise, by name: two a block. BadCheckpoint if the architecture has others.

    Of a decoder of transformers or of vLLM, with the model's config.
    """
    layers = getattr(decoder, "layers", ())
    norms = {}
    for i, layer in enumerate(layers):
        for names in ROLES:
            name = next((name for name in names if hasattr(layer, name)), "")
            norm = getattr(layer, name, None)
            if isinstance(norm, nn.Module) and isinstance(getattr(norm, "weight", None), nn.Parameter):
                norms[f"layers.{i}.{name}"] = norm
    wanted = len(ROLES) * config.get_text_config().num_hidden_layers
    if len(norms) != wanted:
        named = " or ".join(name for names in ROLES for name in names)
        raise BadCheckpoint(
            f"{config.model_type} has {len(norms)} norms named {named}, {wanted} are wanted for "
            "noise. Turn noise off (noise: null) for this architecture."
        )
    return norms


class NormNoise:
    """The norms of one model, clean but for the inside of `applied`."""

    def __init__(self, causal: Any) -> None:
        self.norms = noisy_norms(causal.get_decoder(), causal.config)
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
        try:
            for name, weight in noisy_weights(self.clean, sigma, seed):
                _weight(self.norms[name]).data = weight
            yield
        finally:
            for name, norm in self.norms.items():
                _weight(norm).data = self.clean[name]


def noisy_weights(clean: Mapping[str, Tensor], sigma: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each weight plus its draw from N(0, sigma^2), float32, in order: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in clean.items():
        draw = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)
        yield name, weight.float() + sigma * draw


def _weight(norm: nn.Module) -> nn.Parameter:
    assert isinstance(norm.weight, nn.Parameter)
    return norm.weight


def _keep_dtype(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    # A float32 weight would make a bfloat16 model's norm float32.
    return output.to(inputs[0].dtype)
