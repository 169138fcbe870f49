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

from front_table import FrontTable
from table_cells import (
    ROOT,
    Pivot,
    beside_predicted,
    draft_and_verify,
    fastest_of_newest,
    gib_beside_predicted,
    gib_of_limit,
    increase_over_baseline,
    of_norm,
    over_cublas_and_w4a16,
    over_plain_and_best,
    over_plain_of_s,
    over_planners,
    over_vllm,
    perplexity_and_size,
    ratio_to_baseline,
    seconds_and_cpu,
    seconds_and_peak,
    tokens_and_steps,
    us_of_floor,
    us_over_cublas,
)

KV_32K = {"heads": 32, "kv_heads": 8, "batch": 8, "context": 32768, "kv": "kv4", "op": "attend"}

SPECULATION_CELLS = tuple(f"{b} x {context}" for b in (1, 8, 32) for context in (1024, 8192, 32768))

E2E_JOB = ("prompt", "gen", "precision", "symmetric", "dtype", "kv")

POWERS_OF_TWO = frozenset(1 << i for i in range(14))

TABLES: dict[str, Pivot | FrontTable] = {
    "front": FrontTable(),
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
        index=("precision", "kv", "memory", "prompt", "gen"),
        show=tokens_and_steps,
        value_title="output tokens/s, requests (ms a step)",
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
        index=("model", "cluster", "batch", *E2E_JOB),
        where={"graphs": True, "speculation": None},
        show=over_vllm,
        value_title="output tokens/s",
    ),
    "e2e_step": Pivot(
        file="e2e.jsonl",
        bench="e2e_step",
        index=("model", "cluster", *E2E_JOB, "graphs"),
        where={"speculation": None},
        show=lambda row: f"{row['value']:.2f} ms",
        value_title="decode step",
    ),
    "heterogeneous": Pivot(
        file="e2e.jsonl",
        bench="heterogeneous",
        index=("model", "cluster", "plan", "kv"),
        show=over_planners,
        value_title="output tokens/s: over the other plans",
    ),
    "fidelity": Pivot(
        file="fidelity.jsonl",
        bench="fidelity",
        index=("model", "cluster", "plan"),
        where={"weights": "dummy"},
        show=beside_predicted,
        value_title="measured, predicted",
    ),
    "fidelity_layer": Pivot(
        file="fidelity.jsonl",
        bench="fidelity_layer",
        index=("model", "kind", "precisions", "unseen", "workloads"),
        where={"unseen": "drawn"},
        column="statistic",
        show=lambda row: f"{row['value']:.1f} %",
    ),
    "fidelity_memory": Pivot(
        file="fidelity.jsonl",
        bench="fidelity_memory",
        index=("model", "bits", "kv", "batch", "prompt", "micro_batches", "place"),
        where={"seed": 31},
        show=gib_beside_predicted,
        value_title="measured, predicted",
    ),
    "profile_time": Pivot(
        file="fidelity.jsonl",
        bench="profile_time",
        index=("model", "kinds", "bits", "kernels", "cases"),
        show=lambda row: f"{row['value']:.0f} s",
        value_title="llmpq-profile",
    ),
    "host_memory": Pivot(
        file="fidelity.jsonl",
        bench="host_memory",
        index=("model", "layers", "bits"),
        show=gib_of_limit,
        value_title="peak while loading",
    ),
    "gemm_layer": Pivot(
        file="gemm.jsonl",
        bench="gemm",
        index=("precision", "dtype", "symmetric"),
        column="m",
        where={"model": "llama-3.1-8b", "shape": "layer", "m": POWERS_OF_TWO},
        show=us_over_cublas,
        order=tuple(map(str, sorted(POWERS_OF_TWO))),
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
    "sampling": Pivot(
        file="sampling.jsonl",
        bench="sampling",
        index=("rows", "logits"),
        column="way",
        show=lambda row: f"{row['value']:.0f} ({row['baselines']['operators']:.0f})",
    ),
    "sampling_job": Pivot(
        file="sampling.jsonl",
        bench="sampling_job",
        index=("model", "precision", "batch", "drawn"),
        column="way",
        show=lambda row: f"{row['value']:.0f} ({row['value'] / row['baselines']['greedy']:.2f})",
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
        index=("mode", "acceptance"),
        column=("batch", "context"),
        pick=fastest_of_newest,
        show=over_plain_of_s,
        order=SPECULATION_CELLS,
    ),
    "speculation_times": Pivot(
        file="speculation.jsonl",
        bench="speculation_gpu",
        index=("mode",),
        where={"acceptance": "0.9"},
        column=("batch", "context"),
        pick=fastest_of_newest,
        show=draft_and_verify,
        order=SPECULATION_CELLS,
    ),
    "speculation_auto": Pivot(
        file="speculation.jsonl",
        bench="speculation_auto",
        index=("mode", "acceptance"),
        column=("batch", "context"),
        show=over_plain_and_best,
        order=SPECULATION_CELLS,
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
