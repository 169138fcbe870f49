"""Omega tables of a whole model: the variance and Hessian observers, and the random one.

An observer keeps sums of one layer at a time; its table grows by a row a layer. An expert counts
by the share of the layer's tokens that it was sent; one without any counts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.quality.hessian import HessianSum, squared_error
from llmpq.profiler.quality.kv_variance import KVRanges, kv_omega, kv_ranges, mean_ranges
from llmpq.profiler.quality.variance import (
    Granularity,
    InputStats,
    Rounding,
    activation_omega,
    weight_omega,
)
from llmpq.sizes.memory import Quantization

Table = dict[Precision, list[float]]
KVTable = dict[KVPrecision, list[float]]


@dataclass
class VarianceObserver:
    """Paper eq. (3) for every precision, and the same variance for cached keys and values."""

    precisions: Sequence[Precision]
    kv: Sequence[KVPrecision]
    rounding: Rounding
    granularity: Granularity
    quantization: Quantization
    table: Table = field(default_factory=dict)
    kv_table: KVTable = field(default_factory=dict)
    _weights: Mapping[str, Tensor] = field(default_factory=dict)
    _stats: dict[str, InputStats] = field(default_factory=dict)
    _ranges: list[KVRanges] = field(default_factory=list)

    def begin(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Start a layer."""
        self._weights = weights
        self._stats = {}
        self._ranges = []

    def on_input(self, name: str, x: Tensor) -> None:
        """Add a batch to the operator's sums."""
        if name not in self._stats:
            self._stats[name] = InputStats.empty(x.shape[-1], x.device)
        self._stats[name] = self._stats[name].plus(x)

    def on_cache(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Add a window's ranges."""
        self._ranges.append(kv_ranges(k_TGD, v_TGD))

    def end(self) -> None:
        """Append the layer's omegas."""
        for precision in self.precisions:
            self.table.setdefault(precision, []).append(self._omega(precision))
        mean = mean_ranges(self._ranges)
        for kv in self.kv:
            self.kv_table.setdefault(kv, []).append(kv_omega(mean, kv, self.rounding))

    def _omega(self, precision: Precision) -> float:
        scheme = self.quantization.scheme(precision)
        total = 0.0
        tokens = max(stats.tokens for stats in self._stats.values())
        for name, stats in self._stats.items():
            weight, omega = self._weights[name], 0.0
            if scheme is not None:
                omega += weight_omega(
                    weight, stats, scheme, rounding=self.rounding, granularity=self.granularity
                )
            if precision.activation_bits < 16:
                omega += activation_omega(weight, stats, precision.activation_bits, self.rounding)
            total += omega * (stats.tokens / tokens)
        return total


@dataclass
class HessianObserver:
    """Top eigenvalue times squared weight error, and cached keys and values on the same scale.

    The top eigenvalue prices every weight error as if it pointed the worst way; keys and values,
    whose Hessian is 2 times the identity, are raised by the layer's ratio of top to mean
    eigenvalue, so that weight and KV bits can be traded.
    """

    precisions: Sequence[Precision]
    kv: Sequence[KVPrecision]
    quantization: Quantization
    table: Table = field(default_factory=dict)
    kv_table: KVTable = field(default_factory=dict)
    _weights: Mapping[str, Tensor] = field(default_factory=dict)
    _sums: dict[str, HessianSum] = field(default_factory=dict)
    _ranges: list[KVRanges] = field(default_factory=list)

    def begin(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Start a layer."""
        self._weights = weights
        self._sums = {name: HessianSum(w.shape[1], w.device) for name, w in weights.items()}
        self._ranges = []

    def on_input(self, name: str, x: Tensor) -> None:
        """Add a batch to the operator's Hessian."""
        self._sums[name].add(x)

    def on_cache(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Add a window's ranges."""
        self._ranges.append(kv_ranges(k_TGD, v_TGD))

    def end(self) -> None:
        """Append the layer's omegas."""
        seen = {name: total for name, total in self._sums.items() if total.tokens}
        tokens = max(total.tokens for total in seen.values())
        share = {name: total.tokens / tokens for name, total in seen.items()}
        top = {name: share[name] * total.top_eigenvalue() for name, total in seen.items()}
        mean = {name: share[name] * total.mean_eigenvalue() for name, total in seen.items()}
        worst_ratio = sum(top.values()) / sum(mean.values())
        for precision in self.precisions:
            scheme, omega = self.quantization.scheme(precision), 0.0
            for name, eigenvalue in top.items():
                if scheme is not None:
                    omega += eigenvalue * squared_error(self._weights[name], scheme)
            self.table.setdefault(precision, []).append(omega)
        ranges = mean_ranges(self._ranges)
        for kv in self.kv:
            # The squared error of rounding is S^2 / 12; times the Hessian's 2 that is S^2 / 6.
            omega = worst_ratio * kv_omega(ranges, kv, "stochastic")
            self.kv_table.setdefault(kv, []).append(omega)


def random_tables(
    num_layers: int, precisions: Sequence[Precision], kv: Sequence[KVPrecision], *, seed: int
) -> tuple[Table, KVTable]:
    """Return uniform random values of (0, 1), smaller for more bits in a layer (paper sec. 6.5)."""
    rng = np.random.default_rng(seed)
    weights: Table = {precision: [] for precision in precisions}
    caches: KVTable = {bits: [] for bits in kv}
    by_bits = sorted(precisions, key=lambda p: (p.weight_bits, p.activation_bits))
    for _ in range(num_layers):
        draws = sorted(rng.random(len(by_bits)).tolist(), reverse=True)
        for precision, value in zip(by_bits, draws, strict=True):
            weights[precision].append(0.0 if precision is Precision.W16A16 else value)
        draws = sorted(rng.random(len(kv)).tolist(), reverse=True)
        for bits, value in zip(sorted(kv, key=lambda k: k.mean_bits), draws, strict=True):
            caches[bits].append(value)
    return weights, caches
