"""Families beyond Llama on a GPU, beside their byte floor.

    python benchmarks/families_gpu.py layers    a layer's decode step, and products of experts
    python benchmarks/families_gpu.py models    whole models with recurrent layers: steps, prompts

`families_gpu.py WHAT --help` has the flags of each. step_ledger.py tells a dense
model's step apart, launch by launch.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "layers": "family_layers:main",
    "models": "recurrent_models:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
