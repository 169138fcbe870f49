"""The model of the machine that chooses weight products: timed, then fitted.

    python benchmarks/gemm_model.py search  times every configuration of many products
    python benchmarks/gemm_model.py fit     fits the model to them, says what its choice loses

`gemm_model.py WHAT --help` has the flags of each. gemm_between.py holds its choices against others.
"""

from __future__ import annotations

import sys

from lib.subcommands import run

PARTS = {
    "search": "gemm_search:main",
    "fit": "gemm_fit:main",
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", PARTS))
