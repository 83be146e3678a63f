"""A folder of ours in vLLM as it comes, without our plugin: the format is the public one."""

import json
import subprocess
import sys

import pytest
import torch

from qerl_core.quant.checkpoint import load_model, quantize_folder
from tests.tiny import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
IDS = [40, 50, 60, 70, 80, 90, 100, 110, 45, 46, 47, 48]
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
ids = json.loads(sys.argv[2])
llm = LLM(model=sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2,
          skip_tokenizer_init=True)
wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
(found,) = llm.generate([{"prompt_token_ids": ids}], wanted)
print("LOGPROBS", json.dumps([row[i].logprob for row, i in zip(found.prompt_logprobs[1:], ids[1:])]))
"""


def logprobs(folder, dtype) -> torch.Tensor:
    ids = torch.tensor([IDS], device="cuda")
    with torch.no_grad():
        logits = load_model(folder, compute_dtype=dtype, device="cuda")(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


def test_vllm_reads_our_folders_and_says_what_we_say(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    make_model(tmp_path / "plain", architecture="qwen2", tied=False, **SIZES)
    quantize_folder(tmp_path / "plain", tmp_path / "nvfp4")

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "nvfp4"), json.dumps(IDS)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOGPROBS "))
    found = torch.tensor(json.loads(line.removeprefix("LOGPROBS ")))
    exact, rounded = (logprobs(tmp_path / "nvfp4", dtype) for dtype in (torch.float32, torch.bfloat16))
    assert (found - exact).abs().mean() < 4 * (rounded - exact).abs().mean()
