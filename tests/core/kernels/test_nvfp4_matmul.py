"""M = rows of x, N = out features, K = in features."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qerl_core.kernels import nvfp4_dequant, nvfp4_matmul
from qerl_core.kernels.nvfp4_matmul import (
    Config,
    Lora,
    TiledWeight,
    candidates,
    choose,
    matmul,
    reference,
    tile,
    untile,
)

IS_HOPPER = torch.cuda.is_available() and nvfp4_matmul.is_supported(torch.device("cuda", 0))
GPU = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU")]
SHAPES = [(64, 64), (128, 192), (100, 80), (1, 16), (65, 16), (576, 1536), (0, 32), (64, 0)]
CONFIGS = [
    Config(8, 1, 2, 8, 132), Config(16, 1, 3, 6, 120), Config(32, 2, 4, 4, 132), Config(64, 2, 2, 6, 132),
    Config(128, 1, 2, 4, 132), Config(128, 2, 2, 4, 132), Config(256, 1, 2, 4, 132), Config(64, 1, 3, 5, 7),
]  # fmt: skip


def random_weight(num_rows: int, num_cols: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Every code and every finite positive scale may come up."""
    packed = torch.randint(256, (num_rows, num_cols // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(1, 127, (num_rows, num_cols // 16), dtype=torch.uint8, device=device)
    return packed, scale.view(torch.float8_e4m3fn), torch.tensor(3e-4, device=device)


def random_lora(num_out: int, num_in: int, rank: int, starts: tuple[int, ...], device: str = "cpu") -> Lora:
    a = torch.randn(len(starts) * rank, num_in, device=device).bfloat16() / max(1, num_in) ** 0.5
    return Lora(a, torch.randn(num_out, rank, device=device).bfloat16(), starts)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_tiles_hold_a_weight_to_the_bit(num_rows, num_cols):
    torch.manual_seed(0)
    packed, scale, tensor_scale = random_weight(num_rows, num_cols)

    back = untile(tile(packed, scale, tensor_scale))

    assert torch.equal(back[0], packed)
    assert torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))


def test_tiles_take_no_more_memory_than_the_weight():
    packed, scale, tensor_scale = random_weight(128, 256)

    tiles = tile(packed, scale, tensor_scale).tiles_TUB

    assert tiles.numel() == packed.numel() + scale.numel()


def test_a_block_under_a_zero_scale_becomes_zeros():
    packed = torch.full((64, 32), 0x77, dtype=torch.uint8)
    scale = torch.ones(64, 4).to(torch.float8_e4m3fn)
    scale[3, 1] = 0

    codes, scales = untile(tile(packed, scale, torch.tensor(1.0)))

    decoded = nvfp4_dequant.reference(codes, scales, torch.tensor(1.0), torch.float32)
    assert torch.equal(decoded, nvfp4_dequant.reference(packed, scale, torch.tensor(1.0), torch.float32))


def test_the_masks_and_shifts_of_the_kernel_find_each_weight_in_its_thread():
    # What nvfp4_matmul.cu does with a word, step by step, in whole numbers.
    torch.manual_seed(0)
    packed, scale, _ = random_weight(64, 64)
    one = torch.tensor(1.0)
    tiles = tile(packed, scale, one).tiles_TUB[0, 0]
    words = tiles[:2048].view(torch.int32).view(4, 32, 4).long() & 0xFFFFFFFF
    scales = tiles[2048:].view(4, 8, 2, 2, 2).long()
    mask = 0x81C081C0
    found = torch.zeros(64, 64, dtype=torch.float64)

    def as_bfloat16(bits: int) -> float:
        signed = (bits & 0xFFFF) - (bits >> 15 & 1) * 65536
        return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).double().item()

    for warp in range(4):
        for lane in range(32):
            g, t = lane >> 2, lane & 3
            for step in range(4):
                word = int(words[warp, lane, step])
                rest = (word << 1 & 0x80008000) | (word >> 3 & 0x01800180) | (word >> 7 & 0x00400040)
                registers = [word & mask, word << 3 & mask, word << 6 & mask, rest]
                for number, register in enumerate(registers):
                    row = warp * 16 + (number & 1) * 8 + g
                    factor = as_bfloat16(int(scales[warp, g, step >> 1, number & 1, step & 1]) * 16 + 236 * 128)
                    for parity in range(2):
                        column = step * 16 + (number >> 1) * 8 + 2 * t + parity
                        found[row, column] = as_bfloat16(register >> 16 * parity) * factor * 128

    assert torch.equal(found.float(), nvfp4_dequant.reference(packed, scale, one, torch.float32))


def test_the_scales_of_the_tiles_are_the_numbers_of_the_blocks():
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)

    code = nvfp4_matmul._scale_codes()[1:].int()

    assert torch.equal((1 + (code & 7) / 8) * torch.exp2((code >> 3).float() - 10), scale.float())


@pytest.mark.skipif(IS_HOPPER, reason="here the kernel runs")
def test_without_a_hopper_gpu_the_definition_runs():
    torch.manual_seed(0)
    packed, scale, tensor_scale = random_weight(128, 64)
    x, lora = torch.randn(5, 64), random_lora(128, 64, 16, (0, 64))

    y = matmul(x, tile(packed, scale, tensor_scale), lora)

    assert torch.equal(y, reference(x, packed, scale, tensor_scale, lora))


def test_lora_of_fused_layers_is_that_of_each_alone():
    torch.manual_seed(0)
    packed, scale, tensor_scale = random_weight(192, 64)
    x, lora = torch.randn(3, 64), random_lora(192, 64, 16, (0, 64, 128))

    y = reference(x, packed, scale, tensor_scale, lora)

    for i, rows in enumerate([slice(0, 64), slice(64, 128), slice(128, 192)]):
        own = Lora(lora.a_QK[16 * i : 16 * i + 16], lora.b_NR[rows])
        alone = reference(x, packed[rows], scale[rows], tensor_scale, own)
        torch.testing.assert_close(y[:, rows], alone)


def fitting() -> tuple[Tensor, TiledWeight, Lora]:
    return torch.randn(2, 64), tile(*random_weight(128, 64)), random_lora(128, 64, 16, (0, 64))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, w, lora: (x[:, :32].contiguous(), w, lora),
        lambda x, w, lora: (x[0], w, lora),
        lambda x, w, lora: (x.T.contiguous().T, w, lora),
        lambda x, w, lora: (x, w, replace(lora, starts=(0, 32))),
        lambda x, w, lora: (x, w, replace(lora, starts=(0,))),
        lambda x, w, lora: (x, w, replace(lora, b_NR=lora.b_NR[:64])),
        lambda x, w, lora: (x, w, random_lora(128, 64, 8, (0, 64))),
    ],
)
def test_what_does_not_fit_together_is_refused(spoil):
    with pytest.raises(ValueError, match=r"."):
        matmul(*spoil(*fitting()))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rank", [0, 16, 64])
def test_the_kernel_compiles_for_hopper(config, rank):
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA bindings are not installed")

    code = nvfp4_matmul.compiled(config, rank)

    assert code[:4] == b"\x7fELF"
    assert b"nvfp4_matmul" in code


def test_every_measured_configuration_fits_a_multiprocessor():
    for num_out, num_in in [(4608, 3584), (37888, 3584), (5120, 27648), (576, 576), (64, 64)]:
        for rows in nvfp4_matmul.ROWS:
            config = nvfp4_matmul._chosen(rows, num_out, num_in, 132, rows > 64)
            assert config.shared_bytes <= 227 * 1024
            assert 1 <= config.blocks <= 132


class TestOnHopper:
    pytestmark = GPU

    @pytest.fixture(autouse=True)
    def _poisoned_memory(self):
        # Uninitialized memory becomes NaN, so that what a kernel forgets to write is seen.
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize(
        ("num_rows", "num_out", "num_in"),
        [(1, 128, 128), (7, 100, 80), (8, 512, 256), (37, 4608, 3584), (300, 1000, 528), (16, 64, 18944), (3, 1, 16)],
    )
    def test_equals_the_definition_to_one_rounding_the_same_in_every_run(self, config, num_rows, num_out, num_in):
        weight = random_weight(num_out, num_in, "cuda")
        x = torch.randn(num_rows, num_in, device="cuda").bfloat16()
        tiled = tile(*weight)

        y, again = (matmul(x, tiled, config=config) for _ in range(2))

        assert relative_error(y, reference(x, *weight)) < 2.5e-3  # bfloat16 rounds to 2^-9 at most
        assert torch.equal(y, again)

    @pytest.mark.parametrize("config", CONFIGS)
    @pytest.mark.parametrize("rank", [16, 32, 64])
    def test_adds_the_lora_of_fused_layers(self, config, rank):
        weight = random_weight(1024, 512, "cuda")
        x = torch.randn(21, 512, device="cuda").bfloat16()
        for starts in [(0,), (0, 512), (0, 512, 768)]:
            lora = random_lora(1024, 512, rank, starts, "cuda")
            lora = replace(lora, b_NR=lora.b_NR * 0.3)

            y = matmul(x, tile(*weight), lora, config=config)

            assert relative_error(y, reference(x, *weight, lora)) < 2.5e-3

    @pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 16, 31, 33, 64, 65, 127, 129, 200, 256, 257, 511, 513, 4100])
    @pytest.mark.parametrize(("num_out", "num_in"), [(4608, 3584), (3584, 18944)])
    def test_the_chosen_configuration_is_right_for_every_number_of_rows(self, num_rows, num_out, num_in):
        weight = random_weight(num_out, num_in, "cuda")
        x = torch.randn(num_rows, num_in, device="cuda").bfloat16()
        lora = random_lora(num_out, num_in, 32, (0,), "cuda")

        y = matmul(x, tile(*weight), lora)

        assert y.shape == (num_rows, num_out)
        assert not num_rows or relative_error(y, reference(x, *weight, lora)) < 2.5e-3

    @pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
    def test_tiles_decode_to_the_bits_of_the_definition(self, num_rows, num_cols):
        weight = random_weight(num_rows, num_cols, "cuda")

        decoded = nvfp4_matmul.decode(tile(*weight))

        wanted = nvfp4_dequant.reference(*weight, torch.bfloat16)
        assert torch.equal(decoded.view(torch.int16), wanted.view(torch.int16))

    def test_large_and_tiny_inputs_keep_their_range(self):
        weight = random_weight(256, 256, "cuda")
        x = torch.randn(4, 256, device="cuda").bfloat16()
        tiled = tile(*weight)

        for factor in (2.0**40, 2.0**-60):
            y = matmul(x * factor, tiled)
            assert relative_error(y / factor, reference(x, *weight)) < 2.5e-3

    def test_a_row_that_is_not_finite_spoils_no_other(self):
        weight = random_weight(256, 256, "cuda")
        x = torch.randn(4, 256, device="cuda").bfloat16()
        x[1, 7] = torch.nan

        y = matmul(x, tile(*weight))

        others = torch.tensor([0, 2, 3], device="cuda")
        assert y[1].isnan().all()
        assert relative_error(y[others], reference(x[others], *weight)) < 2.5e-3

    def test_rows_of_a_wider_tensor_are_taken_where_they_lie(self):
        weight = random_weight(256, 128, "cuda")
        wide = torch.randn(6, 512, device="cuda").bfloat16()

        y = matmul(wide[:, 128:256], tile(*weight))

        assert relative_error(y, reference(wide[:, 128:256], *weight)) < 2.5e-3

    def test_a_captured_graph_replays_it_on_new_inputs(self):
        weight, other = random_weight(4608, 3584, "cuda"), random_weight(3584, 4608, "cuda")
        first, second = tile(*weight), tile(*other)
        lora = random_lora(4608, 3584, 32, (0, 3584, 4096), "cuda")
        x = torch.randn(5, 3584, device="cuda").bfloat16()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            matmul(matmul(x, first, lora), second)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = matmul(matmul(x, first, lora), second)

        for _ in range(3):
            x.normal_()
            graph.replay()
            wanted = reference(reference(x, *weight, lora).bfloat16(), *other)
            assert relative_error(y, wanted) < 4e-3

    def test_a_shape_that_was_measured_gets_what_was_measured(self):
        config = choose(8, 37888, 3584, torch.device("cuda", 0), has_lora=True)

        assert config in candidates(8, 37888, 132)
