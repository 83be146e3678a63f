"""The core on a GPU, on the tiny model: the same policy as on the CPU, and a whole run."""

import pytest
import torch

from qerl_core.loop import train
from qerl_core.observer import NullObserver
from qerl_core.policy import model
from tests.core.policy.test_update import ADVANTAGES, GROUPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("float32", 1e-3), ("bfloat16", 0.25)],  # of bfloat16's rounding the CPU makes 0.04 to 0.17, by seed
)
def test_logprobs_and_gradients_are_the_cpu_s(make_policy, monkeypatch, dtype, bound):
    on_gpu = make_policy(dtype=dtype)
    monkeypatch.setattr(model, "default_device", lambda: torch.device("cpu"))
    on_cpu = make_policy(dtype="float32")

    gap = (on_gpu.logprobs(GROUPS).cpu() - on_cpu.logprobs(GROUPS)).abs()
    assert gap.mean() < bound / 4
    on_gpu.update(GROUPS, ADVANTAGES)
    on_cpu.update(GROUPS, ADVANTAGES)
    for name, parameter in on_cpu.model.trainable().items():
        error = (on_gpu.model.trainable()[name].grad.cpu() - parameter.grad).norm() / parameter.grad.norm()
        assert error < bound, name


def test_nothing_decoded_is_kept_between_the_passes(make_policy):
    policy = make_policy(dtype="bfloat16")
    policy.update(GROUPS, ADVANTAGES)

    linears = [layer for layer in policy.model.causal.modules() if hasattr(layer, "keep_decoded")]
    assert linears
    assert all(layer._decoded is None for layer in linears)


def test_a_run_on_a_gpu_learns_from_noisy_rollouts_of_a_calibrated_base(make_config, tiny_folder, cache, tmp_path):
    config = make_config(model={"id": "tiny", "source": str(tiny_folder)})
    steps, notes = {}, []

    class Watch(NullObserver):
        def on_step(self, step, metrics):
            steps[step] = metrics
            return False

        def on_note(self, message):
            notes.append(message)

    assert train(config, tmp_path / "run", Watch(), cache=cache)

    assert "rounded to NVFP4 by gptq" in notes[0]
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[1]["mismatch/kl"] < 0.01  # the sampler is the policy, but for rounding
    assert steps[3]["mismatch/kl"] > steps[1]["mismatch/kl"]
