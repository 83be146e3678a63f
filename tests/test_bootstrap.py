"""The script behind `make`: what it installs from where, and that a second run does nothing."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The script as a module, with an environment of its own to work on and none of this machine's pip settings."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no nvidia-smi
    monkeypatch.setattr(module, "VENV", tmp_path / "venv")
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "test"])
    return module


@pytest.fixture
def installed(bootstrap, monkeypatch):
    """What pip would have been asked for."""
    asked = []
    bootstrap.VENV.mkdir()
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: asked.append(arguments))
    return asked


def test_without_a_gpu_torch_comes_from_pytorch_s_cpu_index(bootstrap):
    assert bootstrap.torch_source() == ["--extra-index-url", bootstrap.TORCH_CPU_INDEX]


def test_with_a_gpu_torch_comes_from_the_package_index(bootstrap, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").touch(mode=0o755)

    assert bootstrap.torch_source() == []


@pytest.mark.parametrize("setting", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_package_sources_of_the_machine_s_owner_are_left_alone(bootstrap, monkeypatch, setting):
    monkeypatch.setenv(setting, "https://packages.example")

    assert bootstrap.torch_source() == []


def test_a_second_run_installs_nothing(bootstrap, installed):
    bootstrap.main()
    first = list(installed)

    bootstrap.main()

    assert installed == first
    assert "--constraint" in first[0]
    assert first[1] == ("install", "--no-deps", bootstrap.WEIGHTS)


def test_a_changed_lock_installs_again(bootstrap, installed):
    bootstrap.main()
    (bootstrap.VENV / ".installed-test").write_text("of an older lock")

    bootstrap.main()

    assert len(installed) == 4


def test_a_python_without_ensurepip_is_told_what_to_install(bootstrap, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(SystemExit):
        bootstrap.make_venv()

    assert "apt-get install python3." in capsys.readouterr().err
