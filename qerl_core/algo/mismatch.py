"""What the sampler did and the policy did not: weights that correct for it, and how large it is.

Rollouts come from a noisy policy on another engine, so their tokens are off-policy from the start. With
k = pi_old / pi_rollout, truncated importance sampling (Ionides 2008) weights each token by min(k, C). A product over a
sequence is unbiased where a token's is not, but grows with length: `sequence_mask` drops what is above a cap. IcePop
(Ring-1T, arXiv:2510.18855) drops single tokens instead, on both sides.

B = sequences, T = completion tokens, padded.
"""

import torch
from torch import Tensor

from qerl_core.config import LossConfig

ICEPOP = (0.5, 5.0)
"""Tokens with a ratio outside are dropped."""


def correction_weights(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, config: LossConfig
) -> Tensor:
    """The weight of each token, without gradient: [B, T], or [B, 1] where a sequence has one. Ones if there is none."""
    log_ratio_BT = (old_logprobs_BT - rollout_logprobs_BT).detach().masked_fill(~mask_BT, 0.0)
    if config.correction == "token_tis":
        return log_ratio_BT.exp().clamp(max=config.tis_cap)
    if config.correction == "sequence_mask":
        ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True).exp()
        return ratio_B1.masked_fill(ratio_B1 > config.sequence_cap, 0.0)
    if config.correction == "icepop":
        ratio_BT = log_ratio_BT.exp()
        return ratio_BT.masked_fill((ratio_BT < ICEPOP[0]) | (ratio_BT > ICEPOP[1]), 0.0)
    return torch.ones_like(log_ratio_BT)


def diagnostics(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, config: LossConfig
) -> dict[str, float]:
    """How far the rollout policy is from the trained one, over the tokens of the mask. Empty if there is none.

    `kl` estimates KL(rollout || policy) by k3, `r - 1 - log r` with r = policy / rollout (Schulman 2020), which is
    never negative; `ess` is the effective sample size of the untruncated weights as a share of the tokens;
    `truncated_frac` is the share of tokens above tis_cap, `dropped_frac` of those that the correction leaves out.
    """
    log_ratio_N = (old_logprobs_BT - rollout_logprobs_BT)[mask_BT].double()
    if log_ratio_N.numel() == 0:
        return {}
    ratio_N = log_ratio_N.exp()
    weights_BT = correction_weights(old_logprobs_BT, rollout_logprobs_BT, mask_BT, config).expand_as(mask_BT)
    return {
        "mismatch/logprob_gap": log_ratio_N.abs().mean().item(),
        "mismatch/kl": (ratio_N - 1 - log_ratio_N).mean().item(),
        "mismatch/ess": (ratio_N.sum().square() / (ratio_N.numel() * ratio_N.square().sum())).item(),
        "mismatch/truncated_frac": (ratio_N > config.tis_cap).double().mean().item(),
        "mismatch/dropped_frac": (weights_BT[mask_BT] == 0).double().mean().item(),
    }


def kl_k3(policy_logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`exp(ref - policy) - (ref - policy) - 1` a token: estimates KL(policy || reference), with gradient."""
    log_ratio_BT = ref_logprobs_BT - policy_logprobs_BT
    return torch.expm1(log_ratio_BT) - log_ratio_BT
