"""Calibrated rounding to NVFP4: GPTQ (arXiv:2210.17323) over blocks of 16 that share a scale.

Rounding W [N, K] to Q loses tr((W - Q) H (W - Q)^T) of a layer's output, H = X^T X over the inputs X that calibration
text brings. Columns are rounded from left to right, and what each one loses is made good in those to its right: with
H^-1 = U^T U, U upper triangular,

    e_j = (w_j - q_j) / U_jj,    w_k -= e_j U_jk  for k > j,    and the loss grows by |e_j|^2.

A block's scale is chosen when its turn comes, from the weights as the columns before have left them: each scale that
the codec's `sweep` tries is carried through the 16 columns, and the one whose |e|^2 is smallest is kept, row by row.
Columns stay in their order, since NVFP4's blocks are of neighbours.

Then the blocks are visited again: with all others as they are, a block's loss is a quadratic of its own, and what GPTQ
finds for it replaces the old scale and values in the rows where it loses less.

N = out features, K = in features, S = K / 16 blocks, B = the 16 of a block, C = scales tried.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_core.errors import BadCheckpoint
from qerl_core.kernels.nvfp4_dequant import BLOCK
from qerl_core.quant.nvfp4 import (
    E2M1_MAX,
    Method,
    NVFP4Weight,
    candidate_scales,
    encode_scale,
    largest_magnitude,
    nearest_codes,
    pack,
)

SCALES: Method = "sweep"
"""The block scales that are tried, and the room above them."""
DAMPING = (0.01, 0.1, 1.0)
"""What is added to H's diagonal, as a part of its mean: the first with which it is positive definite."""
_COLUMNS = 128
"""Columns whose errors reach those beyond in one product."""


def quantize_calibrated(weights: Mapping[str, Tensor], hessian_KK: Tensor) -> tuple[dict[str, NVFP4Weight], Tensor]:
    """Round matrices [*, K] with the same inputs so that their products with these change least, where they lie.

    `hessian_KK` is X^T X up to a factor; it is damped. The matrices share a tensor scale: returns its inverse, the
    encode scale, too. Columns that no input reached are rounded to nearest. Raises BadCheckpoint with the name of a
    matrix that cannot be quantized or whose Hessian cannot be used, ValueError for one of another shape.
    """
    amax = torch.stack([largest_magnitude(weight, name=f"{name}.weight") for name, weight in weights.items()]).amax()
    encode = encode_scale(amax, method=SCALES)
    weight_NK = torch.cat([weight.detach().float() for weight in weights.values()])
    if hessian_KK.shape != (weight_NK.shape[1],) * 2:
        raise ValueError(f"a Hessian {tuple(hessian_KK.shape)} does not fit weights {tuple(weight_NK.shape)}")
    damped_KK, upper_KK = damped_and_factor(hessian_KK, name=next(iter(weights)))
    value_NK, scale_NS = _round(weight_NK, upper_KK, encode)
    _refine(weight_NK, value_NK, scale_NS, damped_KK, encode)
    one = torch.ones((), device=value_NK.device)
    packed_NJ, block_scale_NS = pack(nearest_codes(value_NK, one, one)), scale_NS.to(torch.float8_e4m3fn)
    sizes = [len(weight) for weight in weights.values()]
    parts = zip(weights, torch.split(packed_NJ, sizes), torch.split(block_scale_NS, sizes), strict=True)
    return {name: NVFP4Weight(packed, scale, 1 / encode) for name, packed, scale in parts}, encode


def _round(weight_NK: Tensor, upper_KK: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """Values of E2M1 [N, K] and block scales [N, S], by GPTQ."""
    weight_NK, value_NK = weight_NK.clone(), torch.empty_like(weight_NK)
    num_rows, num_cols = weight_NK.shape
    scale_NS = torch.empty(num_rows, num_cols // BLOCK, device=weight_NK.device)
    for start in range(0, num_cols, _COLUMNS):
        end = min(start + _COLUMNS, num_cols)
        error_NK = torch.empty(num_rows, end - start, device=weight_NK.device)
        for first in range(start, end, BLOCK):
            block = slice(first, first + BLOCK)
            rounded = _round_block(weight_NK[:, block], upper_KK[block, block], encode)
            value_NK[:, block], scale_NS[:, first // BLOCK], error_NB = rounded
            error_NK[:, first - start : first - start + BLOCK] = error_NB
            weight_NK[:, block.stop : end] -= error_NB @ upper_KK[block, block.stop : end]
        weight_NK[:, end:] -= error_NK @ upper_KK[start:end, end:]
    return value_NK, scale_NS


def _round_block(weight_NB: Tensor, upper_BB: Tensor, encode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, 16], scale [N] and error e [N, 16] under the scale that loses least of each row."""
    scale_CN = torch.stack(candidate_scales(weight_NB, encode, SCALES))
    step_CN = scale_CN / encode
    left_BCN = weight_NB.T.unsqueeze(1).repeat(1, len(scale_CN), 1)
    value_BCN, error_BCN = torch.empty_like(left_BCN), torch.empty_like(left_BCN)
    for column in range(BLOCK):
        value_BCN[column] = _nearest(left_BCN[column] / step_CN)
        error_BCN[column] = (left_BCN[column] - value_BCN[column] * step_CN) / upper_BB[column, column]
        left_BCN[column + 1 :] -= error_BCN[column] * upper_BB[column, column + 1 :, None, None]
    best_N = error_BCN.square().sum(0).argmin(0)
    rows_N = torch.arange(len(best_N), device=best_N.device)
    return value_BCN[:, best_N, rows_N].T, scale_CN[best_N, rows_N], error_BCN[:, best_N, rows_N].T


def _nearest(scaled: Tensor) -> Tensor:
    """The nearest value of E2M1, ties to the even code: steps of a half below 2, of one below 4, of two up to 6."""
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round_() * step).clamp_(max=E2M1_MAX).copysign_(scaled)


def _refine(weight_NK: Tensor, value_NK: Tensor, scale_NS: Tensor, hessian_KK: Tensor, encode: Tensor) -> None:
    """Round each block anew, given all others; values and scales change in place, and no row loses more than before."""
    num_cols = weight_NK.shape[1]
    places_SB = torch.arange(num_cols, device=weight_NK.device).view(-1, BLOCK)
    upper_SBB = upper_inverse_factor(hessian_KK[places_SB.unsqueeze(-1), places_SB.unsqueeze(-2)])
    assert upper_SBB is not None  # principal parts of a matrix that is positive definite
    error_NK = value_NK * (scale_NS / encode).repeat_interleave(BLOCK, dim=1) - weight_NK
    for start in range(0, num_cols, _COLUMNS):
        end = min(start + _COLUMNS, num_cols)
        pull_NK = error_NK @ hessian_KK[:, start:end]  # half the loss's gradient
        for first in range(start, end, BLOCK):
            block, here = slice(first, first + BLOCK), slice(first - start, first - start + BLOCK)
            hessian_BB, weight_NB = hessian_KK[block, block], weight_NK[:, block]
            upper_BB = upper_SBB[first // BLOCK]
            # Where this block's error would have to be, given the others, to lose nothing.
            best_NB = error_NK[:, block] - pull_NK[:, here] @ upper_BB.T @ upper_BB
            new_value_NB, new_scale_N, _ = _round_block(weight_NB + best_NB, upper_BB, encode)
            new_error_NB = new_value_NB * (new_scale_N / encode).unsqueeze(-1) - weight_NB
            old_NB, new_NB = error_NK[:, block] - best_NB, new_error_NB - best_NB
            is_better_N = ((new_NB @ hessian_BB) * new_NB).sum(-1) < ((old_NB @ hessian_BB) * old_NB).sum(-1)
            is_better_N1 = is_better_N.unsqueeze(-1)
            change_NB = torch.where(is_better_N1, new_error_NB - error_NK[:, block], 0.0)
            value_NK[:, block] = torch.where(is_better_N1, new_value_NB, value_NK[:, block])
            scale_NS[:, first // BLOCK] = torch.where(is_better_N, new_scale_N, scale_NS[:, first // BLOCK])
            error_NK[:, block] += change_NB
            pull_NK += change_NB @ hessian_KK[block, start:end]


def damped_and_factor(hessian_KK: Tensor, *, name: str = "weight") -> tuple[Tensor, Tensor]:
    """H with a hundredth of its mean diagonal added, and U, upper triangular, with U^T U the inverse of that; float32.

    More is added where that is not positive definite. Raises BadCheckpoint with `name` if none is enough, and for a
    Hessian with NaN or infinities.
    """
    if not torch.isfinite(hessian_KK).all():
        raise BadCheckpoint(
            f"{name}: calibration text gives this layer inputs that are not finite; the checkpoint is damaged, or "
            "choose a rounding method without calibration"
        )
    damped_KK = hessian_KK.double()
    mean = damped_KK.diagonal().mean()
    if not mean:  # nothing reached the layer: every column alike, and none makes good for another
        eye_KK = torch.eye(len(hessian_KK), device=hessian_KK.device)
        return eye_KK, eye_KK
    for damping in DAMPING:
        damped_KK = hessian_KK.double()
        damped_KK.diagonal().add_(damping * mean)
        upper_KK = upper_inverse_factor(damped_KK)
        if upper_KK is not None:
            return damped_KK.float(), upper_KK.float()
    raise BadCheckpoint(
        f"{name}: the Hessian of the calibration inputs is not positive definite, even with {DAMPING[-1]:.0%} of its "
        "mean diagonal added; calibrate with other or longer text, or choose a rounding method without calibration"
    )


def upper_inverse_factor(matrix_KK: Tensor) -> Tensor | None:
    """U, upper triangular, with U^T U the inverse of a matrix, or of each of many; None unless positive definite."""
    # Backwards, so that a lower triangular factor of the flipped matrix is an upper triangular one of the matrix.
    lower_KK, failed = torch.linalg.cholesky_ex(matrix_KK.flip(-2, -1))
    if failed.any():
        return None
    eye_KK = torch.eye(matrix_KK.shape[-1], dtype=matrix_KK.dtype, device=matrix_KK.device)
    inverse_KK: Tensor = torch.linalg.solve_triangular(lower_KK, eye_KK.expand_as(lower_KK), upper=False)
    return inverse_KK.flip(-2, -1)
