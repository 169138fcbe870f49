"""By how much GGUF blocks that are no codes of ours change when they are rounded to our grids.

    python benchmarks/gguf_rounding.py

Random valid blocks (any bytes, scales of 1e-4 to 1e-3), as no Python package makes K-quants of
weights: codes are spread evenly, which is harder on a grid than those of trained weights. One row
per type and grid in results/gguf_rounding.jsonl: ||rounded - numbers|| / ||numbers||.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from lib.rows import write_row

from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme

SCALES_AT = {"Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,), "MXFP4": (), "Q3_K": (108,)}
SCALES_AT["Q2_K"] = (80, 82)
"""Type -> where a block's float16 scales are."""
ROWS, WIDTH, SEEDS = 64, 4096, 5


def numbers(kind: str, seed: int) -> torch.Tensor:
    """Return the numbers [ROWS, WIDTH] of random blocks of a type."""
    number = GGMLQuantizationType[kind]
    weights, size = GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS, WIDTH // weights, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = rng.uniform(1e-4, 1e-3, blocks.shape[:-1]).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":  # its first byte is the exponent
        blocks[..., 0] = rng.integers(118, 122, blocks.shape[:-1])
    return torch.from_numpy(dequantize(blocks.reshape(ROWS, -1), number))


def main() -> None:
    """Measure every type on every grid."""
    for kind in SCALES_AT:
        for bits in (8, 4):
            for group in (32, 128):
                scheme = WeightScheme(bits=bits, group_size=group)
                errors = []
                for seed in range(SEEDS):
                    w = numbers(kind, seed)
                    rounded = quantize_weight(w, scheme, dtype=torch.float16)
                    off = rounded.dequantize(torch.float32) - w
                    errors.append(float(off.norm() / w.norm()))
                case = {"type": kind, "grid": f"{bits} bits, groups of {group}"}
                write_row(
                    "gguf_rounding.jsonl",
                    bench="gguf_rounding",
                    case=case,
                    unit="relative",
                    samples=errors,
                )


if __name__ == "__main__":
    main()
