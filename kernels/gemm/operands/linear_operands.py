"""One product y = x w^T on a GPU as kernels take it: its operands, and constants of w's form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.operands.code_assembly import word_assembly

Constants = dict[str, int | bool | str]


@dataclass(frozen=True, eq=False, slots=True)
class LinearOperands:
    """y [M, N] = x w^T (+ bias) (+ residual), and where y goes: what a kernel's launch is given.

    A launch writes the columns of the full blocks of 16 rows of w. Where all of w's tiles are
    stored one by one, y may be the residual's memory: each tile reads its part before it writes it.
    """

    x_MK: Tensor
    """In rows that follow each other."""
    q: PackedWords
    """w [N, K]."""
    bias_N: Tensor | None
    residual_MN: Tensor | None
    y_MN: Tensor

    @property
    def rows(self) -> int:
        """M, rows of x."""
        return self.x_MK.shape[0]

    @property
    def blocks(self) -> int:
        """Full blocks of 16 rows of w."""
        return self.q.out_features // BLOCK_ROWS

    @property
    def groups(self) -> int:
        """K-groups of 128 columns of w, the last one filled up."""
        return -(-self.x_MK.shape[1] // GROUP)

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        """Bias and residual for a Triton kernel; x in place of one that is not there nor read."""
        x_MK, bias_N, residual_MN = self.x_MK, self.bias_N, self.residual_MN
        return x_MK if bias_N is None else bias_N, x_MK if residual_MN is None else residual_MN


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
