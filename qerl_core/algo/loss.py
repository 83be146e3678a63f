"""The clipped surrogate of PPO without a critic, in the shapes that differ in their ratio and in how tokens count.

    loss = - sum over tokens of  weight * w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)  +  kl_coef * KL
    ratio = exp(policy - old),  w corrects for the sampler   (algo/mismatch.py)

GRPO: arXiv:2402.03300. DAPO (token mean, asymmetric clip): arXiv:2503.14476. Dr. GRPO (tokens by a constant):
arXiv:2503.20783. GSPO (ratio = exp(mean over the sequence of policy - old)): arXiv:2507.18071. CISPO (gain =
clip(ratio) without gradient * A * policy log-prob): arXiv:2506.13585.
B = sequences, T = completion tokens, padded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_core.algo.mismatch import correction_weights, kl_k3
from qerl_core.config import LossConfig


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss sees of some sequences: [B, T] each, `advantages_B` [B]. Masked-out entries are never read."""

    old_logprobs_BT: Tensor
    """The clean policy before this batch's first update."""
    rollout_logprobs_BT: Tensor
    """The policy that sampled the tokens."""
    advantages_B: Tensor
    mask_BT: Tensor
    """Which entries are completion tokens that count; from lengths, never from token ids."""
    weights_BT: Tensor
    """How much each token counts (`token_weights`)."""


def token_weights(mask_BT: Tensor, *, type: str, num_sequences: int, max_tokens: int) -> Tensor:
    """Each token's share of the mean, float32 [B, T]; zero outside the mask.

    `grpo`, `gspo`: 1 / (num_sequences * tokens of its sequence), where num_sequences may count sequences that were
    left out because their advantage is zero. `dr_grpo`: 1 / (num_sequences * max_tokens). `dapo`, `cispo`: 1 / (all
    tokens of the mask).
    """
    mask = mask_BT.float()
    if type in ("dapo", "cispo"):
        return mask / mask.sum().clamp(min=1)
    if type == "dr_grpo":
        return mask / (num_sequences * max_tokens)
    return mask / (num_sequences * mask.sum(dim=1, keepdim=True).clamp(min=1))


def surrogate_loss(
    policy_logprobs_BT: Tensor, batch: TokenBatch, config: LossConfig, *, ref_logprobs_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch (a scalar, with gradient) and weighted sums for its metrics.

    Losses of the parts of a batch, of whole sequences each, add up to the loss of the whole. `ref_logprobs_BT` is
    wanted if kl_coef > 0.
    """
    mask_BT = batch.mask_BT
    policy_BT, old_BT, rollout_BT = (
        logprobs.masked_fill(~mask_BT, 0.0)
        for logprobs in (policy_logprobs_BT, batch.old_logprobs_BT, batch.rollout_logprobs_BT)
    )
    advantages_B1 = batch.advantages_B[:, None]

    log_ratio_BT = policy_BT - (rollout_BT if config.correction == "bypass" else old_BT)
    if config.type == "gspo":
        num_tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / num_tokens_B1).expand_as(mask_BT)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.type == "cispo":
        gain_BT = clipped_BT.detach() * advantages_B1 * policy_BT
    else:
        gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    corrected_BT = batch.weights_BT * correction_weights(old_BT, rollout_BT, mask_BT, config)
    loss = -(corrected_BT * gain_BT).sum()

    is_clipped_BT = (clipped_BT - ratio_BT) * advantages_B1.sign() < 0
    sums = {"ratio/clip_frac": (batch.weights_BT * is_clipped_BT).sum().detach()}
    if config.kl_coef > 0:
        if ref_logprobs_BT is None:
            raise ValueError("kl_coef is above 0, but there are no reference log-probs")
        kl = (batch.weights_BT * kl_k3(policy_BT, ref_logprobs_BT.masked_fill(~mask_BT, 0.0))).sum()
        loss = loss + config.kl_coef * kl
        sums["kl/base"] = kl.detach()
    return loss, sums
