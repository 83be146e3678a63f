"""The update: log-probs of the clean policy, the loss in micro-batches, one clipped optimizer step a minibatch.

P = prompts, G = completions a prompt, B = P G sequences, T = tokens of the longest completion.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from qerl_core import distributed
from qerl_core.algo.advantage import has_signal
from qerl_core.algo.loss import TokenBatch, surrogate_loss, token_weights
from qerl_core.algo.mismatch import diagnostics
from qerl_core.algo.schedule import learning_rate_at
from qerl_core.config import TrainConfig
from qerl_core.errors import NotEnoughMemory, TrainingDiverged
from qerl_core.kernels.token_logprob import token_logprob
from qerl_core.observer import Metrics
from qerl_core.policy import resume
from qerl_core.policy.model import PolicyModel, open_model
from qerl_core.policy.pack import Row, collate, length_mask, make_rows, micro_batches, scatter_logprobs
from qerl_core.policy.resume import Position
from qerl_core.quant.calibration import Text
from qerl_core.types import Group

logger = logging.getLogger(__name__)

MAX_ROW_TOKENS = 2048
"""A row's attention mask is dense: so long may a row with several completions get."""


class Policy:
    """A model with its optimizer, at a position of its run."""

    def __init__(self, config: TrainConfig, model: PolicyModel) -> None:
        self.config = config
        self.model = model
        self.position = Position()
        self.micro_batch_tokens = config.micro_batch_tokens
        """Of the config, or half of it after the GPU's memory ran out."""
        self.on_note: Callable[[str], None] = logger.warning
        """Who is told of that."""
        self.optimizer = torch.optim.AdamW(
            model.trainable().values(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            weight_decay=config.optimizer.weight_decay,
        )

    @classmethod
    def open(cls, config: TrainConfig, cache: Path, *, calibration: Text | None = None) -> "Policy":
        """The base with a fresh adapter."""
        return cls(config, open_model(config, cache, calibration=calibration))

    def resume(self, folder: Path) -> Path | None:
        """Go on from the folder's last whole checkpoint; returns it, or None if there is none."""
        found = resume.load(self.model, self.optimizer, folder)
        if found is None:
            return None
        self.position, checkpoint = found
        return checkpoint

    def save(self, folder: Path) -> Path:
        """Write a verified checkpoint; returns its folder."""
        return resume.save(self.model, self.optimizer, self.position, folder)

    def update(self, groups: Sequence[Group], advantages_PG: Tensor) -> Metrics:
        """Learn from a batch: `num_minibatches` optimizer steps. TrainingDiverged leaves the weights as they were.

        Groups without signal are left out, unless KL to the base gives them one. No groups, no step.
        """
        config, model = self.config, self.model
        kept = has_signal(advantages_PG)
        if config.loss.kl_coef > 0:
            kept = torch.ones_like(kept)
        metrics: Metrics = {"groups/with_signal_frac": kept.double().mean().item()}
        places = kept.nonzero()[:, 0].tolist()
        if not places:
            return metrics | {"tokens/trained": 0.0}

        device = model.device
        size = len(groups) // config.num_minibatches
        parts = [[p for p in places if p // size == m] for m in range(config.num_minibatches)]
        parts = [part for part in parts if part]
        old = [self.logprobs([groups[p] for p in part]) if len(parts) > 1 else None for part in parts]
        rate = learning_rate_at(self.position.step, config.num_steps, config.optimizer)
        for setting in self.optimizer.param_groups:
            setting["lr"] = rate

        totals: dict[str, float] = defaultdict(float)
        num_tokens = 0
        for part, old_logprobs_BT in zip(parts, old, strict=True):
            chosen = [groups[p] for p in part]
            advantages_B = advantages_PG[part].flatten().to(device)
            found, trained = self._step(chosen, advantages_B, old_logprobs_BT, num_groups=size)
            num_tokens += trained
            for name, value in found.items():
                totals[name] += value / len(parts)
        return metrics | totals | {"learning_rate": rate, "tokens/trained": float(num_tokens)}

    def _step(
        self, groups: Sequence[Group], advantages_B: Tensor, old_BT: Tensor | None, *, num_groups: int
    ) -> tuple[dict[str, float], int]:
        """One optimizer step. If memory runs out, once more with half the micro-batch; once a run, and it is said."""
        try:
            return self._take_step(groups, advantages_B, old_BT, num_groups=num_groups)
        except torch.OutOfMemoryError as error:
            halved = self.config.micro_batch_tokens // 2
            if distributed.size() > 1 or self.micro_batch_tokens <= halved or not halved:
                raise NotEnoughMemory(
                    f"step {self.position.step + 1}: the GPU's memory ran out with micro_batch_tokens "
                    f"{self.micro_batch_tokens}; lower it, or max_completion_tokens"
                ) from error
        # Outside of the handler: the error's frames hold what has to go.
        self.micro_batch_tokens = halved
        self.on_note(f"The GPU's memory ran out: micro_batch_tokens is {halved} from here on.")
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return self._step(groups, advantages_B, old_BT, num_groups=num_groups)

    def _take_step(
        self, groups: Sequence[Group], advantages_B: Tensor, old_BT: Tensor | None, *, num_groups: int
    ) -> tuple[dict[str, float], int]:
        """One optimizer step; its metrics and how many tokens it learned from."""
        config, device = self.config, self.model.device
        completions = [completion for group in groups for completion in group.completions]
        mask_BT = length_mask([len(completion.token_ids) for completion in completions], device)
        loss_mask_BT = mask_BT
        if config.loss.mask_truncated:
            ended = torch.tensor([completion.finish_reason != "length" for completion in completions], device=device)
            loss_mask_BT = mask_BT & ended[:, None]
        num_tokens = int(loss_mask_BT.sum())
        if not num_tokens:
            return {}, 0
        rollout_BT = scatter_logprobs([completion.rollout_logprobs for completion in completions], device)
        num_sequences = num_groups * config.rollout.group_size
        weights_BT = token_weights(
            loss_mask_BT,
            type=config.loss.type,
            num_sequences=num_sequences,
            max_tokens=config.rollout.max_completion_tokens,
        )
        ref_BT = self.logprobs(groups, adapter=False) if config.loss.kl_coef > 0 else None

        self.optimizer.zero_grad(set_to_none=True)
        self.model.causal.train()
        seen_BT = torch.zeros(mask_BT.shape, device=device)
        entropy_BT = torch.zeros(mask_BT.shape, device=device)
        sums: dict[str, float] = defaultdict(float)
        for rows in self._my_micro_batches(groups):
            policy_BT, entropies_BT = self._forward(rows, mask_BT.shape)
            here = sorted({sequence for row in rows for sequence in row.sequences})
            seen_BT[here] = policy_BT[here].detach()
            entropy_BT[here] = entropies_BT[here]
            batch = TokenBatch(
                old_logprobs_BT=(seen_BT if old_BT is None else old_BT)[here],
                rollout_logprobs_BT=rollout_BT[here],
                advantages_B=advantages_B[here],
                mask_BT=loss_mask_BT[here],
                weights_BT=weights_BT[here],
            )
            ref_here = None if ref_BT is None else ref_BT[here]
            loss, found = surrogate_loss(policy_BT[here], batch, config.loss, ref_logprobs_BT=ref_here)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in (found | {"loss": loss.detach()}).items():
                sums[name] += float(value)
        parameters = list(self.model.trainable().values())
        for parameter in parameters:
            if parameter.grad is None:  # this process had nothing to do
                parameter.grad = torch.zeros_like(parameter)
        distributed.add_up([cast(Tensor, parameter.grad) for parameter in parameters] + [seen_BT, entropy_BT])
        sums = distributed.added(sums)

        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm))
        if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingDiverged(
                f"step {self.position.step + 1}: the loss is {sums['loss']} and its gradient's norm {norm}; "
                "lower the learning rate"
            )
        self.optimizer.step()
        old_seen_BT = seen_BT if old_BT is None else old_BT
        gap = diagnostics(old_seen_BT, rollout_BT, loss_mask_BT, config.loss)
        entropy = float((entropy_BT * loss_mask_BT).sum() / num_tokens)
        return {**sums, **gap, "grad_norm": norm, "policy/entropy": entropy}, num_tokens

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Group], *, adapter: bool = True) -> Tensor:
        """Log-probs of every completion token under the clean policy, or under the base: float32 [B, T], else zero."""
        lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
        out_BT = torch.zeros(len(lengths), max(lengths, default=0), device=self.model.device)
        self.model.causal.eval()
        with nullcontext() if adapter else self.model.peft.disable_adapter():
            for rows in self._my_micro_batches(groups):
                out_BT += self._forward(rows, out_BT.shape)[0]
        distributed.add_up([out_BT])
        return out_BT

    def _my_micro_batches(self, groups: Sequence[Group]) -> list[list[Row]]:
        """Those of this process: a part of the rows, each of which is a sequence or more."""
        rows = make_rows(groups, max_row_tokens=MAX_ROW_TOKENS)
        return list(micro_batches(rows[distributed.part(len(rows))], max_tokens=self.micro_batch_tokens))

    def _forward(self, rows: Sequence[Row], shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probs, with gradient, and entropies of completion tokens in their places of [B, T], zero elsewhere."""
        model = self.model
        packed = collate(rows, model.device)
        with model.autocast():
            hidden_RLH = model.decoder(
                input_ids=packed.token_ids_RL,
                attention_mask=packed.attention_mask_R1LL,
                position_ids=packed.position_ids_RL,
                use_cache=False,
            ).last_hidden_state
        hidden_NH = hidden_RLH.flatten(0, 1)[packed.predictors]
        temperature = self.config.rollout.temperature
        logprob_N, entropy_N = token_logprob(hidden_NH, model.head_VH, packed.targets, temperature=temperature)
        empty_BT = torch.zeros(*shape, device=model.device)
        return empty_BT.index_put(packed.where, logprob_N), empty_BT.index_put(packed.where, entropy_N)
