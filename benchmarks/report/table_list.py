"""Every table of the READMEs and of docs/results/: which rows, what stands in a cell."""

from __future__ import annotations

from typing import Protocol

from report.configs_table import ConfigsTable
from report.front_table import FrontTable
from report.kills_tables import AddedTable, CommandsTable, InterruptsTable, PausesTable, ReplanTable
from report.live_table import LiveTable
from report.planner_tables import AblationTable, MixedTable, OddTable, ProofsTable
from report.table_cells import (
    Pivot,
    beside_predicted,
    draft_and_verify,
    fastest_of_newest,
    gib_beside_predicted,
    gib_of_limit,
    increase_over_baseline,
    of_layer,
    of_norm,
    of_phases,
    of_words,
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
)

KV_32K = {"heads": 32, "kv_heads": 8, "batch": 8, "context": 32768, "kv": "kv4", "op": "attend"}

SPECULATION_CELLS = tuple(f"{b} x {context}" for b in (1, 8, 32) for context in (1024, 8192, 32768))

E2E_JOB = ("prompt", "gen", "precision", "symmetric", "dtype", "kv")

POWERS_OF_TWO = frozenset(1 << i for i in range(14))


class Table(Protocol):
    """What makes the text of a table."""

    def render(self) -> str:
        """Return the table as Markdown."""
        ...


TABLES: dict[str, Table] = {
    "front": FrontTable(),
    "published_configs": ConfigsTable(),
    "pauses": PausesTable(),
    "commands_under_kills": CommandsTable(),
    "added_device": AddedTable(),
    "interrupts": InterruptsTable(),
    "replan": ReplanTable(),
    "live": LiveTable(stages=1),
    "live_stages": LiveTable(stages=2),
    "pool_job": Pivot(
        file="pool.jsonl",
        bench="pool_job",
        index=("device", "job", "precision"),
        value_title="tokens/s over a pool (ratio to slots)",
        show=ratio_to_baseline("slots"),
    ),
    "pool_job_stops": Pivot(
        file="pool.jsonl",
        bench="pool_job_stops",
        index=("device", "job", "precision"),
        value_title="tokens/s where a token may end each row (ratio to none)",
        show=ratio_to_baseline("pool"),
    ),
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
    "atom_layer": Pivot(
        file="atom_gemm.jsonl",
        bench="atom_layer",
        index=("precision",),
        column="m",
        show=of_layer,
    ),
    "atom_words": Pivot(
        file="atom_gemm.jsonl",
        bench="atom_words",
        index=("m",),
        show=of_words,
        value_title="codes + rounding, words + restoring; cuBLAS bf16: us",
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
        index=("model", "cluster", "batch", *E2E_JOB, "head_bits"),
        where={"graphs": True, "speculation": None},
        show=over_vllm,
        value_title="output tokens/s",
    ),
    "e2e_step": Pivot(
        file="e2e.jsonl",
        bench="e2e_step",
        index=("model", "cluster", "batch", *E2E_JOB, "head_bits", "graphs"),
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
        where={"weights": "dummy", "stages": frozenset({2, 3, 4})},
        show=beside_predicted,
        value_title="measured, predicted",
    ),
    "fidelity_one": Pivot(
        file="fidelity.jsonl",
        bench="fidelity",
        index=("model", "cluster", "precision", "batch", "prompt", "gen"),
        where={"weights": "dummy", "stages": 1},
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
    "start": Pivot(
        file="start.jsonl",
        bench="start",
        index=("model", "bits", "requests", "start"),
        show=of_phases,
        value_title="start (compiling, graphs; with imports)",
    ),
    "host_memory": Pivot(
        file="fidelity.jsonl",
        bench="host_memory",
        index=("model", "layers", "bits"),
        show=gib_of_limit,
        value_title="peak while loading",
    ),
    "kv_error": Pivot(
        file="kv_error.jsonl",
        bench="kv_error",
        index=("kv", "keys"),
        column="source",
        show=lambda row: f"{row['value']:.1e}",
    ),
    "gguf_rounding": Pivot(
        file="gguf_rounding.jsonl",
        bench="gguf_rounding",
        index=("type",),
        column="grid",
        show=lambda row: f"{100 * row['value']:.2g} %",
    ),
    "kv_perplexity": Pivot(
        file="kv_perplexity.jsonl",
        bench="kv_perplexity",
        index=("kv", "keys"),
        column="model",
        show=increase_over_baseline("kv16"),
    ),
    "kv_apart_perplexity": Pivot(
        file="kv_perplexity.jsonl",
        bench="eval over a low-bit cache",
        index=("kv",),
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
    "decode_host": Pivot(
        file="engine.jsonl",
        bench="decode_host",
        index=("part", "rows"),
        value_title="us of the host's processor a step (before)",
        show=lambda row: f"{row['value']:.0f} ({row['baselines']['before']:.0f})",
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
    "planner_ablation": AblationTable(),
    "odd_clusters": OddTable(),
    "mixed_clusters": MixedTable(),
    "planner_proofs": ProofsTable(),
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
