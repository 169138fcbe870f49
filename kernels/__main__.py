"""`python -m llmpq.kernels {bench,check} {gemm,kv,atom}`: time kernels, compare them with twins."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys

# Imported only when asked for: each needs torch and Triton, `--help` needs neither.
_COMMANDS = {
    ("bench", "gemm"): "llmpq.kernels.tools.bench_gemm",
    ("bench", "kv"): "llmpq.kernels.tools.bench_kv",
    ("bench", "atom"): "llmpq.kernels.tools.bench_atom",
    ("check", "gemm"): "llmpq.kernels.tools.check_gemm",
    ("check", "kv"): "llmpq.kernels.tools.check_kv",
    ("check", "atom"): "llmpq.kernels.tools.check_atom",
}

_NOUNS = (
    ("gemm", "weight kernels"),
    ("kv", "KV-cache kernels"),
    ("atom", "kernels of rounded inputs, W4A4 and W8A8"),
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m llmpq.kernels", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("bench", "time kernels on this GPU"), ("check", "compare with the twins")):
        nouns = verbs.add_parser(verb, help=text).add_subparsers(dest="noun", required=True)
        for noun, what in _NOUNS:
            command = nouns.add_parser(noun, help=what)
            if argv[:2] == [verb, noun]:
                importlib.import_module(_COMMANDS[verb, noun]).add_arguments(command)
    args = parser.parse_args(argv)
    try:
        code = importlib.import_module(_COMMANDS[args.verb, args.noun]).main(args)
    except ValueError as error:
        logging.error("%s", error)
        return 2
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
