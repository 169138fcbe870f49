"""A mixture's experts on a GPU: all of a layer in two products, nothing asked of the device.

    weight, expert [T, k]    the router's               kernels/fused/route.py, norm_route.py
    dispatch                     pairs sorted by expert     kernels/gemm/experts/expert_stack.py
    hidden [C, F]            act(gate_up, or up, of every pair)
    y [T, k, h]              down, each pair back at its own number
    sum_j weight[t, j] y[t, j]  kernels/fused/weighted_sum.py, which adds the residual stream too,
                             and what the shared MLP gives, times its gate

A shared MLP that is as wide as an expert is the stacks' last: of few tokens it runs with them.

Weights are put into stacks as they are read, one expert beside the stack at a time; linears hold
views of it. Where a linear holds another weight (a draft's view) or is watched (calibration), the
experts run one after the other, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.kernels.fused import gated_mlp, norm_route, route
from llmpq.kernels.fused.rms_norm import MAX_COLUMNS, rms_norm
from llmpq.kernels.fused.route import RouterRule
from llmpq.kernels.fused.weighted_sum import Shared, weighted_sum
from llmpq.kernels.gemm.experts.expert_dispatch import ExpertDispatch, assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP, GateFunction
from llmpq.runtime.models.norms import Norm

MOST_BESIDE = 32
"""Tokens of a step that go to the shared MLP as to an expert: more are a product of their own."""
OLDEST = (8, 0)
"""Compute capability from which Triton drives the tensor cores."""


def sparse_mlp(
    routing: Routing,
    experts: Iterable[MLP | GatedMLP],
    count: int,
    shared: MLP | GatedMLP | None,
) -> SparseMLP:
    """Return the mixture of `count` experts, stacked where their weights allow it."""
    several = iter(experts)
    first = next(several)
    last = shared if shared is not None and _alike(shared, first) else None
    up, down = (ExpertStack(count + (last is not None)) for _ in range(2))
    made: list[nn.Module] = []
    own: list[Linear] = []
    stacked = True
    for index, expert in enumerate(chain((first,), several)):
        alike = not made or type(expert) is type(made[0])
        fits = stacked and alike and _fit(up, down, expert)
        if fits:
            wide, back = _put(up, index, expert.wide), _put(down, index, expert.down)
            expert = expert.with_linears(wide, back)
            own += (wide, back)
        elif stacked and own:  # rooms for all experts would stay beside what does not fit them
            device = own[0].weight.device
            _move(own, "cpu")
            up, down = ExpertStack(count), ExpertStack(count)
            _move(own, device)
        stacked = fits
        made.append(expert)
    if not stacked:
        return SparseMLP(routing, made, shared)
    if last is not None:
        last = last.with_linears(_put(up, count, last.wide), _put(down, count, last.down))
    return GroupedMLP(routing, made, shared if last is None else last, up, down, last=last)


def _alike(shared: MLP | GatedMLP, expert: MLP | GatedMLP) -> bool:
    """Whether an MLP that all tokens share can be an expert more of a stack."""
    if shared.gate is None or shared.gate != expert.gate or not shared.gate.is_plain:
        return False
    parts = ((shared.wide, expert.wide), (shared.down, expert.down))
    keys = [(part.weight.expert_key, other.weight.expert_key) for part, other in parts]
    biased = any((part.bias is None) != (other.bias is None) for part, other in parts)
    return not biased and all(key is not None and key == other for key, other in keys)


def _move(parts: Sequence[Linear], device: torch.device | str) -> None:
    """Copy weights to a device, each into memory of its own."""
    for part in parts:
        part.weight = part.weight.map_tensors(lambda tensor: tensor.to(device, copy=True))
        if part.bias is not None:
            part.bias = part.bias.to(device, copy=True)


def _put(stack: ExpertStack, index: int, part: Linear) -> Linear:
    """Return a linear that holds its place in the stack."""
    return Linear(*stack.put(index, part.weight, part.bias))


def _fit(up: ExpertStack, down: ExpertStack, expert: MLP | GatedMLP) -> bool:
    if expert.xielu is not None:  # each has numbers of its own
        return False
    weight = expert.down.weight
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < OLDEST:
        return False
    parts = ((up, expert.wide), (down, expert.down))
    return all(stack.takes(part.weight, part.bias) for stack, part in parts)


def _choice(routing: Routing) -> RouterRule:
    """Return a router's rule as the kernels take it."""
    rule = routing.rule
    return RouterRule(
        per_token=routing.per_token,
        score=rule.score,
        groups=rule.groups,
        groups_kept=rule.groups_kept,
        group_score=rule.group_score,
        normalise=rule.normalise,
        scale=rule.scale,
    )


def _by_rule_alone(routing: Routing) -> bool:
    """Whether the kernels choose and weigh as a router does, given its logits."""
    return not routing.rule.weighs_input and routing.expert_scale_E is None


def _routed(routing: Routing, x_Th: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and numbers [T, k] of each token's experts; `Routing.forward` is the twin."""
    if not _by_rule_alone(routing) or not route.fits(
        routing.weight_Eh.shape[0], routing.rule.groups
    ):
        weight_Tk, expert_Tk = routing(x_Th)
        return weight_Tk, expert_Tk
    return route.route(routing.logits(x_Th), _choice(routing), routing.correction_E)


@dataclass(frozen=True)
class Sending:
    """Rows, what experts take of them, the weights of what they make, and who takes what."""

    x_Th: Tensor
    given: Tensor
    """The rows themselves, or a row for each pair of token and expert."""
    weight_Tk: Tensor
    dispatch: ExpertDispatch
    beside: bool = False
    """Whether all tokens go to the stacks' last expert, too: the shared MLP."""


def send(routing: Routing, x_Th: Tensor) -> Sending:
    """Choose the experts of rows that are normed already."""
    return sending(routing, x_Th, *_routed(routing, x_Th))


def sending(routing: Routing, x_Th: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> Sending:
    """Return rows on their way to the experts that were chosen.

    Weights on what experts are given make every pair a row of its own, of one expert.
    """
    experts = routing.weight_Eh.shape[0]
    if not routing.rule.weighs_input:
        return Sending(x_Th, x_Th, weight_Tk, assign(expert_Tk, experts))
    given_Ch = (x_Th[:, None] * weight_Tk[:, :, None]).flatten(0, 1)
    dispatch = assign(expert_Tk.reshape(-1, 1), experts)
    return Sending(x_Th, given_Ch, torch.ones_like(weight_Tk), dispatch)


def norm_and_send(
    routing: Routing, between: Norm, x_Th: Tensor, *, beside: bool = False
) -> Sending:
    """Norm rows and choose their experts: of few rows in two launches.

    `beside`: the shared MLP is the stacks' last expert, and may be sent to as well.
    """
    experts, rule = routing.weight_Eh.shape[0], routing.rule
    plain = not between.centred and between.shape == x_Th.shape[1:]
    of_logits = routing.scale_h is None and _by_rule_alone(routing)
    if not plain or not of_logits or not norm_route.takes(x_Th, experts, rule.groups):
        return send(routing, _normed(between, x_Th))
    normed_Th, weight_Tk, expert_Tk = norm_route.norm_route(
        *(x_Th, between.weight, between.eps, routing.weight_Eh, _choice(routing)),
        bias_E=routing.bias_E,
        correction_E=routing.correction_E,
    )
    beside = beside and len(x_Th) <= MOST_BESIDE and expert_Tk.numel() <= experts
    dispatch = assign(expert_Tk, experts, beside=beside)
    return Sending(normed_Th, normed_Th, weight_Tk, dispatch, beside)


def _normed(part: Norm, x_Th: Tensor) -> Tensor:
    if part.centred or part.shape != x_Th.shape[1:] or x_Th.shape[1] > MAX_COLUMNS:
        normed: Tensor = part(x_Th)
        return normed
    return rms_norm(x_Th, part.weight, part.eps)


class GroupedMLP(SparseMLP):
    """Routing, stacked experts, and an MLP that all tokens share, if any."""

    def __init__(
        self,
        routing: Routing,
        experts: Sequence[nn.Module],
        shared: nn.Module | None,
        up: ExpertStack,
        down: ExpertStack,
        *,
        last: MLP | GatedMLP | None = None,
    ) -> None:
        """`last`: the shared MLP, where it is the stacks' last expert."""
        super().__init__(routing, experts, shared)
        self._up, self._down = up, down
        self._last = None if last is None else (last.wide.weight, last.down.weight)

    @property
    def asks_host(self) -> bool:
        """Whether a step waits for the device: where the experts are not those of the stacks."""
        first: Any = self.experts[0]
        parts = ((first.wide, self._up), (first.down, self._down))
        return any(part.weight is not s.first or part._forward_pre_hooks for part, s in parts)

    @property
    def _beside(self) -> bool:
        """Whether the shared MLP is the stacks' last expert, and not watched."""
        shared: Any = self.shared
        if self._last is None or shared is None:
            return False
        parts = zip((shared.wide, shared.down), self._last, strict=True)
        return all(part.weight is own and not part._forward_pre_hooks for part, own in parts)

    def _hidden(self, x_Th: Tensor, dispatch: ExpertDispatch) -> Tensor:
        """Return act(gate) * up of every pair [C, F], gated in the product where it can be.

        Without a gate act(up).
        """
        first: Any = self.experts[0]
        gate: GateFunction | None = first.gate
        if gate is None or not gate.is_plain:
            activated: Tensor = first.activated(self._up.product(x_Th, dispatch))
            return activated
        if self._up.gates(x_Th, dispatch):
            made = GateRule(gate.activation, gate.limit, gate.slope)
            return self._up.product(x_Th, dispatch, gate=made)
        wide = self._up.product(x_Th, dispatch)
        return gated_mlp.gate_mul(wide, gate.activation, limit=gate.limit, slope=gate.slope)

    def forward(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, h]."""
        if self.asks_host:
            return super().forward(x_BQh)
        x_Th = x_BQh.reshape(-1, x_BQh.shape[-1])
        return self.summed(self._summed(send(self.routing, x_Th), None)).view(x_BQh.shape)

    def mixed(self, x_Th: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts [T, h], without the shared MLP."""
        if self.asks_host:
            return super().mixed(x_Th, weight, expert)
        return self._experts_sum(sending(self.routing, x_Th, weight, expert), None)

    def added(self, residual_BQh: Tensor, between: Norm) -> Tensor:
        """Return r + experts(norm(r)); r may have lost its values then."""
        residual_Th = residual_BQh.reshape(-1, residual_BQh.shape[-1])
        if self.asks_host:
            made = super().forward(_normed(between, residual_Th)[None])
            return residual_BQh.add_(made.view(residual_BQh.shape))
        rows = norm_and_send(self.routing, between, residual_Th, beside=self._beside)
        if self.reduce is not None:
            return self.reduce(self._summed(rows, None), residual_Th).view(residual_BQh.shape)
        return self._summed(rows, residual_Th).view(residual_BQh.shape)

    def _summed(self, rows: Sending, residual_Th: Tensor | None) -> Tensor:
        shared = None if rows.beside else self._shared(rows.x_Th)
        return self._experts_sum(rows, residual_Th, shared=shared)

    def _shared(self, x_Th: Tensor) -> Shared | None:
        """Return what all tokens get, its gate to be multiplied by in the sum."""
        shared: Any = self.shared
        if shared is None:
            return None
        gate = shared.gate
        if gate is None or not gate.is_plain:
            return Shared(made_Th=shared(x_Th))
        wide = shared.wide(x_Th)
        hidden = gated_mlp.gate_mul(wide, gate.activation, limit=gate.limit, slope=gate.slope)
        return self._share(shared.down(hidden), x_Th)

    def _share(self, made_Th: Tensor, x_Th: Tensor) -> Shared:
        """Return what the shared MLP made of x, with its gate, if it has one."""
        shared: Any = self.shared
        gate_1h = None if shared is None else shared.token_gate_1h
        if gate_1h is None:
            return Shared(made_Th=made_Th)
        return Shared(made_Th=made_Th, given_Th=x_Th, gate_1h=gate_1h)

    def _experts_sum(
        self, rows: Sending, residual_Th: Tensor | None, *, shared: Shared | None = None
    ) -> Tensor:
        hidden_CF = self._hidden(rows.given, rows.dispatch)
        y_Ch = self._down.product(hidden_CF, rows.dispatch, back=True)
        if rows.beside:
            last_Th = y_Ch.view(len(rows.x_Th), -1, y_Ch.shape[-1])[:, -1]
            shared = self._share(last_Th, rows.x_Th)
        return weighted_sum(rows.weight_Tk, y_Ch, residual_Th, shared=shared)
