"""MLPs: with or without a gate.

    MLP        down(act(up(x)))                    ReLU (OPT), its square, GELU by tanh (BLOOM) or
                                                   exact (GPT-NeoX), xIELU (Apertus)
    GatedMLP   down(act(gate(x), up(x)))           gate and up are one matrix [2 F, h]
               silu:         silu(g) * u           Llama and most since
               gelu_tanh:    gelu(g) * u           Gemma
               clamped_silu: g sigmoid(s g) (u + 1), g and u clamped   gpt-oss

Legend: B rows, Q new tokens, h hidden, F ffn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.cpu import row_wise
from llmpq.runtime.models.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": Tensor.relu_,
    "gelu": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "relu2": lambda x: x.relu_().square_(),
}
"""What an MLP without a gate applies, in place where that can be."""
XIELU = "xielu"
"""The activation with two numbers that each layer has learned."""
XIELU_SLOPE = 0.5


def require_activation(name: str, known: Collection[str], where: str) -> None:
    """Refuse an activation that is not implemented: another one in its place would be wrong."""
    if name not in known:
        raise ValueError(
            f"activation '{name}' is not supported in {where}; expected {' or '.join(known)}"
        )


class Xielu(nn.Module):
    """xIELU (Huang and Schlag, 2024): p x^2 + x / 2 above zero, n (e^x - 1 - x) + x / 2 below."""

    def __init__(self, positive_1: Tensor, negative_1: Tensor) -> None:
        super().__init__()
        self.positive_1, self.negative_1 = positive_1, negative_1

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x, with no more than two others beside it on the way."""
        below = x.clamp(max=0)
        made = torch.expm1(below).sub_(below).mul_(self.negative_1)
        del below
        made += x.clamp(min=0).square_().mul_(self.positive_1)
        return made.add_(x, alpha=XIELU_SLOPE)


class MLP(nn.Module):
    """down(act(up(x))) with an activation of `ACTIVATIONS`, or with xIELU."""

    gate = None
    """It has none; `GatedMLP` has one."""
    token_gate_1h = None

    def __init__(
        self, up: Linear, down: Linear, activation: str, xielu: Xielu | None = None
    ) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self.activation = activation
        self.xielu = xielu
        if xielu is None:
            require_activation(activation, ACTIVATIONS, "an MLP")

    @property
    def wide(self) -> Linear:
        """What the activation is applied to the product with."""
        return self.up

    def with_linears(self, wide: Linear, down: Linear) -> MLP:
        """Return the same MLP of other linears."""
        return MLP(wide, down, self.activation, self.xielu)

    def activated(self, wide: Tensor) -> Tensor:
        """Return what `down` takes of what `up` gave, which may be overwritten."""
        if self.xielu is not None:
            made: Tensor = self.xielu(wide)
            return made
        return ACTIVATIONS[self.activation](wide)

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        return self.down(self.activated(self.up(x_BQh)))


@dataclass(frozen=True)
class GateFunction:
    """What a gated MLP makes of gate and up."""

    activation: str = "silu"
    limit: float = 0.0
    """clamped_silu: gate and up are at most this, up at least its negative."""
    slope: float = 1.0
    factor: float = 1.0
    """silu: the gate is multiplied by this first."""
    sparsity: float = 0.0
    """Gates are cut off below what this share of a normal distribution is below, less that."""

    def __post_init__(self) -> None:
        """Refuse an activation that is not implemented."""
        require_activation(self.activation, GATED, "a gated MLP")

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than the activation: no factor, nothing cut off."""
        return self.factor == 1.0 and not self.sparsity

    def of_both(self, both: Tensor) -> Tensor:
        """Return what it makes of contiguous [..., 2 F], gate first."""
        if self.activation == "silu" and self.is_plain and row_wise.takes(both, both):
            return row_wise.silu_gate(both)
        # Out of place: the halves are strided views, and `down` wants rows without gaps.
        return self(*both.chunk(2, dim=-1))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return a new tensor; gate and up, strided halves of one, stay as they were."""
        gate = self._cut(gate) if self.sparsity else gate
        if self.activation == "silu":
            gate = gate if self.factor == 1.0 else gate * self.factor
            return functional.silu(gate).mul_(up)
        if self.activation == "gelu_tanh":
            return functional.gelu(gate, approximate="tanh").mul_(up)
        gate = gate.clamp(max=self.limit)
        glu = torch.sigmoid(gate * self.slope).mul_(gate)
        return up.clamp(min=-self.limit, max=self.limit).add_(1).mul_(glu)

    def _cut(self, gate: Tensor) -> Tensor:
        """Return gates less their mean and so many standard deviations, at least zero."""
        share = torch.tensor(self.sparsity, dtype=torch.float32)
        deviations = float(torch.special.ndtri(share).to(gate.dtype))
        mean = gate.mean(dim=-1, keepdim=True)
        cutoff = mean + gate.std(dim=-1, keepdim=True, unbiased=False) * deviations
        return functional.relu(gate - cutoff)


GATED = ("silu", "gelu_tanh", "clamped_silu")


class GatedMLP(nn.Module):
    """down(act(gate(x), up(x))) with gate and up fused into one matrix [2 F, h]."""

    xielu = None
    token_gate_1h: Tensor | None = None
    """Of an MLP that all tokens share: what makes the number whose sigmoid it is multiplied by."""

    def __init__(self, gate_up: Linear, down: Linear, gate: GateFunction | str = "silu") -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.gate = GateFunction(gate) if isinstance(gate, str) else gate

    @property
    def activation(self) -> str:
        """Name of the gate's activation."""
        return self.gate.activation

    @property
    def wide(self) -> Linear:
        """What the activation is applied to the product with: gate and up."""
        return self.gate_up

    def with_linears(self, wide: Linear, down: Linear) -> GatedMLP:
        """Return the same MLP of other linears."""
        return GatedMLP(wide, down, self.gate)

    def activated(self, wide: Tensor) -> Tensor:
        """Return what `down` takes of what gate and up gave."""
        return self.gate.of_both(wide)

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        return self.down(self.activated(self.gate_up(x_BQh)))


class GatedSharedMLP(GatedMLP):
    """The MLP that all tokens share, times the sigmoid of one number a token."""

    def __init__(
        self, gate_up: Linear, down: Linear, gate: GateFunction, token_gate_1h: Tensor
    ) -> None:
        super().__init__(gate_up, down, gate)
        self.token_gate_1h: Tensor = token_gate_1h

    def with_linears(self, wide: Linear, down: Linear) -> GatedSharedMLP:
        """Return the same MLP of other linears."""
        return GatedSharedMLP(wide, down, self.gate, self.token_gate_1h)

    def forward(self, x_Th: Tensor) -> Tensor:
        """Return [T, h]."""
        return super().forward(x_Th).mul_(functional.linear(x_Th, self.token_gate_1h).sigmoid_())
