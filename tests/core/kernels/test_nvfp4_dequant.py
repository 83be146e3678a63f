"""N = out features, K = in features, J = K / 2 bytes, S = K / 16 blocks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_core.kernels import nvfp4_dequant
from qerl_core.kernels.nvfp4_dequant import dequantize, reference

BY_HAND = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SHAPES = [(1, 16), (3, 48), (129, 4096), (20_000, 16), (0, 32), (4, 0)]
WITHOUT_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_GPU])]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    # Uninitialized memory becomes NaN, so that what a kernel forgets to write is seen.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0 from 0."""
    return a.dtype == b.dtype and torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def random_weight(num_rows: int, num_cols: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Every byte and every finite scale may come up."""
    torch.manual_seed(0)
    packed_NJ = torch.randint(256, (num_rows, num_cols // 2), dtype=torch.uint8)
    scale_NS = torch.randint(127, (num_rows, num_cols // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return packed_NJ.to(device), scale_NS.to(device), torch.tensor(3e-4, device=device)


@pytest.mark.parametrize("path", [reference, dequantize])
def test_every_code_has_its_value_and_the_low_nibble_comes_first(path):
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    scale = torch.ones(32, 1).to(torch.float8_e4m3fn)

    out = path(packed, scale, torch.tensor(1.0), torch.float32)

    by_hand = [BY_HAND[nibble] for byte in range(256) for nibble in (byte % 16, byte // 16)]
    assert same_bits(out, torch.tensor(by_hand).view(32, 16))


def test_block_and_tensor_scale_multiply_by_hand():
    packed = torch.full((1, 16), 0xF2, dtype=torch.uint8)  # 1 and -6
    scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)

    out = dequantize(packed, scale, torch.tensor(0.25), torch.float32)

    assert out.tolist() == [[0.5, -3.0] * 8 + [0.125, -0.75] * 8]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_the_fast_path_equals_the_reference(num_rows, num_cols, dtype, device):
    weight = random_weight(num_rows, num_cols, device)

    out = dequantize(*weight, dtype)

    assert same_bits(out, reference(*weight, dtype))


@settings(deadline=None, max_examples=50)
@given(
    codes=st.binary(min_size=24, max_size=24),
    scales=st.lists(st.integers(0, 126), min_size=3, max_size=3),
    tensor_scale=st.floats(2.0**-100, 2.0**100, width=32),
)
def test_the_fast_path_equals_the_reference_at_any_scale(codes, scales, tensor_scale):
    packed = torch.tensor(list(codes), dtype=torch.uint8).view(1, 24)
    scale = torch.tensor([scales], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = packed, scale, torch.tensor(tensor_scale)

    assert same_bits(dequantize(*weight, torch.float32), reference(*weight, torch.float32))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (0, lambda packed: packed.to(torch.int32), "uint8"),
        (0, lambda packed: packed.flatten(), "uint8 matrix"),
        (0, lambda packed: packed[:, :-1].contiguous(), "do not fit"),
        (0, lambda packed: packed[:2], "do not fit"),
        (0, lambda packed: packed.t().contiguous().t(), "contiguous"),
        (0, lambda packed: packed.to("meta"), "different devices"),
        (1, lambda scale: scale[:, :-1], "do not fit"),
        (1, lambda scale: scale.float(), "float8_e4m3fn"),
        (2, lambda scale: scale.double(), "one float32"),
        (2, lambda scale: scale.expand(2), "one float32"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(part, change, message):
    weight = list(random_weight(3, 48))
    weight[part] = change(weight[part])

    with pytest.raises(ValueError, match=message):
        dequantize(*weight, torch.float32)


def test_weights_decode_to_floats_only():
    with pytest.raises(ValueError, match="floating point"):
        dequantize(*random_weight(1, 16), torch.int8)


def test_the_kernel_equals_the_reference_in_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from qerl_core.kernels.nvfp4_dequant import _decode_by_kernel, reference
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
for rows, cols in [(1, 16), (3, 48), (129, 512), (0, 32)]:
    packed = torch.randint(256, (rows, cols // 2), dtype=torch.uint8)
    scale = torch.randint(127, (rows, cols // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = packed, scale, torch.tensor(3e-4), torch.float32
    wanted = reference(*weight).view(torch.int32)
    assert torch.equal(_decode_by_kernel(*weight).view(torch.int32), wanted), (rows, cols)
    on_ampere = packed, scale.view(torch.uint8), *weight[2:]
    assert torch.equal(_decode_by_kernel(*on_ampere).view(torch.int32), wanted), (rows, cols)
every = torch.arange(256, dtype=torch.uint8)[:, None]  # NaN twice, subnormals, both zeros
packed = torch.full((256, 8), 0x21, dtype=torch.uint8)
wanted = reference(packed, every.view(torch.float8_e4m3fn), torch.tensor(3e-4), torch.float32)
found = _decode_by_kernel(packed, every, torch.tensor(3e-4), torch.float32)
assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().sum() == 32
assert torch.equal(found.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))
"""
    # The decorator reads the variable when the module is imported, so a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("out", ["*fp32", "*bf16"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_ampere_hopper_and_blackwell(capability, out, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {
        "packed": "*i64",
        "block_scale": "*u8" if capability < 89 else "*fp8e4nv",
        "tensor_scale": "*fp32",
        "out": out,
        "num_blocks": "i32",
        "BLOCKS": "constexpr",
    }
    source = triton.compiler.ASTSource(nvfp4_dequant._dequantize_kernel, signature, {"BLOCKS": 128})

    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})

    assert f"sm_{capability}" in compiled.asm["ptx"]
