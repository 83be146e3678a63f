"""Chunks of tokens change what is alive at once, and nothing else."""

import copy
import weakref

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_core.config import ALL_TARGETS, LoraConfig
from qerl_core.policy.model import checkpoint_activations, follow_autocast, peft_config
from qerl_core.policy.recompute import ChunkedMLP, chunk_mlps
from qerl_core.quant.checkpoint import load_model, quantize_folder
from tests.tiny import make_model

TOKENS = torch.arange(74).view(2, 37)
WIDTH = 96
ARCHITECTURES = ["llama", "qwen2", "gemma2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An NVFP4 folder of each family."""
    made = {}
    for architecture in ARCHITECTURES:
        folder = tmp_path_factory.mktemp(architecture)
        source = make_model(folder / "plain", architecture=architecture, tied=architecture == "gemma2")
        quantize_folder(source, folder / "packed")
        made[architecture] = folder / "packed"
    return made


@pytest.fixture
def make(folders):
    """A model with an adapter, in training, its activations checkpointed, its MLPs chunked if a size is given."""

    def make(architecture="llama", *, chunk_tokens=None, dropout=0.0, targets=ALL_TARGETS, dtype=torch.float32):
        causal = load_model(folders[architecture], compute_dtype=dtype, keep_decoded=True)
        torch.manual_seed(0)
        peft = get_peft_model(causal, peft_config(LoraConfig(rank=4, dropout=dropout, target_modules=targets)))
        follow_autocast(peft)
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        checkpoint_activations(causal)
        if chunk_tokens:
            assert chunk_mlps(causal, chunk_tokens) == 2
        return peft.train()

    return make


def mlps(peft):
    return [layer.mlp for layer in peft.get_base_model().get_decoder().layers]


def step(peft, **kwargs):
    """Logits and gradients of a step whose random numbers are always the same."""
    torch.manual_seed(1)
    peft.zero_grad(set_to_none=True)
    output = peft(TOKENS, labels=TOKENS, use_cache=False, **kwargs)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in peft.named_parameters() if p.grad is not None}


def assert_same(some, others):
    """Equal to float32 rounding: products of other shapes add in another order. Logits here reach 10."""
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)


def draw_in_chunks(peft, num_chunks):
    """Let dropout draw for a chunk of tokens after another, as chunked MLPs do, in one graph as ever."""
    for mlp in mlps(peft):
        whole = mlp.forward
        mlp.forward = lambda x, whole=whole: torch.cat(
            [whole(part) for part in x.flatten(0, 1).tensor_split(num_chunks)]
        ).view_as(x)
    return peft


@pytest.mark.parametrize("chunk_tokens", [1, 20, 37, 73, 74, 1000])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_and_gradients_are_those_without_chunks(make, architecture, chunk_tokens):
    whole = step(make(architecture))
    chunked = step(make(architecture, chunk_tokens=chunk_tokens))

    assert_same(chunked, whole)


@pytest.mark.parametrize(("chunk_tokens", "num_chunks"), [(37, 2), (20, 4)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dropout_drops_the_same_in_the_backward_pass(make, architecture, chunk_tokens, num_chunks):
    plain = step(draw_in_chunks(make(architecture, dropout=0.1), num_chunks))
    chunked = step(make(architecture, dropout=0.1, chunk_tokens=chunk_tokens))

    assert_same(chunked, plain)
    assert not torch.allclose(plain[0], step(make(architecture))[0], atol=1e-3)


def test_a_step_leaves_the_random_state_where_it_would_be_without_recomputation(make):
    peft = make(dropout=0.1, chunk_tokens=20)
    torch.manual_seed(1)
    loss = peft(TOKENS, labels=TOKENS, use_cache=False).loss
    state = torch.get_rng_state()

    loss.backward()

    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("architecture", "passes"), [("llama", 2), ("qwen2", 2), ("gemma2", 3)])
def test_an_mlp_runs_once_forward_and_once_backward_unless_a_norm_follows_it(make, architecture, passes):
    peft = make(architecture, chunk_tokens=20)
    sizes = []
    for mlp in mlps(peft):
        mlp.act_fn.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:-1].numel()))

    step(peft)

    assert sum(sizes) == 2 * passes * TOKENS.numel()
    assert sorted(set(sizes)) == [18, 19]
    assert len(sizes) == 2 * passes * 4


@pytest.mark.parametrize("targets", [("gate_proj", "up_proj", "down_proj"), ("down_proj",), ("q_proj", "v_proj")])
def test_any_part_of_a_block_may_train(make, targets):
    found = []
    for chunk_tokens in (None, 20):
        peft = make(targets=targets, chunk_tokens=chunk_tokens)
        # As transformers has it, embeddings have a gradient where activations are checkpointed. Without it nothing
        # before the first MLP has one, if MLPs alone train.
        peft.get_base_model().disable_input_require_grads()
        found.append(step(peft))

    assert found[0][1]
    assert_same(found[1], found[0])


def test_the_base_gets_no_gradient_and_keeps_its_names(make):
    plain, chunked = make(), make(chunk_tokens=20)

    _, gradients = step(chunked)

    assert all("lora_" in name for name in gradients)
    assert len(gradients) == 2 * 2 * len(ALL_TARGETS)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in chunked.named_parameters()]
    assert get_peft_model_state_dict(chunked).keys() == get_peft_model_state_dict(plain).keys()


def test_gradients_add_up_over_micro_batches(make):
    once, twice = make(chunk_tokens=20), make(chunk_tokens=20)
    _, gradients = step(once)

    for _ in range(2):
        twice(TOKENS, labels=TOKENS, use_cache=False).loss.backward()

    doubled = {name: 2 * gradient for name, gradient in gradients.items()}
    assert_same([{name: p.grad for name, p in twice.named_parameters() if p.requires_grad}], [doubled])


def test_hooks_see_each_gradient_whole_and_once(make):
    peft = make(chunk_tokens=20)
    seen, after = {}, []
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()) or 2 * grad)
            parameter.register_post_accumulate_grad_hook(lambda p: after.append(id(p)))

    _, gradients = step(peft)

    assert_same([{name: 2 * grad for name, (grad,) in seen.items()}], [gradients])
    assert len(after) == len(set(after)) == len(gradients)


def test_hooks_of_the_mlp_see_the_whole_of_it(make):
    # One that changes the output changes it once.
    peft, plain = make(chunk_tokens=20), make()
    shapes = []
    for mlp in mlps(peft) + mlps(plain):
        mlp.register_forward_hook(lambda _, inputs, output: shapes.append(output.shape) or output * 1.5)

    assert_same(step(peft), step(plain))
    assert set(shapes) == {(*TOKENS.shape, 64)}


def test_gradients_can_be_asked_for_without_being_accumulated(make):
    peft = make(chunk_tokens=20)
    _, expected = step(peft)
    trained = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    peft.zero_grad(set_to_none=True)

    found = torch.autograd.grad(peft(TOKENS, labels=TOKENS, use_cache=False).loss, list(trained.values()))

    assert_same([dict(zip(trained, found, strict=True))], [expected])
    assert all(p.grad is None for p in trained.values())


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_without_training_an_mlp_runs_whole(make, mode):
    plain, chunked = make(), make(chunk_tokens=20)
    if mode == "eval":
        plain.eval()
        chunked.eval()
    sizes = []
    for mlp in mlps(chunked):
        mlp.act_fn.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:-1].numel()))

    with torch.set_grad_enabled(mode == "eval"):
        found, expected = chunked(TOKENS).logits, plain(TOKENS).logits

    assert torch.equal(found, expected)
    assert sizes == [TOKENS.numel()] * 2


def test_autocast_of_the_forward_pass_holds_in_the_backward_pass(make):
    found = []
    for chunk_tokens in (None, 20):
        peft = make(dtype=torch.bfloat16, chunk_tokens=chunk_tokens)
        with torch.autocast("cpu", torch.bfloat16):
            loss = peft(TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        found.append({name: p.grad for name, p in peft.named_parameters() if p.requires_grad})

    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() < 0.02 * expected.norm()


def test_a_chunked_pass_leaves_autocast_no_parameters_without_a_graph(make):
    peft = make(dtype=torch.bfloat16, chunk_tokens=20)
    with torch.autocast("cpu", torch.bfloat16):
        peft(TOKENS, use_cache=False)
        peft(TOKENS[:1, :9], labels=TOKENS[:1, :9], use_cache=False).loss.backward()  # no more than a chunk

    assert all(p.grad is not None and p.grad.any() for p in peft.parameters() if p.requires_grad)


class Alive(TorchDispatchMode):
    """Counts the bytes of the MLPs' tensors [tokens, width], and the most of them that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.rows = {74, 37, 19, 18}
        self.known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (WIDTH,) and leaf.shape[:-1].numel() in self.rows:
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage):
        if storage not in self.known:
            self.known[storage] = True
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage.nbytes())

    def forget(self, size):
        self.now -= size


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_inside_of_an_mlp_is_alive_for_a_chunk_only(make, architecture):
    peaks = {}
    for chunk_tokens in (None, 37, 19):
        peft = make(architecture, chunk_tokens=chunk_tokens)
        step(peft)  # decodes the weights, which are of the same width
        with Alive() as alive:
            step(peft)
        peaks[chunk_tokens] = alive.peak
        assert alive.now == 0

    assert peaks[37] <= 0.55 * peaks[None]
    assert peaks[19] <= 0.30 * peaks[None]


def test_experts_are_left_alone():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "num_experts": 4}
    sizes |= {"mlp_only_layers": [0]}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    dense, sparse = (layer.mlp for layer in mixture.get_decoder().layers)
    before = type(sparse)

    assert chunk_mlps(mixture, 20) == 1
    assert type(sparse) is before
    assert isinstance(dense, ChunkedMLP)


def test_an_mlp_is_chunked_once_and_can_be_copied(make):
    peft = make(chunk_tokens=50)
    cls = type(mlps(peft)[0])

    chunk_mlps(peft.get_base_model(), 20)
    copied = copy.deepcopy(peft)

    assert type(mlps(peft)[0]) is type(mlps(copied)[0]) is cls
    assert_same(step(copied), step(peft))
    with pytest.raises(ValueError, match="1 token or more, not 0"):
        chunk_mlps(peft.get_base_model(), 0)
