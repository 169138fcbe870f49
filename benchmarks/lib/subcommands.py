"""A benchmark of several measurements: the first word names one, whose flags are its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path


def run(doc: str, parts: Mapping[str, str]) -> int:
    """Run what the command line names; return its exit code.

    `parts`: the word -> "MODULE:FUNCTION" of this folder. Only that module is imported. FUNCTION
    takes the other words of the command line and the name that its help shows.
    """
    program = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=program,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{program} {{{','.join(parts)}}} ...",
    )
    parser.add_argument("what", choices=parts)
    what = parser.parse_args(sys.argv[1:2]).what
    module, _, function = parts[what].partition(":")
    measure = getattr(importlib.import_module(f"lib.{module}"), function)
    return measure(sys.argv[2:], f"{program} {what}") or 0
