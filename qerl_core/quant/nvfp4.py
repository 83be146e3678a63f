"""The NVFP4 codec: 16 values of 4 bits share an E4M3 scale, all blocks one float32 scale.

Rounding to nearest (`rtn`):

    encode_scale = 448 * 6 / amax                        tensor_scale = 1 / encode_scale
    block_scale  = e4m3(block_amax / 6 * encode_scale)
    code         = e2m1(w / (block_scale / encode_scale))

so the largest block gets E4M3's largest value, and the largest weight of a block E2M1's. Ties go to the even code;
what lies beyond the largest value saturates. Source: arXiv:2509.25149, where the last two scales of the first line
are called s_enc and s_dec.

For the same encode scale, codes and block scales equal those of the compressed-tensors library (0.20) bit for bit
on float32 weights, and the order of the divisions above is taken from there: `w * encode_scale / block_scale` would
round other ties. Two more rules come with it: a block whose scale would round to zero gets 0.125, under which all its
codes are zeros, and a negative weight that rounds to zero keeps its sign (code 8). The library rounds `block_amax / 6`
to the weights' own type; here it is float32, so on bfloat16 weights a block scale may be the finer one of two.

Two methods choose each block's scale by the squared error that it leaves. `four_over_six` (arXiv:2512.02010) tries to
map the block's largest weight to 6 and to 4, since E2M1 has nothing between; `sweep` tries E4M3's neighbours of the
first, from two below to five above. Both leave room above the largest scale: encode_scale = 256 * 6 / amax. The
format is the same, so whatever reads one reads all. Rounding that looks at a layer's inputs is in `gptq.py`.

N = out features, K = in features, J = K / 2 bytes, S = K / 16 blocks, C = rows of a chunk, B = the 16 of a block.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from qerl_core.errors import BadCheckpoint
from qerl_core.kernels.nvfp4_dequant import BLOCK, E2M1, dequantize

Method = Literal["rtn", "four_over_six", "sweep"]

E2M1_MAX = E2M1[-1]
E4M3_MAX = 448.0
_SCALE_OF_EMPTY_BLOCK = 0.125
_ROOMY_SCALE = 256.0
"""The largest block scale where one and a half times as much may be tried."""
_SWEEP = range(-2, 6)
"""Steps of E4M3 around the scale of `rtn`; four are a factor of 1.5."""
# Between neighbours of E2M1. A tie goes to the even code: down after an even code, up after an odd one.
_BOUNDS = tuple((low + high) / 2 for low, high in pairwise(E2M1))


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Weight:
    """A quantized matrix: `dequantize` defines what it stands for."""

    packed_NJ: Tensor
    """uint8: column 2j in the low nibble of byte j, 2j + 1 in the high one."""
    block_scale_NS: Tensor
    """float8_e4m3fn, never zero where this module made it."""
    tensor_scale: Tensor
    """float32 scalar; multiplies when decoding."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix it stands for."""
        return self.packed_NJ.shape[0], 2 * self.packed_NJ.shape[1]

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K]."""
        return dequantize(self.packed_NJ, self.block_scale_NS, self.tensor_scale, dtype)


def quantize(
    weight_NK: Tensor,
    *,
    name: str = "weight",
    tensor_scale: Tensor | None = None,
    amax: Tensor | None = None,
    method: Method = "rtn",
) -> NVFP4Weight:
    """Round a matrix of any float type to NVFP4, where it lies.

    The tensor scale is the one given, or that of the given `amax`, or that of the matrix's own largest magnitude;
    weights beyond its range saturate. Raises BadCheckpoint with `name` if the matrix cannot be quantized: K no
    multiple of 16, NaN, infinity. ValueError for a tensor scale that is no positive finite float32 scalar.
    """
    own_amax = largest_magnitude(weight_NK, name=name)
    if tensor_scale is None:
        encode = encode_scale(own_amax if amax is None else amax, method=method)
        tensor_scale = 1 / encode
    elif amax is not None:
        raise ValueError("give tensor_scale or amax, not both")
    else:
        encode = 1 / _checked_tensor_scale(tensor_scale)
    num_rows, num_cols = weight_NK.shape
    device = weight_NK.device
    encode, tensor_scale = encode.to(device), tensor_scale.to(device).reshape(())
    packed_NJ = torch.empty(num_rows, num_cols // 2, dtype=torch.uint8, device=device)
    block_scale_NS = torch.empty(num_rows, num_cols // BLOCK, dtype=torch.float8_e4m3fn, device=device)
    # On a CPU a chunk is small enough for the cache; on a GPU the whole matrix is one.
    chunk = max(1, 2**17 // max(1, num_cols)) if device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        packed_NJ[rows], block_scale_NS[rows] = _encode(weight_NK[rows].detach().float(), encode, method)
    return NVFP4Weight(packed_NJ, block_scale_NS, tensor_scale)


def encode_scale(amax: Tensor, *, method: Method = "rtn") -> Tensor:
    """448 * 6 / amax (256 * 6 / amax but for `rtn`) as a float32 scalar: what multiplies weights before rounding.

    1 if `amax` is so small (below 3.2e-35, or zero) that the inverse would leave float32's normal numbers: every
    code is zero then.
    """
    amax = amax.detach().float().reshape(())
    smallest = E4M3_MAX * E2M1_MAX * torch.finfo(torch.float32).tiny
    largest_scale = E4M3_MAX if method == "rtn" else _ROOMY_SCALE
    return torch.where(amax < smallest, torch.ones_like(amax), largest_scale * E2M1_MAX / amax)


def shared_tensor_scale(weights: Iterable[Tensor]) -> Tensor:
    """One tensor scale for matrices that an engine fuses (q, k, v; gate, up): that of the largest weight of all."""
    return 1 / encode_scale(shared_amax(weights))


def shared_amax(weights: Iterable[Tensor]) -> Tensor:
    """The largest magnitude in several matrices, for `quantize(..., amax=)`."""
    return torch.stack([largest_magnitude(weight) for weight in weights]).amax()


def largest_magnitude(weight_NK: Tensor, *, name: str = "weight") -> Tensor:
    """max |w| as a float32 scalar, 0 for a matrix without rows.

    Raises BadCheckpoint with `name` if the matrix cannot be quantized at all.
    """
    if weight_NK.dim() != 2 or not weight_NK.is_floating_point() or weight_NK.element_size() < 2:
        raise BadCheckpoint(
            f"{name}: only a matrix of floats can be quantized to NVFP4, not {weight_NK.dtype} "
            f"{tuple(weight_NK.shape)}; give an unquantized checkpoint"
        )
    if weight_NK.shape[1] % BLOCK:
        raise BadCheckpoint(
            f"{name}: NVFP4 needs a multiple of {BLOCK} input features, not {weight_NK.shape[1]}; "
            "this model has to be trained unquantized"
        )
    if not weight_NK.numel():
        return torch.zeros((), device=weight_NK.device)
    low, high = weight_NK.detach().aminmax()  # either is NaN if any weight is
    amax = torch.maximum(-low, high).float()
    if not torch.isfinite(amax):
        raise BadCheckpoint(
            f"{name}: holds {amax.item()}, so it cannot be quantized; the checkpoint is damaged or was saved "
            "from a run that diverged: fetch it again or take an earlier one"
        )
    return amax


def _checked_tensor_scale(tensor_scale: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    if tensor_scale.dtype != torch.float32 or tensor_scale.numel() != 1:
        raise ValueError(f"the tensor scale is one float32, not {tensor_scale.dtype} {tuple(tensor_scale.shape)}")
    if not (torch.isfinite(tensor_scale) and tensor_scale >= tiny):
        raise ValueError(f"the tensor scale is finite and at least {tiny:.3g}, not {tensor_scale.item()}")
    return tensor_scale.detach().reshape(())


def _encode(weight_CK: Tensor, encode: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    weight_CSB = weight_CK.view(weight_CK.shape[0], weight_CK.shape[1] // BLOCK, BLOCK)
    first, *others = candidate_scales(weight_CSB, encode, method)
    scale_CS, code_CSB = first, nearest_codes(weight_CSB, first, encode)
    if others:
        error_CS = _squared_error(weight_CSB, code_CSB, first, encode)
    for other in others:
        tried_CSB = nearest_codes(weight_CSB, other, encode)
        tried_error_CS = _squared_error(weight_CSB, tried_CSB, other, encode)
        is_better = tried_error_CS < error_CS
        scale_CS = torch.where(is_better, other, scale_CS)
        code_CSB = torch.where(is_better.unsqueeze(-1), tried_CSB, code_CSB)
        error_CS = torch.where(is_better, tried_error_CS, error_CS)
    return pack(code_CSB.flatten(1)), scale_CS.to(torch.float8_e4m3fn)


def pack(code_NK: Tensor) -> Tensor:
    """Two codes a byte, [N, J]."""
    return code_NK[:, 0::2] | code_NK[:, 1::2] << 4


def candidate_scales(weight_CSB: Tensor, encode: Tensor, method: Method) -> list[Tensor]:
    """The block scales that a method tries, as float32 [C, S] of E4M3 values; that of `rtn` first."""
    amax_CS = weight_CSB.abs().amax(dim=-1)
    nearest_CS = _to_e4m3(amax_CS / E2M1_MAX * encode)
    if method == "rtn":
        return [nearest_CS]
    if method == "four_over_six":
        return [nearest_CS, _to_e4m3(amax_CS / 4 * encode)]
    # Positive E4M3 numbers stand in the order of their bytes, from 1 (the smallest) to 126 (448).
    byte_CS = nearest_CS.to(torch.float8_e4m3fn).view(torch.uint8).int()
    tried = [(byte_CS + step).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn) for step in _SWEEP]
    return [nearest_CS, *(scale_CS.float() for scale_CS in tried)]


def _to_e4m3(scale_CS: Tensor) -> Tensor:
    scale_CS = scale_CS.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()  # the cast alone makes NaN of 500
    return torch.where(scale_CS == 0, _SCALE_OF_EMPTY_BLOCK, scale_CS)


def nearest_codes(weight_CSB: Tensor, scale_CS: Tensor, encode: Tensor) -> Tensor:
    """uint8, as the weights are shaped: the nearest codes under a scale for each of their rows."""
    scaled_CSB = weight_CSB / (scale_CS / encode).unsqueeze(-1)
    code_CSB = (scaled_CSB < 0).to(torch.uint8).mul_(8)
    magnitude_CSB = scaled_CSB.abs_()
    for code, bound in enumerate(_BOUNDS):
        code_CSB += magnitude_CSB >= bound if code % 2 else magnitude_CSB > bound
    return code_CSB


def _squared_error(weight_CSB: Tensor, code_CSB: Tensor, scale_CS: Tensor, encode: Tensor) -> Tensor:
    """float32 [C, S]: what the codes lose of each block."""
    value = torch.tensor(E2M1 + tuple(-magnitude for magnitude in E2M1), device=weight_CSB.device)
    decoded_CSB = value[code_CSB.int()] * (scale_CS / encode).unsqueeze(-1)
    return (decoded_CSB - weight_CSB).square().sum(dim=-1)
