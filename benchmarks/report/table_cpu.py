"""The tables of CPUs: ours beside llama.cpp in one run (`benchmarks/cpu.py`)."""

from __future__ import annotations

from report.table_cells import Pivot, Row

CASE = (
    "layers",
    "bits",
    "head bits",
    "batch",
    "depth",
    "kv",
    "threads",
    "level",
    "dtype",
    "llama build",
)


def beside_llama(row: Row) -> str:
    """Show milliseconds and how many times as long llama.cpp takes."""
    own = f"{row['value'] * 1e3:.4g} ms"
    theirs = [value for name, value in row["baselines"].items() if name.startswith("llama.cpp")]
    return own + (f" ({theirs[0] / row['value']:.2f}x)" if theirs else "")


def beside_before(row: Row) -> str:
    """Show tokens/s and how many times as many as the earlier tree's."""
    ((commit, before),) = row["baselines"].items()
    return f"{row['value']:.4g} ({row['value'] / before:.2f}x {commit})"


CPU_TABLES = (
    {
        "cpu_llm": Pivot(
            file="cpu.jsonl",
            bench="cpu LLM",
            index=("model", "rows", "new"),
            value_title="tokens/s",
            show=beside_before,
        ),
    }
    | {
        f"cpu_{name.split()[0]}": Pivot(
            file="cpu.jsonl",
            bench=f"cpu {name}",
            index=("model", *CASE, "prompt"),
            where={"llama head": "same", "cpu activations": "exact", "onednn": None},
            value_title=f"{name} (llama.cpp / ours)",
            show=beside_llama,
        )
        for name in ("decode step", "prefill")
    }
    | {
        f"cpu_{name.split()[0]}_without_amx": Pivot(
            file="cpu.jsonl",
            bench=f"cpu {name}",
            index=("model", "bits", "cpu activations", "batch", "prompt", "threads", "level"),
            where={"llama head": "same", "onednn": "AVX512_CORE_BF16"},
            value_title=f"{name} (llama.cpp / ours)",
            show=beside_llama,
        )
        for name in ("decode step", "prefill")
    }
)
