"""How long a command takes: a plan, a profile of a GPU, a model quantised.

    python benchmarks/command_seconds.py plan       the documented lines of docs/clusters
    python benchmarks/command_seconds.py profile    one `llmpq-profile`; --cold: compiling too
    python benchmarks/command_seconds.py quantize   `llmpq-quantize --scheme w4a4`, and its memory

`command_seconds.py WHAT --help` has the flags of each. A server's start: `serve.py cold-start`.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "plan": "plan_seconds:main",
    "profile": "profile_seconds:main",
    "quantize": "quantize_seconds:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
