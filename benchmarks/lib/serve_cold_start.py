"""From `llmpq-dist serve` to the first token over HTTP, in new processes each time.

    python benchmarks/serve.py cold-start [--runs 3] [--model examples/demo-7m] [--rows FILE]

A client asks again and again until its stream has begun; the time ends when its first event is
read. Cases: one CPU device; two CPU stages through Ray; two replicas of two CPU stages through Ray
Serve. Files are in the page cache. A row is the median of the runs; one taken while other programs
used the processor is marked noisy.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from lib.rows import write_row
from lib.servers import free_port

ROOT = Path(__file__).parents[2]
BUSY = 0.1
"""Share of the processor in use before a run, above which the run counts as disturbed."""
LIMIT_S = 120.0
CPUS = """\
schema: 1
name: cpu-stages
nodes: [{name: here, devices: [{kind: CPU, count: COUNT, threads: 1, memory: 64 MiB}]}]
"""
ALLOWED_S = {"one device": {"limit": 8.0}, "two stages, Ray": {"limit": 25.0}}
"""The limits it is held to."""


def main(words: list[str], program: str) -> None:
    """Measure, print, write rows."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-7m")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (default 3)")
    parser.add_argument("--rows", default="serve.jsonl", help="file of benchmarks/results")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        two, four = (cluster_of(Path(name), count) for count in (2, 4))
        for case, flags in (
            ("one device", []),
            ("two stages, Ray", ["--cluster", two, "--backend", "ray"]),
            ("two replicas of two stages",
             ["--cluster", four, "--replicas", "2"]),
        ):  # fmt: skip
            disturbed, samples = 0, []
            for _ in range(args.runs):
                disturbed += psutil.cpu_percent(0.5) / 100 > BUSY
                samples.append(first_token_s(args.model, flags))
            row = write_row(
                args.rows, bench="serve_cold_start", case={"model": args.model.name, "case": case},
                unit="s", samples=samples, baselines=ALLOWED_S.get(case),
                noisy=disturbed * 2 > args.runs,
            )  # fmt: skip
            print(f"{case}: {row['value']:.2f} s, {row['spread']}, noisy: {row['noisy']}")


def cluster_of(folder: Path, count: int) -> str:
    """Write a cluster of CPU devices; return its path."""
    path = folder / f"{count}.yaml"
    path.write_text(CPUS.replace("COUNT", str(count)))
    return str(path)


def first_token_s(model: Path, flags: Sequence[str]) -> float:
    """Start a server, ask until it answers, end it; seconds to the first token."""
    port = free_port()
    command = [sys.executable, "-m", "llmpq.runtime", "serve", "--model", str(model),
               "--port", str(port), "--no-access-log", *flags]  # fmt: skip
    body = {"model": model.name, "prompt": "def main():", "max_tokens": 4, "stream": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started_s = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not began(asked):
                if process.poll() is not None or time.monotonic() > started_s + LIMIT_S:
                    process.kill()
                    raise SystemExit(f"no answer: {process.communicate()[1]}")
                time.sleep(0.02)
            took_s = time.monotonic() - started_s
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return took_s


def began(asked: urllib.request.Request) -> bool:
    """Whether a stream's first event came."""
    try:
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return answer.readline().startswith(b"data: {")
    except OSError:
        return False
