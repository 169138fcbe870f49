"""Models of every family against Transformers, token for token.

    python benchmarks/configs.py published  published config.json files: read, planned, run
    python benchmarks/configs.py random     configs with sizes and flags drawn anew, of all kinds

`configs.py WHAT --help` has the flags of each.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "published": "published_configs:main",
    "random": "random_configs:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
