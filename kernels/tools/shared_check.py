"""Share a check among processes: compiling kernels takes most of its time, and one core."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def add_part(parser: argparse.ArgumentParser) -> None:
    """Add `--part I/N`; `args.part` is (I, N)."""
    parser.add_argument(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="the I-th (from 0) of N processes that share the check [0/1]",
    )


def share(items: Iterable[T], part: tuple[int, int]) -> Iterator[T]:
    """Return every N-th item from the I-th on."""
    index, count = part
    return itertools.islice(items, index, None, count)


def _part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return int(index), int(count)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with I from 0 to N - 1: 0/4")
