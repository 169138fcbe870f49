"""The measured indicator: how far each layer's linears miss their outputs at each precision.

    omega[i, b] = sum_o mean_t |W x_t - Q_b(W, x_t)|^2         o linear, t token

Q_b is what the runtime does, rounded inputs included: w4a4 with the outlier channels a calibrated
checkpoint would keep, in their order, so that w4a4 and w8a8 stand on the same scale as weight-only
precisions. Unlike eq. (3) it is no bound and needs a sample of inputs, not sums.

K = in_features, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.atom_scheme import atom_scheme
from llmpq.kernels.weights.atom_weight import quantize_atom
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import KVPrecision, Precision, WeightScheme, default_outliers
from llmpq.profiler.quality.kv_variance import KVRanges, kv_omega, kv_ranges, mean_ranges
from llmpq.sizes.memory import Quantization

SAMPLE_TOKENS = 512
"""Tokens stored of each linear's input, spread over the calibration text."""


@dataclass
class OutputErrorObserver:
    """Rounds every linear at every precision and measures its output on sampled inputs."""

    precisions: Sequence[Precision]
    kv: Sequence[KVPrecision]
    quantization: Quantization
    table: dict[Precision, list[float]] = field(default_factory=dict)
    kv_table: dict[KVPrecision, list[float]] = field(default_factory=dict)
    _weights: Mapping[str, Tensor] = field(default_factory=dict)
    _samples: dict[str, list[Tensor]] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)
    _ranges: list[KVRanges] = field(default_factory=list)

    def begin(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Start a layer."""
        self._weights = weights
        self._samples = {}
        self._ranges = []
        self._tokens = {}

    def on_input(self, name: str, x: Tensor) -> None:
        """Keep some of the tokens that enter a linear."""
        x_TK = x.detach().reshape(-1, x.shape[-1])
        self._tokens[name] = self._tokens.get(name, 0) + x_TK.shape[0]
        step = max(1, x_TK.shape[0] // (SAMPLE_TOKENS // 4))
        self._samples.setdefault(name, []).append(x_TK[::step].clone())

    def on_cache(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Add a window's ranges."""
        self._ranges.append(kv_ranges(k_TGD, v_TGD))

    def end(self) -> None:
        """Append the layer's omegas."""
        for precision in self.precisions:
            scheme = self.quantization.scheme(precision)
            total = 0.0
            for name, weight_NK in self._weights.items():
                # An expert counts by the share of tokens it is sent; without any, not at all.
                if scheme is not None and name in self._samples:
                    share = self._tokens[name] / max(self._tokens.values())
                    total += share * output_error(weight_NK, self._sample(name), scheme)
            self.table.setdefault(precision, []).append(total)
        mean = mean_ranges(self._ranges)
        for kv in self.kv:
            # Rounding with step S adds S^2 / 12; the stochastic share is S^2 / 6.
            self.kv_table.setdefault(kv, []).append(kv_omega(mean, kv, "stochastic") / 2)

    def _sample(self, name: str) -> Tensor:
        whole = torch.cat(self._samples[name])
        return whole[:: max(1, whole.shape[0] // SAMPLE_TOKENS)]


def output_error(weight_NK: Tensor, x_TK: Tensor, scheme: WeightScheme) -> float:
    """Return mean_t |W x_t - Q(W, x_t)|^2 of one linear.

    A w4a4 scheme says how many outlier channels it has; one that says none has K / 32.
    """
    exact_TN = functional.linear(x_TK.float(), weight_NK.float())
    if scheme.activation_bits == 16:
        dense = quantize_weight(weight_NK, scheme, dtype=torch.float32).dequantize(torch.float32)
        got_TN = functional.linear(x_TK.float(), dense)
    else:
        index_K = None
        atom = atom_scheme(scheme)
        if scheme.activation_bits < 8:
            outliers = scheme.outliers or default_outliers(weight_NK.shape[1])
            atom = replace(atom, outliers=outliers)
            index_K = x_TK.float().square().sum(0).argsort(stable=True)
        weight = quantize_atom(weight_NK, atom, dtype=torch.float32, index_K=index_K)
        got_TN = weight.matmul(x_TK.float())
    return float((got_TN - exact_TN).double().square().sum(1).mean())
