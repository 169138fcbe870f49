"""Rows: one JSON object a line in `benchmarks/results/`, written by what measured it.

Where LLMPQ_ROWS names another folder rows go there: parts of one measurement that run side by side
have one each, and the files stay as they are while it runs. LLMPQ_COMMIT names the commit where git
is not at hand.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("LLMPQ_ROWS") or HERE / "results")


def write_row(
    file: str,
    *,
    bench: str,
    case: Mapping[str, Any],
    unit: str,
    samples: Sequence[float],
    device: str | None = None,
    floor: float | None = None,
    baselines: Mapping[str, float] | None = None,
    predicted: float | None = None,
    noisy: bool = False,
    made_at: str | None = None,
) -> dict[str, Any]:
    """Append one row to `results/FILE`: the median of `samples`, its range and how it was made.

    `made_at` names the commit where git is not at hand.
    """
    row = {
        "bench": bench,
        "case": dict(case),
        "value": statistics.median(samples),
        "unit": unit,
        "n": len(samples),
        "spread": [min(samples), max(samples)],
        "floor": floor,
        "baselines": dict(baselines or {}),
        "predicted": predicted,
        "noisy": noisy,
        "device": device or f"{platform.machine()} CPU",
        "versions": versions(),
        "commit": made_at or commit(),
        "command": "python " + shlex.join(sys.argv),
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / file).open("a") as out:
        out.write(json.dumps(row) + "\n")
    return row


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "ray", "transformers", "highspy", "pulp"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the short commit of the tree, `-dirty` if it has changes, or what is said of it."""
    said = os.environ.get("LLMPQ_COMMIT")
    if said:
        return said
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    return done.stdout.strip() or "unknown"
