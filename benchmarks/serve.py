"""What a server costs and withstands: `llmpq-dist serve` over HTTP.

    python benchmarks/serve.py cold-start   from the command to the first token
    python benchmarks/serve.py idle         processor time of an idle server, its first token after
    python benchmarks/serve.py load         many streams, slow readers, clients that vanish
    python benchmarks/serve.py share        the share of an engine's tokens/s left behind HTTP

`serve.py WHAT --help` has the flags of each. Rows go to results/serve.jsonl.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "cold-start": "serve_cold_start:main",
    "idle": "serve_idle:main",
    "load": "serve_load:main",
    "share": "serve_share:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
