"""N = out features, K = in features, T = tokens, B = the 16 of a block."""

import pytest
import torch
from torch import Tensor

from qerl_core.errors import BadCheckpoint
from qerl_core.kernels.nvfp4_dequant import E2M1
from qerl_core.quant.gptq import SCALES, _refine, _round, damped_and_factor, quantize_calibrated
from qerl_core.quant.nvfp4 import candidate_scales, encode_scale, largest_magnitude, quantize

VALUES = torch.tensor([sign * value for value in E2M1 for sign in (1, -1)], dtype=torch.float64)


def correlated(num_cols: int, *, seed: int, num_tokens: int = 400, dead: int = 0) -> Tensor:
    """X^T X / T of inputs that share a few directions, of sizes that differ a hundredfold; the first ones are dead."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(num_tokens, 5, generator=generator) @ torch.randn(5, num_cols, generator=generator)
    input_TK = shared + 0.3 * torch.randn(num_tokens, num_cols, generator=generator)
    input_TK *= 10 ** torch.empty(num_cols).uniform_(-1, 1, generator=generator)
    input_TK[:, :dead] = 0
    return input_TK.T @ input_TK / num_tokens


def random_weight(num_rows: int, num_cols: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(seed)) * 0.05


def output_error(decoded_NK: Tensor, weight_NK: Tensor, hessian_KK: Tensor) -> float:
    error_NK = (decoded_NK - weight_NK).double()
    return ((error_NK @ hessian_KK.double()) * error_NK).sum().item()


def calibrated(weight_NK: Tensor, hessian_KK: Tensor) -> Tensor:
    made, _ = quantize_calibrated({"w": weight_NK}, hessian_KK)
    return made["w"].decode(torch.float32)


def test_what_one_column_loses_its_neighbour_makes_good_by_hand():
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([6.0, 2.4, 2.4])
    hessian = torch.eye(16)
    hessian[1, 2] = hessian[2, 1] = 0.99  # so the sum of the two is what counts: 4.8
    hessian[0, 0] = 100.0  # 6 has to stay 6

    rounded = calibrated(weight, hessian)

    assert quantize(weight).decode(torch.float32)[0, :3].tolist() == [6, 2, 2]
    assert sorted(rounded[0, :3].tolist()) == [2, 3, 6]


def textbook(weight_NK: Tensor, hessian_KK: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """GPTQ as it is defined: after each column the rest moves by the inverse of what is left of H."""
    weight_NK = weight_NK.double().clone()
    value_NK, scale_NS = torch.zeros_like(weight_NK), torch.zeros(len(weight_NK), weight_NK.shape[1] // 16)
    for row in range(len(weight_NK)):
        for first in range(0, weight_NK.shape[1], 16):
            tried = []
            for scale in candidate_scales(weight_NK[row, first : first + 16].float(), encode, SCALES):
                rest, values, lost = weight_NK[row].clone(), [], 0.0
                for column in range(first, first + 16):
                    inverse = hessian_KK[column:, column:].inverse()
                    step = (scale / encode).double()
                    values.append(VALUES[(VALUES - rest[column] / step).abs().argmin()])
                    error = rest[column] - values[-1] * step
                    lost += (error**2 / inverse[0, 0]).item()
                    rest[column:] -= error / inverse[0, 0] * inverse[0]
                tried.append((lost, scale, values, rest))
            _, scale, values, weight_NK[row] = min(tried, key=lambda each: each[0])
            value_NK[row, first : first + 16], scale_NS[row, first // 16] = torch.stack(values), scale
    return value_NK, scale_NS


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_is_gptq_as_it_is_defined(seed):
    weight, hessian = random_weight(4, 48, seed=seed), correlated(48, seed=seed)
    damped, upper = damped_and_factor(hessian)
    encode = encode_scale(largest_magnitude(weight), method=SCALES)

    values, scales = _round(weight, upper, encode)

    wanted_values, wanted_scales = textbook(weight, damped.double(), encode)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.double(), wanted_values)


def test_the_factor_is_upper_triangular_and_gives_the_inverse():
    damped, upper = damped_and_factor(correlated(80, seed=1))

    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(80), atol=1e-3, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_rows", "num_cols", "dead"), [(1, 16, 0), (7, 16, 5), (5, 144, 0), (33, 272, 40)])
def test_the_output_loses_no_more_than_by_rounding_to_nearest(num_rows, num_cols, dead, seed):
    weight, hessian = random_weight(num_rows, num_cols, seed=seed), correlated(num_cols, seed=seed, dead=dead)

    ours = output_error(calibrated(weight, hessian), weight, hessian)

    for method in ("rtn", "four_over_six", "sweep"):
        assert ours <= output_error(quantize(weight, method=method).decode(torch.float32), weight, hessian)


@pytest.mark.parametrize("seed", range(3))
def test_visiting_the_blocks_again_makes_no_row_worse(seed):
    weight, hessian = random_weight(9, 272, seed=seed), correlated(272, seed=seed)
    damped, upper = damped_and_factor(hessian)
    encode = encode_scale(largest_magnitude(weight), method=SCALES)
    values, scales = _round(weight, upper, encode)

    def loss() -> Tensor:
        error_NK = (values * (scales / encode).repeat_interleave(16, dim=1) - weight).double()
        return ((error_NK @ damped.double()) * error_NK).sum(-1)

    before = loss()
    _refine(weight, values, scales, damped, encode)

    assert (loss() <= before * (1 + 1e-5)).all()
    assert loss().sum() < 0.97 * before.sum()


def test_without_inputs_each_weight_is_rounded_to_nearest_as_the_sweep_does():
    weight = random_weight(6, 64)

    rounded = calibrated(weight, torch.zeros(64, 64))

    assert torch.equal(rounded, quantize(weight, method="sweep").decode(torch.float32))


def test_columns_without_inputs_do_not_change_how_the_others_are_rounded():
    hessian = correlated(64, seed=3, dead=32)
    weight = random_weight(6, 64)
    other = torch.cat([weight[:, :32].flip(1), weight[:, 32:]], dim=1)

    assert torch.equal(calibrated(weight, hessian)[:, 32:], calibrated(other, hessian)[:, 32:])


def test_matrices_with_the_same_inputs_share_their_scale_and_are_rounded_as_they_would_be_together():
    hessian = correlated(48, seed=2)
    weights = {"q": random_weight(8, 48), "k": 3 * random_weight(4, 48, seed=1)}

    made, encode = quantize_calibrated(weights, hessian)

    together, _ = quantize_calibrated({"qk": torch.cat(list(weights.values()))}, hessian)
    assert encode == encode_scale(largest_magnitude(weights["k"]), method=SCALES)
    assert made["q"].tensor_scale == made["k"].tensor_scale == 1 / encode
    joined = torch.cat([weight.decode(torch.float32) for weight in made.values()])
    assert torch.equal(joined, together["qk"].decode(torch.float32))


def test_rounding_the_same_twice_gives_the_same_bits_and_leaves_its_arguments_alone():
    weight, hessian = random_weight(8, 48), correlated(48, seed=2)
    kept = [each.clone() for each in (weight, hessian)]

    first = calibrated(weight, hessian)

    assert torch.equal(first, calibrated(weight, hessian))
    assert all(torch.equal(a, b) for a, b in zip(kept, (weight, hessian), strict=True))


def test_a_hessian_that_needs_it_is_damped_more():
    hessian = torch.full((32, 32), 1.0)  # of rank one
    hessian += torch.diag(torch.full((32,), -0.05))  # and off by more than a hundredth

    damped, _ = damped_and_factor(hessian)

    assert damped[0, 0].item() == pytest.approx(0.95 * 1.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_is_refused_by_name(bad):
    hessian = torch.eye(16)
    hessian[2, 3] = bad

    with pytest.raises(BadCheckpoint, match=r"layers\.3\.o_proj: .* not finite; .*without calibration"):
        quantize_calibrated({"layers.3.o_proj": random_weight(2, 16)}, hessian)


def test_a_hessian_that_no_damping_mends_is_refused_by_name():
    with pytest.raises(BadCheckpoint, match=r"o_proj: .*positive definite"):
        quantize_calibrated({"o_proj": random_weight(2, 16)}, torch.eye(16) - 3 * torch.ones(16, 16) / 16 * 5)


def test_a_weight_that_is_not_finite_is_refused_by_name():
    weight = random_weight(2, 16)
    weight[1, 1] = torch.nan

    with pytest.raises(BadCheckpoint, match=r"o_proj\.weight: holds nan"):
        quantize_calibrated({"o_proj": weight}, torch.eye(16))


def test_a_hessian_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(32, 32\) does not fit weights \(2, 16\)"):
        quantize_calibrated({"w": random_weight(2, 16)}, torch.eye(32))
