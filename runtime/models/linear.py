"""A product with a matrix, in whatever form its weight is (kernels/weights/weight.py).

Weights are plain attributes, not parameters: they are never trained, moved or saved, and a plain
attribute is the cheapest to read.
"""

from __future__ import annotations

from torch import Tensor, nn

from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.weight import Weight


def round_activations(model: nn.Module, bits: int = 8) -> None:
    """Have a model's weights of few bits round their inputs to `bits` on CPUs."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight = module.weight.with_rounded_inputs(bits)


class Linear(nn.Module):
    """y = x W^T + b; a plain tensor [N, K] is a dense weight."""

    def __init__(self, weight: Weight | Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = DenseWeight(weight) if isinstance(weight, Tensor) else weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., N] in x's dtype."""
        return self.weight.matmul(x, self.bias)
