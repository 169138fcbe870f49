"""Two stages on this machine's CPU at fewer and fewer bits: predicted and measured.

    python benchmarks/cpu_stages.py [--model llama-3.2-1b] [--threads 1] [--cores 0,1,2,3]

Profiles the machine once, then plans and runs the job at each of `--bits` (a list with `+` is what
the planner may choose from). Weights are random. `value` is the median measured time of the job,
`predicted` the plan's; baselines are the job's parts as measured and as predicted. `--cores` pins
all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.rows import write_row

from llmpq.plan import Plan

CLUSTER = """\
schema: 1
name: two-cpu-stages
nodes:
  - name: here
    devices:
      - {kind: CPU, threads: THREADS, memory: MEMORY}
      - {kind: CPU, threads: THREADS, memory: MEMORY}
"""


def main() -> None:
    """Profile, then plan, run and write a row for each choice of bits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-1b", help="a built-in model's shape")
    parser.add_argument("--threads", type=int, default=1, help="of each stage")
    parser.add_argument("--memory", default="6 GiB", help="of each stage")
    parser.add_argument("--cores", help="pin all processes to these, such as 0,1,2,3")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--gen", type=int, default=48)
    parser.add_argument("--bits", default="16,8,4,16+8+4", help="a plan for each")
    parser.add_argument("--theta", default="0.01", help="of the plans that may choose")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--noisy", action="store_true", help="the machine has other work")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    with tempfile.TemporaryDirectory(prefix="llmpq-cpu-stages-") as name:
        folder = Path(name)
        text = CLUSTER.replace("THREADS", str(args.threads)).replace("MEMORY", args.memory)
        (folder / "two.yaml").write_text(text)
        given = ["--model", args.model, "--cluster", str(folder / "two.yaml")]
        given += ["--dtype", args.dtype]
        kept = ["-o", str(folder / "costs.json")]
        job = f"{args.prompt}/{args.gen}"
        run("llmpq.profiler", *given, "--quick", "--bits", "16,8,4", "--job", job, *kept)
        for bits in args.bits.split(","):
            measure(args, given, folder, bits.replace("+", ","))


def measure(args: argparse.Namespace, given: list[str], folder: Path, bits: str) -> None:
    """Plan and run the job at some bits; write its row."""
    path = folder / "plan.json"
    run(
        "llmpq.planner", "--engines", "1", *given,
        "--costs", str(folder / "costs.json"), "--batch", str(args.batch),
        "--prompt-len", str(args.prompt), "--gen-len", str(args.gen), "--bits", bits,
        "--theta", args.theta, "-o", str(path),
    )  # fmt: skip
    plan = Plan.load(path)
    assert plan.predicted is not None
    said = run(
        "llmpq.runtime", "bench", "--plan", str(path), "--model", args.model, "--load-format",
        "dummy", "--backend", "processes", "--repeat", str(args.repeat), "--json",
    )  # fmt: skip
    report: dict[str, Any] = json.loads(said[said.index("{") :])
    tokens = args.batch * args.gen
    samples = [tokens / rate for rate in report["output_throughputs"]]
    parts = {
        "prefill": statistics.median(report["prefill_ms"]) / 1e3,
        "decode step": statistics.median(report["decode_step_ms"]) / 1e3,
        "predicted prefill": plan.predicted.prefill_s,
        "predicted decode": plan.predicted.decode_s,
    }
    write_row(
        "fidelity.jsonl",
        bench="cpu stages",
        case={
            "model": args.model, "allowed": bits, "stages": len(plan.stages),
            "layers": [stage.num_layers for stage in plan.stages],
            "bits": ",".join(p.value for p in plan.precisions), "threads": args.threads,
            "dtype": args.dtype, "batch": args.batch, "prompt": args.prompt, "gen": args.gen,
        },
        unit="s",
        samples=samples,
        predicted=plan.predicted.total_s,
        baselines=parts,
        noisy=args.noisy,
    )  # fmt: skip
    measured = statistics.median(samples)
    off = plan.predicted.total_s / measured - 1
    print(f"{bits}: {len(plan.stages)} stages, {measured:.2f} s, predicted {off:+.1%}", parts)


def run(module: str, *arguments: str) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{module} ended with code {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


if __name__ == "__main__":
    main()
