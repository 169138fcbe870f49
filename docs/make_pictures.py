"""Draw the pictures of README and docs from committed plans and rows, as SVG.

    python docs/make_pictures.py            write docs/plan.svg and docs/speed.svg
    python docs/make_pictures.py --check    exit 1 if one differs from what it is drawn from

docs/plan.svg is docs/plan.json as `llmpq-algo export --to svg` draws it; docs/speed.svg has a bar
for every line of the README's table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report.front_table import LINES
from report.table_cells import ROOT

from llmpq.pictures.plan_cards import cards_svg
from llmpq.plans.plan import Plan

WIDE, ROW, LEFT, BAR = 900, 54, 400, 340
"""Pixels: width, height of a comparison, where bars begin, the length of the longest."""
OURS, THEIRS, TEXT = "#1d4e89", "#9aa5b1", "#1a1a1a"


def plan_svg() -> str:
    """Return the picture of the README's plan."""
    return cards_svg(Plan.load(ROOT / "docs" / "plan.json"))


def speed_svg() -> str:
    """Return llmpq's rate beside the peer's, each comparison to its own scale."""
    height = 44 + ROW * len(LINES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" role="img" '
        'aria-label="Output tokens per second of llmpq beside others" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDE}" height="{height}" fill="white"/>',
        _text(20, 26, "Output tokens/s, each comparison to its own scale", weight="bold"),
    ]
    for number, line in enumerate(LINES):
        device, model, ours, peer, ratio = line.cells()
        called, _, theirs = peer.rpartition(": ")
        top = 44 + ROW * number
        most = max(float(ours), float(theirs))
        parts.append(_text(20, top + 16, device, weight="bold"))
        parts.append(_text(20, top + 34, model))
        for row, (name, value, colour) in enumerate(
            ((f"llmpq {ours} ({ratio})", ours, OURS), (f"{called} {theirs}", theirs, THEIRS))
        ):
            wide = BAR * float(value) / most
            y = top + 5 + 19 * row
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="15" fill="{colour}"/>'
            )
            inside = wide > BAR / 2
            x = LEFT + 6 if inside else LEFT + wide + 6
            ink = "white" if inside and colour == OURS else TEXT
            parts.append(_text(round(x), y + 12, name, colour=ink))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, *, weight: str = "normal", colour: str = TEXT) -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'


PICTURES: dict[str, Callable[[], str]] = {"plan.svg": plan_svg, "speed.svg": speed_svg}
"""File in docs/ -> what draws it."""


def main() -> int:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = False
    for name, draw in PICTURES.items():
        path, made = ROOT / "docs" / name, draw()
        if path.exists() and path.read_text() == made:
            continue
        stale = True
        if not check:
            path.write_text(made)
        sys.stdout.write(f"{'stale' if check else 'wrote'}: docs/{name}\n")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
