"""Devices that go and come while a model runs: pauses and tokens/s beside what was predicted.

    python benchmarks/elastic.py lost       a stage killed on two cards, then its card taken
    python benchmarks/elastic.py added      a CPU stage added to a job that runs
    python benchmarks/elastic.py replan     seconds of planning with one device less

`elastic.py WHAT --help` has the flags of each.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "lost": "lost_gpu:main",
    "added": "added_device:main",
    "replan": "replan:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
