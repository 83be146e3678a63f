"""What the sampler did and the policy did not: weights that correct for it, and how large it is.

Rollouts come from a noisy policy on another engine, so their tokens are off-policy from the start. Truncated
importance sampling (Ionides 2008) weights each token by min(pi_old / pi_rollout, C).

B = sequences, T = completion tokens, padded.
"""

import torch
from torch import Tensor


def importance_weights(old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, *, cap: float) -> Tensor:
    """`min(exp(old - rollout), cap)` a token, without gradient."""
    return (old_logprobs_BT - rollout_logprobs_BT).detach().exp().clamp(max=cap)


def diagnostics(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, *, cap: float
) -> dict[str, float]:
    """How far the rollout policy is from the trained one, over the tokens of the mask. Empty if there is none.

    `kl` estimates KL(rollout || policy) by k3, `r - 1 - log r` with r = policy / rollout (Schulman 2020), which is
    never negative; `ess` is the effective sample size of the untruncated weights as a share of the tokens.
    """
    log_ratio_N = (old_logprobs_BT - rollout_logprobs_BT)[mask_BT].double()
    if log_ratio_N.numel() == 0:
        return {}
    ratio_N = log_ratio_N.exp()
    return {
        "mismatch/logprob_gap": log_ratio_N.abs().mean().item(),
        "mismatch/kl": (ratio_N - 1 - log_ratio_N).mean().item(),
        "mismatch/ess": (ratio_N.sum().square() / (ratio_N.numel() * ratio_N.square().sum())).item(),
        "mismatch/truncated_frac": (ratio_N > cap).double().mean().item(),
    }


def kl_k3(policy_logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """`exp(ref - policy) - (ref - policy) - 1` a token: estimates KL(policy || reference), with gradient."""
    log_ratio_BT = ref_logprobs_BT - policy_logprobs_BT
    return torch.expm1(log_ratio_BT) - log_ratio_BT
