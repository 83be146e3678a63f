"""N = out features, K = in features, T = tokens."""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qerl_core.kernels.nvfp4_matmul import TiledWeight, tile
from qerl_core.quant import linear as module_under_test
from qerl_core.quant.linear import NVFP4Linear, quantizable_linears, replace_linears, scale_groups
from qerl_core.quant.nvfp4 import NVFP4Weight, quantize

BOTH_WAYS = pytest.mark.parametrize("keep_decoded", [False, True])
PACKED = ("weight_packed", "weight_scale", "tensor_scale")


def random_weight(num_rows: int = 48, num_cols: int = 32, seed: int = 0) -> NVFP4Weight:
    return quantize(torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(seed)))


def make(
    num_rows: int = 48,
    num_cols: int = 32,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    keep_decoded: bool = False,
) -> NVFP4Linear:
    torch.manual_seed(1)
    values = torch.randn(num_rows) if bias else None
    return NVFP4Linear.from_weight(random_weight(num_rows, num_cols), values, dtype, keep_decoded=keep_decoded)


@pytest.fixture
def num_decodes(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what is decoded while a test runs."""
    seen: list[tuple[int, ...]] = []

    def dequantize(packed_NJ: Tensor, *rest: object) -> Tensor:
        seen.append(tuple(packed_NJ.shape))
        return original(packed_NJ, *rest)

    original = module_under_test.dequantize
    monkeypatch.setattr(module_under_test, "dequantize", dequantize)
    monkeypatch.setattr("qerl_core.quant.nvfp4.dequantize", dequantize)
    return seen


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 16), (5, 48), (48, 32)])
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3)])
def test_forward_and_gradient_equal_those_of_the_decoded_weight(leading, num_rows, num_cols, bias, dtype, keep_decoded):
    layer = make(num_rows, num_cols, bias=bias, dtype=dtype, keep_decoded=keep_decoded)
    weight_NK = random_weight(num_rows, num_cols).decode(dtype)
    x = torch.randn(*leading, num_cols, dtype=dtype, requires_grad=True)
    y = torch.randn(*leading, num_rows, dtype=dtype)
    expected_x = x.detach().clone().requires_grad_()

    out = layer(x)
    out.backward(y)
    expected = F.linear(expected_x, weight_NK, layer.bias)
    expected.backward(y)

    assert torch.equal(out, expected)
    assert torch.equal(x.grad, expected_x.grad)


def test_the_gradient_is_that_of_finite_differences():
    layer = make(dtype=torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(layer, (x,))


def test_a_bias_that_is_asked_for_its_gradient_gets_it():
    layer = make()
    layer.bias.requires_grad_()

    layer(torch.randn(2, 3, 32)).sum().backward()

    assert layer.bias.grad.tolist() == [6.0] * 48


def test_nothing_is_trainable_until_asked():
    layer = make()

    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not layer(torch.randn(2, 32)).requires_grad


def test_nothing_but_the_packed_weight_outlives_the_forward_pass(num_decodes):
    layer = make(48, 320)
    x = torch.randn(4, 320, requires_grad=True)
    saved: list[Tensor] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        out = layer(x)
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (48, 320)]

    assert (saved, alive) == ([], [])
    out.sum().backward()
    assert len(num_decodes) == 2


def test_a_kept_weight_is_decoded_once(num_decodes):
    layer = make(keep_decoded=True)

    for _ in range(3):
        layer(torch.randn(2, 32, requires_grad=True)).sum().backward()

    assert len(num_decodes) == 1


def test_a_weight_kept_from_inference_can_be_trained_through():
    layer = make(keep_decoded=True)
    with torch.inference_mode():
        layer(torch.randn(2, 32))
    x = torch.randn(2, 32, requires_grad=True)

    layer(x).sum().backward()

    assert torch.allclose(x.grad[0], random_weight().decode(torch.float32).sum(0))


def test_it_works_under_gradient_checkpointing():
    layer = make()
    x = torch.randn(2, 32, requires_grad=True)

    checkpoint(layer, x, use_reentrant=False).sum().backward()

    assert torch.allclose(x.grad[0], random_weight().decode(torch.float32).sum(0))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_input_of_any_type_is_computed_in_the_compute_dtype_whatever_autocast_says(given):
    layer = make(dtype=torch.float32)
    x = torch.randn(2, 32, dtype=given, requires_grad=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.sum().backward()

    assert torch.equal(out, F.linear(x.float(), random_weight().decode(torch.float32), layer.bias))
    assert x.grad.dtype == given


@BOTH_WAYS
@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_a_change_of_type_moves_compute_and_bias_and_leaves_the_packed_bits(move, keep_decoded):
    layer = make(keep_decoded=keep_decoded)
    before = {name: getattr(layer, name).clone() for name in PACKED}
    layer(torch.randn(2, 32))

    move(layer)

    assert layer.compute_dtype == layer.bias.dtype == layer.weight.dtype != torch.float32
    for name, tensor in before.items():
        assert getattr(layer, name).dtype == tensor.dtype
        assert torch.equal(getattr(layer, name).float(), tensor.float())
    x = torch.randn(2, 32)
    expected = F.linear(x.to(layer.compute_dtype), random_weight().decode(layer.compute_dtype), layer.bias)
    assert torch.equal(layer(x), expected)


def test_a_change_of_device_moves_everything():
    layer = make().to("meta")

    assert {tensor.device.type for tensor in (*layer.buffers(), *layer.parameters(), layer.weight)} == {"meta"}
    assert layer.compute_dtype == torch.float32


@BOTH_WAYS
def test_a_deep_copy_is_another_layer_with_the_same_output(keep_decoded):
    layer = make(keep_decoded=keep_decoded)
    x = torch.randn(2, 32)
    out = layer(x)

    twin = copy.deepcopy(layer)
    layer.weight_packed.zero_()

    assert torch.equal(twin(x), out)


@BOTH_WAYS
def test_the_state_dict_holds_the_packed_weight_and_loads_into_an_empty_layer(keep_decoded):
    layer, x = make(), torch.randn(2, 32)
    empty = NVFP4Linear(32, 48, True, compute_dtype=torch.float32, keep_decoded=keep_decoded)
    for name in (*PACKED, "bias"):
        getattr(empty, name).data.zero_()
    empty(x)

    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    empty.load_state_dict(torch.load(file, weights_only=True))

    assert layer.state_dict().keys() == {*PACKED, "bias"}
    assert torch.equal(empty(x), layer(x))


def test_shape_type_and_device_of_the_weight_cost_nothing(num_decodes):
    weight = make(dtype=torch.bfloat16).weight

    assert (weight.shape, weight.dtype, weight.device.type) == ((48, 32), torch.bfloat16, "cpu")
    assert (weight.is_floating_point(), weight.requires_grad, weight.dim()) == (True, False, 2)
    assert "NVFP4 weight (48, 32)" in repr(weight)
    assert num_decodes == []


@BOTH_WAYS
def test_an_operation_on_the_weight_sees_the_decoded_values(keep_decoded):
    layer, decoded = make(keep_decoded=keep_decoded), random_weight().decode(torch.float32)

    assert torch.equal(layer.weight, decoded)
    assert torch.equal(layer.weight.data.clone(), decoded)
    assert torch.equal(layer.weight.T @ torch.ones(48), decoded.T @ torch.ones(48))
    assert torch.equal(layer.weight.to(torch.bfloat16), decoded.bfloat16())
    assert type(layer.weight + 0) is Tensor


@BOTH_WAYS
@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.add_(1),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: layer.weight.__iadd__(torch.ones(48, 32)),
        lambda layer: setattr(layer.weight, "data", torch.ones(48, 32)),
        lambda layer: torch.add(torch.ones(48, 32), 1, out=layer.weight),
    ],
)
def test_the_weight_cannot_be_written_to(write, keep_decoded):
    layer = make(keep_decoded=keep_decoded)

    with pytest.raises(RuntimeError, match="frozen"):
        write(layer)

    assert torch.equal(layer.weight, random_weight().decode(torch.float32))


def test_the_weight_cannot_be_replaced():
    layer = make()

    with pytest.raises(AttributeError):
        layer.weight = torch.ones(48, 32)
    with pytest.raises(KeyError):
        layer.weight = nn.Parameter(torch.ones(48, 32))


def test_a_view_of_a_kept_weight_is_a_copy():
    layer = make(keep_decoded=True)
    layer(torch.randn(2, 32))

    layer.weight.T.zero_()

    assert torch.equal(layer.decode(), random_weight().decode(torch.float32))


def test_a_layer_needs_whole_blocks_and_a_bias_that_fits():
    with pytest.raises(ValueError, match="multiple of 16 input features, not 24"):
        NVFP4Linear(24, 8)
    with pytest.raises(ValueError, match="does not fit"):
        NVFP4Linear.from_weight(random_weight(), torch.zeros(47))


class TwoLayers(nn.Module):
    """Linear layers in a module, and an output head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.block = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
        self.lm_head = nn.Linear(32, 10, bias=False)
        self.lm_head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.lm_head(self.block(self.embedding(tokens_T)))


def test_every_linear_layer_but_the_head_is_replaced_and_tied_embeddings_stay_tied():
    torch.manual_seed(0)
    model, expected = TwoLayers().eval(), TwoLayers()
    expected.load_state_dict(model.state_dict())
    weights = {name: quantize(linear.weight) for name, linear in quantizable_linears(model).items()}
    for name, weight in weights.items():
        expected.get_submodule(name).weight.data = weight.decode(torch.float32)

    replace_linears(model, weights, compute_dtype=torch.float32)

    assert [type(module) for module in model.block] == [NVFP4Linear, nn.ReLU, NVFP4Linear]
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.embedding.weight
    assert not model.block[0].training
    assert torch.equal(model(torch.arange(10)), expected(torch.arange(10)))


def test_ignored_layers_are_left_alone():
    assert list(quantizable_linears(TwoLayers(), ignore={"block.2"})) == ["block.0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("block.0"), "do not match.*block.0"),
        (lambda weights: weights.update({"lm_head": random_weight(10, 32)}), "do not match.*lm_head"),
        (lambda weights: weights.update({"block.0": random_weight(32, 48)}), "block.0 is 48 x 32"),
    ],
)
def test_weights_that_do_not_fit_the_model_leave_it_unchanged(change, message):
    model = TwoLayers()
    weights = {name: quantize(linear.weight) for name, linear in quantizable_linears(model).items()}
    change(weights)

    with pytest.raises(ValueError, match=message):
        replace_linears(model, weights)

    assert type(model.block[0]) is nn.Linear


def test_layers_that_engines_fuse_are_one_group():
    names = ["0.q_proj", "0.o_proj", "0.k_proj", "0.v_proj", "0.up_proj", "0.gate_proj", "1.q_proj", "1.fc"]

    assert scale_groups(names) == [
        ("0.q_proj", "0.k_proj", "0.v_proj"), ("0.o_proj",), ("0.up_proj", "0.gate_proj"), ("1.q_proj",), ("1.fc",),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_adopts_tiles_computes_the_same_and_keeps_no_copy(dtype):
    torch.manual_seed(0)
    weight = quantize(torch.randn(96, 64))
    own, shared = (NVFP4Linear.from_weight(weight, torch.randn(96), dtype) for _ in range(2))
    shared.bias = own.bias
    tiled = tile(weight.packed_NJ, weight.block_scale_NS, weight.tensor_scale)
    x = torch.randn(5, 64, dtype=dtype)

    shared.adopt(tiled)

    assert not shared.weight_packed.numel()
    assert torch.equal(shared.packed.packed_NJ, weight.packed_NJ)
    assert torch.equal(shared.weight + 0, own.weight + 0)
    for layer in (own, shared):
        layer.input = x.clone().requires_grad_(True)
        layer.output = layer(layer.input)
        layer.output.float().square().sum().backward()
    assert torch.equal(own.output, shared.output)
    assert torch.equal(own.input.grad, shared.input.grad)


def test_a_layer_adopts_a_part_of_a_fused_matrix():
    torch.manual_seed(0)
    weight = quantize(torch.randn(192, 32))
    tiled = tile(weight.packed_NJ, weight.block_scale_NS, weight.tensor_scale)
    rows = slice(64, 192)
    part = NVFP4Weight(weight.packed_NJ[rows], weight.block_scale_NS[rows], weight.tensor_scale)
    layer = NVFP4Linear.from_weight(part, compute_dtype=torch.float32)
    wanted = layer(torch.eye(32))

    layer.adopt(TiledWeight(tiled.tiles_TUB[1:3], weight.tensor_scale, 128, 32))

    assert torch.equal(layer(torch.eye(32)), wanted)


def test_tiles_of_another_shape_are_not_adopted():
    weight = quantize(torch.randn(64, 32))
    layer = NVFP4Linear.from_weight(weight)

    with pytest.raises(ValueError, match="tiles of 64 x 16 do not fit"):
        layer.adopt(TiledWeight(torch.zeros(1, 1, 2304, dtype=torch.uint8), weight.tensor_scale, 64, 16))
