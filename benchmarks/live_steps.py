"""Steps of live requests, sized by times and memory, beside steps of 512 tokens: as predicted.

    python benchmarks/live_steps.py

The engine's own scheduler over predicted step times (runtime/simulate/): Llama-3.1-8B in 16 bits on
an H200 by its profile, Azure's conversations at 15 requests a second; and a prompt alone on two T4.
Rows are 512 over the engine's own; a simulation has no noise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.rows import write_row
from lib.traces import read_trace

from llmpq.plan import Plan
from llmpq.runtime.simulate.simulation import EngineModel, simulate
from llmpq.traffic import Arrival

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "benchmarks" / "data" / "h200-llama-3.1-8b.costs.json"
H200 = ("--model", "llama-3.1-8b", "--cluster", str(ROOT / "clusters" / "h200x1.yaml"),
        "--costs", str(COSTS), "--batch", "128", "--prompt-len", "2048", "--gen-len", "512",
        "--bits", "16", "--dtype", "bfloat16")  # fmt: skip
T4 = ("--model", "opt-6.7b", "--devices", "t4:2", "--batch", "8", "--prompt-len", "1024",
      "--gen-len", "64", "--bits", "16")  # fmt: skip
RATE, REQUESTS, HOST_S = 15.0, 250, 0.0003


def main() -> None:
    """Simulate and write rows."""
    rows = [row for row in read_trace("azure_2023_conv", REQUESTS) if row.prompt_tokens < 4000]
    span_s = rows[-1].at_s - rows[0].at_s
    traffic = [
        Arrival((row.at_s - rows[0].at_s) * len(rows) / RATE / span_s, row.prompt_tokens,
                row.output_tokens)
        for row in rows
    ]  # fmt: skip
    compare("azure_2023_conv", "llama-3.1-8b, H200", made(H200), traffic)
    compare("a prompt alone", "opt-6.7b, 2 T4", made(T4), [Arrival(0.0, 1024, 8)])


def made(flags: Sequence[str]) -> Plan:
    """Return the plan that llmpq-algo makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "llmpq.planner", *flags, "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return Plan.load(path)


def compare(trace: str, model: str, plan: Plan, traffic: Sequence[Arrival]) -> None:
    """Write the rows of a traffic."""
    own = EngineModel.of_plan(plan)
    fixed = replace(own.limits, step_tokens=512, mixed_tokens=None, fill_tokens=0.0)
    before, after = (
        measured(replace(own, limits=limits, host_s=HOST_S), traffic)
        for limits in (fixed, own.limits)
    )
    for name, value in after.items():
        row = write_row(
            "live.jsonl", bench=f"live_steps_{name}", case={"trace": trace, "plan": model},
            unit="s", samples=[value], baselines={"512": before[name]}, device="simulated",
        )  # fmt: skip
        ratio = row["baselines"]["512"] / row["value"]
        print(f"{model}, {trace}: {name} {1e3 * value:.1f} ms, {ratio:.2f}x as quick as of 512")


def measured(model: EngineModel, traffic: Sequence[Arrival]) -> dict[str, float]:
    """Return quantiles of what is served, and its end."""
    served = simulate([model], traffic)
    found = {
        "ttft": sorted(one.ttft_s for one in served),
        "tpot": sorted(one.tpot_s or 0.0 for one in served),
    }
    quantiles = {
        f"{name}_p{100 * share:.0f}": values[min(len(values) - 1, int(share * len(values)))]
        for name, values in found.items()
        for share in (0.5, 0.99)
    }
    return {**quantiles, "end": max(one.end_s for one in served)}


if __name__ == "__main__":
    main()
