"""Is the memory that plans predict what stages take?

    python benchmarks/memory_fidelity.py stages     stages of random plans on a GPU
    python benchmarks/memory_fidelity.py fits       `llmpq-algo fits` of tiny models on CPU stages

`memory_fidelity.py WHAT --help` has the flags of each.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "stages": "memory_of_stages:main",
    "fits": "fits_truth:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
