"""Few rows times packed NVFP4 weights, with one LoRA: y = x @ W^T + (x @ A^T) @ B^T, W never decoded to memory.

For rollouts. The weights lie in tiles of 64 x 64 (`tile`), in the order in which the tensor cores take them: a copy
of 2304 contiguous bytes brings a tile to a multiprocessor, and a thread finds what it multiplies in one 16-byte word.
The kernel is CUDA C++ for Hopper (`nvfp4_matmul.cu`), compiled at run time; elsewhere the definition runs.

Products are exact: a code times its block scale is a bfloat16, and x is taken as it is. Sums are float32, the tensor
scale multiplies the whole sum, and the result is rounded once. Same inputs, same bits: partial sums meet in a fixed
order.

M = rows of x, N = out features, K = in features, R = LoRA rank, F = linear layers fused along N, each with an A of its
own; T = N / 64 and U = K / 64 tiles, rounded up.
"""

import ctypes
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl_core.kernels import nvfp4_dequant
from qerl_core.kernels.nvfp4_dequant import BLOCK

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU need not have it
    triton = None

TILE = 64
TILE_BYTES = 2304  # 4096 codes of four bits, 256 scales of eight
RANKS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """An NVFP4 matrix [N, K] in tiles: as large as it was, rounded up to whole tiles."""

    tiles_TUB: Tensor
    """uint8 [T, U, 2304]: 16-byte words of codes by slab of 16 rows and lane, then scales."""
    tensor_scale: Tensor
    """float32 scalar."""
    num_rows: int
    num_cols: int


@dataclass(frozen=True, slots=True)
class Lora:
    """The LoRA of a linear layer, or of several that are fused along N. Scaling is in one of the two."""

    a_QK: Tensor
    """bfloat16 [F * R, K]: the layers' A below each other."""
    b_NR: Tensor
    """bfloat16 [N, R]."""
    starts: tuple[int, ...] = (0,)
    """The first row of each layer in W and B: multiples of 64, at most three."""

    @property
    def rank(self) -> int:
        """R."""
        return self.b_NR.shape[1]


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is built and launched for a shape."""

    rows: int
    """Rows of x a tile: a multiple of 8 to 256."""
    slabs: int
    """Slabs of 64 rows of W a warpgroup."""
    warpgroups: int
    """That decode and multiply."""
    stages: int
    """Of the copy pipeline."""
    blocks: int
    """Of the grid; at most one a multiprocessor."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory a block."""
        stage = self.rows * 128 + self.slabs * self.warpgroups * TILE_BYTES + 16
        output = -(-self.rows * (128 * self.slabs + 16) // 1024) * 1024
        return 1024 + self.stages * stage + self.warpgroups * output

    def num_steps(self, num_rows: int, num_out: int, num_cols: int) -> int:
        """Steps of 64 columns that the blocks share out; no block may be without one."""
        tiles = -(-num_rows // self.rows) * -(-num_out // (TILE * self.slabs * self.warpgroups))
        return tiles * -(-num_cols // TILE)

    @property
    def partial_floats(self) -> int:
        """Workspace that all blocks together may need."""
        return self.blocks * self.rows * self.slabs * self.warpgroups * TILE


def reference(
    x_MK: Tensor, packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor, lora: Lora | None = None
) -> Tensor:
    """The definition, float32 [M, N]; `x @ A^T` is rounded to A's type between the two products, as PEFT does."""
    x_MK = x_MK.float()
    y_MN = x_MK @ nvfp4_dequant.reference(packed_NJ, block_scale_NS, tensor_scale, torch.float32).T
    if lora is not None:
        h_MQ = (x_MK @ lora.a_QK.float().T).to(lora.a_QK.dtype).float()
        y_MN += _expanded(h_MQ, lora)
    return y_MN


def _expanded(h_MQ: Tensor, lora: Lora) -> Tensor:
    ends = (*lora.starts[1:], len(lora.b_NR))
    return torch.cat(
        [
            h_MR @ lora.b_NR[start:end].T.to(h_MR.dtype)
            for h_MR, start, end in zip(h_MQ.split(lora.rank, dim=1), lora.starts, ends, strict=True)
        ],
        dim=1,
    )


# Tiles


# Of each of the four fragment registers: where a 16-bit half has the code's sign and its bits 2, 1 and 0. The first
# three are shifts of where bfloat16 has them; the fourth takes what is left.
_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))


@functools.cache
def _placed() -> Tensor:
    """Where a code's bits go in a 16-bit half, int32 [4, 16]: by which of the four fragment registers, by code."""
    code = torch.arange(16)
    sign, high, mid, low = code >> 3, code >> 2 & 1, code >> 1 & 1, code & 1
    return torch.stack([sign << s | high << h | mid << m | low << z for s, h, m, z in _BITS]).int()


@functools.cache
def _scale_codes() -> Tensor:
    """Of the 128 non-negative E4M3 bytes: the same number with 5 exponent bits and no subnormals, uint8; 0 for 0."""
    value = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    mantissa, exponent = torch.frexp(value)
    code = (exponent + 9) * 8 + ((2 * mantissa - 1) * 8).int()
    return torch.where(value > 0, code, 0).to(torch.uint8)


def tile(packed_NJ: Tensor, block_scale_NS: Tensor, tensor_scale: Tensor) -> TiledWeight:
    """Rearrange an NVFP4 matrix, exactly; a block under a zero scale becomes zeros. ValueError as in `dequantize`."""
    nvfp4_dequant._check(packed_NJ, block_scale_NS, tensor_scale, torch.bfloat16)
    num_rows, num_cols = packed_NJ.shape[0], packed_NJ.shape[1] * 2
    rows, cols = -(-num_rows // TILE), -(-num_cols // TILE)
    tiles = torch.zeros(rows, cols, TILE_BYTES, dtype=torch.uint8, device=packed_NJ.device)
    for first in range(0, rows, 16):
        some = slice(first * TILE, (first + 16) * TILE)
        tiles[first : first + 16] = _tiles_of(packed_NJ[some], block_scale_NS[some], cols)
    return TiledWeight(tiles, tensor_scale, num_rows, num_cols)


def _tiles_of(packed_NJ: Tensor, block_scale_NS: Tensor, cols: int) -> Tensor:
    rows, device = -(-len(packed_NJ) // TILE), packed_NJ.device
    scale = torch.zeros(rows * TILE, cols * 4, dtype=torch.uint8, device=device)
    scale[: len(packed_NJ), : block_scale_NS.shape[1]] = block_scale_NS.view(torch.uint8)
    code = torch.zeros(rows * TILE, cols * TILE, dtype=torch.uint8, device=device)
    code[: len(packed_NJ), 0 : packed_NJ.shape[1] * 2 : 2] = packed_NJ & 0xF
    code[: len(packed_NJ), 1 : packed_NJ.shape[1] * 2 : 2] = packed_NJ >> 4
    code.view(*scale.shape, BLOCK).mul_((scale > 0).unsqueeze(-1))
    # Row = tile, warp, half, g; column = tile, step, half, t, parity: to tiles, warp, g, t, step, halves, parity.
    code = code.view(rows, 4, 2, 8, cols, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    register = torch.arange(4, device=device).view(2, 2, 1)
    half = _placed().to(device)[register, code.long()].sum(dim=(-3, -2), dtype=torch.int32)  # bits that do not meet
    words = half.to(torch.int16).reshape(rows, cols, 1024).view(torch.uint8)
    scales = _scale_codes().to(device)[scale.long()].view(rows, 4, 2, 8, cols, 2, 2).permute(0, 4, 1, 3, 5, 2, 6)
    return torch.cat([words, scales.reshape(rows, cols, 256)], dim=-1)


def untile(weight: TiledWeight) -> tuple[Tensor, Tensor]:
    """Packed codes [N, K/2] and block scales [N, K/16] of a tiled matrix: what `tile` was given."""
    tiles, device = weight.tiles_TUB, weight.tiles_TUB.device
    rows, cols = tiles.shape[:2]
    half = tiles[..., :2048].contiguous().view(torch.int16).int() & 0xFFFF
    code = torch.zeros(rows, cols, 512, 2, 2, 2, dtype=torch.uint8, device=device)  # column half, row half, parity
    half = half.view(rows, cols, 512, 2)
    for register, (sign, high, mid, low) in enumerate(_BITS):
        bits = (half >> sign & 1) << 3 | (half >> high & 1) << 2 | (half >> mid & 1) << 1 | half >> low & 1
        code[..., register >> 1, register & 1, :] = bits.to(torch.uint8)
    code = code.view(rows, cols, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4, 8)
    code_NK = code.reshape(rows * TILE, cols * TILE)[: weight.num_rows, : weight.num_cols]
    back = torch.zeros(256, dtype=torch.uint8)
    back[_scale_codes().long()] = torch.arange(127, dtype=torch.uint8)
    scale = back.to(device)[tiles[..., 2048:].long()].view(rows, cols, 4, 8, 2, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    scale_NS = scale.reshape(rows * TILE, cols * 4)[: weight.num_rows, : weight.num_cols // BLOCK]
    packed_NJ = code_NK[:, 0::2] | code_NK[:, 1::2] << 4
    return packed_NJ.contiguous(), scale_NS.contiguous().view(torch.float8_e4m3fn)


def decode(weight: TiledWeight) -> Tensor:
    """The matrix [N, K] in bfloat16, equal to that of `nvfp4_dequant` bit for bit."""
    device = weight.tiles_TUB.device
    if not is_supported(device):
        return nvfp4_dequant.dequantize(*untile(weight), weight.tensor_scale, torch.bfloat16)
    out_NK = torch.empty(weight.num_rows, weight.num_cols, dtype=torch.bfloat16, device=device)
    num_tiles = weight.tiles_TUB.shape[0] * weight.tiles_TUB.shape[1]
    if not num_tiles:
        return out_NK
    from cuda.bindings import driver

    pointers = (weight.tiles_TUB.data_ptr(), weight.tensor_scale.data_ptr(), out_NK.data_ptr())
    sizes = (weight.num_rows, weight.num_cols, weight.tiles_TUB.shape[1], num_tiles)
    types = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 4)
    with torch.cuda.device(device):
        function = _untile_function(device.index or 0)
        stream = torch.cuda.current_stream().cuda_stream
        grid = -(-num_tiles // 2)
        _ok(driver.cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, stream, ((*pointers, *sizes), types), 0))
    return out_NK


# The product


def matmul(x_MK: Tensor, weight: TiledWeight, lora: Lora | None = None, *, config: Config | None = None) -> Tensor:
    """[M, K] -> [M, N], bfloat16 on a Hopper GPU. `config` is chosen by shape if it is not given.

    Elsewhere `reference` runs, in x's type. ValueError if shapes, types or memory layouts do not fit together.
    """
    _check(x_MK, weight, lora)
    if not is_supported(x_MK.device):
        return reference(x_MK, *untile(weight), weight.tensor_scale, lora).to(x_MK.dtype)
    num_rows = len(x_MK)
    y_MN = torch.empty(num_rows, weight.num_rows, dtype=torch.bfloat16, device=x_MK.device)
    if not (y_MN.numel() and weight.num_cols):
        return y_MN.zero_()
    if x_MK.dtype != torch.bfloat16:
        raise ValueError(f"the kernel multiplies bfloat16, not {x_MK.dtype}")
    if config is None:
        config = choose(num_rows, weight.num_rows, weight.num_cols, x_MK.device, has_lora=lora is not None)
    h_MQ = None if lora is None else shrink(x_MK, lora.a_QK)
    with torch.cuda.device(x_MK.device):
        _launch(config, x_MK, weight, y_MN, h_MQ, lora)
    return y_MN


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Whether the kernel runs there: compute capability 9.0, with Triton and the CUDA bindings that PyTorch brings."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or triton is None:
        return False
    try:
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


def _check(x_MK: Tensor, weight: TiledWeight, lora: Lora | None) -> None:
    if x_MK.dim() != 2 or x_MK.shape[1] != weight.num_cols:
        raise ValueError(f"x {tuple(x_MK.shape)} does not fit a weight {weight.num_rows} x {weight.num_cols}")
    if x_MK.stride(1) != 1 or x_MK.stride(0) % 8 or x_MK.data_ptr() % 16:
        raise ValueError("rows of x are contiguous and begin at multiples of 16 bytes")
    if lora is None:
        return
    fused = len(lora.starts)
    if lora.b_NR.shape[0] != weight.num_rows or lora.a_QK.shape != (fused * lora.rank, weight.num_cols):
        raise ValueError(
            f"a LoRA of {tuple(lora.a_QK.shape)} and {tuple(lora.b_NR.shape)} for {fused} layers does not fit a "
            f"weight {weight.num_rows} x {weight.num_cols}"
        )
    if lora.rank not in RANKS or fused > 3 or lora.starts[0] or any(start % TILE for start in lora.starts):
        raise ValueError(f"a LoRA has rank {RANKS} and one to three layers that start at multiples of {TILE}")
    if not (lora.a_QK.is_contiguous() and lora.b_NR.is_contiguous()):
        raise ValueError("the LoRA's matrices must be contiguous")


ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that configurations are measured for; one between two takes that of the larger."""


@functools.cache
def choose(num_rows: int, num_out: int, num_in: int, device: torch.device, *, has_lora: bool) -> Config:
    """The configuration that was measured to be the fastest for a shape, or for the one most like it."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if num_rows <= ROWS[-1]:
        return _chosen(next(rows for rows in ROWS if num_rows <= rows), num_out, num_in, processors, has_lora)
    tiles = -(-num_rows // 256)
    return _deepest(-(-num_rows // (32 * tiles)) * 32, 1, 2, processors)  # in 32s: few builds


@functools.cache
def _chosen(rows: int, num_out: int, num_in: int, processors: int, has_lora: bool) -> Config:
    measured = json.loads(Path(__file__).with_suffix(".json").read_text())["configs"]

    def distance(found: dict[str, Any]) -> float:
        other_out, other_in = found["shape"]
        return abs(math.log(num_out / other_out)) + abs(math.log(num_in / other_in))

    nearest = min((found for found in measured if found["rows"] == rows), key=distance)
    config = Config(*nearest["lora" if has_lora else "plain"])
    if nearest["shape"] == [num_out, num_in] and config.blocks <= processors:
        return config
    return replace(config, blocks=_grids(rows, num_out, config, processors)[-1])


def candidates(num_rows: int, num_out: int, processors: int) -> list[Config]:
    """Configurations worth a measurement for a shape, for `num_rows` of `ROWS`."""
    found = []
    for tile_rows in {num_rows, -(-num_rows // 16) * 8} if num_rows > 128 else {num_rows}:
        for slabs, warpgroups in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4)):
            if tile_rows * slabs > (256, 96, 64)[warpgroups - 2]:
                continue  # more registers than there are
            for shared_kib in (227, 113):  # the second leaves room for the next kernel to begin
                config = _deepest(tile_rows, slabs, warpgroups, processors, shared_kib)
                if config.shared_bytes > shared_kib * 1024:
                    continue
                for blocks in _grids(num_rows, num_out, config, processors):
                    found.append(replace(config, blocks=blocks))
    return list(dict.fromkeys(found))


def _deepest(rows: int, slabs: int, warpgroups: int, blocks: int, shared_kib: int = 227) -> Config:
    """With as many stages as fit, three at least."""
    config = Config(rows, slabs, warpgroups, 16, blocks)
    while config.stages > 3 and config.shared_bytes > shared_kib * 1024:
        config = replace(config, stages=config.stages - 1)
    return config


def _grids(num_rows: int, num_out: int, config: Config, processors: int) -> list[int]:
    """As many blocks as there are multiprocessors, and, for few tiles, as many as share each tile evenly."""
    tiles = -(-num_out // (TILE * config.slabs * config.warpgroups)) * -(-num_rows // config.rows)
    even = processors // tiles * tiles
    return [processors] if even in (0, processors) else [processors, even]


def _wgmma(rows: int) -> str:
    count = rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"((d)[{i}])' for i in range(count))
    return (
        "#define WGMMA(d, a, desc) asm volatile("
        f'"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, '
        f'{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, 1, 1, 1, 0;" : {outputs} : '
        '"r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(desc))\n'
    )


@functools.cache
def compiled(config: Config, rank: int) -> bytes:
    """The kernel's machine code for sm_90a. RuntimeError with the compiler's words if it does not compile."""
    defined = {
        "BM": config.rows, "MI": config.slabs, "WGS": config.warpgroups, "STAGES": config.stages, "RANK": rank,
    }  # fmt: skip
    return _compile("nvfp4_matmul", _wgmma(config.rows), [f"-D{name}={value}" for name, value in defined.items()])


def _compile(name: str, prelude: str = "", options: Sequence[str] = ()) -> bytes:
    from cuda.bindings import nvrtc

    source = prelude + (Path(__file__).parent / f"{name}.cu").read_text()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    flags = [flag.encode() for flag in ("--gpu-architecture=sm_90a", *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name}.cu does not compile: {log.decode().strip()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code: bytes = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _ok(result: tuple[Any, ...]) -> Any:
    """What a driver call returns; RuntimeError with the driver's name for what went wrong."""
    if result[0]:
        raise RuntimeError(f"the GPU driver refuses the NVFP4 product: {result[0].name}")
    return result[1] if len(result) > 1 else None


@functools.cache
def _function(config: Config, rank: int, device: int) -> Any:
    from cuda.bindings import driver

    function = _loaded("nvfp4_matmul", compiled(config, rank))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _ok(driver.cuFuncSetAttribute(function, limit, config.shared_bytes))
    return function


@functools.cache
def _untile_function(device: int) -> Any:
    return _loaded("nvfp4_untile", _compile("nvfp4_untile"))


def _loaded(name: str, code: bytes) -> Any:
    from cuda.bindings import driver

    return _ok(driver.cuModuleGetFunction(_ok(driver.cuModuleLoadData(code)), name.encode()))


_WORKSPACES: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _workspace(device: torch.device, num_floats: int) -> tuple[Tensor, Tensor]:
    """Partial sums and flags, shared by the calls of a device, which therefore belong on one stream."""
    partial, flag = _WORKSPACES.get(device, (None, None))
    if partial is None or flag is None or partial.numel() < num_floats:
        size = max(num_floats, 132 * 256 * 128)
        partial = torch.empty(size, dtype=torch.float32, device=device)
        flag = torch.zeros(1024, dtype=torch.int32, device=device)
        _WORKSPACES[device] = partial, flag
    return partial, flag


_TYPES = (None, *(ctypes.c_void_p,) * 7, *(ctypes.c_int,) * 5)


def _tensor_map(x_MK: Tensor, rows: int) -> Any:
    """How the copy engine finds x: boxes of `rows` x 64, zeros beyond its edges, in the tensor cores' swizzle."""
    from cuda.bindings import driver

    num_rows, num_cols = x_MK.shape
    sizes = [driver.cuuint64_t(num_cols), driver.cuuint64_t(num_rows)]
    strides = [driver.cuuint64_t(x_MK.stride(0) * 2)]
    box, steps = [driver.cuuint32_t(TILE), driver.cuuint32_t(rows)], [driver.cuuint32_t(1)] * 2
    return _ok(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x_MK.data_ptr(), sizes, strides, box, steps,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _launch(
    config: Config, x_MK: Tensor, weight: TiledWeight, y_MN: Tensor, h_MQ: Tensor | None, lora: Lora | None
) -> None:
    from cuda.bindings import driver

    device = x_MK.device
    partial, flag = _workspace(device, config.partial_floats)
    function = _function(config, 0 if lora is None else lora.rank, device.index or 0)
    first, second = (*(() if lora is None else lora.starts[1:]), 2**31 - 1, 2**31 - 1)[:2]
    values = (
        _tensor_map(x_MK, config.rows), weight.tiles_TUB.data_ptr(), y_MN.data_ptr(), weight.tensor_scale.data_ptr(),
        0 if h_MQ is None else h_MQ.data_ptr(), 0 if lora is None else lora.b_NR.data_ptr(),
        partial.data_ptr(), flag.data_ptr(),
        len(x_MK), weight.num_rows, weight.num_cols, first, second,
    )  # fmt: skip
    launch = driver.CUlaunchConfig()
    launch.gridDimX = min(config.blocks, config.num_steps(len(x_MK), weight.num_rows, weight.num_cols))
    launch.gridDimY = launch.gridDimZ = 1
    launch.blockDimX = 128 * (config.warpgroups + 1)
    launch.blockDimY = launch.blockDimZ = 1
    launch.sharedMemBytes = config.shared_bytes
    launch.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    overlap.value = value
    launch.attrs, launch.numAttrs = [overlap], 1
    _ok(driver.cuLaunchKernelEx(launch, function, (values, _TYPES), 0))


# x @ A^T

if triton is not None:

    @triton.jit
    def _shrink_kernel(
        x, a, h, partial, counter, M, K, x_stride, Q, K_SPLIT: tl.constexpr,
        ROWS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        # A block multiplies a stretch of K; the last of a tile's blocks adds the stretches up, in order.
        split, row_tile, rank_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        splits = tl.num_programs(0)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        out = rank_tile * RANK + tl.arange(0, RANK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        sums = tl.zeros((ROWS, RANK), tl.float32)
        for k in range(split * K_SPLIT, min(K, (split + 1) * K_SPLIT), STEP):
            col = k + tl.arange(0, STEP)
            x_tile = tl.load(
                x + row[:, None] * x_stride + col[None, :], mask=(row[:, None] < M) & (col[None, :] < K), other=0.0
            )
            a_tile = tl.load(a + out[:, None] * K + col[None, :], mask=col[None, :] < K, other=0.0)
            sums = tl.dot(x_tile, tl.trans(a_tile), sums)
        live = row[:, None] < M
        if splits == 1:
            tl.store(h + row[:, None] * Q + out[None, :], sums.to(tl.bfloat16), mask=live)
        else:
            place = row[:, None] * Q + out[None, :]
            tl.store(partial + split * M * Q + place, sums, mask=live)
            tl.debug_barrier()
            count = counter + row_tile * tl.num_programs(2) + rank_tile
            if tl.atomic_add(count, 1, sem="acq_rel") == splits - 1:
                sums = tl.zeros((ROWS, RANK), tl.float32)
                for other in range(splits):
                    sums += tl.load(partial + other * M * Q + place, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(h + place, sums.to(tl.bfloat16), mask=live)
                tl.store(count, 0)


_SHRINK: dict[torch.device, tuple[Tensor, Tensor]] = {}


def shrink(x_MK: Tensor, a_QK: Tensor) -> Tensor:
    """x @ A^T, bfloat16 [M, Q], on a GPU. The kernel that follows may start when this one has begun."""
    num_rows, num_cols = x_MK.shape
    if num_rows > 128:
        return torch.nn.functional.linear(x_MK, a_QK)
    num_out, device = len(a_QK), x_MK.device
    h_MQ = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device=device)
    rows = 16
    rank = 32 if num_out % 32 == 0 else 16
    row_tiles, rank_tiles = -(-num_rows // rows), num_out // rank
    wanted = max(1, min(-(-num_cols // 256), 132 // (row_tiles * rank_tiles)))
    split = -(-num_cols // wanted // 128) * 128
    splits = -(-num_cols // split)
    partial, counter = _SHRINK.get(device, (None, None))
    if partial is None or counter is None or partial.numel() < splits * h_MQ.numel():
        partial = torch.empty(max(2**22, splits * h_MQ.numel()), dtype=torch.float32, device=device)
        counter = torch.zeros(4096, dtype=torch.int32, device=device)
        _SHRINK[device] = partial, counter
    kernel: Any = _shrink_kernel
    kernel[(splits, row_tiles, rank_tiles)](
        x_MK, a_QK, h_MQ, partial, counter, num_rows, num_cols, x_MK.stride(0), num_out, K_SPLIT=split,
        ROWS=rows, RANK=rank, STEP=128, num_warps=4, num_stages=2, launch_pdl=True,
    )  # fmt: skip
    return h_MQ
