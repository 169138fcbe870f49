"""Seconds from a new user's command to a plan: the documented lines and cluster files.

    python benchmarks/command_seconds.py plan --repeat 3 --rows first_plan.jsonl

Each command runs in a process of its own, from start to exit, with what it prints thrown away.
`--noisy` marks rows that were measured beside other work.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from lib.rows import write_row

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "docs" / "clusters"


def documented() -> list[str]:
    """Return every `llmpq-algo` line of docs/clusters, the page's and the files'."""
    blocks = re.findall(r"```sh\n(.*?)```", (CLUSTERS / "README.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    for path in sorted(CLUSTERS.glob("*.yaml")):
        lines += re.findall(r"^#   (llmpq-algo .*)$", path.read_text(), flags=re.M)
    return lines


def seconds_of(line: str) -> tuple[float, float, str]:
    """Run a line; return its wall seconds, CPU seconds, and what the plan says of itself."""
    command = [sys.executable, "-m", "llmpq.planner", *shlex.split(line)[1:]]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - start, os.times()
    cpu = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    said = next(line for line in done.stdout.splitlines() if line.startswith("exact: "))
    return wall, cpu, said


def main(words: list[str], program: str) -> None:
    """Time every line, print a table, and append rows where asked."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", help="file of benchmarks/results/ to append to")
    parser.add_argument("--noisy", action="store_true", help="the machine was busy")
    parser.add_argument("--only", default="", help="lines with this text alone")
    args = parser.parse_args(words)
    for line in [line for line in documented() if args.only in line]:
        runs = [seconds_of(line) for _ in range(args.repeat)]
        walls, cpus = [run[0] for run in runs], [run[1] for run in runs]
        print(f"{min(walls):6.2f} to {max(walls):.2f} s, {min(cpus):.2f} s of CPU: {line}")
        print(f"         {runs[-1][2]}")
        if args.rows:
            write_row(
                args.rows,
                bench="first_plan",
                case={"command": line, "cpu_s": round(min(cpus), 2), "plan": runs[-1][2]},
                unit="s",
                samples=walls,
                noisy=args.noisy,
            )
