"""The tables of kernels: products, decoder layers of families, attention over caches."""

from __future__ import annotations

from report.table_cells import (
    Pivot,
    Row,
    over_cublas,
    ratio_to_baseline,
    us_and_dense_rate,
    us_and_launches,
    us_of_floor,
    us_over_cublas,
)

KV_32K = {"heads": 32, "kv_heads": 8, "batch": 8, "context": 32768, "kv": "kv4", "op": "attend"}

POWERS_OF_TWO = frozenset(1 << i for i in range(14))


def us_beside(row: Row) -> str:
    """Return microseconds, and those of what stands beside."""
    others = ", ".join(f"{us:.1f}" for us in row["baselines"].values())
    return f"{row['value']:.1f} ({others})"


def us_beside_all_keys(row: Row) -> str:
    """Return microseconds, those in front of attention, and those of attention to all keys."""
    beside = row["baselines"]
    return f"{row['value']:.0f} ({beside['before attention']:.0f}, {beside['all']:.0f})"


def over_cublas_and_tiles(row: Row) -> str:
    """Return how many times as long cuBLAS takes in 16 bits, and the best tiles."""
    beside = row["baselines"]
    return f"{beside['cublas'] / row['value']:.2f}x ({beside['tiles'] / row['value']:.2f})"


def over_cublas_and_before(row: Row) -> str:
    """Return how many times as long cuBLAS takes in 16 bits, and the kernels before."""
    beside, us = row["baselines"], row["value"]
    before = f" ({beside['before'] / us:.2f})" if "before" in beside else ""
    return f"{beside['cublas'] / us:.2f}x{before}"


def us_beside_sixteen_bits(row: Row) -> str:
    """Return a step's us (over our pool in 16 bits) and attention's (the best in 16 bits)."""
    peers, us = dict(row["baselines"]), f"{row['value']:.1f}"
    attention, step = peers.pop("attention"), peers.pop("pages16")
    return f"{us} ({step:.1f}), {attention:.1f} ({min(peers.values()):.1f})"


def us_and_error(row: Row) -> str:
    """Return microseconds beside 16 bits', and the error beside theirs."""
    case, plain = row["case"], row["baselines"]["torch, 16 bits"]
    return f"{row['value']:.0f} ({plain:.0f}), {case['error']:.3f} ({case['error in 16 bits']:.3f})"


def family_layers(device: str) -> Pivot:
    """Return the table of layers' decode steps on a card."""
    return Pivot(
        file="families.jsonl",
        bench="family layer",
        index=("model", "precision"),
        column="batch",
        where={"experts": None},
        show=us_of_floor,
        order=("1", "8", "32", "128"),
        device=device,
    )


def family_grouped(device: str) -> Pivot:
    """Return the table of a prompt's products of experts on a card."""
    return Pivot(
        file="families.jsonl",
        bench="grouped product",
        index=("model", "product"),
        column="precision",
        where={"product": frozenset({"up", "down"})},
        show=us_and_dense_rate,
        device=device,
    )


KERNEL_TABLES = {
    "family_layers": family_layers("NVIDIA H200"),
    "family_mxfp4": Pivot(
        file="families.jsonl",
        bench="family layer",
        index=("model", "precision", "experts"),
        column="batch",
        where={"experts": "mxfp4"},
        show=us_of_floor,
        order=("1", "8", "32", "128"),
    ),
    "codebook_products": Pivot(
        file="families.jsonl",
        bench="table product",
        index=("n", "k", "form"),
        column="rows",
        where={"way": None},
        show=ratio_to_baseline("16 bits"),
        order=("1", "8", "32", "128", "512", "2048"),
    ),
    "family_layers_h100": family_layers("NVIDIA H100 80GB HBM3"),
    "family_steps": Pivot(
        file="families.jsonl",
        bench="family kernels",
        index=("kernel",),
        column=("model", "batch"),
        where={"precision": "w4a16", "model": frozenset({"gemma-3-12b", "qwen2.5-32b"})},
        show=us_and_launches,
        newest=True,
    ),
    "family_kernels": Pivot(
        file="families.jsonl",
        bench="family kernels",
        index=("kernel",),
        column=("model", "precision"),
        where={"batch": 1},
        show=us_and_launches,
        newest=True,
    ),
    "family_grouped": family_grouped("NVIDIA H200"),
    "family_grouped_h100": family_grouped("NVIDIA H100 80GB HBM3"),
    "family_latents": Pivot(
        file="families.jsonl",
        bench="latent attention",
        index=("model", "batch"),
        column="context",
        show=us_of_floor,
    ),
    "family_packed": Pivot(
        file="families.jsonl",
        bench="packed attention",
        index=("model", "batch", "context", "window"),
        column="kv",
        show=us_of_floor,
    ),
    "kv_pages": Pivot(
        file="kv_pages.jsonl",
        bench="kv_pages",
        index=("heads", "kv_heads", "head_dim", "kv", "rows"),
        column="tokens",
        where={
            "kv": frozenset({"kv8", "kv4", "kv2"}),
            "rows": frozenset({1, 8, 32}),
            "tokens": frozenset({"300", "1500", "9000", "33000"}),
        },
        show=us_beside_sixteen_bits,
        newest=True,
    ),
    "kv_apart": Pivot(
        file="kv_apart.jsonl",
        bench="kv_pages",
        index=("kv", "rows"),
        column="tokens",
        show=us_of_floor,
    ),
    "packed_latents": Pivot(
        file="latents_gpu.jsonl",
        bench="packed latents",
        index=("heads", "batch", "context"),
        column="kv",
        show=us_beside,
        newest=True,
    ),
    "chosen_latents": Pivot(
        file="latents_gpu.jsonl",
        bench="chosen_latents",
        index=("rows",),
        column="tokens",
        show=us_beside_all_keys,
        newest=True,
    ),
    "fp8_products": Pivot(
        file="fp8_gpu.jsonl",
        bench="fp8 product",
        index=("rows",),
        column="product",
        show=us_beside,
        newest=True,
    ),
    "fp8_experts": Pivot(
        file="fp8_gpu.jsonl",
        bench="fp8 experts",
        index=("tokens",),
        column="product",
        show=us_beside,
        newest=True,
    ),
    "fp8_by_rows": Pivot(
        file="fp8_gpu.jsonl",
        bench="fp8 product by rows",
        index=("rows",),
        column="product",
        show=us_beside,
        newest=True,
    ),
    "fp8_experts_by_rows": Pivot(
        file="fp8_gpu.jsonl",
        bench="fp8 experts by rows",
        index=("tokens",),
        column="product",
        show=us_beside,
        newest=True,
    ),
    "fp8_native": Pivot(
        file="fp8_gpu.jsonl",
        bench="fp8 times fp8",
        index=("rows",),
        column="product",
        show=us_and_error,
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
    "step_kernels": Pivot(
        file="step.jsonl",
        bench="step_kernel",
        index=("place", "kernel"),
        column=("model", "precision", "rows"),
        where={"model": "llama-3.1-8b"},
        show=lambda row: f"{row['value']:.1f}",
        newest=True,
    ),
    "step_share": Pivot(
        file="step.jsonl",
        bench="step_share",
        index=("model", "kind", "context", "head_bits"),
        column="rows",
        show=lambda row: (
            f"{row['value']:.0f} ({row['floor'] / row['value']:.2f}, "
            f"{row['baselines']['copy_us'] / row['value']:.2f})"
        ),
        newest=True,
    ),
    "step_stream": Pivot(
        file="step.jsonl",
        bench="step_stream",
        index=("model", "kind", "context", "way"),
        column="rows",
        show=lambda row: f"{row['value']:.0f} ({row['baselines']['without_us']:.0f})",
    ),
    "tune": Pivot(
        file="tune.jsonl",
        bench="tune",
        index=("model", "product", "timed"),
        column="rows",
        show=lambda row: f"{row['baselines']['before']:.1f} -> {row['value']:.1f}",
    ),
    "long_steps": Pivot(
        file="step.jsonl",
        bench="long_step",
        index=("model", "precision", "kv", "chunks", "behind"),
        column="step",
        show=lambda row: f"{row['value']:.0f} ({row['baselines']['host']:.0f})",
    ),
    "merged_parts": Pivot(
        file="step.jsonl",
        bench="merged_parts",
        index=("model", "context", "requests"),
        column="channels",
        show=lambda row: f"{row['value']:.2f} ({row['baselines']['merging, us']:.0f})",
    ),
    "gemm_between": Pivot(
        file="gemm_choice.jsonl",
        bench="gemm_between",
        index=("precision", "weights", "shape"),
        column="m",
        show=over_cublas_and_tiles,
    ),
    "gemm_humming": Pivot(
        file="gemm_choice.jsonl",
        bench="gemm_humming",
        index=("precision", "weights", "shape"),
        column="m",
        show=lambda row: (
            f"{row['baselines']['humming'] / row['value']:.2f}x "
            f"({row['baselines']['cublas'] / row['value']:.2f})"
        ),
    ),
    "rows_between": Pivot(
        file="gemm_choice.jsonl",
        bench="rows_between",
        index=("precision", "weights", "shape"),
        column="m",
        order=tuple(
            ["96", "128", "200", "256", "333", "512", "640", "777", "1024", "1280", "1500", "2048"],
        ),
        show=over_cublas_and_before,
    ),
    "gemm_untuned": Pivot(
        file="gemm_choice.jsonl",
        bench="gemm",
        index=("precision", "shape"),
        column="m",
        where={"table": False},
        show=over_cublas,
    ),
}
