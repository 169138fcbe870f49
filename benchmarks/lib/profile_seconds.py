"""Wall time of one `llmpq-profile`, from its start to costs.json.

    python benchmarks/command_seconds.py profile --cluster clusters/h200x1.yaml \\
        --bits 16,8,4,3 -o costs.json

`--cold` gives it an empty folder for compiled kernels, as on a machine that never ran the model;
otherwise it finds what earlier runs compiled. One row, in seconds. Samples of an earlier profile
would be taken over: they must not be there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmpq.costs.cost_model import CostModel
from llmpq.kernels.gpu_timing import write_row

RESULTS = Path(__file__).parents[1] / "results" / "fidelity.jsonl"


def main(words: list[str], program: str) -> None:
    """Run the command and write its row."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--device", help="only this device kind")
    parser.add_argument("--bits", default="16,8,4,3")
    parser.add_argument("--max-tokens", type=int, help="of one prefill")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(words)
    samples = args.output.with_suffix(".samples.jsonl")
    if samples.exists():
        parser.error(f"{samples} is there: its samples would not be timed again; remove it")
    command = [sys.executable, "-m", "llmpq.profiler", "--model", args.model]
    command += ["--cluster", str(args.cluster), "--bits", args.bits, "-o", str(args.output)]
    for option in ("device", "max_tokens"):
        if (value := getattr(args, option)) is not None:
            command += [f"--{option.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, **({"TRITON_CACHE_DIR": empty} if args.cold else {})}
        started_s = time.perf_counter()
        subprocess.run(command, check=True, env=env)
        seconds = time.perf_counter() - started_s
    costs = CostModel.load_json(args.output)
    count = len(samples.read_text().splitlines())
    print(f"{seconds:.1f} s for {count} cases")
    write_row(
        args.rows,
        bench="profile_time",
        case={
            "model": args.model,
            "kinds": " ".join(costs.device_kinds),
            "bits": args.bits,
            "kernels": "compiled in it" if args.cold else "compiled before",
            "cases": count,
        },
        unit="s",
        samples=[seconds],
        commit=args.commit,
        program="python benchmarks/command_seconds.py profile",
    )
