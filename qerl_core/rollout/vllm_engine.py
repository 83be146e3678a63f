"""Rollouts by vLLM in this process. `VllmEngine` shares the policy's own 4-bit tensors; `StockVllmEngine` is its twin.

In `VllmEngine` nothing is sent and nothing is kept twice: vLLM holds the base in tiles (`vllm_plugin.py`), the
trainer's linears read those same tiles, its embedding and head those same matrices. A step writes LoRA into buffers,
in place, so CUDA graphs stay valid. `StockVllmEngine` is vLLM as it comes, with a copy of the base, its own kernels and
an adapter folder a step: slower, on any GPU that vLLM runs on, and what the other is held to.

A completion is a request of its own, so that each is there as it ends; those of a prompt share its prefill by vLLM's
prefix cache, as they would in one request, which vLLM takes apart in the same way.

In both, norm weights are float32 and written in place, clean or noisy. Log-probs are those of the tokens drawn, under
the temperature and top-p they were drawn with.

R = LoRA rank, K = in features, N = out features.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qerl_core.errors import RolloutFailed
from qerl_core.kernels.nvfp4_matmul import TILE, TiledWeight
from qerl_core.policy.model import PolicyModel
from qerl_core.policy.norms import noisy_norms, noisy_weights
from qerl_core.quant.linear import FUSED, NVFP4Linear
from qerl_core.rollout.engine import OnCompletion, Sampling, completion_seed
from qerl_core.types import Completion, FinishReason, Group, Prompt

STOCK_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Those that vLLM has LoRA kernels for."""


class StockVllmEngine:
    """A `RolloutEngine` of vLLM as it comes: its own copy of the base, its own LoRA kernels."""

    def __init__(
        self,
        model: PolicyModel,
        *,
        rank: int,
        max_tokens: int,
        max_sequences: int = 512,
        memory_fraction: float = 0.5,
        graphs: bool = True,
    ) -> None:
        """Load the model's folder into vLLM.

        `max_tokens` is the longest prompt and completion together; `memory_fraction` of the GPU's memory is for
        weights, KV cache and the engine's activations. RolloutFailed if vLLM cannot be started.
        """
        # vLLM reads these when it is imported: the engine must be in this process for its weights to be in reach.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            from vllm import LLM

            from qerl_core.rollout import vllm_plugin
        except ImportError as error:
            raise RolloutFailed(f"vLLM cannot be imported ({error}); install qerl[gpu], or roll out by hf") from error
        vllm_plugin.use_float32_norms()
        self.model = model
        arguments: dict[str, Any] = {
            "model": str(model.folder), "dtype": "bfloat16", "max_model_len": max_tokens,
            "max_num_seqs": max_sequences, "gpu_memory_utilization": memory_fraction, "enable_prefix_caching": True,
            "enforce_eager": not graphs, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True,
            "generation_config": "vllm",
        }  # fmt: skip
        try:
            self._llm: Any = LLM(**arguments | self._arguments(rank))
        except (ValueError, TypeError, RuntimeError) as error:  # a setting it lacks, a model it cannot run, memory
            raise RolloutFailed(
                f"vLLM cannot start ({type(error).__name__}: {error}); see rollout.memory_fraction, or set "
                "rollout.engine to hf"
            ) from error
        (self._inside,) = self._llm.apply_model(lambda inside: inside)
        norms: dict[str, Any] = dict(noisy_norms(self._inside.model, self._inside.config))
        self._norms: dict[str, Tensor] = {name: norm.weight for name, norm in norms.items()}
        self._clean = {name: weight.detach().clone() for name, weight in self._norms.items()}
        self._request: Any = None

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
        numbers = range(sampling.num_completions)
        places = {f"{p}.{number}": (p, number) for p in range(len(prompts)) for number in numbers}
        ended: dict[tuple[int, int], Completion] = {}
        try:
            self.load(sigma=sigma, seed=seed)
            for name, (p, number) in places.items():
                self._add(name, prompts[p], sampling, completion_seed(seed, first + p, number))
            while self._llm.llm_engine.has_unfinished_requests():
                for request in self._llm.llm_engine.step():
                    p, number = places[request.request_id]
                    (output,) = request.outputs
                    ended[p, number] = self._completion(output)
                    if on_completion:
                        on_completion(first + p, number, ended[p, number])
        except BaseException:
            self._llm.llm_engine.abort_request(list(places))  # those that have ended it does not know any more
            raise
        finally:
            if sigma:
                self._write_norms(0.0, seed)
        return [Group(prompt, tuple(ended[p, number] for number in numbers)) for p, prompt in enumerate(prompts)]

    def _add(self, name: str, prompt: Prompt, sampling: Sampling, seed: int) -> None:
        """Let vLLM sample a completion, and speak of it when it has ended."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sorted(self.model.eos_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = tokens_input(list(prompt.token_ids))
        self._llm.llm_engine.add_request(name, tokens, wanted, lora_request=self._request)

    @torch.no_grad()
    def load(self, *, sigma: float, seed: int) -> None:
        """Write the adapter as it is now, and norms with a fresh draw of noise; drop what was cached of older ones."""
        self._write_adapter()
        self._write_norms(sigma, seed)
        if not self._llm.reset_prefix_cache():
            raise RolloutFailed("vLLM holds on to cached prefixes of older weights")

    def _arguments(self, rank: int) -> dict[str, Any]:
        """What LLM is told besides."""
        wide = next((wide for wide in STOCK_RANKS if rank <= wide), None)
        if wide is None:
            raise RolloutFailed(f"vLLM holds LoRA of rank {STOCK_RANKS[-1]} at most, not {rank}")
        self._folder = TemporaryDirectory(prefix="qerl-adapter-")
        self._loads = 0
        return {"enable_lora": True, "max_lora_rank": wide, "max_loras": 1}

    def _write_adapter(self) -> None:
        from vllm.lora.request import LoRARequest

        self._loads += 1
        folder = Path(self._folder.name) / str(self._loads)
        self.model.peft.save_pretrained(str(folder), save_embedding_layers=False)
        self._request = LoRARequest(f"step-{self._loads}", self._loads, str(folder))

    @torch.no_grad()
    def _write_norms(self, sigma: float, seed: int) -> None:
        found = dict(noisy_weights(self._clean, sigma, seed)) if sigma else self._clean
        torch._foreach_copy_(list(self._norms.values()), [found[name] for name in self._norms])

    def _completion(self, output: Any) -> Completion:
        tokens = tuple(output.token_ids)
        logprobs = tuple(output.logprobs.logprobs)
        if len(logprobs) != len(tokens) or output.finish_reason not in ("stop", "length"):
            raise RolloutFailed(
                f"vLLM ended a completion by {output.finish_reason!r} with {len(tokens)} tokens and {len(logprobs)} "
                "log-probs"
            )
        text = self.model.tokenizer.decode(tokens, skip_special_tokens=True)
        reason: FinishReason = "stop" if output.finish_reason == "stop" else "length"
        return Completion(tokens, logprobs, text, reason)


class VllmEngine(StockVllmEngine):
    """A `RolloutEngine` in which the policy's base lives, with one resident LoRA."""

    def __init__(self, model: PolicyModel, **settings: Any) -> None:
        """Load the model's folder into vLLM, then let the model share what vLLM holds. Settings: see the twin."""
        super().__init__(model, **settings)
        self._share_base()
        self._lora = self._lora_targets()

    def _arguments(self, rank: int) -> dict[str, Any]:
        from qerl_core.rollout import vllm_plugin

        vllm_plugin.register()
        return {"quantization": vllm_plugin.NAME, "additional_config": {"qerl_rank": rank}}

    def _write_adapter(self) -> None:
        weights = [linear.weight.detach() for linear, _, _ in self._lora]
        scaled = torch._foreach_mul(weights, [factor for _, factor, _ in self._lora])
        torch._foreach_copy_([target for _, _, target in self._lora], scaled)

    def _engine_linear(self, name: str) -> tuple[Any, int]:
        """vLLM's linear that a module of the model's is a part of, and which part."""
        parent, _, leaf = name.rpartition(".")
        for fused, members in zip(("qkv_proj", "gate_up_proj"), FUSED, strict=True):
            if leaf in members:
                return self._inside.get_submodule(f"{parent}.{fused}"), members.index(leaf)
        return self._inside.get_submodule(name), 0

    @torch.no_grad()
    def _share_base(self) -> None:
        causal = self.model.causal
        for name, linear in causal.named_modules():
            if not isinstance(linear, NVFP4Linear):
                continue
            held, part = self._engine_linear(name.removesuffix(".base_layer"))
            first = held.starts[part] // TILE
            rows = held.tiles[first : first - (-linear.out_features // TILE)]
            linear.adopt(TiledWeight(rows, held.tensor_scale, linear.out_features, linear.in_features))
        for module, held in (
            (causal.get_input_embeddings(), self._inside.model.embed_tokens),
            (causal.get_output_embeddings(), self._inside.lm_head),
        ):
            module.weight.data = held.weight.data[: module.weight.shape[0]]
        torch.cuda.empty_cache()

    def _lora_targets(self) -> list[tuple[nn.Linear, float, Tensor]]:
        """Each LoRA matrix of the policy, what to multiply it by, and the part of a buffer it goes to."""
        targets: list[tuple[nn.Linear, float, Tensor]] = []
        for name, layer in self.model.causal.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            held, part = self._engine_linear(name)
            a, b = (cast(nn.Linear, matrices["default"]) for matrices in (layer.lora_A, layer.lora_B))
            rank, start = layer.r["default"], held.starts[part]
            first = part * held.rank
            targets.append((a, 1.0, held.lora_a[first : first + rank]))
            target_b = held.lora_b[start : start + b.out_features, :rank]
            targets.append((b, float(layer.scaling["default"]), target_b))
        return targets
