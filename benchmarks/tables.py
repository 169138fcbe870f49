"""Write the tables of the README files from the rows in `benchmarks/results/`.

    python benchmarks/tables.py            rewrite every table in place
    python benchmarks/tables.py --check    exit 1 if a table differs from its rows

A table stands between `<!-- table NAME -->` and `<!-- end NAME -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """A table with one line per `index` case and one column per value of the case key `column`."""

    file: str
    bench: str
    index: tuple[str, ...]
    column: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    show: Callable[[Row], str] = lambda row: f"{row['value']:.4g}"
    value_title: str = "value"
    order: tuple[str, ...] = ()
    """Columns in this order first."""

    def render(self) -> str:
        """Return the table as Markdown; the newest row of a case wins."""
        latest: dict[tuple[str, ...], dict[str, str]] = {}
        columns: list[str] = list(self.order)
        for row in load(self.file, self.bench, self.where):
            key = tuple(str(row["case"].get(k, "")) for k in self.index)
            name = str(row["case"].get(self.column, "")) if self.column else self.value_title
            if name not in columns:
                columns.append(name)
            latest.setdefault(key, {})[name] = self.show(row)
        columns = [c for c in columns if any(c in cells for cells in latest.values())]
        head = [*self.index, *columns]
        body = [[*key, *(cells.get(c, "") for c in columns)] for key, cells in latest.items()]
        return markdown(head, body)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(line) + " |" for line in body]
    return "\n".join(lines)


def load(file: str, bench: str, where: dict[str, Any]) -> list[Row]:
    """Return the rows of a results file that match, oldest first."""
    path = RESULTS / file
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        r
        for r in rows
        if r["bench"] == bench and all(r["case"].get(k) == v for k, v in where.items())
    ]


def ratio_to_baseline(name: str) -> Callable[[Row], str]:
    """Show the value and its ratio to a baseline of the same row."""

    def show(row: Row) -> str:
        base = row["baselines"].get(name)
        return f"{row['value']:.4g}" + (f" ({row['value'] / base:.2f}x)" if base else "")

    return show


def over_plain_of_s(row: Row) -> str:
    """Show the ratio to plain decoding and the share of S(acceptance, c, v) that it is."""
    plain = row["baselines"]["plain"]
    return f"{row['value'] / plain:.2f}x [{row['value'] / row['predicted']:.0%}]"


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


def us_over_cublas(row: Row) -> str:
    """Show microseconds, the share of the floor and the speed-up over cuBLAS in 16 bits."""
    base = next(v for k, v in row["baselines"].items() if k.startswith("cublas"))
    return f"{row['value']:.1f} [{row['floor'] / row['value']:.0%}] {base / row['value']:.2f}x"


def over_vllm(row: Row) -> str:
    """Show tokens per second and the ratio to vLLM on the same kind of GPU."""
    base = next((v for k, v in row["baselines"].items() if k.startswith("vllm")), None)
    return f"{row['value']:.0f}" + (f" ({row['value'] / base:.2f}x vLLM)" if base else "")


def over_planners(row: Row) -> str:
    """Show tokens per second of the exact plan and the speed-up over every other planner's."""
    others = [f"{row['value'] / base:.2f}x {name}" for name, base in row["baselines"].items()]
    return f"{row['value']:.0f}: {', '.join(others)}"


def beside_predicted(row: Row) -> str:
    """Show measured seconds, those predicted and how far off they are."""
    off = row["predicted"] / row["value"] - 1
    return f"{row['value']:.2f} s, {row['predicted']:.2f} s ({off:+.1%})"


def gib_beside_predicted(row: Row) -> str:
    """Show bytes, the prediction and its error."""
    error = row["predicted"] / row["value"] - 1
    return f"{row['value'] / 2**30:.2f} GiB, {row['predicted'] / 2**30:.2f} ({error:+.1%})"


KV_32K = {"heads": 32, "kv_heads": 8, "batch": 8, "context": 32768, "kv": "kv4", "op": "attend"}


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


def seconds_and_peak(row: Row) -> str:
    """Show seconds, seconds a layer and the peak of GPU memory."""
    case = row["case"]
    each = row["value"] / case["layers"]
    return (
        f"{row['value']:.1f} s ({each:.1f} s a layer), {case['peak_reserved_bytes'] / 1e9:.1f} GB"
    )


TABLES: dict[str, Pivot] = {
    "atom_ablation": Pivot(
        file="atom.jsonl",
        bench="atom_ablation",
        index=("step",),
        column="model",
        show=perplexity_and_size,
    ),
    "atom_acceptance": Pivot(
        file="atom.jsonl",
        bench="atom_acceptance",
        index=("model", "weights"),
        column="gamma",
        show=lambda row: f"{row['value']:.3f}",
    ),
    "atom_gemm": Pivot(
        file="atom_gemm.jsonl",
        bench="atom_gemm",
        index=("precision", "m"),
        column="shape",
        show=over_cublas_and_w4a16,
        order=("qkv", "o", "gate_up", "down", "layer"),
    ),
    "atom_fused": Pivot(
        file="atom_gemm.jsonl",
        bench="atom_fused",
        index=("m",),
        show=of_norm,
        value_title="norm, order, rounding: us (of torch's RMSNorm)",
    ),
    "atom_end_to_end": Pivot(
        file="atom_end_to_end.jsonl",
        bench="atom_end_to_end",
        index=("precision", "kv", "memory", "prompt", "gen", "batch"),
        show=lambda row: f"{row['value']:.0f}",
        value_title="output tokens/s",
    ),
    "atom_quantize": Pivot(
        file="atom_quantize.jsonl",
        bench="atom_quantize",
        index=("model", "layers", "windows", "window"),
        show=seconds_and_peak,
        value_title="measured",
    ),
    "e2e": Pivot(
        file="e2e.jsonl",
        bench="e2e",
        index=(
            "model",
            "cluster",
            "batch",
            "prompt",
            "gen",
            "precision",
            "symmetric",
            "dtype",
            "kv",
        ),
        where={"graphs": True},
        show=over_vllm,
        value_title="output tokens/s",
    ),
    "e2e_step": Pivot(
        file="e2e.jsonl",
        bench="e2e_step",
        index=("model", "cluster", "precision", "symmetric", "dtype", "kv", "graphs"),
        show=lambda row: f"{row['value']:.2f} ms",
        value_title="decode step",
    ),
    "heterogeneous": Pivot(
        file="e2e.jsonl",
        bench="heterogeneous",
        index=("model", "cluster"),
        show=over_planners,
        value_title="exact, output tokens/s: over the other plans",
    ),
    "fidelity": Pivot(
        file="fidelity.jsonl",
        bench="fidelity",
        index=("model", "cluster", "plan", "precision", "kv"),
        where={"weights": "dummy"},
        show=beside_predicted,
        value_title="measured, predicted",
    ),
    "fidelity_layer": Pivot(
        file="fidelity.jsonl",
        bench="fidelity_layer",
        index=("model", "kind", "precisions", "unseen", "workloads"),
        column="statistic",
        show=lambda row: f"{row['value']:.1f} %",
    ),
    "fidelity_memory": Pivot(
        file="fidelity.jsonl",
        bench="fidelity_memory",
        index=("model", "bits", "kv", "batch", "prompt", "micro_batches", "place"),
        show=gib_beside_predicted,
        value_title="measured, predicted",
    ),
    "gemm_layer": Pivot(
        file="gemm.jsonl",
        bench="gemm",
        index=("precision", "dtype", "symmetric"),
        column="m",
        where={"model": "llama-3.1-8b", "shape": "layer"},
        show=us_over_cublas,
    ),
    "gemm_products": Pivot(
        file="gemm.jsonl",
        bench="gemm",
        index=("m",),
        column="shape",
        where={
            "model": "llama-3.1-8b",
            "precision": "w4a16",
            "dtype": "fp16",
            "symmetric": True,
        },
        show=us_over_cublas,
        order=("qkv", "o", "gate_up", "down", "layer"),
    ),
    "gemm_single": Pivot(
        file="gemm.jsonl",
        bench="gemm",
        index=("shape", "precision"),
        column="m",
        where={"model": None},
        show=us_over_cublas,
    ),
    "kv_attend": Pivot(
        file="kv.jsonl",
        bench="kv",
        index=("heads", "kv_heads", "batch", "context"),
        column="kv",
        where={"op": "attend", "q_len": 1, "layout": "contiguous", "keys": "kc128"},
        show=us_of_floor,
        order=("kv16", "kv8", "kv4", "kv2"),
    ),
    "kv_variants": Pivot(
        file="kv.jsonl",
        bench="kv",
        index=("keys", "q_len", "layout"),
        where=KV_32K,
        show=us_of_floor,
        value_title="us",
    ),
    "kv_append": Pivot(
        file="kv.jsonl",
        bench="kv",
        index=("batch", "context", "kv"),
        column="op",
        where={"context": 2048},
        show=lambda row: f"{row['value']:.1f}",
    ),
    "kv_prefill": Pivot(
        file="kv.jsonl",
        bench="kv",
        index=("batch", "context", "kv"),
        where={"op": "prefill"},
        value_title="us",
        show=lambda row: f"{row['value']:.1f}",
    ),
    "kv_error": Pivot(
        file="kv_error.jsonl",
        bench="kv_error",
        index=("kv", "keys"),
        column="source",
        show=lambda row: f"{row['value']:.1e}",
    ),
    "kv_perplexity": Pivot(
        file="kv_perplexity.jsonl",
        bench="kv_perplexity",
        index=("kv", "keys"),
        column="model",
        show=increase_over_baseline("kv16"),
    ),
    "quality": Pivot(
        file="quality.jsonl",
        bench="perplexity",
        index=("precision", "rounding"),
        column="model",
        show=increase_over_baseline("w16a16"),
    ),
    "hf_generate": Pivot(
        file="hf_generate.jsonl",
        bench="hf_generate",
        index=("model", "batch", "threads"),
        value_title="tokens/s (ratio to Hugging Face generate)",
        show=ratio_to_baseline("hf"),
    ),
    "continuous_batching": Pivot(
        file="engine.jsonl",
        bench="continuous_batching",
        index=("model", "requests", "slots", "stages", "measure"),
        value_title="continuous (ratio to static)",
        show=ratio_to_baseline("static"),
    ),
    "scheduler_step": Pivot(
        file="engine.jsonl",
        bench="scheduler_step",
        index=("running", "waiting"),
        value_title="us per step and running request",
        show=lambda row: f"{row['value']:.2f}",
    ),
    "acceptance": Pivot(
        file="speculation.jsonl",
        bench="acceptance",
        index=("model", "mode"),
        column="gamma",
        show=lambda row: f"{row['value']:.3f}",
    ),
    "speculation_gpu": Pivot(
        file="speculation.jsonl",
        bench="speculation_gpu",
        index=("mode", "batch", "context", "acceptance"),
        column="gamma",
        show=over_plain_of_s,
        order=tuple("1234567"),
    ),
    "speculation_auto": Pivot(
        file="speculation.jsonl",
        bench="speculation_auto",
        index=("mode", "batch", "context", "acceptance"),
        show=over_plain_and_best,
        value_title="over plain decoding (over the best fixed length)",
    ),
    "speculation_stages": Pivot(
        file="speculation.jsonl",
        bench="speculation_stages",
        index=("mode", "stages", "batch", "context", "acceptance"),
        column="gamma",
        show=ratio_to_baseline("plain"),
    ),
    "speculation": Pivot(
        file="speculation.jsonl",
        bench="speculation",
        index=("model", "mode", "gamma", "batch", "dtype"),
        value_title="tokens/s (ratio to plain decoding)",
        show=ratio_to_baseline("plain"),
    ),
    "planner": Pivot(
        file="planner.jsonl",
        bench="planner",
        index=("cluster",),
        column="objective",
        show=seconds_and_cpu,
    ),
    "planner_gap": Pivot(
        file="planner.jsonl",
        bench="planner_gap",
        index=("cluster",),
        column="objective",
        show=lambda row: f"{row['value']:.1e}",
    ),
    "planner_ratio": Pivot(
        file="planner.jsonl",
        bench="planner_ratio",
        index=("cluster",),
        column="method",
        show=lambda row: f"{row['value']:.3f}",
    ),
    "planner_real": Pivot(
        file="planner.jsonl",
        bench="planner_real",
        index=("cluster", "plan"),
        value_title="measured s, predicted, the paper's formula",
        show=lambda row: (
            f"{row['value']:.1f}, {row['predicted']:.1f} "
            f"({row['predicted'] / row['value'] - 1:+.1%}), "
            f"{row['baselines']['paper_formula']:.1f} "
            f"({row['baselines']['paper_formula'] / row['value'] - 1:+.1%})"
        ),
    ),
}


def rewrite(text: str) -> str:
    """Return `text` with every marked table rendered anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"unknown table '{name}': known: {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n{TABLES[name].render()}\n<!-- end {name} -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end \1 -->", table, text, flags=re.S)


def main() -> int:
    """Rewrite or check every README of the tree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 on a difference"
    )
    args = parser.parse_args()
    stale = []
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]):
        if ".venv" in path.parts:
            continue
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
