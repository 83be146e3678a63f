"""The adapter folder: PEFT's own layout, which PEFT and vLLM load. What was trained is what is saved."""

from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from qerl_core.errors import BadCheckpoint
from qerl_core.policy.model import PolicyModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(model: PolicyModel, folder: Path) -> None:
    """Write the adapter into a new folder and read it back: `verify_adapter` holds afterwards."""
    # "auto" would ask the hub whether the base's vocabulary was resized.
    model.peft.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card is a form with nothing filled in
    verify_adapter(model, folder)


def verify_adapter(model: PolicyModel, folder: Path) -> None:
    """BadCheckpoint unless the folder holds the model's LoRA tensors to the bit, all of them and nothing else."""
    config = PeftLoraConfig.from_pretrained(str(folder))
    if config.base_model_name_or_path != model.name:
        raise BadCheckpoint(f"{CONFIG} names {config.base_model_name_or_path} as its base, not {model.name}")
    saved, trained = read_tensors(folder / WEIGHTS), get_peft_model_state_dict(model.peft, save_embedding_layers=False)
    if saved.keys() != trained.keys():
        raise BadCheckpoint(f"{WEIGHTS} lacks or adds {sorted(saved.keys() ^ trained.keys())[:3]}")
    for name, tensor in trained.items():
        if not torch.equal(saved[name], tensor.detach().cpu()):
            raise BadCheckpoint(f"{name} in {WEIGHTS} is not what was trained")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU. BadCheckpoint if it is missing or cut short."""
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {type(error).__name__}") from error
    return tensors
