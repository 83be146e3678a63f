"""The form of a result: JSON that says what was measured, on what, with which command."""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

BASELINES = Path(__file__).parent / "baselines"
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "triton",
    "vllm",
    "trl",
    "bitsandbytes",
    "liger-kernel",
    "fastapi",
    "sqlalchemy",
    "celery",
    "redis",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours beside its peers', from the same run."""

    case: str
    metric: str
    better: Literal["higher", "lower"]
    ours: float
    peers: dict[str, float] = field(default_factory=dict)
    spread: float | None = None
    """Largest minus smallest of the repeats."""
    goal: str | None = None
    met: bool | None = None

    def judged(self, is_met: Callable[[float, dict[str, float]], bool]) -> "Row":
        """The row with its verdict: is the goal met by (ours, peers)?"""
        return replace(self, met=is_met(self.ours, self.peers))


def write(name: str, machine: str, rows: list[Row], **extra: Any) -> Path:
    """Write `baselines/<machine>/<name>.json`; returns its path.

    Rows of other cases that are on record stay: each says which command made it, and when. Ratios are within a row.
    """
    command = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip()
    made = {"command": command, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
    path = BASELINES / machine / f"{name}.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    ours = {(row.case, row.metric) for row in rows}
    kept = [row for row in before["rows"] if (row["case"], row["metric"]) not in ours]
    record = {
        "name": name,
        **made,
        "machine": {
            "name": machine, "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "os": platform.system(), **_gpu(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "rows": kept + [asdict(row) | made for row in rows],
        **extra,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu() -> dict[str, str]:
    torch = sys.modules.get("torch")  # asked only where the benchmark has it
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
