"""What tells kernels the form of a weight's codes: their constants, and its tensors as words."""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.formats.codebook_weight import Codebook, CodebookWeight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.gemm.scaled.code_assembly import word_assembly

Coded = QuantizedWeight | CodebookWeight
Constants = dict[str, int | bool | str]


def form_of(q: Coded) -> str:
    """Return the form by scaled_operand.py's name; "" of integers with one scale a k-group."""
    if isinstance(q, QuantizedWeight):
        return "parts" if q.group_size not in (None, GROUP) else ""
    if q.codebook is not Codebook.E2M1:
        return q.codebook.value
    return "e2m1" if q.is_mxfp4 else "nvfp4"


def form_constants(q: Coded, dtype: torch.dtype) -> Constants:
    """Return the constants of gemv.py and splitk_gemm.py that a weight decides."""
    form, bits = form_of(q), q.bits
    symmetric = q.symmetric if isinstance(q, QuantizedWeight) else True
    floats = form in ("e2m1", "nvfp4")
    parts = 0 if q.group_size is None else 1 if floats else max(1, GROUP // q.group_size)
    made: Constants = {"BITS": bits, "GROUPED": parts, "SYMMETRIC": symmetric}
    if not form or floats:
        return made | {"FORM": form, "ASM": ""}
    kind = "f16" if dtype == torch.float16 else "bf16"
    return made | {"FORM": form, "ASM": word_assembly(form, bits, kind, symmetric, parts)}


def words_of(q: Coded) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return planes, scales and zeros of the full blocks of 16 rows as int32.

    NVFP4's factors of rows stand where zeros do, in float32.
    """
    if isinstance(q, QuantizedWeight):
        return q.block_words()
    scale = q.scale.view(torch.int32)
    return (q.plane.view(torch.int32),), scale, scale if q.factor is None else q.factor
