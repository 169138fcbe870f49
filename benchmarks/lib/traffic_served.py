"""Live traffic as predicted by `llmpq-algo simulate`, beside what a server measures.

    python benchmarks/traffic.py served --costs costs.json [--write]

Plans the bundled model for a small traffic over two CPU stages (as long as `--costs` says, from
`llmpq-profile --cluster benchmarks/traffic.yaml` on the same machine), serves it with `llmpq-dist
serve --plan`, sends the traffic's requests over HTTP as they come, and compares TTFT, TPOT and
latency of the streams with the plan's prediction. Machines that others use serve slower than they
were profiled, or the other way round: rows from such are marked noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from lib.rows import write_row
from lib.servers import free_port, wait_until_ready

from llmpq.planner.__main__ import main as plan_main
from llmpq.planner.evaluate.engine_simulation import simulate_plan
from llmpq.plans.topology import read_plan
from llmpq.service_measures import ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.traffic import Arrival, poisson_traffic

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "demo-7m"
PROMPTS, OUTPUTS = (40, 120), (20, 60)


def send(
    port: int, number: int, arrival: Arrival, start_s: float, out: list[ServedRequest]
) -> None:
    """Send one request when it comes, and note when its tokens are there."""
    time.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
    body = {
        "prompt": arrival.prompt(1000, number),
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    first = 0.0
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter()
    out.append(
        ServedRequest(
            number=number,
            at_s=arrival.at_s,
            first_token_s=first - start_s,
            end_s=time.perf_counter() - start_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
        )
    )


def served(plan: Path, traffic: Sequence[Arrival]) -> list[ServedRequest]:
    """Return when each request's tokens came from a server of the plan."""
    port = free_port()
    words = ["-m", "llmpq.runtime", "serve", "--plan", str(plan), "--model", str(MODEL)]
    command = [sys.executable, *words, "--port", str(port), "--backend", "processes"]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        wait_until_ready(port, server)
        found: list[ServedRequest] = []
        warm: list[ServedRequest] = []
        for number in range(2):
            send(port, 10**6 + number, Arrival(0.0, 40, 8), time.perf_counter(), warm)
        start_s = time.perf_counter() + 0.5
        threads = [
            threading.Thread(target=send, args=(port, number, arrival, start_s, found))
            for number, arrival in enumerate(traffic)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait()
    return found


def main(words: list[str], program: str) -> None:
    """Predict, serve, compare."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--costs", type=Path, required=True, help="costs.json of llmpq-profile")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="append rows to results/traffic.jsonl")
    options = parser.parse_args(words)
    traffic = poisson_traffic(PROMPTS, OUTPUTS, requests=options.requests, rate_per_s=options.rate)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        words = ["--cluster", str(ROOT / "benchmarks" / "traffic.yaml"), "--model", str(MODEL)]
        words += ["--costs", str(options.costs), "--bits", "16", "-o", str(plan)]
        words += ["--prompt", ",".join(map(str, PROMPTS)), "--gen", ",".join(map(str, OUTPUTS))]
        words += ["--rate", str(options.rate), "--ttft", "1", "--tpot", "0.2"]
        assert plan_main([*words, "--requests", str(options.requests)]) == 0
        predicted = simulate_plan(read_plan(plan), traffic)
        measured = ServiceMeasures.of(served(plan, traffic), ServiceLimits())
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {os.cpu_count()} cores; predicted beside measured, seconds")
    for name in ("ttft_s", "tpot_s", "latency_s"):
        for quantile in ("mean", "p50", "p90", "p99"):
            one, other = (getattr(getattr(m, name), quantile) for m in (predicted, measured))
            print(f"{name:10} {quantile:5} {one:.4f} {other:.4f}  {one / other - 1:+.1%}")
            if options.write:
                write_row(
                    "traffic.jsonl",
                    bench="traffic",
                    case={
                        "what": "served",
                        "model": "demo-7m",
                        "measure": name.removesuffix("_s"),
                        "of": quantile,
                        "rate": options.rate,
                        "requests": options.requests,
                        "stages": 2,
                    },
                    unit="s",
                    samples=[other],
                    predicted=one,
                    noisy=load > 1.0,
                )
