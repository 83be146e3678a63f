"""The peers of `benchmarks.step`: TRL's GRPOTrainer with vLLM beside it, and QeRL's published procedure.

TRL is measured as its user gets it, by its own defaults but for sizes, lengths and vLLM's share of memory: the base in
BF16, or in NF4 with double quantization (QLoRA); LoRA by PEFT, gradient checkpointing, vLLM in the same process and
awake all the time. Each step it merges the LoRA into the base, gives vLLM every weight of the model and takes the LoRA
out again, and it corrects for vLLM's log-probs with one more forward pass. Over an NF4 base it starts vLLM with
bitsandbytes, which makes its own NF4 from the same folder; then a merge decodes each weight, rounds it anew by way of
the CPU, and gives vLLM the codes but not their scales: its samples are somewhat off, which does not change its time,
and only that is measured here. Without a GPU there is no vLLM, and TRL samples by transformers.

QeRL's procedure is rebuilt from its description (arXiv:2510.11696) out of parts of ours: every weight decoded by eager
passes, in the forward, in its recomputation and in the backward; stock PEFT; every completion a row of its own; vLLM
with Marlin and a copy of the base, an adapter folder a step, asleep while the policy learns (level 1: its weights go to
the CPU and come back). Loss, log-prob kernel and optimizer are ours, which favours it if anything.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BitsAndBytesConfig, TrainerCallback

from benchmarks.kernels import EagerLinear
from qerl_core.config import TrainConfig
from qerl_core.policy.model import PolicyModel, checkpoint_activations
from qerl_core.policy.pack import Row, make_rows, micro_batches
from qerl_core.policy.update import Policy
from qerl_core.quant.linear import NVFP4Linear
from qerl_core.rollout.engine import Sampling
from qerl_core.rollout.vllm_engine import StockVllmEngine
from qerl_core.types import Group, Prompt


@dataclass(slots=True)
class Memory:
    """The most of the GPU's memory that was in use whenever someone looked."""

    used_bytes: int = 0

    def look(self) -> None:
        """Look now; without a GPU there is nothing to see."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.used_bytes = max(self.used_bytes, total - free)

    def figures(self) -> dict[str, float]:
        """As a figure of a record, if there is one."""
        return {"peak_gib": self.used_bytes / 2**30} if self.used_bytes else {}


def now() -> float:
    """The time when the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def stock_lora(config: TrainConfig) -> LoraConfig:
    """The run's LoRA as PEFT has it."""
    targets: list[str] = list(config.lora.target_modules)
    alpha = int(config.lora.alpha)
    return LoraConfig(r=config.lora.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")


# TRL


def nf4() -> BitsAndBytesConfig:
    """QLoRA's base."""
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


def write_words(folder: Path, num_words: int) -> None:
    """A tokenizer in which the word `t7` is token 7, from 3 on, and nothing is added to a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    # The special ones must be no part of a word: they are found first, wherever they stand.
    words = ["<pad>", "<eos>", "<unk>", *(f"t{token}" for token in range(3, num_words))]
    inner = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.save_pretrained(folder)


class Watch(TrainerCallback):
    """Takes the time of TRL's steps."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory = Memory()
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A batch is there: sampling is next."""
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer has made its step."""
        self.times.append(now() - self._started)
        self.memory.look()


def watch_rollouts(trainer: Any, tokens_in: int, tokens_out: int) -> list[float]:
    """Where times of TRL's rollouts will go, weights to vLLM included. One of wrong lengths is a RuntimeError."""
    generate, times = trainer._generate, []

    def timed(prompts: Any) -> Any:
        started = now()
        found = generate(prompts)
        times.append(now() - started)
        lengths = {(len(prompt), len(completion)) for prompt, completion in zip(*found[:2], strict=True)}
        if lengths != {(tokens_in, tokens_out)}:
            raise RuntimeError(f"prompts and completions of {lengths} tokens")
        return found

    trainer._generate = timed
    return times


def trl_arguments(config: TrainConfig, num_steps: int, folder: str) -> Any:
    """What TRL is told: sizes and lengths of the run, micro-batches of about as many tokens, nothing saved."""
    from trl import GRPOConfig

    rollout, has_gpu = config.rollout, torch.cuda.is_available()
    num_sequences = rollout.num_prompts * rollout.group_size
    tokens_in, tokens_out = rollout.max_prompt_tokens, rollout.max_completion_tokens
    most = config.micro_batch_tokens // (tokens_in + tokens_out)
    at_once = max(size for size in range(1, most + 1) if num_sequences % size == 0)
    return GRPOConfig(
        output_dir=folder, max_steps=num_steps, per_device_train_batch_size=at_once,
        gradient_accumulation_steps=num_sequences // at_once, num_generations=rollout.group_size,
        max_completion_length=tokens_out, temperature=rollout.temperature, beta=0.0,
        learning_rate=config.optimizer.learning_rate, bf16=True, gradient_checkpointing=True,
        model_init_kwargs={"dtype": "bfloat16"}, shuffle_dataset=False, seed=config.seed,
        use_cpu=not has_gpu, use_vllm=has_gpu, vllm_mode="colocate", vllm_max_model_length=tokens_in + tokens_out,
        vllm_gpu_memory_utilization=rollout.memory_fraction,
        generation_kwargs={"ignore_eos": True} if has_gpu else {"min_new_tokens": tokens_out},
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip


def measure_trl(folder: Path, config: TrainConfig, batches: Sequence[Tensor], *, quantized: bool) -> dict[str, float]:
    """Medians of a step and its parts, after the first, which is not counted; a batch is token ids [P, tokens in].

    `folder` holds BF16 weights and the words of `write_words`. Rewards are random.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOTrainer

    draw, rollout = random.Random(0), config.rollout
    prompts = [" ".join(f"t{token}" for token in row) for batch in batches for row in batch.tolist()]

    def reward(completions: Any, **_: Any) -> list[float]:
        return [draw.gauss(0, 1) for _ in completions]

    watch = Watch()
    with TemporaryDirectory() as output:
        trainer: Any = GRPOTrainer(
            model=str(folder), reward_funcs=reward, args=trl_arguments(config, len(batches), output),
            # With a fingerprint of our own: datasets makes one by pickling pyarrow's types, which not all can be.
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
            # AutoTokenizer would go by the model's type and cut words as Qwen does; vLLM may, since it only decodes.
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            peft_config=stock_lora(config), callbacks=[watch],
            quantization_config=nf4() if quantized else None,
        )  # fmt: skip
        sampled = watch_rollouts(trainer, rollout.max_prompt_tokens, rollout.max_completion_tokens)
        trainer.train()
    if not len(sampled) == len(watch.times) == len(batches):
        raise RuntimeError(f"{len(watch.times)} steps and {len(sampled)} rollouts, not {len(batches)} of each")
    updated = [step - part for step, part in zip(watch.times, sampled, strict=True)]
    times = {"rollout_s": sampled, "update_s": updated, "step_s": watch.times}
    return {name: median(values[1:]) for name, values in times.items()} | watch.memory.figures()


# QeRL's procedure


def qerl_peft(causal: Any, config: TrainConfig) -> Any:
    """Stock PEFT over linears that decode by eager passes, activations checkpointed."""
    for module in causal.modules():
        if isinstance(module, NVFP4Linear):
            module.__class__ = EagerLinear
    peft = get_peft_model(causal, stock_lora(config))
    checkpoint_activations(causal)
    return peft


class QerlPolicy(Policy):
    """Every completion behind a copy of its prompt."""

    def _my_micro_batches(self, groups: Sequence[Group]) -> list[list[Row]]:
        return list(micro_batches(make_rows(groups, max_row_tokens=0), max_tokens=self.micro_batch_tokens))


class QerlEngine(StockVllmEngine):
    """vLLM with Marlin, asleep but while it samples."""

    def __init__(self, model: PolicyModel, memory: Memory, **settings: Any) -> None:
        """Load the model's folder into vLLM and put it to sleep. `memory` looks when both are there."""
        super().__init__(model, **settings)
        self.memory = memory
        self._llm.sleep(level=1)

    def load(self, *, sigma: float, seed: int) -> None:
        """Wake up, then take adapter and noise."""
        self._llm.wake_up()
        super().load(sigma=sigma, seed=seed)

    def rollout(self, prompts: Sequence[Prompt], sampling: Sampling, **settings: Any) -> list[Group]:
        """See `RolloutEngine`."""
        groups = super().rollout(prompts, sampling, **settings)
        self.memory.look()
        self._llm.sleep(level=1)
        return groups

    def _arguments(self, rank: int) -> dict[str, Any]:
        return super()._arguments(rank) | {"linear_backend": "marlin", "enable_sleep_mode": True}
