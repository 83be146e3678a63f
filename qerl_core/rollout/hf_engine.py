"""Rollouts by the trained model itself, through transformers: slow, exact, runs on a CPU.

A prompt is prefilled once for all its completions; finished sequences leave the batch. P = prompts, B = sequences
that still grow, S = tokens of a completion, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from qerl_core.errors import RolloutFailed
from qerl_core.policy.model import PolicyModel
from qerl_core.policy.norms import NormNoise
from qerl_core.rollout.engine import OnCompletion, Sampling, completion_seed
from qerl_core.types import Completion, FinishReason, Group, Prompt


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class HfEngine:
    """A `RolloutEngine` over the policy's own modules: nothing is copied, so nothing is ever stale."""

    def __init__(self, model: PolicyModel, *, max_sequences: int = 64) -> None:
        self.model = model
        self.max_sequences = max_sequences
        self.noise: NormNoise | None = None

    @torch.no_grad()
    def rollout(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        sigma: float,
        seed: int,
        first: int = 0,
        on_completion: OnCompletion | None = None,
    ) -> list[Group]:
        """See `RolloutEngine`."""
        was_training = self.model.causal.training
        self.model.causal.eval()
        try:
            if sigma == 0:
                return self._groups(prompts, sampling, seed, first, on_completion)
            self.noise = self.noise or NormNoise(self.model.causal)
            with self.noise.applied(sigma, seed):
                return self._groups(prompts, sampling, seed, first, on_completion)
        finally:
            self.model.causal.train(was_training)

    def _groups(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        first: int,
        on_completion: OnCompletion | None,
    ) -> list[Group]:
        prompts_at_once = max(1, self.max_sequences // sampling.num_completions)
        groups: list[Group] = []
        for start in range(0, len(prompts), prompts_at_once):
            some = prompts[start : start + prompts_at_once]
            groups += self._decode(some, sampling, seed, first + start, on_completion)
        return groups

    def _decode(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        first: int,
        on_completion: OnCompletion | None,
    ) -> list[Group]:
        device = self.model.device
        token_ids_PL, mask_BL = _pad_left([prompt.token_ids for prompt in prompts], device)
        positions_PL = (mask_BL.cumsum(dim=1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.causal.config)
        logits_BV = self._forward(token_ids_PL, mask_BL, positions_PL, cache)

        repeat = sampling.num_completions
        cache.batch_repeat_interleave(repeat)
        logits_BV = logits_BV.repeat_interleave(repeat, dim=0)
        mask_BL = mask_BL.repeat_interleave(repeat, dim=0)
        position_B = positions_PL[:, -1].repeat_interleave(repeat)

        sequences = [_Sequence() for _ in range(len(prompts) * repeat)]
        ended: dict[int, Completion] = {}
        draws_BS = torch.stack(
            [
                _draws(completion_seed(seed, first + p, number), sampling.max_tokens)
                for p in range(len(prompts))
                for number in range(repeat)
            ]
        ).to(device)
        live = list(range(len(sequences)))
        for step in range(sampling.max_tokens):
            token_B, logprob_B = sample(logits_BV, sampling, draws_BS[live, step])
            going = []
            for place, (number, token, logprob) in enumerate(
                zip(live, token_B.tolist(), logprob_B.tolist(), strict=True)
            ):
                sequence = sequences[number]
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.stopped = token in self.model.eos_ids
                if not sequence.stopped and step + 1 < sampling.max_tokens:
                    going.append(place)
                    continue
                ended[number] = self._completion(sequence)
                if on_completion:
                    on_completion(first + number // repeat, number % repeat, ended[number])
            if not going:
                break
            if len(going) < len(live):
                keep = torch.tensor(going, device=device)
                cache.batch_select_indices(keep)
                token_B, mask_BL, position_B = token_B[keep], mask_BL[keep], position_B[keep]
                live = [live[place] for place in going]
            position_B = position_B + 1
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(live), 1)], dim=1)
            logits_BV = self._forward(token_B[:, None], mask_BL, position_B[:, None], cache)

        return [
            Group(prompt, tuple(ended[number] for number in range(p * repeat, (p + 1) * repeat)))
            for p, prompt in enumerate(prompts)
        ]

    def _forward(self, token_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        # By place: the cache's name differs between releases of transformers.
        with self.model.autocast():
            hidden = self.model.decoder(token_ids, mask, positions, cache, use_cache=True).last_hidden_state[:, -1]
        logits_BV: Tensor = (hidden @ self.model.head_VH.T).float()
        if not bool(logits_BV.isfinite().all()):
            raise RolloutFailed("the policy's logits are not finite while sampling")
        return logits_BV

    def _completion(self, sequence: _Sequence) -> Completion:
        text = self.model.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        reason: FinishReason = "stop" if sequence.stopped else "length"
        return Completion(tuple(sequence.tokens), tuple(sequence.logprobs), text, reason)


def _draws(seed: int, num: int) -> Tensor:
    """float64 [num], uniform in [0, 1): made on the CPU, so the same on every device."""
    return torch.rand(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(logits_BV: Tensor, sampling: Sampling, draw_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row and its log-prob under the distribution it was drawn from: int64 [B], float32 [B].

    `draw_B`, uniform in [0, 1), says where in the cumulative distribution. Greedy (temperature 0) has no use for it,
    and gives the log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        token_B = logits_BV.argmax(dim=-1)
        return token_B, logits_BV.log_softmax(dim=-1).gather(1, token_B[:, None])[:, 0]
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(dim=-1)
        outside_BV = probs_BV.cumsum(dim=-1) - probs_BV >= sampling.top_p  # the first token is always inside
        logits_BV = logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), -torch.inf)
    logprobs_BV = logits_BV.log_softmax(dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    wanted_B1 = (draw_B * cumulative_BV[:, -1])[:, None]
    # The first token beyond: one of probability zero is never that. The clamp is for a product rounded up to the sum.
    token_B1 = torch.searchsorted(cumulative_BV, wanted_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
    return token_B1[:, 0], logprobs_BV.gather(1, token_B1)[:, 0]


def _pad_left(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    length = max(map(len, rows))
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for r, row in enumerate(rows):
        token_ids[r, length - len(row) :] = torch.tensor(row)
        mask[r, length - len(row) :] = 1
    return token_ids.to(device), mask.to(device)
