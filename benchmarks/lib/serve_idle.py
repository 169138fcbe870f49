"""What an idle server costs, and how late its first token is after such a time.

    python benchmarks/serve.py idle [--idle 60] [--times 3] [--backend processes ray] [--rows FILE]

Two CPU stages of the demo model. Each time: so many seconds without a request, in which the CPU
time of every process is counted (through Ray its own processes together), then one streamed request
alone, then twelve after each other as the measure of a warm server. Run it where nothing
else runs: a row taken beside other work is marked noisy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from lib.rows import write_row
from lib.serve_cold_start import BUSY, ROOT, cluster_of
from lib.servers import free_port, wait_until_ready

WARM = 12
"""Requests behind which a server is warm, and by which it is measured."""


def main(words: list[str], program: str) -> None:
    """Measure, print, write rows."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-7m")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without a request (60)")
    parser.add_argument("--times", type=int, default=3, help="idle times of each backend (3)")
    parser.add_argument("--backend", nargs="+", default=["processes", "ray"])
    parser.add_argument("--rows", default="serve.jsonl", help="file of benchmarks/results")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        flags = [str(args.model), "--cluster", cluster_of(Path(name), 2)]
        for backend in args.backend:
            noisy = psutil.cpu_percent(1.0) / 100 > BUSY
            shares, ratios = measured([*flags, "--backend", backend], args.idle, args.times)
            case = {"model": args.model.name, "backend": backend, "idle_s": args.idle}
            for what, unit, samples, limit in (
                ("most of a process", "percent of a core", shares["most"], 2.0),
                ("Ray's own together", "percent of a core", shares["ray"], 5.0),
                ("first token over warm", "ratio", ratios, 1.2),
            ):
                if what.startswith("Ray") and backend != "ray":
                    continue
                row = write_row(
                    args.rows, bench="idle_server", case=case | {"what": what}, unit=unit,
                    samples=samples, baselines={"limit": limit}, noisy=noisy,
                )  # fmt: skip
                print(f"{backend}, {what}: {row['value']:.2f} {unit}, {row['spread']}", flush=True)


def measured(
    flags: list[str], idle_s: float, times: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Return per cents of a core while idle, and first tokens as multiples of warm ones."""
    port = free_port()
    command = [sys.executable, "-m", "llmpq.runtime", "serve", *flags, "--port", str(port)]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    shares: dict[str, list[float]] = {"most": [], "ray": []}
    ratios = []
    try:
        wait_until_ready(port, server)
        for _ in range(WARM):
            first_token_s(port)
        for _ in range(times):
            before = cpu_seconds()
            begun = time.perf_counter()
            time.sleep(idle_s)
            took = time.perf_counter() - begun
            used = {
                who: 100 * (spent - before[who]) / took
                for who, spent in cpu_seconds().items()
                if who in before
            }
            ours = [share for (_, rays), share in used.items() if not rays]
            shares["most"].append(max(ours))
            shares["ray"].append(sum(share for (_, rays), share in used.items() if rays))
            first = first_token_s(port)
            ratios.append(first / statistics.median(first_token_s(port) for _ in range(WARM)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    return shares, ratios


def cpu_seconds() -> dict[tuple[int, bool], float]:
    """Return CPU seconds so far by process of the server, and whether the process is Ray's own.

    Ray's processes are not the server's children: all of this machine that run Ray count.
    """
    found = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            words = " ".join(process.cmdline())
            if not ("llmpq.runtime" in words or "ray" in words):
                continue
            own = "llmpq.runtime" not in words and "RemoteStageWorker" not in words
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[process.pid, own] = times.user + times.system
    return found


def first_token_s(port: int) -> float:
    """Return the seconds from a request for a few tokens to the first event of its stream."""
    name = f"f{time.time_ns()}"
    body = {"prompt": f"def {name}(self):\n    return " * 8, "max_tokens": 4, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    begun = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"temperature": 0}),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"the server answered {answer.status}: {answer.read(300)!r}")
    answer.readline()
    took = time.perf_counter() - begun
    answer.read()
    connection.close()
    return took
