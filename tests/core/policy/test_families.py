"""Every family of models goes the whole way: quantized, loaded, adapted, noised."""

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from qerl_core.config import LoraConfig
from qerl_core.policy.model import peft_config
from qerl_core.policy.norms import NormNoise
from qerl_core.quant.checkpoint import load_model, load_plain_model, quantize_folder
from qerl_core.quant.linear import NVFP4Linear, quantizable_linears
from tests.tiny import make_model

TOKENS = torch.arange(34).view(2, 17)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request, tmp_path_factory):
    """An unquantized folder of a family, and its NVFP4 twin."""
    folder = tmp_path_factory.mktemp("families")
    # Gemma ties its embeddings in every released model.
    source = make_model(folder / "plain", architecture=request.param, tied="gemma" in request.param)
    quantize_folder(source, folder / "packed")
    return source, folder / "packed"


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_it_is_the_model_that_transformers_loads_with_rounded_weights(folders):
    source, packed = folders
    ours, plain = load_model(packed, compute_dtype=torch.float32), load_plain_model(source, compute_dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(logits(plain), logits(stock))

    for name, linear in quantizable_linears(plain).items():
        linear.weight.data = ours.get_submodule(name).decode()

    assert sum(isinstance(module, NVFP4Linear) for module in ours.modules()) == 14
    assert torch.equal(logits(ours), logits(plain))
    assert torch.equal(
        logits(load_model(packed)), logits(AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_trains_under_noise_and_the_clean_model_is_back_afterwards(folders, dtype):
    causal = load_model(folders[1], compute_dtype=dtype)
    noise = NormNoise(causal)
    model = get_peft_model(causal, peft_config(LoraConfig(rank=4)))
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    clean = logits(model)

    with noise.applied(0.1, 0):
        noisy = logits(model)
        model(TOKENS, labels=TOKENS).loss.backward()

    assert len(noise.norms) == 4
    assert len(adapted) == 14
    assert noisy.dtype == clean.dtype == dtype
    assert not torch.equal(noisy, clean)
    assert torch.equal(logits(model), clean)
    grads = [parameter.grad for name, parameter in model.named_parameters() if "lora_B" in name]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
