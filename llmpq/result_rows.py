"""A result row: one measured value, how it was measured and by what, as a JSON line of a file.

`benchmarks/results/` has such files; benchmarks append to them, and so does `llmpq-dist bench`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def append_row(
    path: Path,
    *,
    bench: str,
    case: Mapping[str, Any],
    unit: str,
    samples: Sequence[float],
    device: str,
    versions: Mapping[str, str],
    commit: str,
    command: str,
    floor: float | None = None,
    baselines: Mapping[str, float] | None = None,
    predicted: float | None = None,
    noisy: bool = False,
) -> dict[str, Any]:
    """Append a row, whose value is the median of `samples`, and return it."""
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
        "device": device,
        "versions": dict(versions),
        "commit": commit,
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
    return row


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of packages, of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_of(folder: Path) -> str:
    """Return the short commit of the checkout a folder is in, `-dirty` if it has changes."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    return done.stdout.strip() or "unknown"
