"""What stands in the README tables: rows pivoted, and how a cell shows its row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """A table with a line per `index` case and a column per value of the case key (or keys).

    The key `device` is the row's own.
    """

    file: str
    bench: str
    index: tuple[str, ...]
    column: str | tuple[str, ...] = ()
    where: dict[str, Any] = field(default_factory=dict)
    """Values of case keys; a frozenset takes any of its values."""
    pick: Callable[[list[Row]], Row] = lambda rows: rows[-1]
    """Which of a cell's rows is shown, oldest first."""
    show: Callable[[Row], str] = lambda row: f"{row['value']:.4g}"
    value_title: str = "value"
    order: tuple[str, ...] = ()
    """Columns in this order first."""
    device: str | None = None
    """Rows of this device alone."""
    newest: bool = False
    """Of each column only the rows of its last row's commit: lines that are no more go."""

    def render(self) -> str:
        """Return the table as Markdown."""
        found: dict[tuple[str, ...], dict[str, list[Row]]] = {}
        columns: list[str] = list(self.order)
        rows = [
            (self._name(row), row)
            for row in load(self.file, self.bench, self.where)
            if self.device in (None, row["device"])
        ]
        commits = {name: row["commit"] for name, row in rows}
        for name, row in rows:
            if self.newest and row["commit"] != commits[name]:
                continue
            own = row["case"] | {"device": row["device"].removeprefix("NVIDIA ")}
            key = tuple(str(own.get(k, "")) for k in self.index)
            if name not in columns:
                columns.append(name)
            found.setdefault(key, {}).setdefault(name, []).append(row)
        if all(len(key) == 1 and key[0].isdigit() for key in found):
            found = dict(sorted(found.items(), key=lambda item: int(item[0][0])))
        columns = [c for c in columns if any(c in cells for cells in found.values())]
        head = [*self.index, *columns]
        shown = {
            key: {name: self.show(self.pick(rows)) for name, rows in cells.items()}
            for key, cells in found.items()
        }
        body = [[*key, *(cells.get(c, "") for c in columns)] for key, cells in shown.items()]
        return markdown(head, body)

    def _name(self, row: Row) -> str:
        keys = (self.column,) if isinstance(self.column, str) else self.column
        return " x ".join(str(row["case"].get(k, "")) for k in keys) or self.value_title


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(line) + " |" for line in body]
    return "\n".join(lines)


def _is(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, frozenset) else value == wanted


def load(file: str, bench: str, where: dict[str, Any]) -> list[Row]:
    """Return the rows of a results file that match, oldest first."""
    path = RESULTS / file
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        r
        for r in rows
        if r["bench"] == bench and all(_is(r["case"].get(k), v) for k, v in where.items())
    ]


def ratio_to_baseline(name: str) -> Callable[[Row], str]:
    """Show the value and its ratio to a baseline of the same row."""

    def show(row: Row) -> str:
        base = row["baselines"].get(name)
        return f"{row['value']:.4g}" + (f" ({row['value'] / base:.2f}x)" if base else "")

    return show


def fastest_of_newest(rows: list[Row]) -> Row:
    """Return the fastest of the rows that the newest one's commit measured."""
    return max((r for r in rows if r["commit"] == rows[-1]["commit"]), key=lambda r: r["value"])


def over_plain_of_s(row: Row) -> str:
    """Show the ratio to plain decoding, drafts and the share of S(acceptance, c, v) that it is."""
    plain, gamma = row["baselines"]["plain"], row["case"]["gamma"]
    return f"{row['value'] / plain:.2f}x, {gamma} [{row['value'] / row['predicted']:.0%}]"


def draft_and_verify(row: Row) -> str:
    """Show c and v."""
    return f"{row['baselines']['c']:.2f}, {row['baselines']['v']:.2f}"


def over_plain_and_best(row: Row) -> str:
    """Show the ratios to plain decoding and to the best fixed length."""
    base = row["baselines"]
    return f"{row['value'] / base['plain']:.2f}x ({row['value'] / base['best_fixed']:.2f})"


def increase_over_baseline(name: str) -> Callable[[Row], str]:
    """Show the value and by how much it exceeds a baseline of the same row."""

    def show(row: Row) -> str:
        base = row["baselines"].get(name)
        return f"{row['value']:.3f}" + (f" ({row['value'] / base - 1:+.2%})" if base else "")

    return show


def of_phases(row: Row) -> str:
    """Return seconds of a start, and those of what it consists of."""
    phases = row["baselines"]
    compiling, graphs = phases["compile_forked_s"], phases["record_s"]
    return f"{row['value']:.1f} s ({compiling:.1f}, {graphs:.1f}; {phases['all_s']:.1f})"


def seconds_and_cpu(row: Row) -> str:
    """Show wall and CPU seconds, and the paper's where it has them."""
    paper = row["baselines"].get("paper_table_10")
    text = f"{row['value']:.2f} s ({row['baselines']['cpu_s']:.2f} s CPU)"
    return text + (f"; paper {paper:g} s" if paper else "")


def us_of_floor(row: Row) -> str:
    """Show microseconds, the speed-up over cuDNN fp16 attention and the share of the byte floor."""
    base = row["baselines"].get("sdpa_cudnn_fp16")
    speed = f" {base / row['value']:.2f}x" if base else ""
    return f"{row['value']:.1f}{speed} [{row['floor'] / row['value']:.0%}]"


def us_and_launches(row: Row) -> str:
    """Show microseconds a layer, and its launches where it is not one."""
    launches = round(row["case"]["launches"], 2)
    return f"{row['value']:.1f}" + ("" if launches == 1 else f" ({launches:g} launches)")


def us_and_dense_rate(row: Row) -> str:
    """Show microseconds and the rate beside a dense product's of equal shape."""
    return f"{row['value']:.0f} [{row['baselines']['dense'] / row['value']:.2f}]"


def us_over_cublas(row: Row) -> str:
    """Show microseconds, the share of the floor and the speed-up over cuBLAS in 16 bits."""
    base = next(v for k, v in row["baselines"].items() if k.startswith("cublas"))
    return f"{row['value']:.1f} [{row['floor'] / row['value']:.0%}] {base / row['value']:.2f}x"


def over_cublas(row: Row) -> str:
    """Show the speed-up over cuBLAS in 16 bits."""
    return f"{row['baselines']['cublas_fp16'] / row['value']:.2f}x"


def over_vllm(row: Row) -> str:
    """Show tokens per second and the ratio to vLLM on the same kind of GPU."""
    base = next((v for k, v in row["baselines"].items() if k.startswith("vllm")), None)
    return f"{row['value']:.0f}" + (f" ({row['value'] / base:.2f}x vLLM)" if base else "")


def over_planners(row: Row) -> str:
    """Show tokens per second of a plan and the speed-up over every other planner's."""
    others = [f"{row['value'] / base:.2f}x {name}" for name, base in row["baselines"].items()]
    return f"{row['value']:.0f}: {', '.join(others)}"


def beside_predicted(row: Row) -> str:
    """Show what a plan chose, measured seconds, those predicted and how far off they are."""
    off, case = row["predicted"] / row["value"] - 1, row["case"]
    chosen = f"{case['precision']} {case['kv']}"
    return f"{chosen}: {row['value']:.2f} s, {row['predicted']:.2f} s ({off:+.1%})"


def gib_beside_predicted(row: Row) -> str:
    """Show bytes, the prediction and its error."""
    error = row["predicted"] / row["value"] - 1
    return f"{row['value'] / 2**30:.2f} GiB, {row['predicted'] / 2**30:.2f} ({error:+.1%})"


def gib_of_limit(row: Row) -> str:
    """Show bytes and the limit they must keep."""
    return f"{row['value'] / 2**30:.2f} GiB (limit {row['floor'] / 2**30:.2f})"


def perplexity_and_size(row: Row) -> str:
    """Show a perplexity, by how much it exceeds 16-bit, and the megabytes of all layers."""
    size = f"{row['case']['layer_bytes'] / 1e6:.1f} MB"
    if row["value"] > 1000 * row["baselines"]["w16a16"]:
        return f"{row['value']:.0e} (broken) {size}"
    return f"{increase_over_baseline('w16a16')(row)} {size}"


def over_cublas_and_w4a16(row: Row) -> str:
    """Show microseconds, the speed-up over cuBLAS bf16 and, few tokens, what W4A16 takes of it."""
    text = f"{row['value']:.1f} {row['baselines']['cublas_bf16'] / row['value']:.2f}x"
    peer = row["baselines"].get("w4a16")
    return text + (f", {row['value'] / peer:.2f} of W4A16" if peer else "")


def of_norm(row: Row) -> str:
    """Show microseconds of the fused rounding, and how many of torch's RMSNorm alone."""
    return f"{row['value']:.1f} ({row['value'] / row['baselines']['rms_norm_torch']:.2f})"


def of_layer(row: Row) -> str:
    """Show microseconds of a layer as it runs, of one that rounds apart, and cuBLAS's over it."""
    apart, dense = (row["baselines"][way] for way in ("by_themselves", "cublas_bf16"))
    return f"{row['value']:.0f} ({apart:.0f}) {dense / row['value']:.2f}x"


def of_words(row: Row) -> str:
    """Show microseconds of W4A4's products and roundings by both of its ways, and cuBLAS's."""
    us = row["baselines"]
    both = f"{row['value']:.0f} + {us['rounding']:.0f}, {us['words']:.0f} + {us['restoring']:.0f}"
    return f"{both}; {us['cublas_bf16']:.0f}"


def tokens_and_steps(row: Row) -> str:
    """Show tokens/s, the requests served at once and what a mean step of each phase took."""
    case = row["case"]
    steps = [
        f"{phase} {case[f'{phase}_s'] / case[f'{phase}_steps'] * 1e3:.1f}"
        for phase in ("prefill", "decode")
    ]
    return f"{row['value']:.0f}, {case['batch']} at once ({', '.join(steps)})"


def seconds_and_peak(row: Row) -> str:
    """Show seconds, seconds a layer and the peak of GPU memory."""
    case = row["case"]
    each = row["value"] / case["layers"]
    return (
        f"{row['value']:.1f} s ({each:.1f} s a layer), {case['peak_reserved_bytes'] / 1e9:.1f} GB"
    )
