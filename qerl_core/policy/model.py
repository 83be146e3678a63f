"""The policy: an NVFP4 base, frozen, with a PEFT LoRA on its linears. What trains is the LoRA, in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoTokenizer

from qerl_core.config import LoraConfig, ModelConfig, RoundingMethod, TrainConfig
from qerl_core.errors import BadCheckpoint
from qerl_core.policy.recompute import chunk_mlps
from qerl_core.policy.source import local_folder
from qerl_core.quant.calibration import Text
from qerl_core.quant.checkpoint import cached_nvfp4, load_model, load_plain_model
from qerl_core.quant.linear import NVFP4Linear


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A causal language model with an adapter, and what sampling and training need to know of it."""

    peft: PeftModel
    causal: Any
    """The model inside `peft`, adapter layers included."""
    tokenizer: Any
    eos_ids: frozenset[int]
    """Each of them ends a completion."""
    name: str
    """What an adapter says its base is."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.head_VH.device

    @property
    def folder(self) -> Path:
        """The checkpoint that the base was opened from, quantized if the base is."""
        return Path(self.tokenizer.name_or_path)

    @property
    def decoder(self) -> nn.Module:
        """Token ids to hidden states."""
        decoder: nn.Module = self.causal.get_decoder()
        return decoder

    @property
    def head_VH(self) -> Tensor:
        """The output head's weight."""
        weight: Tensor = self.causal.get_output_embeddings().weight
        return weight

    def autocast(self) -> torch.autocast:
        """Where forwards run: a bfloat16 model takes its LoRA products in bfloat16, from the float32 parameters."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.head_VH.dtype == torch.bfloat16)

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters that train, by name."""
        return {name: p for name, p in self.peft.named_parameters() if p.requires_grad}


def default_device() -> torch.device:
    """The first GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rounding_method(config: ModelConfig) -> RoundingMethod:
    """The method that the config comes to on this machine."""
    if config.quantization_method != "auto":
        return config.quantization_method
    return "gptq" if default_device().type == "cuda" else "rtn"


def open_base(
    config: ModelConfig, cache: Path, *, dtype: str = "auto", calibration: Text | None = None
) -> tuple[Any, Any]:
    """The frozen base and its tokenizer; quantized once and kept in `cache`. BadCheckpoint says what is wrong.

    `calibration` is what `gptq` looks at (`qerl_core/calibration.py`).
    """
    device = default_device()
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    compute_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    folder = local_folder(config, cache)
    if config.quantization == "nvfp4":
        method = rounding_method(config)
        folder = cached_nvfp4(folder, cache, method=method, calibration=calibration, device=device)
        # On a CPU decoding costs more than the product, so each weight is decoded once and kept.
        keep = device.type == "cpu"
        causal = load_model(folder, compute_dtype=compute_dtype, device=device, keep_decoded=keep)
    else:
        causal = load_plain_model(folder, compute_dtype=compute_dtype, device=device)
    return causal, AutoTokenizer.from_pretrained(folder)


def open_model(config: TrainConfig, cache: Path, *, calibration: Text | None = None) -> PolicyModel:
    """The base with a fresh adapter: B is zero, so it is the base's equal until it is trained."""
    causal, tokenizer = open_base(config.model, cache, dtype=config.dtype, calibration=calibration)
    torch.manual_seed(config.seed)
    peft = get_peft_model(causal, peft_config(config.lora))
    name = base_name(config.model)
    peft.peft_config["default"].base_model_name_or_path = name  # PEFT has put the folder's path here
    follow_autocast(peft)
    wanted = config.activation_checkpointing
    if wanted == "on" or (wanted == "auto" and causal.device.type == "cuda"):
        checkpoint_activations(causal)
        chunk_mlps(causal)
    return PolicyModel(peft, causal, tokenizer, eos_ids(causal, tokenizer), name)


def follow_autocast(peft: PeftModel) -> None:
    """Let autocast choose the type of the LoRA products; PEFT would make each input float32, the width of the layer."""
    for module in peft.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def checkpoint_activations(causal: Any) -> None:
    """Keep a block's input only, and run the block again in the backward pass. Has effect in training mode."""
    kwargs = {"use_reentrant": False}
    if hasattr(causal, "activation_checkpointing_enable"):
        causal.activation_checkpointing_enable(kwargs)
    else:  # transformers before 5.18
        causal.gradient_checkpointing_enable(kwargs)


def base_name(config: ModelConfig) -> str:
    """The public name of the base: never a local path."""
    return config.hub_id or config.id


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """The adapter's PEFT config."""
    made = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT divides by it, so a fraction does
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    made._register_custom_module({NVFP4Linear: AddedInPlace})
    return made


class AddedInPlace(lora.Linear):
    """PEFT's LoRA on a linear, its update added to the frozen product where that stands.

    PEFT's own forward makes three more tensors of the layer's width: the update, the scaled update and the sum; its
    backward a fourth. Here the scale is taken on the narrow side. In bfloat16 the sum is rounded once, not thrice.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., K] to [..., N]; whatever is not one plain adapter goes PEFT's way."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        special = args or kwargs or self.disable_adapters or self.merged or self.lora_variant or len(names) != 1
        if special or self.lora_B[names[0]].bias is not None:
            return super().forward(x, *args, **kwargs)
        down, up = self.lora_A[names[0]], cast(Tensor, self.lora_B[names[0]].weight)
        x_TK = x.reshape(-1, x.shape[-1])  # now, not later: adding to a view in place costs a copy in the backward
        out_TN: Tensor = self.base_layer(x_TK)
        dropped_TK = self.lora_dropout[names[0]](self._cast_input_dtype(x_TK, up.dtype))
        low_TR = down(dropped_TK) * self.scaling[names[0]]
        out_TN.addmm_(low_TR.to(out_TN.dtype), up.to(out_TN.dtype).T)
        return out_TN.view(*x.shape[:-1], out_TN.shape[-1])


def eos_ids(causal: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a completion: the generation config's, or else the config's and the tokenizer's."""
    for source in (causal.generation_config, causal.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    raise BadCheckpoint("neither generation_config.json nor config.json nor the tokenizer names an eos_token_id")
