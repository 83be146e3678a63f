"""PEFT's LoRA with the sum taken in place: the same adapter, the same numbers."""

import pytest
import torch
from peft import get_peft_model
from peft.tuners import lora
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_core.config import LoraConfig
from qerl_core.policy.model import AddedInPlace, peft_config
from qerl_core.quant.linear import NVFP4Linear
from qerl_core.quant.nvfp4 import quantize

IN, OUT, RANK = 32, 48, 4


class Small(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        weight, bias = quantize(torch.randn(OUT, IN)), torch.randn(OUT)
        self.q_proj = NVFP4Linear.from_weight(weight, bias, dtype)

    def forward(self, x):
        return self.q_proj(x)


def make(*, ours, dtype=torch.float32, dropout=0.0, cast_input=True):
    """A layer with an adapter, which is ours or PEFT's own."""
    config = peft_config(LoraConfig(rank=RANK, dropout=dropout, target_modules=("q_proj",)))
    config.task_type = None
    if not ours:
        config._custom_modules = None
    peft = get_peft_model(Small(dtype), config)
    layer = peft.base_model.model.q_proj
    assert type(layer) is (AddedInPlace if ours else lora.Linear)
    layer.lora_B["default"].weight.data.normal_(generator=torch.Generator().manual_seed(1))
    layer.lora_A["default"].weight.data.normal_(generator=torch.Generator().manual_seed(2))
    layer.cast_input_dtype_enabled = cast_input
    return peft


def run(peft, *shape, dtype=torch.float32, autocast=False):
    """Output and gradients."""
    x = torch.randn(*shape, IN, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    torch.manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = peft(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    layer = peft.base_model.model.q_proj
    return y, x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad


@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_outputs_and_gradients_are_those_of_peft(shape, dropout):
    found, expected = (run(make(ours=ours, dropout=dropout), *shape) for ours in (True, False))

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bfloat16_it_is_as_near_to_the_exact_result_as_peft(autocast):
    # Without autocast PEFT takes LoRA's products in float32.
    exact = run(make(ours=True), 64)
    errors = []
    for ours in (True, False):
        found = run(
            make(ours=ours, dtype=torch.bfloat16, cast_input=not autocast), 64, dtype=torch.bfloat16, autocast=autocast
        )
        assert found[0].dtype == found[1].dtype == torch.bfloat16
        errors.append([((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)])

    for ours, peft in zip(*errors, strict=True):
        assert ours < max(1.25 * peft, 0.005)


def test_it_makes_one_tensor_of_the_width():
    made = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == (7, OUT) and "view" not in str(func):
                made.append(result.untyped_storage().data_ptr())
            return result

    for ours in (True, False):
        peft = make(ours=ours)
        x = torch.randn(7, IN)
        made.clear()
        with Counter():
            output = peft(x)
        assert output.shape == (7, OUT)
        assert (len(set(made)) == 1) == ours


def test_without_its_adapter_it_is_the_base():
    peft = make(ours=True)
    x = torch.randn(3, IN)

    with peft.disable_adapter():
        assert torch.equal(peft(x), Small(torch.float32)(x))
    assert not torch.allclose(peft(x), Small(torch.float32)(x))


def test_two_adapters_at_once_are_left_to_peft():
    found = []
    for ours in (True, False):
        peft = make(ours=ours)
        torch.manual_seed(0)
        config = peft_config(LoraConfig(rank=8, target_modules=("q_proj",)))
        config.init_lora_weights, config.task_type = False, None
        peft.add_adapter("other", config)
        peft.base_model.set_adapter(["default", "other"])
        found.append(peft(torch.ones(2, IN)))

    torch.testing.assert_close(found[0], found[1])


def test_it_is_saved_as_peft_saves_its_own_and_cannot_be_merged_either(tmp_path):
    for name, ours in {"ours": True, "peft": False}.items():
        make(ours=ours).save_pretrained(tmp_path / name)

    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "peft" / file).read_bytes()
    with pytest.raises(RuntimeError, match="cannot be merged"):
        make(ours=True).merge_and_unload()
