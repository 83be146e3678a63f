import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl_core.errors import BadCheckpoint
from qerl_core.policy.norms import NormNoise, noisy_norms
from tests.tiny import make_model

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


BEFORE_THE_MLP = dict.fromkeys([*FAMILIES, "gemma"], "post_attention_layernorm") | dict.fromkeys(
    ["gemma2", "gemma3_text"], "pre_feedforward_layernorm"
)


@pytest.mark.parametrize(("architecture", "second"), BEFORE_THE_MLP.items())
def test_two_norms_of_each_block_carry_noise(architecture, second, tmp_path):
    causal = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture=architecture))

    assert list(noisy_norms(causal.get_decoder(), causal.config)) == [
        "layers.0.input_layernorm", f"layers.0.{second}", "layers.1.input_layernorm", f"layers.1.{second}",
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", BEFORE_THE_MLP)
def test_the_norms_are_those_whose_output_the_linears_read(architecture, tmp_path):
    causal = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture=architecture))
    written, read = {}, {}
    for name, norm in noisy_norms(causal.get_decoder(), causal.config).items():
        norm.register_forward_hook(lambda norm, inputs, output, name=name: written.update({name: output}))
    for i, layer in enumerate(causal.model.layers):
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer.get_submodule(leaf).register_forward_pre_hook(
                lambda linear, inputs, name=f"layers.{i}.{leaf}": read.update({name: inputs[0]})
            )

    with torch.no_grad():
        causal(torch.arange(8)[None])

    assert len(written) == 4
    for name, states in read.items():
        first, second = [norm for norm in written if norm.startswith(name[:9])]
        assert torch.equal(states, written[first if "self_attn" in name else second])


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_norms_multiply_by_one_more_than_their_weight_and_noise_is_added_to_that(architecture, tmp_path):
    causal = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture=architecture), dtype=torch.float32)
    noise = NormNoise(causal)
    [norm, *_] = noise.norms.values()
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    clean, weight = norm(states), norm.weight.detach().clone()

    with noise.applied(0.1, 0):
        factor = (1 + norm.weight) / (1 + weight)
        noisy = norm(states)

    torch.testing.assert_close(noisy, clean * factor)


def test_an_architecture_with_one_norm_a_block_is_refused(tmp_path):
    causal = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, architecture="cohere"))

    with pytest.raises(BadCheckpoint, match=r"cohere has 2 norms .* 4 are wanted .* Turn noise off"):
        noisy_norms(causal.get_decoder(), causal.config)


def test_an_architecture_with_other_norms_is_refused(tiny_folder):
    causal = AutoModelForCausalLM.from_pretrained(tiny_folder)
    del causal.model.layers[1].input_layernorm

    with pytest.raises(BadCheckpoint, match=r"3 norms .* 4 are wanted"):
        NormNoise(causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_clean_plus_draw_and_gone_afterwards_to_the_bit(tiny_folder, dtype):
    causal = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype)
    noise = NormNoise(causal)
    norms = list(noise.norms.values())
    clean = [norm.weight.detach().clone() for norm in norms]
    draws = []

    for seed in (1, 2):
        with noise.applied(0.01, seed):
            draws.append(torch.cat([norm.weight - before.float() for norm, before in zip(norms, clean, strict=True)]))

    assert all(torch.equal(norm.weight, before) for norm, before in zip(norms, clean, strict=True))
    assert all(norm.weight.dtype == dtype for norm in norms)
    assert draws[0].std().item() == pytest.approx(0.01, rel=0.15)
    assert draws[1].std().item() == pytest.approx(0.01, rel=0.15)  # a fresh draw, not one more on top
    assert not torch.equal(draws[0], draws[1])


def test_small_noise_is_not_lost_to_bfloat16(tiny_folder):
    causal = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
    noise = NormNoise(causal)
    [norm, *_] = noise.norms.values()
    clean = norm.weight.float()

    with noise.applied(1e-4, 0):
        changed = norm.weight != clean
        output = norm(torch.ones(1, 64, dtype=torch.bfloat16))

    assert changed.all()  # in bfloat16 a step at 1 is 7.8e-3: nothing would have changed
    assert output.dtype == torch.bfloat16


def test_an_error_inside_leaves_the_norms_clean(tiny_folder):
    causal = AutoModelForCausalLM.from_pretrained(tiny_folder)
    noise = NormNoise(causal)
    [norm, *_] = noise.norms.values()
    before = norm.weight.detach().clone()

    with pytest.raises(RuntimeError, match="the engine broke"), noise.applied(0.1, 0):
        raise RuntimeError("the engine broke")

    assert torch.equal(norm.weight, before)


def test_negative_sigma_is_refused(tiny_folder):
    noise = NormNoise(AutoModelForCausalLM.from_pretrained(tiny_folder))

    with pytest.raises(ValueError, match="below 0"), noise.applied(-0.1, 0):
        pass
