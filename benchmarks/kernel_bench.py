"""`kernel_bench.py {bench,check} {gemm,kv,atom}`: time kernels on this GPU, compare with twins."""

from __future__ import annotations

import importlib
import logging
import sys

from llmpq.commands.command_line import end_of
from reference.kernel_flags import COMMANDS, PROGRAM

# Imported only when asked for: each needs torch and Triton, `--help` needs neither.
_MODULES = {
    ("bench", "gemm"): "lib.bench_gemm",
    ("bench", "kv"): "lib.bench_kv",
    ("bench", "atom"): "lib.bench_atom",
    ("check", "gemm"): "reference.check_gemm",
    ("check", "kv"): "reference.check_kv",
    ("check", "atom"): "reference.check_atom",
}

USAGE = f"""\
usage: {PROGRAM} {{bench,check}} {{gemm,kv,atom}} [flags]

  bench gemm|kv|atom   time kernels on this GPU
  check gemm|kv|atom   compare kernels with their plain-torch twins

gemm: weight kernels; kv: the low-bit KV cache; atom: rounded inputs, W4A4 and W8A8.
Each has its own --help: {PROGRAM} bench gemm --help
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "--help-all"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    return end_of(PROGRAM, lambda: _run(words))


def _run(words: list[str]) -> int:
    command = (words[0], words[1] if len(words) > 1 else "")
    if command not in COMMANDS:
        known = ", ".join(" ".join(names) for names in COMMANDS)
        raise ValueError(f"unknown command '{' '.join(command).strip()}'; expected one of {known}")
    parser, request = COMMANDS[command]
    asked = parser().read_as(request, words[2:])
    return int(importlib.import_module(_MODULES[command]).main(asked))


if __name__ == "__main__":
    sys.exit(main())
