"""A product with a matrix, in whatever form its weight is (kernels/weights/weight.py).

Weights are plain attributes, not parameters: they are never trained, moved or saved, and a plain
attribute is the cheapest to read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.weight import Weight


class Reduce(Protocol):
    """Sums over the devices of a stage in tensor parallel; all of them call it in one order."""

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum plus the residual, and that by an RMSNorm if it costs no further pass."""
        ...

    @property
    def captures(self) -> bool:
        """Whether the devices are connected, by sums that a graph can hold."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Leave the other devices out meanwhile: of what not all of them run."""
        ...

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all devices' parts, plus the residual, maybe in the part's place."""
        ...


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

    def with_weight(self, weight: Weight) -> Linear:
        """Return the same product with a weight in another form."""
        return Linear(weight, self.bias)


class RowParallelLinear(Linear):
    """A product of which a device has some of the inputs: the sum over a stage's devices is y."""

    def __init__(self, weight: Weight | Tensor, bias: Tensor | None, reduce: Reduce) -> None:
        super().__init__(weight, bias)
        self.reduce = reduce

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return y [..., N] in x's dtype, of all devices' inputs, plus the residual."""
        return self.reduce(super().forward(x), residual)

    def normed(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return y as `forward`, and y by an RMSNorm if that costs no further pass."""
        return self.reduce.normed(super().forward(x), residual, weight, eps)

    def with_weight(self, weight: Weight) -> RowParallelLinear:
        """Return the same product with a weight in another form."""
        return RowParallelLinear(weight, self.bias, self.reduce)
