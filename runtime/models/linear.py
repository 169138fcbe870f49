"""A product with a matrix, dense or of few bits.

Weights are plain attributes, not parameters: they are never trained, moved or saved, and a plain
attribute is the cheapest to read.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from llmpq.kernels.atom.product import AtomWeight, atom_linear
from llmpq.kernels.cpu.dense import dense_linear
from llmpq.kernels.linear import CodebookWeight, Fp8Weight, QuantizedWeight, linear


def round_activations(model: nn.Module, bits: int = 8) -> None:
    """Have a model's weights of few bits meet activations rounded to `bits` on CPUs."""
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.weight, QuantizedWeight):
            module.weight = replace(module.weight, activation_bits=bits)


Weight = Tensor | QuantizedWeight | AtomWeight | Fp8Weight | CodebookWeight
"""A dense weight (kernels/cpu/dense.py), one of few bits, one that meets rounded activations, or
one in E4M3, or of a table's codes, as a checkpoint has it."""


class Linear(nn.Module):
    """y = x W^T + b with a dense or a quantised W [N, K]."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., N] in x's dtype."""
        if isinstance(self.weight, Tensor):
            return dense_linear(x, self.weight, self.bias)
        if isinstance(self.weight, AtomWeight):
            return atom_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)
