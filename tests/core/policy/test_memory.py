"""Reckoned against what a 7B and a 32B model are made of."""

import pytest
from transformers import Qwen2Config

from benchmarks.rollout import SIZES
from qerl_core.errors import NotEnoughMemory
from qerl_core.policy.memory import GIB, Sizes, estimate, require_memory, sizes_of

LONG = {"num_prompts": 2, "group_size": 4, "max_prompt_tokens": 512, "max_completion_tokens": 1536}
RANK_32 = {"rank": 32, "alpha": 64}


def of(size: str) -> Sizes | None:
    return sizes_of(Qwen2Config(**SIZES[size], tie_word_embeddings=False))


def test_the_parts_of_a_7b_model_by_hand(make_config):
    need = estimate(of("7b"), make_config(lora=RANK_32, rollout=LONG))

    linears = 28 * (3584 * 3584 * 2 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    assert need.base == linears * 9 / 16 + 2 * 152064 * 3584 * 2
    low_rank = 28 * 32 * (4 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert need.adapter == low_rank * 18
    assert need.cache == 2 * 2048 * 512 * 28 * 2
    assert 5 * GIB < need.activations < 8 * GIB


def test_an_unquantized_base_takes_two_bytes_a_weight(make_config):
    sizes = of("7b")
    plain = make_config(model={"id": "m", "source": "m", "quantization": "none"})

    assert estimate(sizes, plain).base > 2.5 * estimate(sizes, make_config()).base


def test_a_32b_policy_trains_and_samples_on_80_gb(make_config):
    config = make_config(lora=RANK_32, rollout=LONG | {"memory_fraction": 0.4})

    require_memory(config, of("32b"), total_bytes=80e9, engine="vllm")


def test_a_gpu_that_is_too_small_is_told_which_batch_would_fit(make_config):
    config = make_config(lora=RANK_32, rollout=LONG)
    with pytest.raises(
        NotEnoughMemory, match=r"training needs about .* GiB .*; set micro_batch_tokens to (\d+)"
    ) as told:
        require_memory(config, of("7b"), total_bytes=12 * GIB, engine="hf")
    tokens = int(str(told.value).rsplit(" ", 1)[1])

    smaller = make_config(lora=RANK_32, rollout=LONG, micro_batch_tokens=tokens)
    require_memory(smaller, of("7b"), total_bytes=12 * GIB, engine="hf")


def test_a_part_too_small_for_the_engine_is_told_a_larger_one(make_config):
    config = make_config(lora=RANK_32, rollout=LONG | {"memory_fraction": 0.2})
    with pytest.raises(NotEnoughMemory, match=r"20% of .* do not hold the base .*memory_fraction to (0\.\d+)") as told:
        require_memory(config, of("32b"), total_bytes=80e9, engine="vllm")
    fraction = float(str(told.value).split("memory_fraction to ")[1].split(" ")[0])

    larger = make_config(lora=RANK_32, rollout=LONG | {"memory_fraction": fraction})
    require_memory(larger, of("32b"), total_bytes=80e9, engine="vllm")


def test_what_fits_no_batch_is_told_so(make_config):
    with pytest.raises(NotEnoughMemory, match="larger GPU"):
        require_memory(make_config(rollout=LONG), of("32b"), total_bytes=16 * GIB, engine="hf")


def test_a_model_without_the_usual_sizes_is_not_reckoned():
    class Odd:
        def get_text_config(self):
            return object()

    assert sizes_of(Odd()) is None


def test_stock_vllm_has_a_base_of_its_own(make_config):
    config = make_config(lora=RANK_32, rollout=LONG | {"memory_fraction": 0.45}, micro_batch_tokens=4096)
    sizes, total = of("32b"), 52e9

    require_memory(config, sizes, total_bytes=total, engine="vllm")
    with pytest.raises(NotEnoughMemory, match=r"beside vLLM's 45% and the base \(\d"):
        require_memory(config, sizes, total_bytes=total, engine="vllm_stock")
