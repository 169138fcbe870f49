"""PackedWords: what the GPU kernels of gemm/ read of a weight whose words lie in FRAGMENT.

form      codes                                  scales of a row's k-group
""        integers                               one, or one a row
parts     integers                               four (groups of 32) or two (64)
e2m1      E2M1 (MXFP4)                           four powers of two
nvfp4     E2M1                                   eight in E4M3, and a factor of each row
nf4 fp4 iq4    places in a codebook              four or two
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.kernel_table import KernelForm

INTEGERS = ("", "parts")
"""Forms whose codes are integers."""
LOOKED_UP = ("nf4", "fp4", "iq4")
"""Forms whose codes are places in a codebook."""


class PackedWords(Protocol):
    """A weight [N, K] of 3, 4 or 8 bits."""

    @property
    def form(self) -> str:
        """As the file's head names it."""

    @property
    def kernel_form(self) -> KernelForm:
        """The form's lines in the table of kernels."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale; None: a row."""

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""

    @property
    def out_features(self) -> int:
        """N."""

    @property
    def in_features(self) -> int:
        """K."""

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Packed codes."""

    @property
    def scale(self) -> Tensor:
        """Flat, in the layout's order."""

    @property
    def zero(self) -> Tensor | None:
        """Flat, in the layout's order."""

    @property
    def layout(self) -> Layout:
        """Where the bytes lie."""

    @property
    def device(self) -> torch.device:
        """Where the words are."""

    @property
    def needs_dtype(self) -> torch.dtype | None:
        """The only type of x that its scales serve; None: any of 16 bits."""

    def block_words(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return planes, scales and zeros of the full blocks of 16 rows as int32; where there are
        no zeros, something else stands in for them: kernels need some pointer."""

    def cut(self, start: int, stop: int) -> Self:
        """Return rows start..stop."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K]."""
