"""Which layers of a checkpoint keep codes of its own, that no draft reads at less cost.

FP8 (w8a16), and 4-bit codes of a codebook (w4a16): MXFP4, NVFP4, NF4, FP4, IQ4.
A draft of qspec rounds the inputs of linear 4-bit codes; it leaves these as they are, at the
target's cost. Reads config.json or GGUF's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.quantization_config import (
    fp8_block,
    is_kept_block,
    modelopt_bits,
    quantization_of,
)
from llmpq.precision import Precision

TABLES = ("MXFP4", "IQ4_NL", "IQ4_XS")
"""GGUF types whose codes point into a codebook."""
KEPT = {
    Precision.W8A16: ("FP8 (E4M3)",),
    Precision.W4A16: ("MXFP4", "NVFP4", "NF4", "FP4", "IQ4_NL", "IQ4_XS"),
}
"""Forms whose codes layers of a precision keep, on every device."""
_PLAIN = ("F32", "F16", "BF16")


def stored_codes(path: str | Path | None) -> frozenset[Precision]:
    """Return the precisions whose linears all keep such codes; none for what is not there."""
    if path is None:
        return frozenset()
    if is_gguf(path):
        tensors = open_gguf(path).tensors.items()
        kinds = {t.kind for name, t in tensors if name.startswith("blk.") and len(t.shape) > 1}
        coded = kinds and kinds.isdisjoint(_PLAIN) and kinds <= set(TABLES)
        return frozenset({Precision.W4A16} if coded else ())
    if not (Path(path) / "config.json").is_file():
        return frozenset()
    described = quantization_of(path) or {}
    method = described.get("quant_method")
    bits = _float_bits(described) if method == "compressed-tensors" else 0
    if method == "modelopt":
        return frozenset(
            {4: Precision.W4A16, 8: Precision.W8A16}[bits] for bits in modelopt_bits(described)
        )
    if method in ("fp8", "fbgemm_fp8") or bits == 8:
        return frozenset({Precision.W8A16} if is_kept_block(fp8_block(described)) else ())
    if method == "bitsandbytes" or bits == 4:
        return frozenset({Precision.W4A16})
    return frozenset()


def _float_bits(described: Mapping[str, Any]) -> int:
    """Return the bits of a compressed-tensors model's weights where all are floats, else 0."""
    groups = described.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if groups else []
    bits = {w.get("num_bits") if w.get("type") == "float" else 0 for w in weights}
    return int(bits.pop() or 0) if len(bits) == 1 else 0
