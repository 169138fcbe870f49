"""Humming's products (vLLM's kernels of any bits, PyPI humming-kernels), to time beside ours.

Layers of random weights: `copies` of one, so that none is found in the L2. Humming chooses its own
kernel for a number of rows; the first call with it compiles.
"""

from __future__ import annotations

import copy
import importlib.util

import torch
from torch import Tensor

GROUP = 128


def available() -> bool:
    """Whether Humming is installed."""
    return importlib.util.find_spec("humming") is not None


class HummingProducts:
    """One weight [n, k] of `bits`, in groups of 128, with copies."""

    def __init__(
        self, bits: int, k: int, n: int, dtype: torch.dtype, *, symmetric: bool, copies: int
    ) -> None:
        from humming.layer import HummingLayer

        self.wide = torch.randn(n, k, device="cuda", dtype=dtype) / 64
        layer = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config={
                "dtype": f"uint{bits}",
                "group_size": GROUP,
                "has_zero_point": not symmetric,
            },
            torch_dtype=dtype,
        ).cuda()
        layer.load_from_unquantized(self.wide)
        layer.transform()
        self.layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
        self.allowed = {3: 0.4, 4: 0.2, 8: 0.02}[bits]
        """Relative error that rounding to so many bits explains."""

    def check(self, x_MK: Tensor) -> None:
        """Raise `ValueError` where the product is none of this weight."""
        exact = x_MK.float() @ self.wide.float().t()
        error = float((self.layers[0](x_MK).float() - exact).norm() / exact.norm())
        if not error < self.allowed:
            raise ValueError(f"Humming's product: relative error {error}, expected {self.allowed}")

    def run(self, x_MK: Tensor, i: int) -> Tensor:
        """Multiply by copy i."""
        y: Tensor = self.layers[i](x_MK)
        return y
