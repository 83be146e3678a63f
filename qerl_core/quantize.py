"""Quantize a base model ahead, and say what it cost: `python -m qerl_core.quantize MODEL OUT`; `qerl quantize` runs it.

OUT appears when it is whole, quantization_report.json included, or not at all. Status 0: done, 1: this model or text
cannot be had or quantized, 2: a bad argument, 130: interrupted. What goes wrong is a line, never a traceback.
"""

import argparse
import json
import logging
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from qerl_core.config import ModelConfig, RoundingMethod
from qerl_core.errors import BadCheckpoint, BadData, QerlError
from qerl_core.folders import lone_maker, published

if TYPE_CHECKING:
    import torch

    from qerl_core.quant.comparison import Comparison

REPORT = "quantization_report.json"
METHODS: tuple[str, ...] = get_args(RoundingMethod)
WORST = 10


class BadArgument(Exception):
    """Why the command cannot begin, in a line."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is written beside the weights."""

    model: str
    method: str
    num_linears: int
    num_weights: int
    """Elements of the quantized layers."""
    source_bytes: int
    packed_bytes: int
    """Size of the safetensors files, what is not quantized included."""
    relative_error: float
    """Norm of the rounding error over the norm of the weights, all quantized layers together."""
    layer_errors: dict[str, float]
    """The same for each quantized layer, the worst first."""
    text: "Comparison | None"
    """Base and quantized model on a text, if one was given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parser().parse_args(argv)
    # Torch is loaded later: that takes seconds, in which an interruption is a line too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING)
    try:
        report = run(arguments)
    except BadArgument as error:
        return _refuse(str(error), 2)
    except QerlError as error:
        return _refuse(str(error), 1)
    except OSError as error:  # all that is read has errors of its own
        return _refuse(f"{arguments.out} cannot be written: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        return _refuse("stopped", 130)
    sys.stdout.write(json.dumps(asdict(report)) + "\n" if arguments.json else described(report, arguments.out))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m qerl_core.quantize", description="Write a model's NVFP4 twin.")
    made.add_argument("model", help="a folder, a hub id, or package:NAME; or any name, with --source")
    made.add_argument("out", type=Path, help="the folder to make")
    made.add_argument("--source", help="where MODEL is, if that is only what it is called")
    made.add_argument("--revision", help="the hub commit")
    made.add_argument("--gguf-file", help="the file inside MODEL if its weights are GGUF")
    made.add_argument("--method", choices=METHODS, default=METHODS[0], help="how weights are rounded (%(default)s)")
    made.add_argument("--calibration", type=Path, help="text that gptq rounds for: UTF-8, or JSONL rows")
    made.add_argument("--text", type=Path, help="UTF-8 text to compare base and quantized model on")
    made.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (the first GPU, or else the CPU)")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    made.add_argument("--cache", type=Path, default=Path(".qerl/cache"), help="models converted from GGUF")
    return made


def run(arguments: argparse.Namespace) -> Report:
    """Quantize, compare, publish. BadArgument before any work, QerlError, OSError."""
    out: Path = arguments.out
    _require_new(out)
    if (arguments.method == "gptq") != (arguments.calibration is not None):
        raise BadArgument("gptq needs --calibration FILE, and no other method looks at one")
    text = None if arguments.text is None else _read_text(arguments.text)
    calibration = None if arguments.calibration is None else _read_text(arguments.calibration)

    device = _device(arguments.device)
    source = _source(arguments)
    pieces = None if text is None else _pieces(source, text)
    examples = None if calibration is None else _examples(source, calibration, arguments.calibration)
    _require_room(source, out)

    from qerl_core.quant.checkpoint import quantize_folder

    with lone_maker(out) as is_wanted:
        if not is_wanted:
            _require_new(out)
        with published(out) as partial:
            made = partial / out.name
            with _progress("quantizing", "layer") as on_layer:
                packed = quantize_folder(
                    source, made, method=arguments.method, calibration=examples, device=device, on_layer=on_layer
                )
            report = Report(
                model=arguments.model,
                method=arguments.method,
                num_linears=packed.num_linears,
                num_weights=packed.num_weights,
                source_bytes=packed.source_bytes,
                packed_bytes=packed.packed_bytes,
                relative_error=packed.relative_error,
                layer_errors=dict(sorted(packed.layer_errors.items(), key=lambda layer: -layer[1])),
                text=None if pieces is None else _compare(source, made, pieces, device),
            )
            (made / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
            for path in made.iterdir():
                path.rename(partial / path.name)
            made.rmdir()
    return report


def described(report: Report, out: Path) -> str:
    """The report for a reader."""
    sizes = f"{_size(report.source_bytes)} -> {_size(report.packed_bytes)}"
    lines = [
        f"{out}: {report.num_linears} layers of {report.model} by {report.method}",
        f"size            {sizes} ({report.source_bytes / report.packed_bytes:.2f} times smaller)",
        f"relative error  {report.relative_error:.4f}, and of the worst layers:",
        *(f"                {error:.4f}  {name}" for name, error in list(report.layer_errors.items())[:WORST]),
    ]
    if report.text is not None:
        lines += [
            f"perplexity      {report.text.base_perplexity:.4f} -> {report.text.perplexity:.4f} "
            f"on {report.text.num_tokens} tokens",
            f"KL              {report.text.kl_nats:.5f} nats a token, of base from quantized",
        ]
    return "\n".join([*lines, f"all layers      {out / REPORT}", ""])


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise BadArgument(f"{out} exists already; name another folder, or remove it")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadArgument(f"{path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise BadArgument(f"{path} cannot be read: {error.strerror}") from error


def _device(name: str) -> "torch.device":
    import torch

    from qerl_core.policy.model import default_device

    if name == "auto":
        return default_device()
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # no such device, or torch without CUDA
        reason = str(error).partition("\n")[0]
        raise BadArgument(f"--device {name} cannot be used: {reason}") from error
    return device


def _source(arguments: argparse.Namespace) -> Path:
    from qerl_core.policy.source import local_folder

    config = ModelConfig(
        id=arguments.model,
        source=arguments.source or arguments.model,
        revision=arguments.revision,
        gguf_file=arguments.gguf_file,
    )
    return local_folder(config, arguments.cache)


def _pieces(source: Path, text: str) -> list[list[int]]:
    from qerl_core.quant.comparison import windows

    tokenizer, max_tokens = _tokenizer(source)
    return windows(text, tokenizer, max_tokens=max_tokens)


def _examples(source: Path, content: str, path: Path) -> list[list[int]]:
    """Calibration text as token ids: windows of a plain text, or the rows of JSONL."""
    from qerl_core.quant.comparison import windows

    tokenizer, max_tokens = _tokenizer(source)
    if path.suffix not in (".jsonl", ".json"):
        return windows(content, tokenizer, max_tokens=max_tokens)
    examples = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            examples.append(_row_ids(line, tokenizer, f"{path.name} line {number}")[:max_tokens])
    if not any(examples):
        raise BadData(f"{path.name} has no rows to calibrate on")
    return examples


def _row_ids(line: str, tokenizer: Any, where: str) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadData(f"{where} is no JSON; a calibration text that is not JSONL has a name in .txt") from error
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("messages"), list):
        try:
            ids: list[int] = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        except Exception as error:  # templates raise what they like
            raise BadData(f"the chat template refuses {where}: {error}") from error
        return ids
    text = row.get("text", row.get("prompt"))
    if not isinstance(text, str):
        raise BadData(f"{where} has neither `messages` nor a string `text` or `prompt`")
    ids = tokenizer(text, verbose=False)["input_ids"]
    return ids


def _tokenizer(source: Path) -> tuple[Any, int]:
    """A folder's tokenizer, and how long a window of its model is."""
    from transformers import AutoConfig, AutoTokenizer

    from qerl_core.quant.comparison import WINDOW_TOKENS

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        config: Any = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except Exception as error:  # whatever transformers raises for files that it does not understand
        raise BadCheckpoint(
            f"{source.name}: its config and tokenizer cannot be read ({type(error).__name__}), and a text needs both; "
            "fetch the folder again, or leave the text out"
        ) from error
    longest = getattr(config, "max_position_embeddings", None) or WINDOW_TOKENS
    return tokenizer, min(WINDOW_TOKENS, longest)


def _require_room(source: Path, out: Path) -> None:
    from qerl_core.quant.checkpoint import twin_bytes

    needed = twin_bytes(source)
    place = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise BadArgument(f"{out} needs {_size(needed)}, and {_size(free)} are free there")


def _compare(source: Path, made: Path, pieces: Sequence[Sequence[int]], device: "torch.device") -> "Comparison":
    import torch

    from qerl_core.quant.checkpoint import load_model, load_plain_model
    from qerl_core.quant.comparison import compare

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        base = load_plain_model(source, compute_dtype=dtype, device=device)
        quantized = load_model(made, compute_dtype=dtype, device=device, keep_decoded=device.type == "cpu")
        with _progress("comparing", "window") as on_window:
            done = iter(range(1, len(pieces) + 1))
            return compare(base, quantized, pieces, on_piece=lambda: on_window(next(done), len(pieces)))
    except torch.OutOfMemoryError as error:
        raise BadData(f"{device} has no room for base and quantized model at once; leave --text out") from error


@contextmanager
def _progress(what: str, unit: str) -> Iterator[Any]:
    """A bar on a terminal, with what is done and the time left; elsewhere nothing."""
    from tqdm import tqdm

    size = shutil.get_terminal_size()  # a guess where it is not known; there tqdm would show nothing
    with tqdm(desc=what, unit=unit, disable=None, ncols=size.columns, nrows=size.lines) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _size(num_bytes: int) -> str:
    power = min(3, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def _refuse(line: str, status: int) -> int:
    sys.stderr.write(f"qerl: {' '.join(line.split())}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
