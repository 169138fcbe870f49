"""Write the tables of the READMEs and of docs/results/ from the rows in `benchmarks/results/`.

    python benchmarks/tables.py            rewrite every table in place
    python benchmarks/tables.py --check    exit 1 if a table differs from its rows

A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from report.table_cells import ROOT
from report.table_community import COMMUNITY_TABLES
from report.table_cpu import CPU_TABLES
from report.table_kernels import KERNEL_TABLES
from report.table_list import TABLES as OTHERS

TABLES = {**OTHERS, **KERNEL_TABLES, **CPU_TABLES, **COMMUNITY_TABLES}


def rewrite(text: str) -> str:
    """Return `text` with every marked table rendered anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"unknown table '{name}': known: {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n{TABLES[name].render()}\n<!-- end {name} -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", table, text, flags=re.S)


def pages() -> list[Path]:
    """Return every page of the tree that may show a table, the rooms once."""
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name[0] != "." and path.name != "llmpq"
    ]
    return sorted([*ROOT.glob("*.md"), *(page for f in folders for page in f.rglob("*.md"))])


def main() -> int:
    """Rewrite or check every page of the tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 on a difference"
    )
    args = parser.parse_args()
    stale = []
    for path in pages():
        old = path.read_text()
        new = rewrite(old)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not args.check:
                path.write_text(new)
    for path in stale:
        print(f"{'stale' if args.check else 'rewrote'}: {path}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
