"""A mixture's experts on a GPU: all of a layer in two products, nothing asked of the device.

    weight, expert [T, k]    the router's               kernels/fused/route.py
    sent                     pairs sorted by expert     kernels/gemm/expert_stack.py
    hidden [C, F]            act(gate_up of every pair)
    y [T, k, h]              down, each pair back at its own number
    sum_j weight[t, j] y[t, j]  kernels/fused/weighted_sum.py, which adds the residual stream too

Weights are put into stacks as they are read, one expert beside the stack at a time; linears hold
views of it. Where a linear holds another weight (a draft's view) or is watched (calibration), the
experts run one after the other, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from llmpq.kernels.fused import gated_mlp, route
from llmpq.kernels.fused.weighted_sum import weighted_sum
from llmpq.kernels.gemm.expert_sent import Sent, assign
from llmpq.kernels.gemm.expert_stack import ExpertStack, stackable
from llmpq.kernels.gemm.gated import GateRule
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP

OLDEST = (8, 0)
"""Compute capability from which Triton drives the tensor cores."""


def sparse_mlp(
    routing: Routing,
    experts: Iterable[MLP | GatedMLP],
    count: int,
    shared: MLP | GatedMLP | None,
) -> SparseMLP:
    """Return the mixture of `count` experts, stacked where their weights allow it."""
    up, down = ExpertStack(count), ExpertStack(count)
    made: list[nn.Module] = []
    stacked = True
    for index, expert in enumerate(experts):
        stacked = stacked and isinstance(expert, GatedMLP) and _fit(up, down, expert)
        if stacked and isinstance(expert, GatedMLP):
            parts = _put(up, index, expert.gate_up), _put(down, index, expert.down)
            expert = GatedMLP(*parts, expert.gate)
        made.append(expert)
    if not stacked:
        return SparseMLP(routing, made, shared)
    return GroupedMLP(routing, made, shared, up, down)


def _put(stack: ExpertStack, index: int, part: Linear) -> Linear:
    """Return a linear that holds its place in the stack."""
    weight = part.weight
    assert stackable(weight)
    return Linear(*stack.put(index, weight, part.bias))


def _fit(up: ExpertStack, down: ExpertStack, expert: GatedMLP) -> bool:
    weight = expert.down.weight
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < OLDEST:
        return False
    parts = ((up, expert.gate_up), (down, expert.down))
    return all(stack.takes(part.weight, part.bias) for stack, part in parts)


def _routed(routing: Routing, x_Th: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and numbers [T, k] of each token's experts; `Routing.forward` is the twin."""
    rule, experts = routing.rule, routing.weight_Eh.shape[0]
    if not route.fits(experts, rule.groups):
        weight_Tk, expert_Tk = routing(x_Th)
        return weight_Tk, expert_Tk
    return route.route(
        routing.logits(x_Th),
        routing.per_token,
        score=rule.score,
        correction_E=routing.correction_E,
        groups=rule.groups,
        groups_kept=rule.groups_kept,
        group_score=rule.group_score,
        normalise=rule.normalise,
        scale=rule.scale,
    )


class GroupedMLP(SparseMLP):
    """Routing, stacked experts, and an MLP that all tokens share, if any."""

    def __init__(
        self,
        routing: Routing,
        experts: Sequence[nn.Module],
        shared: nn.Module | None,
        up: ExpertStack,
        down: ExpertStack,
    ) -> None:
        super().__init__(routing, experts, shared)
        self._up, self._down = up, down

    @property
    def asks_host(self) -> bool:
        """Whether a step waits for the device: where the experts are not those of the stacks."""
        first = self.experts[0]
        assert isinstance(first, GatedMLP)
        parts = ((first.gate_up, self._up), (first.down, self._down))
        return any(part.weight is not s.first or part._forward_pre_hooks for part, s in parts)

    def _hidden(self, x_Th: Tensor, sent: Sent) -> Tensor:
        """Return act(gate) * up of every pair [C, F], gated in the product where it can be."""
        gate = self.experts[0].gate
        assert not isinstance(gate, (Tensor, nn.Module))
        if self._up.gates(x_Th, sent):
            made = GateRule(gate.activation, gate.limit, gate.slope)
            return self._up.product(x_Th, sent, gate=made)
        wide = self._up.product(x_Th, sent)
        return gated_mlp.gate_mul(wide, gate.activation, limit=gate.limit, slope=gate.slope)

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        if self.asks_host:
            return super().forward(x_BQh)
        return self._summed(x_BQh, None)

    def added(self, x_BQh: Tensor, residual_BQh: Tensor) -> Tensor:
        """Return residual + experts(x); the residual may have lost its values then."""
        if self.asks_host:
            return residual_BQh.add_(super().forward(x_BQh))
        return self._summed(x_BQh, residual_BQh)

    def _summed(self, x_BQh: Tensor, residual_BQh: Tensor | None) -> Tensor:
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        weight_Tk, expert_Tk = _routed(self.routing, x_Th)
        sent = assign(expert_Tk, len(self.experts))
        hidden_CF = self._hidden(x_Th, sent)
        y_Ch = self._down.product(hidden_CF, sent, back=True)
        residual_Th = None if residual_BQh is None else residual_BQh.reshape(x_Th.shape)
        y_Th = weighted_sum(weight_Tk, y_Ch, residual_Th)
        if self.shared is not None:
            y_Th.add_(self.shared(x_Th))
        return y_Th.view(x_BQh.shape)
