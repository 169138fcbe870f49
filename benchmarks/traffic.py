"""Live traffic as `llmpq-algo simulate` predicts it, beside what was measured.

    python benchmarks/traffic.py served     a server of the bundled model over two CPU stages
    python benchmarks/traffic.py vllm       vLLM on an RTX 4090, as LLMServingSim measured it

`traffic.py WHAT --help` has the flags of each. Rows go to results/traffic.jsonl.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "served": "traffic_served:main",
    "vllm": "traffic_vllm:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
