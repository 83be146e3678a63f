"""`qerl quantize`, as a user runs it. The other commands are in tests/system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import cli
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def qerl(tmp_path, monkeypatch):
    """Run a command in a process of its own."""
    monkeypatch.setenv("QERL_HOME", str(tmp_path / "home"))

    def call(*options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "app.cli", *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)

    return call


@pytest.fixture
def models_file(folder, tmp_path, monkeypatch):
    path = tmp_path / "models.toml"
    path.write_text(f'[[models]]\nid = "Tiny-1"\nsource = "{folder}"\nlimits = {{ context_tokens = 64 }}\n')
    monkeypatch.setenv("QERL_MODELS_FILE", str(path))
    return path


def test_a_folder_is_quantized_and_the_report_printed(qerl, folder, tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 30)

    done = qerl("quantize", folder, tmp_path / "out", "--text", tmp_path / "text.txt", "--method", "sweep")

    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path / 'out'}: 14 layers of {folder} by sweep\n" in done.stdout
    assert "perplexity" in done.stdout
    assert (tmp_path / "out" / "quantization_report.json").is_file()


def test_an_id_of_the_models_file_names_a_model(qerl, models_file, tmp_path):
    done = qerl("quantize", "Tiny-1", tmp_path / "out", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["model"] == "Tiny-1"
    assert report["method"] == "rtn"
    assert len(report["layer_errors"]) == 14


def refused(done: subprocess.CompletedProcess[str], status: int, *needles: str) -> None:
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("qerl: ")
    assert done.stderr.count("\n") == 1
    assert all(needle in done.stderr for needle in needles), done.stderr


def test_what_cannot_be_is_a_line(qerl, folder, models_file, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()

    refused(qerl("quantize", "Tiny-2", tmp_path / "out"), 2, "Tiny-2", "models.toml", "Tiny-1")
    refused(qerl("quantize", folder, tmp_path / "there"), 2, "there exists already")
    refused(qerl("quantize", "Tiny-1", tmp_path / "out", "--revision", "abc"), 2, "--revision", "Tiny-1")
    refused(qerl("quantize", folder, tmp_path / "out", "--revision", "abc"), 2, "--revision", "hub id")
    refused(qerl("quantize", "package:no_such_package", tmp_path / "out"), 1, "is not installed")
    monkeypatch.setenv("QERL_MODELS_FILE", str(tmp_path / "none.toml"))
    refused(qerl("quantize", "Tiny-1", tmp_path / "out"), 2, "none.toml")
    assert not (tmp_path / "out").exists()


def test_without_torch_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)

    assert cli.main(["quantize", "model", str(tmp_path / "out")]) == 2

    assert capsys.readouterr().err == "qerl: quantizing needs torch: pip install 'qerl[train]'\n"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["owner/name", "--revision", "abc"], ["--revision=abc", "--method=rtn"]),
        (["package:weights", "--gguf-file", "w.gguf"], ["--gguf-file=w.gguf", "--method=rtn"]),
        (["Tiny-1", "--device", "cuda:1", "--json"], ["--method=rtn", "--device=cuda:1", "--json"]),
        (["owner/name", "--method=gptq", "--calibration=-c"], ["--method=gptq", "--calibration=-c"]),
    ],
)
def test_everything_given_reaches_the_core_in_the_same_process(given, options, folder, models_file, monkeypatch):
    became: list[str] = []
    monkeypatch.setattr(cli.os, "execv", lambda program, command: became.extend(command))

    cli.main(["quantize", given[0], "out", *given[1:]])

    assert became[:3] == [sys.executable, "-m", "qerl_core.quantize"]
    source = [f"--source={folder}"] if given[0] == "Tiny-1" else []
    assert became[4:-3] == [*source, *options]
    assert became[-3:] == ["--", given[0], "out"]
