"""`kernel_bench.py {bench,check} {gemm,kv,atom}`: time kernels on this GPU, compare with twins."""

from __future__ import annotations

import sys

from reference.kernel_commands import main

if __name__ == "__main__":
    sys.exit(main())
