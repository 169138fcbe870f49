"""At how many bits the layers of a GGUF file are planned, and what they can be served at.

    Q8_0, Q6_K, Q5_K, Q5_1, Q5_0                               8 bits
    Q4_K, Q4_1, Q4_0, IQ4_XS, IQ4_NL, MXFP4, Q3_K, Q2_K        4 bits

Files mix types inside a layer (Q4_K_M keeps some matrices at Q6_K): the layer gets the bits of most
of its weights. The blocks are numbers to the runtime, so that any other precision will do, too.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from llmpq.gguf_file import GgufFile
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
