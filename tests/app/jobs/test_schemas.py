import pytest

from app.errors import BadRequest
from app.files.models import File
from app.jobs.schemas import RL, JobRequest, Plan, resolve
from app.models.catalog import CatalogModel
from qerl_core.config import NoiseConfig, TrainConfig
from tests.app.conftest import reinforcement

MODEL = CatalogModel.model_validate(
    {
        "id": "tiny",
        "source": "package:tiny",
        "limits": {
            "context_tokens": 2048,
            "max_rank": 64,
            "max_group_size": 32,
            "max_batch_size": 64,
            "max_steps": 2000,
        },
    }
)
HYPER = "method.reinforcement.hyperparameters"


def file_of(num_rows: int) -> File:
    return File(id="file-1", key="files/file-1.jsonl", num_rows=num_rows)


def planned(*, rows: int = 100, valid: bool = False, hyper: dict | None = None, **blocks: object) -> Plan:
    body = {"model": "tiny", "training_file": "file-1", "method": reinforcement(hyperparameters=hyper or {}), **blocks}
    request = JobRequest.model_validate(body)
    return resolve(request, model=MODEL, train=file_of(rows), valid=file_of(10) if valid else None)


def test_what_is_left_open_is_the_config_s_own_default():
    config = planned(seed=7).config

    default = TrainConfig.model_validate(
        {
            "model": {"id": "tiny", "source": "package:tiny"},
            "data": {"train_path": "files/file-1.jsonl"},
            "grader": reinforcement()["reinforcement"]["grader"],
            "seed": 7,
        }
    )
    assert config == default


KNOBS = {
    "group_size": 4,
    "max_prompt_tokens": 100,
    "max_completion_tokens": 50,
    "temperature": 0.7,
    "top_p": 0.9,
    "loss": "grpo",
    "clip_low": 0.1,
    "clip_high": 0.3,
    "kl_coef": 0.01,
    "correction": "token_tis",
    "tis_cap": 3.0,
    "mask_truncated": True,
    "scale_by_std": False,
    "noise": {
        "schedule": "adaptive",
        "sigma_start": 0.02,
        "sigma_end": 0.001,
        "num_stages": 5,
        "hold": "entropy",
        "set_point": 0.4,
    },
    "overlong": {"buffer_tokens": 10, "penalty": 0.5},
    "max_rounds": 3,
    "engine": "vllm",
    "memory_fraction": 0.4,
    "learning_rate": 3e-4,
    "beta1": 0.8,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "schedule": "cosine",
    "max_grad_norm": 0.5,
    "num_minibatches": 2,
    "micro_batch_tokens": 1024,
    "checkpoint_interval": 5,
    "max_idle_steps": None,
    "safeguards": {
        "max_grader_error_frac": 0.02,
        "max_kl": None,
        "min_entropy_ratio": 0.2,
        "min_length_ratio": 0.3,
    },
    "shuffle": False,
    "eval_rows": 9,
    "activation_checkpointing": "on",
    "dtype": "float32",
}


def test_every_knob_reaches_the_config_and_none_is_out_of_reach():
    config = planned(
        rl={**KNOBS, "max_steps": 20},
        lora={"rank": 8, "alpha": 16, "dropout": 0.1, "target_modules": ["q_proj"]},
        quantization={"format": "none"},
        hyper={"batch_size": 10, "eval_interval": 4, "eval_samples": 2},
        valid=True,
        seed=3,
    ).config.model_dump(mode="json")

    masked = planned(rl={"correction": "sequence_mask", "sequence_cap": 4.0}).config
    assert masked.loss.sequence_cap == 4.0
    assert KNOBS.keys() | {"sequence_cap"} == RL.keys()
    for name, value in KNOBS.items():
        section, _, field = RL[name].rpartition(".")
        assert (config[section] if section else config)[field] == value, name
    assert config["lora"] == {"rank": 8, "alpha": 16, "dropout": 0.1, "target_modules": ["q_proj"]}
    assert config["model"]["quantization"] == "none"
    assert config["evaluation"] == {"every": 4, "max_rows": 9, "samples": 2}
    assert config["data"] == {"train_path": "files/file-1.jsonl", "valid_path": "files/file-1.jsonl", "shuffle": False}
    assert (config["num_steps"], config["seed"], config["rollout"]["num_prompts"]) == (20, 3, 10)
    assert leaves(TrainConfig) == ELSEWHERE | set(RL.values())


@pytest.mark.parametrize("method", ["sweep", "gptq"])
def test_a_rounding_method_reaches_the_config_and_is_refused_where_it_has_no_effect(method):
    chosen = planned(quantization={"format": "nvfp4", "method": method}).config.model

    assert (chosen.quantization, chosen.quantization_method) == ("nvfp4", method)
    with pytest.raises(BadRequest, match=r"quantization\.method has no effect"):
        planned(quantization={"format": "none", "method": method})


ELSEWHERE = {
    *(f"model.{name}" for name in ("id", "source", "revision", "gguf_file", "hub_id", "quantization")),
    "model.quantization_method",
    *(f"lora.{name}" for name in ("rank", "alpha", "dropout", "target_modules")),
    *("data.train_path", "data.valid_path", "grader", "rollout.num_prompts", "num_steps", "seed"),
    *("evaluation.every", "evaluation.samples"),
}
"""What is set by the model, its own block, OpenAI's hyperparameters, or several of them."""


def leaves(config: type) -> set[str]:
    found = set()
    for name, field in config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found |= {f"{name}.{leaf}" for leaf in inner} if inner else {name}
    return found


@pytest.mark.parametrize(
    ("rows", "hyper", "rl", "batch_size", "n_epochs", "num_steps"),
    [
        (100, {}, {}, 8, 8, 100),  # auto aims at 100 steps
        (10_000, {}, {}, 8, 1, 1250),  # a large file is seen once
        (3, {}, {}, 3, 50, 50),  # a small batch, and no more than 50 epochs
        (64, {"batch_size": 4}, {"max_steps": 36}, 4, 3, 36),
        (68, {"batch_size": 4, "n_epochs": 50}, {"max_steps": 36}, 4, 50, 36),
        (10, {"batch_size": 4, "n_epochs": 1}, {}, 4, 1, 3),  # the last step begins the next epoch
        (10, {"batch_size": "auto", "n_epochs": "auto"}, {"num_minibatches": 3}, 6, 50, 84),
        (10, {}, {"num_minibatches": 10}, 10, 50, 50),
    ],
)
def test_batch_and_length(rows, hyper, rl, batch_size, n_epochs, num_steps):
    plan = planned(rows=rows, hyper=hyper, rl=rl)

    shown = plan.request["hyperparameters"]
    assert (shown["batch_size"], shown["n_epochs"]) == (batch_size, n_epochs)
    assert (plan.config.rollout.num_prompts, plan.config.num_steps) == (batch_size, num_steps)


def test_seeds_are_drawn_anew_if_absent():
    assert planned().config.seed != planned().config.seed


def test_the_echo_has_resolved_values():
    plan = planned(hyper={"learning_rate_multiplier": 3}, valid=True, metadata={"a": "b"})

    shared = {"batch_size": 8, "n_epochs": 8, "learning_rate_multiplier": 3.0}
    assert plan.config.optimizer.learning_rate == pytest.approx(3e-5)
    assert plan.request["hyperparameters"] == shared
    echoed = plan.request["method"]["reinforcement"]
    assert echoed["hyperparameters"] == {
        **shared,
        "compute_multiplier": 1,
        "eval_interval": None,
        "eval_samples": 1,
        "reasoning_effort": "default",
    }
    assert echoed["grader"] == reinforcement()["reinforcement"]["grader"]
    assert (plan.request["metadata"], plan.request["warnings"]) == ({"a": "b"}, [])


def test_noise_shrinks_to_a_short_run_and_says_so():
    short = planned(rl={"max_steps": 5, "noise": {"sigma_start": 0.02}})
    tiny = planned(rl={"max_steps": 2})
    off = planned(rl={"noise": None, "max_steps": 2})

    assert short.config.noise == NoiseConfig(sigma_start=0.02, num_stages=5)
    assert short.request["warnings"] == ["rl.noise.num_stages is 5, the steps of the job, instead of 10."]
    assert tiny.config.noise is None
    assert tiny.request["warnings"] == ["rl.noise is off: 2 steps are too few for its 3 stages."]
    assert (off.config.noise, off.request["warnings"]) == (None, [])


def test_steps_that_the_epochs_do_not_reach_are_warned_of():
    plan = planned(rows=10, hyper={"n_epochs": 2, "batch_size": 5}, rl={"max_steps": 9, "noise": None})

    assert plan.config.num_steps == 4
    assert plan.request["warnings"] == ["rl.max_steps 9 is not reached: 2 epochs of 10 rows, 5 a step, are 4 steps."]


def test_a_validation_file_that_is_the_training_file_is_warned_of():
    [warning] = planned(valid=True, validation_file="file-1").request["warnings"]

    assert warning.startswith("validation_file is the training_file")


@pytest.mark.parametrize(
    ("request_parts", "param", "message"),
    [
        ({"lora": {"rank": 65}}, "lora.rank", "lora.rank 65 is above the 64 of tiny"),
        ({"rl": {"group_size": 33}}, "rl.group_size", "33 is above the 32"),
        ({"hyper": {"batch_size": 101}}, f"{HYPER}.batch_size", "101 is above the 100 rows"),
        ({"hyper": {"batch_size": 65}}, f"{HYPER}.batch_size", "65 is above the 64 of tiny"),
        (
            {"hyper": {"batch_size": 9}, "rl": {"num_minibatches": 2}},
            f"{HYPER}.batch_size",
            "9 is not a multiple of rl.num_minibatches 2",
        ),
        ({"rl": {"num_minibatches": 200}}, "rl.num_minibatches", "above the largest batch, 64"),
        ({"rl": {"max_prompt_tokens": 1537}}, "rl.max_prompt_tokens", "1537 and rl.max_completion_tokens 512"),
        ({"rl": {"max_completion_tokens": 2000}}, "rl.max_completion_tokens", "context of tiny, 2048 tokens"),
        ({"hyper": {"eval_interval": 5}}, f"{HYPER}.eval_interval", "no effect without a validation_file"),
        ({"hyper": {"eval_samples": 5}}, f"{HYPER}.eval_samples", "no effect without a validation_file"),
        ({"rl": {"eval_rows": 5}}, "rl.eval_rows", "no effect without a validation_file"),
        ({"rl": {"tis_cap": 5.0, "correction": "none"}}, "rl.tis_cap", "no effect"),
        ({"rl": {"sequence_cap": 5.0}}, "rl.sequence_cap", "no effect"),
        ({"rl": {"engine": "hf", "memory_fraction": 0.3}}, "rl.memory_fraction", "no effect"),
        ({"rl": {"loss": "dr_grpo"}}, "rl.loss", "set rl.scale_by_std"),
        ({"rl": {"overlong": {"buffer_tokens": 512}}}, "rl.overlong.buffer_tokens", "rl.max_completion_tokens 512"),
        ({"rl": {"warmup_steps": 101}}, "rl.warmup_steps", "101 is above the 100 steps"),
        ({"rl": {"noise": {"num_stages": 101}}}, "rl.noise.num_stages", "101 is above the 100 steps"),
        ({"hyper": {"n_epochs": 50}, "rows": 1000}, "rl.max_steps", "6250 steps, above the 2000 of tiny"),
        (
            {"hyper": {"learning_rate_multiplier": 2}, "rl": {"learning_rate": 1e-4}},
            "rl.learning_rate",
            "give one of them",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_field_and_the_values(request_parts, param, message):
    with pytest.raises(BadRequest) as caught:
        planned(**request_parts)

    assert caught.value.param == param
    assert message in caught.value.message


def test_a_rule_of_the_config_that_nobody_foresaw_is_still_a_400(monkeypatch):
    def refuse(*given: object, **more: object) -> TrainConfig:
        return TrainConfig.model_validate({})

    monkeypatch.setattr("app.jobs.schemas.TrainConfig", type("Strange", (), {"model_validate": refuse}))

    with pytest.raises(BadRequest, match="Field required"):
        planned()
