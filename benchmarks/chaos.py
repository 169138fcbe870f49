"""What a killed stage or an interrupted command costs: answers lost, pauses, exit codes.

    python benchmarks/chaos.py answers      stages killed at random and special moments
    python benchmarks/chaos.py batch        `llmpq-dist run`, stages killed every so many seconds
    python benchmarks/chaos.py serve        `llmpq-dist serve` under a trace, the same
    python benchmarks/chaos.py interrupts   Ctrl-C and SIGTERM to commands at random moments

`chaos.py WHAT --help` has the flags of each. Rows go to results/chaos.jsonl.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "answers": "chaos_answers:main",
    "batch": "chaos_commands:batch",
    "serve": "chaos_commands:serve",
    "interrupts": "chaos_interrupts:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
