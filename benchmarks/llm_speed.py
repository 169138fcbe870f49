"""Tokens/s of `LLM(MODEL)` on this machine's CPU, this tree and an earlier one in turn.

    git worktree add /tmp/before 77dc42a
    python benchmarks/llm_speed.py --other /tmp/before [--rows 1,8] [--new 128] [--turns 3]

Each turn is a process of its own that loads the model, generates once to warm up and five times
more, of which the median counts. Both choose their threads as `LLM` does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from lib.rows import write_row

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "demo-7m"
PROMPTS = ["def __repr__(self):\n        return", "import os\nimport sys\n",
           "class A:\n    def __init__(self", "for i in range("]  # fmt: skip
PROGRAM = """
import statistics, sys, time
from llmpq import LLM, SamplingParams
model, rows, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prompts = (sys.argv[4:] * rows)[:rows]
greedy = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
seconds = []
with LLM(model) as llm:
    for _ in range(6):
        started = time.perf_counter()
        answers = llm.generate(prompts, greedy)
        seconds.append(time.perf_counter() - started)
        assert all(len(answer.token_ids) == new for answer in answers)
print("seconds", statistics.median(seconds[1:]))
"""


def main() -> None:
    """Measure both trees and write a row for each number of prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True, help="an earlier tree")
    parser.add_argument("--commit", default="77dc42a", help="its commit, for the row")
    parser.add_argument("--rows", default="1,8", help="prompts at once")
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--noisy", action="store_true", help="the machine has other work")
    args = parser.parse_args()
    for count in map(int, args.rows.split(",")):
        theirs, ours = [], []
        for _ in range(args.turns):
            theirs.append(count * args.new / seconds(args.other, count, args.new))
            ours.append(count * args.new / seconds(ROOT, count, args.new))
        write_row(
            "cpu.jsonl",
            bench="cpu LLM",
            case={"model": MODEL.name, "rows": count, "new": args.new},
            unit="tokens/s",
            samples=ours,
            baselines={args.commit: statistics.median(theirs)},
            noisy=args.noisy,
        )
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"{count} rows: {statistics.median(ours):.0f} tokens/s, {ratio:.2f}x {args.commit}")


def seconds(tree: Path, rows: int, new: int) -> float:
    """Return the seconds one tree takes for prompts at once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(MODEL), str(rows), str(new), *PROMPTS],
        env=os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=True, cwd=tree,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
