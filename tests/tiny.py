"""A language model that fits in a test: two layers, byte vocabulary, random weights. Real classes, real files."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS, PAD, IM_START = "<|im_end|>", "<|pad|>", "<|im_start|>"
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'][0] + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A token a byte, and three special ones."""
    vocab = {byte: i for i, byte in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, additional_special_tokens=[IM_START]
    )
    fast.chat_template = CHAT
    return fast


def make_model(folder: Path, *, architecture: str = "llama", tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a random model with its tokenizer to a folder; returns the folder."""
    tokenizer = make_tokenizer()
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    eos = tokenizer.convert_tokens_to_ids(EOS)
    config = AutoConfig.for_model(
        architecture,
        **{**sizes, "vocab_size": len(tokenizer), "tie_word_embeddings": tied, "eos_token_id": eos, **changes},
        bos_token_id=None,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, num_rows: int) -> Path:
    """JSONL rows with an `answer`."""
    rows = ({"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
