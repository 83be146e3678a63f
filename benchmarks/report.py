"""`python -m benchmarks.report`: every figure on record as a Markdown table, with its goal and whether it is met."""

import json
import sys
from typing import Any

from benchmarks.record import BASELINES

MANY = 20
"""A longer table is folded."""


def table(record: dict[str, Any]) -> list[str]:
    """A record's lines."""
    machine = record["machine"]
    where = f"{machine.get('gpu') or machine['cpu']}, {machine['cores']} cores"
    fold = len(record["rows"]) > MANY
    lines = [
        f"**{record['name']}** on {where}, {record['date']}: `python -m benchmarks.{record['name']}`",
        "",
        *([f"<details><summary>{len(record['rows'])} figures</summary>", ""] if fold else []),
        "| case | metric | ours | peers | goal | met |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        peers = ", ".join(f"{name} {value:.4g}" for name, value in row["peers"].items())
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        cells = (row["case"], row["metric"], f"{row['ours']:.4g}", peers, row["goal"] or "", met)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *(["</details>", ""] if fold else [])]


def main() -> None:
    """Print the tables of all baselines."""
    for path in sorted(BASELINES.rglob("*.json")):
        sys.stdout.write("\n".join(table(json.loads(path.read_text()))) + "\n")


if __name__ == "__main__":
    main()
