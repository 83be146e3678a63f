import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from qerl_core.errors import BadCheckpoint
from qerl_core.policy import resume
from qerl_core.policy.adapter import verify_adapter
from qerl_core.policy.model import open_base
from qerl_core.policy.resume import Position
from tests.core.policy.test_update import ADVANTAGES, GROUPS


def trained_policy(make_policy, steps=2):
    policy = make_policy()
    for _ in range(steps):
        policy.update(GROUPS, ADVANTAGES)
    policy.position = Position(step=steps, prompts_taken=2 * steps, updates=steps)
    return policy


def test_a_resumed_policy_goes_on_to_the_bit(make_policy, tmp_path):
    policy = trained_policy(make_policy)
    policy.save(tmp_path)
    resumed = make_policy(fresh=True)

    assert resumed.resume(tmp_path)

    assert resumed.position == policy.position
    assert torch.equal(resumed.logprobs(GROUPS), policy.logprobs(GROUPS))  # the adapter is applied once
    assert resumed.update(GROUPS, ADVANTAGES) == policy.update(GROUPS, ADVANTAGES)
    for name, parameter in policy.model.trainable().items():
        assert torch.equal(parameter, resumed.model.trainable()[name])


def test_the_last_two_checkpoints_are_kept(make_policy, tmp_path):
    policy = make_policy()
    for step in (1, 2, 3):
        policy.position = Position(step=step)
        policy.save(tmp_path)

    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_flipped_byte_sends_the_run_back_to_the_checkpoint_before(make_policy, tmp_path, file):
    policy = trained_policy(make_policy)
    policy.save(tmp_path)
    policy.position = Position(step=3)
    path = policy.save(tmp_path) / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    resumed = make_policy()

    assert resumed.resume(tmp_path)

    assert resumed.position.step == 2


def test_a_missing_file_is_named(make_policy, tmp_path):
    path = trained_policy(make_policy).save(tmp_path)
    (path / "state.json").write_text("{}")

    with pytest.raises(BadCheckpoint, match=r"step-000002 was changed .*state\.json"):
        resume.verify(path)


def test_an_interrupted_save_is_no_checkpoint(make_policy, tmp_path, monkeypatch):
    policy = trained_policy(make_policy)

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "save_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        policy.save(tmp_path)

    assert not list((tmp_path / "checkpoints").iterdir())
    assert not make_policy().resume(tmp_path)


def test_the_adapter_is_peft_s_and_names_its_base_by_its_public_id(make_policy, tmp_path, cache):
    policy = trained_policy(make_policy)
    adapter = policy.save(tmp_path) / "adapter"

    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(".lora_A." in name or ".lora_B." in name for name in load_file(adapter / "adapter_model.safetensors"))

    base, _ = open_base(policy.config.model, cache)
    loaded = PeftModel.from_pretrained(base, str(adapter))
    ids = torch.tensor([[70, 71, 72, 80, 81]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy.model.peft(ids).logits, rtol=0, atol=0)


def test_an_adapter_that_is_not_what_was_trained_is_refused(make_policy, tmp_path):
    policy = trained_policy(make_policy)
    adapter = policy.save(tmp_path) / "adapter"
    next(iter(policy.model.trainable().values())).data.add_(1e-6)

    with pytest.raises(BadCheckpoint, match=r"lora_A.*is not what was trained"):
        verify_adapter(policy.model, adapter)
