import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl_core.kernels.token_logprob import reference, token_logprob


def inputs(num_tokens, hidden, vocabulary, dtype=torch.float32):
    torch.manual_seed(0)
    states = torch.randn(num_tokens, hidden).to(dtype)
    head = (torch.randn(vocabulary, hidden) * 0.3).to(dtype)
    return states.requires_grad_(True), head, torch.randint(vocabulary, (num_tokens,))


def test_by_hand():
    # Logits log(1), log(2), log(5): probabilities 1/8, 1/4, 5/8.
    head = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])

    logprob, entropy = token_logprob(torch.ones(2, 1), head, torch.tensor([1, 2]))

    torch.testing.assert_close(logprob.exp(), torch.tensor([1 / 4, 5 / 8]))
    by_hand = -(1 / 8 * math.log(1 / 8) + 1 / 4 * math.log(1 / 4) + 5 / 8 * math.log(5 / 8))
    torch.testing.assert_close(entropy, torch.full((2,), by_hand))


@pytest.mark.parametrize(("num_tokens", "hidden", "vocabulary"), [(1, 16, 7), (63, 48, 1000), (130, 8, 33)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_bytes", [1, 50_000, 1 << 28])
def test_equals_the_reference_and_its_gradient_in_float64(num_tokens, hidden, vocabulary, temperature, chunk_bytes):
    states, head, target = inputs(num_tokens, hidden, vocabulary)
    upstream = torch.randn(num_tokens)

    logprob, entropy = token_logprob(states, head, target, temperature=temperature, chunk_bytes=chunk_bytes)
    logprob.backward(upstream)

    exact = states.detach().double().requires_grad_(True)
    logits = exact @ head.double().T / temperature
    wanted = logits.log_softmax(-1)
    chosen = wanted.gather(1, target[:, None])[:, 0]
    chosen.backward(upstream.double())
    torch.testing.assert_close(logprob.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(wanted.exp() * wanted).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    for found, defined in zip(
        (logprob, entropy), reference(states, head, target, temperature=temperature), strict=True
    ):
        torch.testing.assert_close(found, defined, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_the_gradient_is_right_to_its_rounding():
    states, head, target = inputs(40, 64, 500, torch.bfloat16)

    logprob, _ = token_logprob(states, head, target)
    logprob.sum().backward()

    exact = states.detach().double().requires_grad_(True)
    (exact @ head.double().T).log_softmax(-1).gather(1, target[:, None]).sum().backward()
    error = (states.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert states.grad.dtype == torch.bfloat16
    assert error < 2**-7


def test_no_tokens_have_no_logprobs():
    states, head, target = inputs(0, 16, 7)

    logprob, entropy = token_logprob(states, head, target)
    logprob.sum().backward()

    assert logprob.shape == entropy.shape == (0,)
    assert states.grad.shape == (0, 16)


def test_the_entropy_has_no_gradient():
    states, head, target = inputs(3, 16, 7)

    assert not token_logprob(states, head, target)[1].requires_grad


@pytest.mark.parametrize(
    ("states", "head", "target", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(9, 5), torch.zeros(3, dtype=torch.long), "shapes do not fit"),
        (torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(2, dtype=torch.long), "shapes do not fit"),
        (torch.zeros(3, 4), torch.zeros(9, 4, requires_grad=True), torch.zeros(3, dtype=torch.long), "frozen"),
    ],
)
def test_bad_arguments_are_refused(states, head, target, message):
    with pytest.raises(ValueError, match=message):
        token_logprob(states, head, target)


def test_the_kernel_equals_the_torch_path_in_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from qerl_core.kernels.token_logprob import _stats_by_kernel, _stats_by_torch
torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
torch.manual_seed(0)
for rows, vocabulary in [(1, 7), (3, 2048), (5, 5000)]:
    for dtype in (None, torch.float32):
        logits, target = torch.randn(rows, vocabulary) * 5, torch.randint(vocabulary, (rows,))
        found = _stats_by_kernel(logits.clone(), target, 0.7, dtype)
        wanted = _stats_by_torch(logits.clone(), target, 0.7, dtype)
        for a, b in zip(found, wanted):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-4, atol=1e-4), (rows, vocabulary, a, b)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_ampere_hopper_and_blackwell(capability, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    from qerl_core.kernels.token_logprob import _stats_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = ["logits", "target", "logprob", "entropy", "residual", "V", "residual_stride", "inv_temperature"]
    types = ["*fp32", "*i64", "*fp32", "*fp32", "*bf16", "i32", "i32", "fp32"]
    source = triton.compiler.ASTSource(
        _stats_kernel, dict(zip(names, types, strict=True)) | {"BLOCK": "constexpr", "WRITE": "constexpr"},
        constexprs={"BLOCK": 4096, "WRITE": True},
    )  # fmt: skip
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True}).asm[
        "cubin"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("num_tokens", "hidden", "vocabulary"), [(1, 64, 7), (63, 896, 32_003), (2000, 3584, 152_064)])
def test_on_a_gpu_the_gradient_is_right_to_bfloat16_rounding(num_tokens, hidden, vocabulary):
    states, head, target = inputs(num_tokens, hidden, vocabulary, torch.bfloat16)
    states, head, target = states.detach().cuda().requires_grad_(True), head.cuda(), target.cuda()
    upstream = torch.randn(num_tokens, device="cuda")

    logprob, entropy = token_logprob(states, head, target, temperature=0.8)
    logprob.backward(upstream)

    exact = states.detach().float().requires_grad_(True)
    wanted, defined = reference(exact, head.float(), target, temperature=0.8)
    wanted.backward(upstream)
    torch.testing.assert_close(logprob, wanted, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(entropy, defined, rtol=1e-4, atol=2e-3)
    error = (states.grad.float() - exact.grad).norm() / exact.grad.norm()
    assert error < 2**-7
