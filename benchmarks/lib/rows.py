"""Rows: one JSON object a line in `benchmarks/results/`, written by what measured it.

Where LLMPQ_ROWS names another folder rows go there: parts of one measurement that run side by side
have one each, and the files stay as they are while it runs. LLMPQ_COMMIT names the commit where git
is not at hand.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from llmpq.result_rows import append_row, commit_of, versions_of

HERE = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("LLMPQ_ROWS") or HERE / "results")


def write_row(
    file: str, *, device: str | None = None, made_at: str | None = None, **row: Any
) -> dict[str, Any]:
    """Append one row to `results/FILE`; `row`: what else `llmpq.result_rows.append_row` takes.

    `made_at` names the commit where git is not at hand.
    """
    return append_row(
        RESULTS / file,
        device=device or f"{platform.machine()} CPU",
        versions=versions(),
        commit=made_at or commit(),
        command="python " + shlex.join(sys.argv),
        **row,
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, where installed."""
    packages = ("torch", "triton", "ray", "transformers", "highspy", "pulp")
    return {"python": platform.python_version(), **versions_of(*packages)}


def commit() -> str:
    """Return the short commit of the tree, `-dirty` if it has changes, or what is said of it."""
    return os.environ.get("LLMPQ_COMMIT") or commit_of(HERE)
