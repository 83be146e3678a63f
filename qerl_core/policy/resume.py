"""A checkpoint: adapter, optimizer, position. Written to a temporary folder, hashed, renamed; verified before use.

    checkpoints/step-000020/adapter/                 PEFT's layout
                            optimizer.safetensors    AdamW's moments by parameter name
                            state.json               step, prompt position, counters
                            manifest.json            sha256 of every other file

There is no RNG state to keep: every draw of a step (noise, tokens, dropout) is seeded from (run's seed, step).
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from qerl_core.errors import BadCheckpoint
from qerl_core.folders import published
from qerl_core.policy.adapter import WEIGHTS, read_tensors, write_adapter
from qerl_core.policy.model import PolicyModel

logger = logging.getLogger(__name__)

KEEP = 2
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run is. The noise stage and the learning rate follow from the step."""

    step: int = 0
    """Steps done."""
    prompts_taken: int = 0
    """Prompts drawn from the stream."""
    updates: int = 0
    """Optimizer steps done."""
    idle_steps: int = 0
    """Steps since the run's start or its last update that had nothing to learn from."""
    sigma: float | None = None
    """What the adaptive noise controller has come to; None: there is none, or it has not begun."""


def save(model: PolicyModel, optimizer: torch.optim.Optimizer, position: Position, folder: Path) -> Path:
    """Write and verify the checkpoint of a step; older ones but the last are then removed. Returns its folder."""
    target = folder / "checkpoints" / f"step-{position.step:06d}"
    with published(target) as partial:
        write_adapter(model, partial / "adapter")
        save_file(_moments(optimizer, model.trainable()), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(position)))
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        manifest = {str(path.relative_to(partial)): _sha256(path) for path in files}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(target, ignore_errors=True)  # a broken one that was passed over
    verify(target)
    for old in _found(folder)[:-KEEP]:
        shutil.rmtree(old)
    return target


def load(model: PolicyModel, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Position, Path] | None:
    """Go on from the newest checkpoint that is whole; None if there is none. A broken one is passed over and logged.

    Returns where the run is and the checkpoint's folder.
    """
    for path in reversed(_found(folder)):
        try:
            verify(path)
        except BadCheckpoint as error:
            logger.warning("%s is broken, going back to the one before: %s", path.name, error)
            continue
        found: Any = set_peft_model_state_dict(model.peft, read_tensors(path / "adapter" / WEIGHTS))
        if found.unexpected_keys:
            raise BadCheckpoint(f"{path.name} is of another adapter: {found.unexpected_keys[:3]}")
        _set_moments(optimizer, model.trainable(), read_tensors(path / "optimizer.safetensors"))
        return Position(**json.loads((path / "state.json").read_text())), path
    return None


def verify(path: Path) -> None:
    """BadCheckpoint unless every file of the manifest is there with its hash."""
    try:
        manifest: dict[str, str] = json.loads((path / "manifest.json").read_text())
        wrong = [name for name, sha256 in manifest.items() if _sha256(path / name) != sha256]
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path.name} is not whole: {type(error).__name__}") from error
    if wrong:
        raise BadCheckpoint(f"{path.name} was changed after it was written: {', '.join(wrong)}")


def _found(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


def _moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment].detach().cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def _set_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: dict[str, torch.Tensor]
) -> None:
    for name, parameter in parameters.items():
        if f"step.{name}" in tensors:
            state = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
            optimizer.state[parameter] = {
                moment: tensor if moment == "step" else tensor.to(parameter.device) for moment, tensor in state.items()
            }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
