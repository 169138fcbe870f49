"""At how many bits the layers of a GGUF file are planned, and what they can be served at.

    Q8_0, Q6_K, Q5_K, Q5_1, Q5_0                               8 bits
    Q4_K, Q4_1, Q4_0, IQ4_XS, IQ4_NL, MXFP4, Q3_K, Q2_K        4 bits

Files mix types inside a layer (Q4_K_M keeps some matrices at Q6_K): the layer gets the bits of most
of its weights. On CPUs the runtime keeps the codes of most types where groups
are of 32 (runtime/weights/gguf_codes.py); else blocks are numbers to it, to be rounded as planned.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from llmpq.checkpoints.gguf_file import GgufFile, open_gguf
from llmpq.memory import Quantization
from llmpq.precision import Precision

LAYER = re.compile(r"blk\.(\d+)\.")
BITS = {
    **dict.fromkeys(("F32", "F16", "BF16"), Precision.W16A16),
    **dict.fromkeys(("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0"), Precision.W8A16),
    **dict.fromkeys(("Q4_K", "Q4_1", "Q4_0", "IQ4_XS", "IQ4_NL", "MXFP4"), Precision.W4A16),
    **dict.fromkeys(("Q3_K", "Q2_K"), Precision.W4A16),
}
"""Type of blocks -> precision."""


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """How a layer is stored, and every precision it can be served at."""

    stored: Precision
    served: tuple[Precision, ...]
    rounds_fp8: bool = False
    """Whether it has FP8 linears beside codes of fewer bits, to which their numbers are rounded."""


CENTRED = ("Q8_0", "Q4_0", "Q5_0", "MXFP4", "IQ4_NL", "IQ4_XS")
"""Types without a low end of their own."""
GROUP = 32
"""Weights of a block that share a scale."""


def kept_grid(path: str | Path) -> Quantization | None:
    """Return the grid on which a GGUF file's codes are kept as they are; None without one."""
    tensors = open_gguf(path).tensors.items()
    kinds = {t.kind for name, t in tensors if LAYER.match(name) and len(t.shape) > 1}
    kinds -= {"F32", "F16", "BF16"}
    return Quantization(group_size=GROUP, symmetric=kinds <= set(CENTRED)) if kinds else None


def stored_in_gguf(file: GgufFile, num_layers: int) -> tuple[StoredLayer, ...] | None:
    """Return how every layer of a GGUF file is stored; None where none is quantised."""
    weights: list[Counter[Precision]] = [Counter() for _ in range(num_layers)]
    for name, tensor in file.tensors.items():
        match = LAYER.match(name)
        if match is not None and len(tensor.shape) > 1 and int(match[1]) < num_layers:
            weights[int(match[1])][BITS[tensor.kind]] += prod(tensor.shape)
    stored = [max(found, key=lambda p: found[p], default=Precision.W16A16) for found in weights]
    if all(precision is Precision.W16A16 for precision in stored):
        return None
    return tuple(StoredLayer(stored=p, served=tuple(Precision)) for p in stored)
