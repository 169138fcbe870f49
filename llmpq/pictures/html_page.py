"""One self-contained HTML file: parts of text, tables and charts, and the data they are made of.

The file names no other host and loads nothing: its policy forbids it. Text, tables and cards are
there without scripts; the charts are drawn by the Vega that is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from llmpq.file_form import save_text
from llmpq.pictures.charts import Chart
from llmpq.version import __version__

SCRIPTS = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
"""Nothing is fetched from anywhere. Vega compiles its expressions, hence `unsafe-eval`."""


@dataclass
class HtmlPage:
    """A page that grows part by part; `text` is the file."""

    title: str
    data: dict[str, Any]
    """What the page is made of: embedded, and saved again by its buttons."""
    charts: dict[str, Chart] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Further files that the page can save: name -> text."""
    parts: list[str] = field(default_factory=list)

    def section(self, title: str, *parts: str) -> None:
        """Add a part of the page under a heading; none without content."""
        if not any(parts):
            return
        name = "".join(c if c.isalnum() else "-" for c in title.lower())
        inner = "\n".join(filter(None, parts))
        self.parts.append(
            f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>\n'
            f"{inner}</section>"
        )

    def chart(self, name: str, chart: Chart, caption: str, *, zooms: bool = False) -> str:
        """Add a chart's specification; return its figure."""
        self.charts[name] = chart
        zoom = "".join(
            f'<button type="button" data-zoom="{how}">{label}</button>'
            for how, label in (
                ("in", "Zoom in"),
                ("out", "Zoom out"),
                ("earlier", "Earlier"),
                ("later", "Later"),
                ("all", "All"),
            )
        )
        return (
            f'<figure data-chart="{name}"><figcaption id="{name}-caption">{escape(caption)}'
            f'</figcaption><div class="buttons">{zoom if zooms else ""}'
            '<button type="button" data-save>Save as SVG</button></div>'
            f'<div class="chart" role="img" aria-labelledby="{name}-caption"></div></figure>'
        )

    def text(self) -> str:
        """Return the whole file."""
        held = {**self.data, "charts": self.charts, "files": self.files}
        saved = "".join(
            f'<button type="button" data-file="{escape(name)}">Save {escape(name)}</button>'
            for name in [*(f"{key}.json" for key in ("plan", "report") if key in held), *self.files]
        )
        versions = json.loads(_file("vega/versions.json"))["packages"]
        named = ", ".join(f"{p['name']} {p['version']}" for p in versions)
        return "\n".join(
            [
                "<!doctype html>",
                '<html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(self.title)}</title>",
                '<link rel="icon" href="data:,">',
                f"<style>{_file('report_page.css')}</style></head><body>",
                '<header><p class="brand">llmpq</p>',
                f"<h1>{escape(self.title)}</h1>",
                f'<div class="buttons">{saved}</div></header><main>',
                *self.parts,
                f"</main><footer>llmpq {__version__}; charts: {escape(named)} (BSD-3-Clause). "
                "This file loads nothing from elsewhere.</footer>",
                f'<script type="application/json" id="data">{_embedded(held)}</script>',
                *(f"<script>{_file(f'vega/{name}')}</script>" for name in SCRIPTS),
                f"<script>{_file('report_page.js')}</script>",
                "</body></html>",
                "",
            ]
        )


@dataclass(frozen=True)
class Picture:
    """A page as notebooks show it: in a frame of its own; `save` writes the file."""

    page: str = field(repr=False)
    height: int = 640

    def _repr_html_(self) -> str:
        """Return a frame that holds the whole page."""
        return (
            f'<iframe srcdoc="{escape(self.page)}" title="llmpq" width="100%" '
            f'height="{self.height}" style="border:0"></iframe>'
        )

    def save(self, path: str | Path) -> None:
        """Write the page as a file, creating its folder."""
        save_text(path, self.page)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    left: Sequence[str] = (),
    marked: int | None = None,
) -> str:
    """Return a table; the columns of `left` are text, the others numbers; one row may be marked."""
    if not rows:
        return ""
    kinds = ["" if name in left else ' class="number"' for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(columns, kinds, strict=True)
    )
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        lines.append(f"<tr{' class=marked' if index == marked else ''}>{cells}</tr>")
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def numbers(named: Mapping[str, str]) -> str:
    """Return a few numbers that stand out."""
    pairs = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in named.items()
    )
    return f'<dl class="numbers">{pairs}</dl>' if named else ""


def lines(said: Sequence[str]) -> str:
    """Return sentences as a list."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>" if said else ""


def _embedded(data: object) -> str:
    """Return data as JSON that no tag can end."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@lru_cache
def _file(name: str) -> str:
    return (resources.files("llmpq.pictures") / name).read_text()
