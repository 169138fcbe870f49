"""The host's own time of a decoding step: scheduler, message, tokens, news; nothing is computed.

    git worktree add /tmp/before COMMIT
    python benchmarks/host_time.py --other /tmp/before [--rows 256] [--repeat 7]

A first stage serves so many streamed requests over arithmetic that returns the same tokens at once,
steps ahead as on a GPU; the row is this tree's processor time of a step beside the other tree's,
which ran in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lib.rows import write_row

HERE = Path(__file__).resolve()
STEPS = 200


def main() -> None:
    """Measure both trees in turn; write a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True, help="an earlier tree")
    parser.add_argument("--rows", type=int, default=256, help="requests that decode (default 256)")
    parser.add_argument("--repeat", type=int, default=7, help="turns (default 7)")
    parser.add_argument("--noisy", action="store_true", help="others share this machine")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(step_us(args.rows))
        return
    own, other = [], []
    for _ in range(args.repeat):
        own.append(of_tree(HERE.parents[1], args.rows))
        other.append(of_tree(args.other.resolve(), args.rows))
    row = write_row(
        "engine.jsonl", bench="host_step", case={"rows": args.rows, "stages": 1}, unit="us",
        samples=own, baselines={"earlier": statistics.median(other)}, noisy=args.noisy,
    )  # fmt: skip
    ratio = row["baselines"]["earlier"] / row["value"]
    print(f"{row['value']:.0f} us a step of {args.rows} rows, {ratio:.2f}x as quick as before")


def of_tree(tree: Path, rows: int) -> float:
    """Return the processor time of one tree's step."""
    done = subprocess.run(
        [sys.executable, str(HERE), "--once", "--other", ".", "--rows", str(rows)],
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True, cwd=tree,
    )  # fmt: skip
    return float(done.stdout)


def step_us(rows: int) -> float:
    """Return the processor time of a step of so many rows, in microseconds."""
    import torch

    from llmpq.runtime.engine.pool_limits import PoolLimits
    from llmpq.runtime.engine.scheduler import Scheduler
    from llmpq.runtime.engine.stage_loop import FirstStage
    from llmpq.runtime.request import Mailbox, Request
    from llmpq.runtime.trace import Recorder

    class Nothing:
        """A device that samples at once, ahead of what the host knows."""

        runs_ahead, fused_rounds = True, False

        def run(self, message, hidden_BQH):  # type: ignore[no-untyped-def]
            return tokens_B1[: message.num_rows]

    tokens_B1 = torch.full((rows, 1), 7)
    limits = PoolLimits(
        num_blocks=8 * rows, max_rows=rows, max_len=2000, step_tokens=1 << 20, decode_rows=rows,
        tokens_ahead=2,
    )  # fmt: skip
    mailbox = Mailbox()
    scheduler, recorder = Scheduler(limits), Recorder()
    stage = FirstStage(scheduler, Nothing(), None, mailbox, recorder, num_stages=1)  # type: ignore[arg-type]
    for number in range(rows):
        mailbox.requests.put(
            Request(id=number, prompt=(1,) * 100, max_new=STEPS, stream=True, recorded=True)
        )
    mailbox.requests.put(None)
    since_s = time.process_time()
    stage.run()
    return 1e6 * (time.process_time() - since_s) / (STEPS + 1)


if __name__ == "__main__":
    main()
