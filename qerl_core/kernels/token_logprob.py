"""Hidden states and the output head -> log-prob of each chosen token, without all logits in memory at once.

    z = hidden @ head.T / temperature,   logprob = z[target] - logsumexp(z),   entropy = logsumexp(z) - sum p z

The gradient of a log-prob with respect to its hidden state is `(head[target] - p @ head) / temperature`, whatever
comes after; what comes after only scales each row. So the forward pass makes it while a chunk's probabilities are at
hand, and the backward pass is one product by row: two matrix products in all, where making logits anew takes three.

N = tokens, H = hidden size, V = vocabulary, C = tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU need not have it
    triton = None

CHUNK_BYTES = 11 << 26  # 1152 tokens of a 152k vocabulary: as many tiles as an H200 has multiprocessors
TILE_ROWS = 128  # of a matrix product


def reference(
    hidden_NH: Tensor, head_VH: Tensor, target_N: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The definition, in float32: log-probs and entropies, [N] each."""
    logits_NV = (hidden_NH @ head_VH.T).float() / temperature
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, target_N[:, None])[:, 0], entropy_N


def softmax_stats(
    logits_CV: Tensor, target_C: Tensor, *, temperature: float, residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of float32 logits [C, V]: log-prob of each target [C], entropy [C], and `onehot(target) - p` [C, V] if wanted.

    The logits are used up: the residual takes their memory. ValueError if they are not float32 and contiguous.
    """
    if logits_CV.dtype != torch.float32 or not logits_CV.is_contiguous():
        raise ValueError(f"logits are contiguous float32, not {logits_CV.dtype}")
    if logits_CV.device.type == "cuda" and triton is not None:
        return _stats_by_kernel(logits_CV, target_C, temperature, residual_dtype)
    return _stats_by_torch(logits_CV, target_C, temperature, residual_dtype)


def _stats_by_torch(
    logits_CV: Tensor, target_C: Tensor, temperature: float, residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits_CV = logits_CV.div_(temperature)
    lse_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    logprob_C = (logits_CV.gather(1, target_C[:, None]) - lse_C1)[:, 0]
    probs_CV = (logits_CV - lse_C1).exp_()
    entropy_C = lse_C1[:, 0] - torch.linalg.vecdot(probs_CV, logits_CV)
    if residual_dtype is None:
        return logprob_C, entropy_C, None
    ones_C1 = probs_CV.new_ones(len(target_C), 1)
    residual_CV = probs_CV.neg_().scatter_add_(1, target_C[:, None], ones_C1)
    return logprob_C, entropy_C, residual_CV.to(residual_dtype)


if triton is not None:

    @triton.jit
    def _stats_kernel(
        logits, target, logprob, entropy, residual, V, residual_stride, inv_temperature,
        BLOCK: tl.constexpr, WRITE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, BLOCK)
        # Each lane keeps its own maximum m, sum of e^(z - m), and sum of e^(z - m) z; they meet once at the end.
        m = tl.full((BLOCK,), -1e30, tl.float32)
        s = tl.zeros((BLOCK,), tl.float32)
        w = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            live = start + lane < V
            z = tl.load(logits + row * V + start + lane, mask=live, other=-1e30) * inv_temperature
            new = tl.maximum(m, z)
            fade = tl.exp(m - new)
            e = tl.where(live, tl.exp(z - new), 0.0)
            s = s * fade + e
            w = w * fade + e * z
            m = new
        top = tl.max(m, 0)
        fade = tl.exp(m - top)
        total = tl.sum(s * fade, 0)
        lse = top + tl.log(total)
        chosen = tl.load(target + row)
        tl.store(logprob + row, tl.load(logits + row * V + chosen) * inv_temperature - lse)
        tl.store(entropy + row, lse - tl.sum(w * fade, 0) / total)
        if WRITE:
            for start in range(0, V, BLOCK):
                column = start + lane
                live = column < V
                z = tl.load(logits + row * V + column, mask=live, other=-1e30) * inv_temperature
                value = tl.where(column == chosen, 1.0, 0.0) - tl.exp(z - lse)
                tl.debug_barrier()  # the row is overwritten from its start: no faster than every warp has read it
                tl.store(residual + row * residual_stride + column, value.to(residual.dtype.element_ty), mask=live)


def _stats_by_kernel(
    logits_CV: Tensor, target_C: Tensor, temperature: float, residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_rows, num_columns = logits_CV.shape
    logprob_C, entropy_C = logits_CV.new_empty(2, num_rows)
    # Row by row in the logits' own memory: an entry is never wider than the logit that it replaces.
    residual_CV = None if residual_dtype is None else logits_CV.view(residual_dtype)[:, :num_columns]
    written = logits_CV if residual_CV is None else residual_CV
    kernel: Any = _stats_kernel
    kernel[(num_rows,)](
        logits_CV, target_C, logprob_C, entropy_C, written, num_columns, written.stride(0), 1 / temperature,
        BLOCK=4096, WRITE=residual_CV is not None, num_warps=16, enable_fp_fusion=True,
    )  # fmt: skip
    return logprob_C, entropy_C, residual_CV


def _logits(hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
    """float32 [C, V]; the product's sums are never rounded to a shorter type where the device can help it."""
    if hidden_CH.device.type == "cuda" and hidden_CH.dtype != torch.float32:
        return torch.mm(hidden_CH, head_VH.T, out_dtype=torch.float32)
    return (hidden_CH @ head_VH.T).float()


def token_logprob(
    hidden_NH: Tensor, head_VH: Tensor, target_N: Tensor, *, temperature: float = 1.0, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, float32 [N] each; logits take `chunk_bytes` at most.

    The log-probs have a gradient to `hidden_NH`; the entropies have none. ValueError if the shapes do not fit, or if
    the head wants a gradient: it is frozen here.
    """
    if hidden_NH.shape[0] != target_N.shape[0] or hidden_NH.shape[1:] != head_VH.shape[1:]:
        shapes = f"hidden {tuple(hidden_NH.shape)}, head {tuple(head_VH.shape)}, target {tuple(target_N.shape)}"
        raise ValueError(f"shapes do not fit: {shapes}")
    if head_VH.requires_grad:
        raise ValueError("the output head must be frozen")
    chunk = max(1, chunk_bytes // (4 * head_VH.shape[0]))
    chunk -= chunk % TILE_ROWS if chunk > TILE_ROWS else 0
    found: tuple[Tensor, Tensor] = _TokenLogprob.apply(hidden_NH, head_VH, target_N, temperature, chunk)
    return found


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, target_N: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprob_N, entropy_N = hidden_NH.new_empty(2, len(hidden_NH), dtype=torch.float32)
        slope_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        residual_dtype = None if slope_NH is None else head_VH.dtype
        for start in range(0, len(hidden_NH), chunk):
            here = slice(start, start + chunk)
            logits_CV = _logits(hidden_NH[here], head_VH)
            logprob_N[here], entropy_N[here], residual_CV = softmax_stats(
                logits_CV, target_N[here], temperature=temperature, residual_dtype=residual_dtype
            )
            if slope_NH is not None and residual_CV is not None:
                slope_NH[here] = (residual_CV @ head_VH).mul_(1 / temperature)
            del logits_CV, residual_CV  # before the next chunk's are made
        ctx.save_for_backward(slope_NH)
        ctx.mark_non_differentiable(entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope_NH,) = ctx.saved_tensors
        return (grad_N[:, None] * slope_NH).to(slope_NH.dtype), None, None, None, None
