"""`qerl`: up, doctor, demo, quantize, keys. What goes wrong at a start is a line and status 2, never a traceback."""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from app.embedded import EmbeddedStack, StackError, redis_server
from app.keys.commands import add_keys
from app.models import catalog
from app.settings import Settings
from qerl_core.config import RoundingMethod

USAGE_ERROR = 2
METHODS: tuple[str, ...] = get_args(RoundingMethod)
WANTED_FREE_BYTES = 2 * 1024**3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except StackError as error:
        return _refuse(str(error))
    except ValidationError as error:
        return _refuse("; ".join(f"QERL_{_name(fault['loc'])}: {fault['msg']}" for fault in error.errors()))


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="qerl", description="Self-hosted reinforcement fine-tuning of language models.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_up(commands)
    add_demo(commands)
    add_doctor(commands)
    add_quantize(commands)
    add_keys(commands)
    return top


def add_up(commands: Any) -> None:
    """`qerl up`."""
    command = commands.add_parser("up", help="run the service on this machine until Ctrl-C")
    command.add_argument("--home", type=Path, help="folder of database, files and logs (QERL_HOME; .qerl)")
    command.add_argument("--port", type=int, help="where the API listens (QERL_PORT; 8000); 0 takes a free one")
    command.set_defaults(command=up)


def add_demo(commands: Any) -> None:
    """`qerl demo`."""
    command = commands.add_parser("demo", help="train a small model on this machine, from start to end")
    command.add_argument(
        "--folder", type=Path, default=Path("demo"), help="where the adapter and the picture go (demo)"
    )
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(command=demo)


def add_doctor(commands: Any) -> None:
    """`qerl doctor`."""
    command = commands.add_parser("doctor", help="what this machine has and lacks; status 1 if it lacks something")
    command.set_defaults(command=doctor)


def add_quantize(commands: Any) -> None:
    """`qerl quantize`."""
    command = commands.add_parser("quantize", help="write a model's NVFP4 twin to a folder, and say what it cost")
    command.add_argument("model", metavar="MODEL", help="a folder, an id of the models file, a hub id, package:NAME")
    command.add_argument("out", metavar="OUT", help="the folder to make")
    command.add_argument("--revision", help="the commit of a hub id")
    command.add_argument("--gguf-file", metavar="NAME", help="the file inside MODEL if its weights are GGUF")
    command.add_argument("--method", choices=METHODS, default="rtn", help="how weights are rounded (%(default)s)")
    command.add_argument("--calibration", metavar="FILE", help="text that gptq rounds for: UTF-8, or JSONL rows")
    command.add_argument("--text", metavar="FILE", help="UTF-8 text to compare base and quantized model on")
    command.add_argument("--device", help="cpu, cuda, cuda:1 ... (the first GPU, or else the CPU)")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(command=quantize)


def up(arguments: argparse.Namespace) -> int:
    """Run the stack in the foreground. A second Ctrl-C stops it without waiting for the running job."""
    given = {name: value for name in ("home", "port") if (value := getattr(arguments, name)) is not None}
    stack = EmbeddedStack(Settings(**given))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stack.interrupt)
    try:
        stack.start()
        _say(f"QeRL is ready at {stack.base_url}/v1 (logs in {stack.logs})")
        stack.wait()
        _say("stopping; a running job finishes its step and checkpoints (again to stop at once)")
        stack.stop()
    except KeyboardInterrupt:
        _say("stopped")
    finally:
        stack.stop(grace_s=0)
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo. A signal at any time leaves nothing running."""
    try:
        from app.demo import DemoError, run
    except ModuleNotFoundError as error:
        return _refuse(f"the demo needs {error.name}: pip install 'qerl[demo]'")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        run(arguments.folder, cache=Settings().cache, seed=arguments.seed)
    except DemoError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        _say("stopped")
        return 130
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Print a table of what is there; 1 if something needed is missing."""
    checks = examine(Settings())
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "ok" if check.found else "MISSING" if check.needed else "-"
        _say(f"{check.name:{width}}  {mark:7}  {check.detail}")
    return 1 if any(check.needed and not check.found for check in checks) else 0


def quantize(arguments: argparse.Namespace) -> int:
    """Become `python -m qerl_core.quantize`: one process, so what ends the command ends the work."""
    if importlib.util.find_spec("torch") is None:
        return _refuse("quantizing needs torch: pip install 'qerl[train]'")
    settings = Settings()
    try:
        source = _base(arguments, settings)
    except (_NoModel, catalog.BadModelsFile) as error:
        return _refuse(str(error))
    options = {**source, **{name: getattr(arguments, name) for name in ("method", "calibration", "text", "device")}}
    command = [sys.executable, "-m", "qerl_core.quantize", f"--cache={settings.cache}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    command += ["--json"] if arguments.json else []
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "--", arguments.model, arguments.out])


class _NoModel(Exception):
    """Why a name stands for no model, in a line."""


def _base(arguments: argparse.Namespace, settings: Settings) -> dict[str, str | None]:
    """Where the model is, as options of the core. _NoModel or BadModelsFile if that cannot be said."""
    name: str = arguments.model
    given = {"source": None, "revision": arguments.revision, "gguf_file": arguments.gguf_file}
    if Path(name).is_dir() or name.startswith(catalog.PACKAGE):
        if arguments.revision:
            raise _NoModel(f"--revision has no effect: {name} is no hub id")
        return given
    try:
        listed = catalog.read(settings.models_file)
    except catalog.BadModelsFile:
        if catalog.HUB_ID.fullmatch(name):
            return given
        raise
    if (model := listed.find(name)) is not None:
        if arguments.revision or arguments.gguf_file:
            raise _NoModel(f"{settings.models_file.name} says where {name} is: leave --revision and --gguf-file out")
        return {"source": model.source, "revision": model.revision, "gguf_file": model.gguf_file}
    if catalog.HUB_ID.fullmatch(name):
        return given
    raise _NoModel(
        f"{name} is no folder, no hub id, and not in {settings.models_file.name} ({', '.join(listed.ids())})"
    )


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `qerl doctor`."""

    name: str
    found: bool
    detail: str
    needed: bool = True


def examine(settings: Settings) -> list[Check]:
    """Look at this machine. Nothing heavy is imported."""
    version = sys.version_info
    return [
        Check("python", version >= (3, 11), f"{version.major}.{version.minor}.{version.micro} (3.11 or newer)"),
        *(_package(name, needed=True) for name in ("torch", "transformers", "peft")),
        _package("vllm", needed=False),
        _gpu(),
        _redis(settings),
        _home(settings.home),
        _disk(settings.home),
        _models(settings.models_file),
    ]


def _package(name: str, *, needed: bool) -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name), needed)
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install 'qerl[train]'" if needed else "only for a GPU: pip install 'qerl[gpu]'"
        return Check(name, False, remedy, needed)


def _gpu() -> Check:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check("gpu", False, "no nvidia-smi: runs train on the CPU", needed=False)
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Check("gpu", False, "nvidia-smi does not answer", needed=False)
    names = "; ".join(done.stdout.strip().splitlines())
    return Check("gpu", done.returncode == 0 and bool(names), names or done.stderr.strip()[:200], needed=False)


def _redis(settings: Settings) -> Check:
    if "redis_url" in settings.model_fields_set:
        return Check("redis", True, "the server of QERL_REDIS_URL")
    server = redis_server()
    return Check("redis", server is not None, server or "apt install redis-server, or pip install 'qerl[embedded]'")


def _home(home: Path) -> Check:
    existing = _existing(home)
    return Check("home", existing.is_dir() and os.access(existing, os.W_OK), f"{home} must be writable")


def _disk(home: Path) -> Check:
    free = shutil.disk_usage(_existing(home)).free
    detail = f"{free / 1024**3:.1f} GiB free at {home} ({WANTED_FREE_BYTES / 1024**3:.0f} wanted)"
    return Check("disk", free >= WANTED_FREE_BYTES, detail)


def _models(path: Path) -> Check:
    try:
        return Check("models", True, f"{', '.join(catalog.read(path).ids())} in {path}")
    except catalog.BadModelsFile as error:
        return Check("models", False, str(error))


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _name(location: Sequence[int | str]) -> str:
    return str(location[0]).upper() if location else "*"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse(line: str) -> int:
    sys.stderr.write(f"qerl: {' '.join(line.split())}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
