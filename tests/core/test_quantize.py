import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qerl_core import quantize
from qerl_core.quant.checkpoint import load_model, quantize_folder, twin_bytes
from tests.tiny import make_model

# The command as it is, but slow enough to be interrupted: a layer is done, and then it waits.
SLOW = """
import sys, time
from qerl_core import quantize
from qerl_core.quant import checkpoint

def each(*arguments, inner=checkpoint._round_each):
    for number, group in enumerate(inner(*arguments)):
        if number == 1:
            print("halfway", flush=True)
            time.sleep(60)
        yield group

checkpoint._round_each = each
sys.exit(quantize.main())
"""


@pytest.fixture(autouse=True)
def handlers():
    """`main` takes the signals for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Füße, and then some more text. " * 20, encoding="utf-8")
    return path


@pytest.fixture
def main(tiny_folder, tmp_path, capsys):
    """Run it in this process: status, stdout, stderr. The model is the tiny one unless another is given."""

    def call(*options: object, model: object = tiny_folder, out: object = tmp_path / "out") -> tuple[int, str, str]:
        capsys.readouterr()
        status = quantize.main([*map(str, (f"--cache={tmp_path / 'cache'}", *options, "--", model, out))])
        return status, *capsys.readouterr()

    return call


def refused(result: tuple[int, str, str], status: int, *needles: str) -> None:
    """One line that says it, and nothing on stdout."""
    assert result[:2] == (status, ""), result
    assert result[2].startswith("qerl: ")
    assert result[2].count("\n") == 1
    assert all(needle in result[2] for needle in needles), result[2]


def test_a_user_gets_a_folder_that_loads_and_a_report(tiny_folder, tmp_path, text):
    out = tmp_path / "made" / "out"
    command = [sys.executable, "-m", "qerl_core.quantize", tiny_folder, out, "--text", text, "--device", "cpu"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((out / "quantization_report.json").read_text())
    errors = list(report["layer_errors"].values())
    assert len(errors) == report["num_linears"] == 14
    assert errors == sorted(errors, reverse=True)
    assert 0.05 < errors[-1] <= report["relative_error"] <= errors[0] < 0.15
    assert report["text"]["kl_nats"] > 0
    assert report["text"]["num_tokens"] == len(text.read_bytes()) - 2  # windows of the model's 512, a token a byte
    assert report["packed_bytes"] == (out / "model.safetensors").stat().st_size < report["source_bytes"]
    lines = done.stdout.splitlines()
    assert "14 layers" in lines[0]
    assert [line.split()[1] for line in lines[3:13]] == list(report["layer_errors"])[:10]
    assert f"on {report['text']['num_tokens']} tokens" in done.stdout
    assert "nats a token" in done.stdout
    assert load_model(out)
    assert AutoModelForCausalLM.from_pretrained(out)
    assert {path.name for path in out.parent.iterdir()} == {"out", ".out.lock"}


def test_the_weights_are_those_of_quantize_folder_and_json_is_the_report(main, tiny_folder, tmp_path):
    status, out, _ = main("--json", "--method", "four_over_six")

    quantize_folder(tiny_folder, tmp_path / "direct", method="four_over_six")
    report = json.loads(out)
    assert status == 0
    assert report["method"] == "four_over_six"
    assert report["text"] is None
    assert report == json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    for file in (tmp_path / "direct").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.txt", "Some text to round for. " * 30),
        (
            "rows.jsonl",
            '{"messages": [{"role": "user", "content": "2+2="}]}\n\n{"text": "2+2=4"}\n{"prompt": "3+3="}\n',
        ),
    ],
)
def test_gptq_takes_its_calibration_from_a_text_or_from_rows(main, tmp_path, name, content):
    (tmp_path / name).write_text(content)

    status, out, err = main("--json", "--method", "gptq", "--calibration", tmp_path / name)

    assert status == 0, err
    assert json.loads(out)["method"] == "gptq"
    assert load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("row", "needle"),
    [
        ("[]", "line 2 has neither"),
        ('{"text": 3}', "line 2 has neither"),
        ("{", "line 2 is no JSON"),
        ('{"messages": [3]}', "line 2"),
    ],
)
def test_a_bad_calibration_row_is_named(main, tmp_path, row, needle):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "a b"}}\n{row}\n')

    refused(main("--method", "gptq", "--calibration", tmp_path / "rows.jsonl"), 1, "rows.jsonl", needle)


def test_calibration_and_method_go_together(main, text):
    refused(main("--method", "gptq"), 2, "--calibration")
    refused(main("--calibration", text), 2, "--calibration")


def test_a_folder_that_exists_is_left_alone(main, tmp_path):
    (tmp_path / "out").mkdir()

    refused(main(), 2, "out exists already")

    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_said_before_any_work(main, tiny_folder, tmp_path, monkeypatch):
    needed = twin_bytes(tiny_folder)
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, needed - 1))

    refused(main(), 2, "needs", "KiB are free")
    assert not list(tmp_path.glob(".out*"))

    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, needed))
    assert main()[0] == 0
    total = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert 0.5 * needed < total <= needed


def test_a_disk_that_fills_up_underway_is_a_line_too(main, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # to the writer the same as a full disk
    try:
        result = main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    refused(result, 1, "cannot be written: ", "File too large")

    assert {path.name for path in tmp_path.glob(".out*")} == {".out.lock"}


def test_what_cannot_be_had_or_read_is_a_line(main, tmp_path, tiny_folder):
    (tmp_path / "latin.txt").write_bytes("Füße".encode("latin-1"))
    (tmp_path / "short.txt").write_text("x")
    packed = tmp_path / "packed"
    quantize_folder(tiny_folder, packed)

    refused(main(model=tmp_path / "none"), 1, "is not there")
    refused(main(model="package:no_such_package"), 1, "no-such-package is not installed")
    refused(main(model=packed), 1, "is quantized already")
    refused(main("--text", tmp_path / "none.txt"), 2, "none.txt cannot be read")
    refused(main("--text", tmp_path / "latin.txt"), 2, "latin.txt is not UTF-8")
    refused(main("--text", tmp_path / "short.txt"), 1, "two are the least")
    refused(main("--device", "cuda:99"), 2, "--device cuda:99")
    refused(main("--device", "nonsense"), 2, "--device nonsense")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_leave_no_folder(main, tiny_folder, tmp_path):
    bad = shutil.copytree(tiny_folder, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(float("nan"))
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})

    refused(main(model=bad), 1, "model.layers.1.mlp.down_proj.weight", "nan")

    assert {path.name for path in tmp_path.iterdir() if "out" in path.name} == {".out.lock"}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_leaves_nothing_that_is_taken_for_whole(tiny_folder, tmp_path, number, status):
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, tiny_folder, out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "halfway\n", running.stderr.read()
        running.send_signal(number)
        said = running.communicate(timeout=30)

    assert running.returncode == status
    assert said == ("", "" if number == signal.SIGKILL else "qerl: stopped\n")
    assert not out.exists()
    assert len(list(tmp_path.glob(".out.*.partial"))) == (number == signal.SIGKILL)

    assert quantize.main([str(tiny_folder), str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock"}
    assert load_model(out)


def test_ctrl_c_while_torch_is_loading_is_a_line(tiny_folder, tmp_path):
    script = "import sys, time; from qerl_core import quantize; print('on', flush=True); sys.exit(quantize.main())"
    command = [sys.executable, "-X", "importtime", "-c", script, tiny_folder, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "on\n"
        for line in running.stderr:
            if line.rstrip().endswith("torch.version") or "| torch." in line or line.rstrip().endswith(" torch._C"):
                break
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)

    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "qerl: stopped"


def test_a_terminal_sees_a_bar_with_layers_done_and_the_time_left(tiny_folder, tmp_path):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "qerl_core.quantize", tiny_folder, tmp_path / "out"]
    environment = os.environ | {"COLUMNS": "100", "LINES": "30"}
    done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)

    assert done.wait(30) == 0
    assert "quantizing: 100%" in shown.decode()
    assert "14/14 [00:0" in shown.decode()


def test_a_model_of_a_second_device_type_is_compared_in_float32(tiny_folder):
    assert quantize._device("cpu") == torch.device("cpu")
    assert quantize._device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize(("size", "shown"), [(0, "0 bytes"), (1023, "1023 bytes"), (2048, "2 KiB"), (3 << 30, "3 GiB")])
def test_sizes_are_shown_in_their_unit(size, shown):
    assert quantize._size(size) == shown


def test_a_model_of_gguf_is_converted_in_the_cache(tmp_path):
    folder = make_model(tmp_path / "model")

    result = subprocess.run(
        [sys.executable, "-m", "qerl_core.quantize", folder, tmp_path / "out", "--gguf-file", "none.gguf"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )

    refused((result.returncode, result.stdout, result.stderr), 1, "none.gguf is not in")
