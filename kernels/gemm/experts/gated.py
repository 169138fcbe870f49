"""The activation of a gated MLP from its gate and up rows, shared by the expert kernels.

silu          g sigmoid(g) u
gelu_tanh     g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)) u
clamped_silu  g sigmoid(slope g) (u + 1), g at most `limit`, u within +-limit   (gpt-oss)
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class GateRule:
    """An activation and, of clamped_silu, its values."""

    activation: str = "silu"
    limit: float = 0.0
    slope: float = 1.0


@triton.jit
def gated(gate, up, limit, slope, ACT: tl.constexpr):
    """act(gate) * up, in float32."""
    inner = gate
    if ACT == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif ACT == "clamped_silu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        inner = gate * slope
    return gate / (1.0 + tl.exp(-inner)) * up
