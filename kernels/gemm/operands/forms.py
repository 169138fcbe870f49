"""The constants by which gemv.py and splitk_gemm.py know the form of a weight's words."""

from __future__ import annotations

import torch

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.gemm.operands.code_assembly import word_assembly

Constants = dict[str, int | bool | str]


def form_constants(q: PackedWords, dtype: torch.dtype) -> Constants:
    """Return the constants of gemv.py and splitk_gemm.py that a weight decides."""
    form, bits, symmetric = q.form, q.bits, q.symmetric
    floats = form in ("e2m1", "nvfp4")
    parts = 0 if q.group_size is None else 1 if floats else max(1, GROUP // q.group_size)
    made: Constants = {"BITS": bits, "GROUPED": parts, "SYMMETRIC": symmetric}
    if not form or floats:
        return made | {"FORM": form, "ASM": ""}
    kind = "f16" if dtype == torch.float16 else "bf16"
    return made | {"FORM": form, "ASM": word_assembly(form, bits, kind, symmetric, parts)}
