"""N = out features, K = in features, J = K / 2 bytes, S = K / 16 blocks."""

import math

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_core.errors import BadCheckpoint
from qerl_core.quant.nvfp4 import NVFP4Weight, encode_scale, quantize, shared_amax, shared_tensor_scale

ONE = torch.tensor(1.0)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where two values are equally near: the codes of the float just below, of the tie itself, of the float just above.
TIES = {
    0.25: [0, 0, 1], 0.75: [1, 2, 2], 1.25: [2, 2, 3], 1.75: [3, 4, 4], 2.5: [4, 4, 5], 3.5: [5, 6, 6], 5.0: [6, 6, 7],
}  # fmt: skip
# The library's preset NVFP4A16.
WEIGHTS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False,
    scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
)  # fmt: skip
SCHEME = QuantizationScheme(targets=["Linear"], weights=WEIGHTS, format="nvfp4-pack-quantized")


def codes(weight: NVFP4Weight) -> list[list[int]]:
    """One code a column."""
    return torch.stack((weight.packed_NJ & 0xF, weight.packed_NJ >> 4), dim=-1).flatten(1).tolist()


def in_a_block_of_scale_one(*values: float) -> Tensor:
    """A row whose largest value is 6, so that with tensor scale 1 its block scale is 1."""
    return torch.tensor([[*values, *[6.0] * (16 - len(values))]])


def library_global_scale(weight_NK: Tensor) -> Tensor:
    return generate_gparam(weight_NK.min(), weight_NK.max())


def library_compress(weight_NK: Tensor, global_scale: Tensor) -> dict[str, Tensor]:
    """What compressed-tensors writes for a weight and its global scale."""
    blocks = weight_NK.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), WEIGHTS, global_scale=global_scale)
    state = {"weight": weight_NK, "weight_scale": scale, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def library_decompress(packed_NJ: Tensor, block_scale_NS: Tensor, global_scale: Tensor) -> Tensor:
    state = {"weight_packed": packed_NJ, "weight_scale": block_scale_NS, "weight_global_scale": global_scale}
    return NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]


def hard_weights() -> dict[str, Tensor]:
    """Random matrices, and the corners of the format."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 256, generator=generator)
    heavy = normal**5
    corners = normal.clone()
    corners[0] = 0.0
    corners[1] = -0.0
    corners[2, :16] = 1e-9  # scale underflows to zero
    corners[2, 16:32] = -1e-9
    corners[3, :16] *= 2**-12  # scale among E4M3's subnormal numbers
    corners[4, :16] = torch.linspace(-1e-38, 1e-38, 16)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return {
        "normal": normal, "small": normal * 0.02, "heavy": heavy, "corners": corners,
        "as bf16": normal.bfloat16().float(), "ties": torch.stack((ties, -ties, ties / 3, -ties * 7)),
        "zero": torch.zeros(2, 32), "one": torch.ones(1, 16),
    }  # fmt: skip


HARD = hard_weights()


@pytest.mark.parametrize("sign", [1, -1])
def test_every_value_gets_its_own_code(sign):
    weight = in_a_block_of_scale_one(*(sign * value for value in VALUES))

    quantized = quantize(weight, tensor_scale=ONE)

    assert codes(quantized)[0][:8] == [code if sign == 1 or code == 0 else code + 8 for code in range(8)]
    assert torch.equal(quantized.decode(torch.float32), weight)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tie", TIES)
def test_a_tie_goes_to_the_even_code_and_its_neighbours_to_their_own(tie, sign):
    below, above = (torch.nextafter(torch.tensor(tie), torch.tensor(to)).item() for to in (0.0, 9.0))

    quantized = quantize(in_a_block_of_scale_one(*(sign * x for x in (below, tie, above))), tensor_scale=ONE)

    assert codes(quantized)[0][:3] == [code + (8 if sign == -1 else 0) for code in TIES[tie]]


def test_a_block_by_hand():
    # amax 12, so s_enc = 2688 / 12 = 224; block scales 12 / 6 * 224 = 448 and 0.6 / 6 * 224 = 22.4 -> 22 (E4M3)
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([12.0, -3.0, 1.0, 0.4])
    weight[0, 16:19] = torch.tensor([0.6, -0.3, 0.02])

    quantized = quantize(weight)

    assert quantized.tensor_scale.item() == pytest.approx(1 / 224)
    assert quantized.block_scale_NS.float().tolist() == [[448.0, 22.0]]
    # in units of 2: 6, -1.5, 0.5, 0.2; in units of 22 / 224: 6.1, -3.05, 0.2
    assert codes(quantized)[0][:4] == [7, 8 + 3, 1, 0]
    assert codes(quantized)[0][16:19] == [7, 8 + 5, 0]
    assert quantized.decode(torch.float32)[0, :4].tolist() == pytest.approx([12.0, -3.0, 1.0, 0.0])


@pytest.mark.parametrize("name", HARD)
def test_what_the_library_writes_is_what_we_write_bit_for_bit(name):
    global_scale = library_global_scale(HARD[name])
    theirs = library_compress(HARD[name], global_scale)

    ours = quantize(HARD[name])

    assert torch.equal(ours.packed_NJ, theirs["weight_packed"])
    assert torch.equal(ours.block_scale_NS.float(), theirs["weight_scale"].float())
    assert torch.equal(ours.tensor_scale, (1 / global_scale)[0])


@pytest.mark.parametrize("scale", [2.0**-9, 1e-4, 3.7e-3, 0.5])
def test_with_a_given_tensor_scale_we_write_what_the_library_writes(scale):
    tensor_scale = torch.tensor(scale)
    theirs = library_compress(HARD["heavy"], (1 / tensor_scale).reshape(1))

    ours = quantize(HARD["heavy"], tensor_scale=tensor_scale)

    assert torch.equal(ours.packed_NJ, theirs["weight_packed"])
    assert torch.equal(ours.block_scale_NS.float(), theirs["weight_scale"].float())


@pytest.mark.parametrize("name", HARD)
def test_the_library_decodes_what_we_write_to_the_same_bfloat16(name):
    ours = quantize(HARD[name])

    theirs = library_decompress(ours.packed_NJ, ours.block_scale_NS, (1 / ours.tensor_scale).reshape(1))

    assert torch.equal(ours.decode(torch.bfloat16), theirs)


@pytest.mark.parametrize("name", HARD)
def test_we_decode_what_the_library_writes_to_the_same_bfloat16(name):
    global_scale = library_global_scale(HARD[name])
    theirs = library_compress(HARD[name], global_scale)
    decoded = library_decompress(theirs["weight_packed"], theirs["weight_scale"], global_scale)

    ours = NVFP4Weight(theirs["weight_packed"], theirs["weight_scale"], (1 / global_scale)[0])

    assert torch.equal(ours.decode(torch.bfloat16), decoded)


def test_in_float32_dividing_by_the_global_scale_gives_what_multiplying_gives_to_two_units_in_the_last_place():
    ours = quantize(HARD["heavy"])
    divided = ours.block_scale_NS.float() / (1 / ours.tensor_scale)

    unscaled = NVFP4Weight(ours.packed_NJ, torch.ones_like(ours.block_scale_NS.float()).to(torch.float8_e4m3fn), ONE)
    theirs = unscaled.decode(torch.float32) * divided.repeat_interleave(16, dim=-1)

    assert torch.allclose(ours.decode(torch.float32), theirs, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_type_is_rounded_as_the_same_float32(dtype):
    weight = HARD["normal"].to(dtype)

    ours, expected = quantize(weight), quantize(weight.float())

    assert torch.equal(ours.packed_NJ, expected.packed_NJ)
    assert torch.equal(ours.block_scale_NS.float(), expected.block_scale_NS.float())
    assert torch.equal(ours.tensor_scale, expected.tensor_scale)


def test_a_matrix_is_rounded_row_by_row_and_however_it_lies_in_memory():
    weight = HARD["normal"].repeat(40, 1)  # more rows than are worked on at once
    amax = weight.abs().amax()

    whole, rows = quantize(weight), [quantize(row[None], amax=amax) for row in weight[:3]]
    strided = quantize(weight.t().contiguous().t())

    assert torch.equal(whole.packed_NJ[:3], torch.cat([row.packed_NJ for row in rows]))
    assert torch.equal(whole.packed_NJ[-64:], whole.packed_NJ[:64])
    assert torch.equal(whole.packed_NJ, strided.packed_NJ)


def test_a_parameter_is_quantized_without_a_graph():
    quantized = quantize(torch.nn.Parameter(torch.ones(2, 16)))

    assert not quantized.decode(torch.float32).requires_grad


def test_quantizing_twice_changes_nothing():
    once = quantize(HARD["small"])

    twice = quantize(once.decode(torch.float32), tensor_scale=once.tensor_scale)

    assert torch.equal(once.decode(torch.float32), twice.decode(torch.float32))
    assert torch.equal(once.block_scale_NS.float(), twice.block_scale_NS.float())


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=32, max_size=32))
def test_the_error_is_at_most_a_sixth_of_the_blocks_largest_weight(values):
    weight = torch.tensor([values])

    error = (quantize(weight).decode(torch.float64) - weight.double()).abs().view(2, 16)

    # Half of the widest gap is amax / 6, a sixteenth more where E4M3 rounds up; a scale below E4M3's normal numbers
    # may be off by half its last place, 2^-10, or vanish: six times that in units of the tensor scale.
    amax = weight.abs().view(2, 16).amax(-1, keepdim=True).double()
    assert (error <= amax / 6 * (1 + 1 / 16) * (1 + 1e-6) + amax.max() / 2688 * 6 * 2**-10).all()


@settings(deadline=None, max_examples=30)
@given(
    values=st.lists(st.floats(-100, 100, width=32, allow_subnormal=False), min_size=16, max_size=16),
    power=st.integers(-20, 20),
)
def test_a_power_of_two_moves_into_the_tensor_scale(values, power):
    weight = torch.tensor([values])
    quantized, scaled = quantize(weight), quantize(weight * 2.0**power)

    if weight.abs().max() * 2.0 ** min(power, 0) > 1e-30:
        assert torch.equal(scaled.tensor_scale, quantized.tensor_scale * 2.0**power)
        assert torch.equal(scaled.packed_NJ, quantized.packed_NJ)
        assert torch.equal(scaled.block_scale_NS.float(), quantized.block_scale_NS.float())


@settings(deadline=None, max_examples=30)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=16))
def test_the_negative_of_a_matrix_decodes_to_the_negative(values):
    weight = torch.tensor([values])

    assert torch.equal(quantize(-weight).decode(torch.float32), -quantize(weight).decode(torch.float32))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -3e-36])
def test_a_matrix_of_almost_nothing_becomes_zeros(value):
    quantized = quantize(torch.full((3, 32), value))

    assert quantized.tensor_scale.item() == 1.0
    assert quantized.block_scale_NS.float().eq(0.125).all()
    assert not quantized.decode(torch.float32).any()


@pytest.mark.parametrize("amax", [4e-35, 1e-20, 1e20, 3e38])
def test_very_small_and_very_large_matrices_keep_their_size(amax):
    decoded = quantize(torch.full((1, 16), amax)).decode(torch.float32)

    assert decoded[0, 0].item() == pytest.approx(amax, rel=1e-6)


def test_a_block_too_small_for_a_scale_becomes_zeros():
    weight = torch.ones(1, 32)
    weight[0, 16:] = -1e-9

    quantized = quantize(weight)

    assert quantized.block_scale_NS[0, 1].float() == 0.125
    assert quantized.decode(torch.float32)[0, 16:].eq(0).all()


def test_weights_beyond_a_given_scale_saturate():
    quantized = quantize(torch.tensor([[1e6, -1e6, *[1.0] * 14]]), tensor_scale=ONE)

    assert quantized.block_scale_NS.float().tolist() == [[448.0]]
    assert quantized.decode(torch.float32)[0, :2].tolist() == [2688.0, -2688.0]


def test_matrices_that_share_a_scale_take_that_of_the_largest_weight():
    small, large = torch.full((1, 16), 0.5), torch.full((2, 32), -4.0)

    scale = shared_tensor_scale([small, large])

    assert torch.equal(scale, quantize(large).tensor_scale)
    assert torch.equal(scale, quantize(small, amax=shared_amax([small, large])).tensor_scale)
    assert quantize(small, tensor_scale=scale).decode(torch.float32)[0, 0] == pytest.approx(0.5, rel=1e-6)


def test_the_encode_scale_is_448_times_6_over_amax():
    assert encode_scale(torch.tensor(6.0)).item() == 448.0
    assert encode_scale(torch.tensor(0.0)).item() == 1.0


@pytest.mark.parametrize("shape", [(0, 16), (0, 0), (3, 0), (1, 16), (7, 48)])
def test_odd_and_empty_shapes_keep_their_shape(shape):
    quantized = quantize(torch.ones(shape))

    assert quantized.shape == shape
    assert quantized.block_scale_NS.shape == (shape[0], shape[1] // 16)
    assert torch.allclose(quantized.decode(torch.float32), torch.ones(shape))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((2, 16), math.nan), "holds nan"),
        (torch.tensor([[1.0] * 15 + [math.inf]]), "holds inf"),
        (torch.tensor([[1.0] * 15 + [-math.inf]]), "holds inf"),
        (torch.full((1, 16), 1e300, dtype=torch.float64), "holds inf"),
        (torch.ones(2, 24), "multiple of 16 input features, not 24"),
        (torch.ones(2, 16, dtype=torch.int8), "int8"),
        (torch.ones(2, 16).to(torch.float8_e4m3fn), "float8"),
        (torch.ones(16), "matrix"),
        (torch.ones(1, 2, 16), "matrix"),
    ],
)
def test_a_matrix_that_cannot_be_quantized_is_a_bad_checkpoint_that_names_it(weight, message):
    with pytest.raises(BadCheckpoint, match=f"layers.3.q_proj.weight: .*{message}") as caught:
        quantize(weight, name="layers.3.q_proj.weight")

    assert caught.value.code == "bad_checkpoint"


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_a_tensor_scale_that_scales_nothing_is_refused(scale):
    with pytest.raises(ValueError, match="tensor scale is finite"):
        quantize(torch.ones(1, 16), tensor_scale=torch.tensor(scale))


@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones((), dtype=torch.float64)])
def test_a_tensor_scale_is_one_float32(scale):
    with pytest.raises(ValueError, match="one float32"):
        quantize(torch.ones(1, 16), tensor_scale=scale)


def test_a_tensor_scale_and_an_amax_are_one_too_many():
    with pytest.raises(ValueError, match="not both"):
        quantize(torch.ones(1, 16), tensor_scale=ONE, amax=ONE)


def block(*values: float) -> Tensor:
    """One block, filled up with its last value."""
    return torch.tensor([[*values, *values[-1:] * (16 - len(values))]])


ONE = torch.tensor(1.0)  # a tensor scale, so that block scales are seen as they are


@pytest.mark.parametrize(
    ("weights", "method", "scale"),
    [
        (block(6.0, 4.8), "rtn", 1.0),
        (block(6.0, 4.8), "four_over_six", 1.5),  # 4.8 is 3 * 1.5 + 0.3; under 1.0 it is 4 + 0.8
        (block(6.0, 4.0), "four_over_six", 1.0),  # exact as it is
        (block(6.0, 5.2), "four_over_six", 1.5),  # 5.2 is 3 * 1.5 + 0.7; under 1.0 it is 6 - 0.8
        (block(6.0, 5.2), "sweep", 0.875),  # 5.2 is 6 * 0.875 - 0.05, for 0.75 of the one largest
    ],
)
def test_methods_choose_the_scale_that_loses_least_by_hand(weights, method, scale):
    assert quantize(weights, tensor_scale=ONE, method=method).block_scale_NS.float().item() == scale


@pytest.mark.parametrize("method", ["four_over_six", "sweep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_block_loses_more_than_by_rounding_to_nearest_under_the_same_tensor_scale(method, dtype):
    torch.manual_seed(0)
    weights = (torch.randn(300, 96) * torch.rand(300, 1)).to(dtype)
    scale = 1 / encode_scale(weights.abs().amax(), method=method)

    def loss(chosen) -> Tensor:
        error = quantize(weights, tensor_scale=scale, method=chosen).decode(torch.float32) - weights.float()
        return error.view(300, -1, 16).square().sum(-1)

    assert (loss(method) <= loss("rtn") * (1 + 1e-5)).all()
    assert loss(method).sum() < 0.95 * loss("rtn").sum()


def test_the_sweep_loses_no_more_than_four_over_six():
    torch.manual_seed(0)
    weights = torch.randn(100, 64)

    def loss(method) -> float:
        return (quantize(weights, method=method).decode(torch.float32) - weights).norm().item()

    assert loss("sweep") < loss("four_over_six") < loss("rtn")


@pytest.mark.parametrize("method", ["four_over_six", "sweep"])
@pytest.mark.parametrize("weights", [torch.zeros(2, 32), torch.full((2, 32), 1e-30), torch.full((1, 16), 3e38)])
def test_methods_survive_the_edges_of_float32_and_e4m3(method, weights):
    found = quantize(weights, method=method)

    decoded = found.decode(torch.float32)
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, weights, rtol=0.05, atol=0)
    assert (found.block_scale_NS.float() > 0).all()
