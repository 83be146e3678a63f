"""Decode NVFP4 weights: w[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * tensor_scale.

N = out features, K = in features, J = K / 2 bytes, S = K / 16 blocks, C = rows of a chunk. Byte j of a row holds
column 2j in its low nibble and 2j + 1 in its high one. The two scales are multiplied first, in float32; the result
is rounded once, to the type asked for. Source: arXiv:2509.25149.
"""

import functools
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU need not have it
    triton = None

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude by code; bit 3 is the sign
BLOCK = 16  # columns that share a block scale


def reference(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition. Every other path equals it bit for bit."""
    code_NK = torch.stack((packed_NJ & 0xF, packed_NJ >> 4), dim=-1).flatten(-2).long()
    value_NK = torch.tensor(E2M1 + tuple(-m for m in E2M1), device=packed_NJ.device)[code_NK]
    scale_NS = block_scale_NS.float() * tensor_scale
    return (value_NK * scale_NS.repeat_interleave(BLOCK, dim=-1)).to(dtype)


def dequantize(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [N, K/2], float8_e4m3fn [N, K/16], float32 scalar -> [N, K], equal to `reference` bit for bit.

    A CUDA tensor is decoded by the Triton kernel, a CPU tensor by table. ValueError if shapes, types, devices or
    memory layouts do not fit together.
    """
    _check(packed_NJ, block_scale_NS, tensor_scale, dtype)
    if packed_NJ.device.type == "cpu":
        return _decode_by_table(packed_NJ, block_scale_NS, tensor_scale, dtype)
    if packed_NJ.device.type == "cuda" and triton is not None:
        with torch.cuda.device(packed_NJ.device):
            return _decode_by_kernel(packed_NJ, block_scale_NS, tensor_scale, dtype)
    return reference(packed_NJ, block_scale_NS, tensor_scale, dtype)


def _check(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"weights decode to a floating point type, not {dtype}")
    if packed_NJ.dtype != torch.uint8 or packed_NJ.dim() != 2:
        raise ValueError(f"packed weights are a uint8 matrix, not {packed_NJ.dtype} {tuple(packed_NJ.shape)}")
    num_rows, num_bytes = packed_NJ.shape
    if num_bytes % (BLOCK // 2) or block_scale_NS.shape != (num_rows, num_bytes // (BLOCK // 2)):
        raise ValueError(f"scales {tuple(block_scale_NS.shape)} do not fit weights {tuple(packed_NJ.shape)}")
    if block_scale_NS.dtype != torch.float8_e4m3fn:
        raise ValueError(f"block scales are float8_e4m3fn, not {block_scale_NS.dtype}")
    if tensor_scale.dtype != torch.float32 or tensor_scale.numel() != 1:
        raise ValueError(f"the tensor scale is one float32, not {tensor_scale.dtype} {tuple(tensor_scale.shape)}")
    devices = {packed_NJ.device, block_scale_NS.device, tensor_scale.device}
    if len(devices) > 1:
        raise ValueError(f"weights and scales lie on different devices: {sorted(map(str, devices))}")
    if not (packed_NJ.is_contiguous() and block_scale_NS.is_contiguous()):
        raise ValueError("packed weights and block scales must be contiguous")


@functools.cache
def _pairs_by_byte() -> Tensor:
    # Both values of a byte as one 64-bit word: one look-up gives two weights.
    value = torch.tensor(E2M1 + tuple(-m for m in E2M1))
    byte = torch.arange(256)
    return torch.stack((value[byte & 0xF], value[byte >> 4]), dim=-1).view(torch.int64).flatten()


def _decode_by_table(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num_bytes = packed_NJ.shape
    out_NK = torch.empty(num_rows, 2 * num_bytes, dtype=dtype)
    # A chunk is small enough for the cache, large enough that the calls cost nothing.
    chunk = max(1, 2**17 // max(1, num_bytes))
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        pairs = _pairs_by_byte().index_select(0, packed_NJ[rows].flatten().int())
        value_CSB = pairs.view(torch.float32).view(*block_scale_NS[rows].shape, BLOCK)
        scale_CS = block_scale_NS[rows].float() * tensor_scale
        out_NK[rows] = value_CSB.mul_(scale_CS.unsqueeze(-1)).flatten(-2)
    return out_NK


if triton is not None:

    @triton.jit
    def _dequantize_kernel(packed, block_scale, tensor_scale, out, num_blocks, BLOCKS: tl.constexpr):
        # A block is one 64-bit word. A code's bits, put where float16 has its sign, low exponent bits and high
        # mantissa bit, are its value times 2^-14, zeros and 0.5 included; the scale takes the 2^14, so both are exact.
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        live = block < num_blocks
        scale = tl.load(block_scale + block, mask=live, other=0.0)
        if block_scale.dtype.element_ty == tl.uint8:  # an Ampere GPU knows no E4M3; the same trick, with 2^-8
            byte = scale.to(tl.int32)
            bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
            scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            scale = tl.where((byte & 0x7F) == 0x7F, float("nan"), scale)
        scale = scale.to(tl.float32) * tl.load(tensor_scale) * 16384.0
        word = tl.load(packed + block, mask=live, other=0)
        code = (word[:, None] >> (tl.arange(0, 16) * 4)[None, :]).to(tl.int32)
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale[:, None]  # [BLOCKS, 16]
        tl.store(out + block[:, None] * 16 + tl.arange(0, 16)[None, :], value, mask=live[:, None])


def _decode_by_kernel(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num_bytes = packed_NJ.shape
    out_NK = torch.empty(num_rows, 2 * num_bytes, dtype=dtype, device=packed_NJ.device)
    num_blocks = block_scale_NS.numel()
    if num_blocks:
        kernel: Any = _dequantize_kernel
        words = packed_NJ.view(torch.int64)
        if packed_NJ.is_cuda and torch.cuda.get_device_capability(packed_NJ.device) < (8, 9):
            block_scale_NS = block_scale_NS.view(torch.uint8)
        kernel[(triton.cdiv(num_blocks, 128),)](
            words, block_scale_NS, tensor_scale, out_NK, num_blocks, BLOCKS=128, num_warps=2, enable_fp_fusion=False
        )
    return out_NK
