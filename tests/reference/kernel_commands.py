"""`benchmarks/kernel_bench.py`: its flags, the request each command makes of them, its start.

Standard library only: a command's own module, which needs torch and Triton, is imported later.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmpq.commands.command_line import CommandParser, Section, run_command

T = TypeVar("T")

PROGRAM = "kernel_bench.py"
LAYER = "qkv,o,gate_up,down"


@dataclass(frozen=True, kw_only=True)
class BenchGemm:
    """Which weight products to time."""

    shapes: str
    m: str
    precision: str
    dtype: str
    symmetric: bool
    repeats: int
    out: Path | None
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class BenchAtom:
    """Which products of rounded inputs to time."""

    what: str
    m: str
    scheme: str
    shapes: str
    repeats: int
    out: Path | None
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class CheckGemm:
    """Which weight products to compare with their twins."""

    bits: str
    dtype: str | None
    m: str | None
    seed: int
    shapes: str
    seconds: float | None
    part: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CheckAtom:
    """Which products of rounded inputs to compare with their twins."""

    scheme: str | None
    dtype: str
    m: str | None
    shapes: str
    seed: int
    part: tuple[int, int]


def bench_gemm() -> CommandParser:
    """Return the flags of `bench gemm`."""
    parser = _parser("bench gemm", "Time the weight kernels against cuBLAS and torch's tinygemm.")
    flags = parser.section("cases")
    shapes = "models (llama-3.1-8b, llama-2-7b, opt-30b) and products KxN, with commas"
    flags.flag("--shapes", default="llama-3.1-8b", daily=True, help=shapes)
    flags.flag("--m", default="1,16,32,64", daily=True, help="rows of x (1,16,32,64)")
    flags.flag("--precision", default="w4a16", daily=True, help="w3a16,w4a16,w8a16 (w4a16)")
    flags.flag("--dtype", default="fp16", daily=True, help="fp16 or bf16 (fp16)")
    flags.flag("--symmetric", action="store_true", daily=True, help="weights without zeros")
    _rows_out(flags)
    return parser


def bench_atom() -> CommandParser:
    """Return the flags of `bench atom`."""
    parser = _parser("bench atom", "Time products of rounded inputs, W4A4 and W8A8.")
    flags = parser.section("cases")
    what = ("gemm", "fused", "layer", "words", "sweep")
    flags.flag("--what", default="gemm", choices=what, daily=True, help="default gemm")
    tokens = "1,16,32,128,256,512,1024,2048,4096"
    flags.flag("--m", default=tokens, daily=True, help=f"tokens ({tokens})")
    flags.flag("--scheme", default="w4a4,w8a8", daily=True, help="of w4a4, w4a4-int, w8a8")
    flags.flag("--shapes", default=LAYER, daily=True, help=f"of {LAYER}")
    _rows_out(flags)
    return parser


def check_gemm() -> CommandParser:
    """Return the flags of `check gemm`."""
    parser = _parser("check gemm", "Compare the weight kernels with their plain-torch twins.")
    flags = parser.section("cases")
    flags.flag("--bits", default="3,4,8", daily=True, help="weight bits (3,4,8)")
    flags.flag("--dtype", daily=True, help="fp16,bf16 (GPU), fp32,bf16 (CPU)")
    flags.flag("--m", daily=True, help="rows of x (of every bucket)")
    flags.flag("--shapes", default="all", daily=True, help="tuned, odd, random or all (all)")
    flags.flag("--seed", type=int, default=0, help="of the order, shapes, codes and x")
    flags.flag("--seconds", type=float, help="start no weight after these")
    _part(flags)
    return parser


def check_atom() -> CommandParser:
    """Return the flags of `check atom`."""
    parser = _parser("check atom", "Compare the kernels of rounded inputs with their twins.")
    flags = parser.section("cases")
    flags.flag("--scheme", daily=True, help="w4a4, w8a8, ... with commas (all)")
    flags.flag("--dtype", default="bf16,fp16", daily=True, help="on a GPU (bf16,fp16)")
    flags.flag("--m", daily=True, help="tokens (one or more a way)")
    flags.flag("--shapes", default="all", daily=True, help="layer, odd or all (all)")
    flags.flag("--seed", type=int, default=0, help="of weights and inputs")
    _part(flags)
    return parser


COMMANDS: dict[tuple[str, str], tuple[Any, type]] = {
    ("bench", "gemm"): (bench_gemm, BenchGemm),
    ("bench", "atom"): (bench_atom, BenchAtom),
    ("check", "gemm"): (check_gemm, CheckGemm),
    ("check", "atom"): (check_atom, CheckAtom),
}
"""What is done, with which kernels -> its flags, and the request they become."""


def share(items: Iterable[T], part: tuple[int, int]) -> Iterator[T]:
    """Return every N-th item from the I-th on: compiling takes most of a check, and one core."""
    index, count = part
    return itertools.islice(items, index, None, count)


def _parser(command: str, summary: str) -> CommandParser:
    return CommandParser(
        f"{PROGRAM} {command}", summary, example=f"python benchmarks/{PROGRAM} {command}"
    )


def _rows_out(flags: Section) -> None:
    flags.flag("--repeats", type=int, default=20, help="samples of each case (20)")
    flags.flag("--out", type=Path, daily=True, help="append rows (JSON lines) to this file")
    flags.flag("--commit", help="commit to name in rows where git is not at hand")


def _part(flags: Section) -> None:
    flags.flag(
        "--part",
        type=_read_part,
        default=(0, 1),
        metavar="I/N",
        help="the I-th (from 0) of N processes that share the check (0/1)",
    )


def _read_part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return int(index), int(count)
    raise ArgumentTypeError(f"got '{text}', expected I/N with I from 0 to N - 1: 0/4")


# Imported only when asked for: each needs torch and Triton, `--help` needs neither.
_MODULES = {
    ("bench", "gemm"): "lib.bench_gemm",
    ("bench", "atom"): "lib.bench_atom",
    ("check", "gemm"): "reference.check_gemm",
    ("check", "atom"): "reference.check_atom",
}

USAGE = f"""\
usage: {PROGRAM} {{bench,check}} {{gemm,atom}} [flags]

  bench gemm|atom   time kernels on this GPU
  check gemm|atom   compare kernels with their plain-torch twins

gemm: weight kernels; atom: rounded inputs, W4A4 and W8A8.
Each has its own --help: {PROGRAM} bench gemm --help
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "--help-all"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    return run_command(PROGRAM, lambda: _run(words))


def _run(words: list[str]) -> int:
    command = (words[0], words[1] if len(words) > 1 else "")
    if command not in COMMANDS:
        known = ", ".join(" ".join(names) for names in COMMANDS)
        raise ValueError(f"unknown command '{' '.join(command).strip()}'; expected one of {known}")
    parser, request = COMMANDS[command]
    asked = parser().read_as(request, words[2:])
    return int(importlib.import_module(_MODULES[command]).main(asked))
