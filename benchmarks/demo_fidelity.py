"""Predicted against measured end-to-end time of the demo: how far the planner can be trusted.

    python benchmarks/demo_fidelity.py [--demo out/demo] [--runs 5]

Takes the plan that `examples/demo.py` made (and makes it first where there is none), runs it
several times, and writes one row for the demo's prompts and one for prompts of exactly the planned
length. `value` is the median measured time, `predicted` the plan's. A row taken while other
programs used the processor is marked noisy.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lib.rows import write_row

from llmpq.plan import Plan
from llmpq.runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAMPLING: str = runpy.run_path(str(EXAMPLES / "demo.py"))["SAMPLING"]
BUSY = 0.1
"""Share of the processor that others may use before a run counts as disturbed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the plan."""

    total_s: float
    prefill_s: float
    decode_s: float
    disturbed: bool


def main() -> None:
    """Measure both cases and print how far the prediction is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--demo", type=Path, default=Path("out/demo"), help="the demo's folder")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (default 5)")
    args = parser.parse_args()
    if not (args.demo / "plan.json").exists():
        subprocess.run(
            [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(args.demo)], check=True
        )
    plan = Plan.load(args.demo / "plan.json")
    if plan.predicted is None:
        raise SystemExit(f"{args.demo}/plan.json predicts no time: make it with llmpq-algo")
    full = args.demo / "full-length.jsonl"
    write_full_length(plan, full)
    for name, prompts in (("demo", EXAMPLES / "prompts.jsonl"), ("full-length", full)):
        runs = [run_once(args.demo, prompts, plan) for _ in range(args.runs)]
        report(name, plan, runs)


def write_full_length(plan: Plan, path: Path) -> None:
    """Write the batch with prompts of exactly the planned length, cut from the held-out text."""
    text = (EXAMPLES / "heldout.txt").read_text()
    tokens = Tokenizer(EXAMPLES / "demo-7m").encode(text, special=False)
    length = plan.workload.prompt_len
    rows = [
        {"id": str(i), "prompt": tokens[i * length : (i + 1) * length]}
        for i in range(plan.workload.batch)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_once(demo: Path, prompts: Path, plan: Plan) -> Run:
    """Run the plan once, with the options of the demo; return what its report measured."""
    report_path = demo / "fidelity-report.json"
    command = (
        f"-m llmpq.runtime --strat_file_name {demo}/plan.json --model {EXAMPLES}/demo-7m"
        f" -i {prompts} -o {demo}/fidelity-out.jsonl --max_tokens {plan.workload.gen_len}"
        f" --report {report_path} --ignore-eos --seed 1 {SAMPLING}"
    )
    others = busy_share()
    subprocess.run(
        [sys.executable, *shlex.split(command)], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
    )
    measured = json.loads(report_path.read_text())["measured"]
    return Run(
        total_s=measured["total_s"],
        prefill_s=measured["prefill_s"],
        decode_s=measured["decode_s"],
        disturbed=max(others, busy_share()) > BUSY,
    )


def report(name: str, plan: Plan, runs: list[Run]) -> None:
    """Write the row and print the ratio."""
    assert plan.predicted is not None
    predicted, work = plan.predicted, plan.workload
    totals = [run.total_s for run in runs]
    row = write_row(
        "fidelity.jsonl",
        bench="fidelity",
        case={
            "model": plan.model.name,
            "cluster": plan.cluster.name,
            "prompts": name,
            "batch": work.batch,
            "prompt": work.prompt_len,
            "gen": work.gen_len,
            "stages": len(plan.stages),
            "bits": ",".join(p.value for p in plan.precisions),
        },
        unit="s",
        samples=totals,
        predicted=predicted.total_s,
        noisy=any(run.disturbed for run in runs) or max(totals) > 1.3 * min(totals),
    )
    for phase in ("prefill", "decode", "total"):
        got = statistics.median(getattr(run, f"{phase}_s") for run in runs)
        want = getattr(predicted, f"{phase}_s")
        off = want / got - 1
        print(f"{name:12} {phase:8} predicted {want:.3f} s, measured {got:.3f} s: {off:+.0%}")
    print("noisy: other programs were running" if row["noisy"] else "quiet")


def busy_share(seconds: float = 0.5) -> float:
    """Return the share of all cores in use over a moment in which this benchmark sleeps."""
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    idle, total = (b - a for a, b in zip(before, after, strict=True))
    return 1 - idle / total if total else 0.0


def _cpu_times() -> tuple[int, int]:
    """Return idle and total ticks of all cores since the machine started; zeros if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


if __name__ == "__main__":
    main()
