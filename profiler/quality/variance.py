"""The variance indicator: how much a layer's outputs vary more when its weights are rounded.

Paper eq. (3), summed over a layer's linear operators o:

    omega[i, b] = sum_o D_W S_W(b)^2 G(X)      D_W = N K elements of W, S_W(b) its quantisation step
    deterministic  G(X) = Var[X] / 4           S_W = (max - min) / (2^b - 1)            asymmetric
    stochastic     G(X) = (E[X]^2 + Var[X]) / 6    = max|W| / (2^(b-1) - 1)             symmetric

Granularity `tensor` is that form: one step and one G per operator. `group` applies it to every
(row, group of K) by itself, as the weights are stored, with G per input channel; with equal groups
and channels the two agree. Activations and cached keys and values are operators too (identity):
an element rounded with step S adds at most S^2 / 4, or S^2 / 6, to the variance of what it feeds.

Knows no files and no model. N = out_features, K = in_features, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from llmpq.precision import WeightScheme

Rounding = Literal["deterministic", "stochastic"]
Granularity = Literal["tensor", "group"]


@dataclass(frozen=True, kw_only=True)
class InputStats:
    """Running sums over the tokens that reach one operator, per input channel, in float64."""

    tokens: int
    sum_K: Tensor
    square_K: Tensor
    largest_square: float
    """Sum over tokens of the token's largest magnitude, squared."""

    @classmethod
    def empty(cls, in_features: int, device: torch.device | str = "cpu") -> InputStats:
        """Return the sums of no tokens."""
        zero = torch.zeros(in_features, dtype=torch.float64, device=device)
        return cls(tokens=0, sum_K=zero, square_K=zero, largest_square=0.0)

    def plus(self, x: Tensor) -> InputStats:
        """Return the sums with the tokens of x [..., K] added."""
        x_TK = x.reshape(-1, x.shape[-1])
        largest_T = torch.maximum(x_TK.amax(dim=1), -x_TK.amin(dim=1))
        return replace(
            self,
            tokens=self.tokens + x_TK.shape[0],
            sum_K=self.sum_K + x_TK.sum(0, dtype=torch.float64),
            square_K=self.square_K + x_TK.float().square().sum(0, dtype=torch.float64),
            largest_square=self.largest_square + float(largest_T.double().square().sum()),
        )

    def gain_K(self, rounding: Rounding) -> Tensor:
        """Return G of each input channel."""
        mean_K = self.sum_K / self.tokens
        moment_K = self.square_K / self.tokens
        return _gain(mean_K, moment_K, rounding)

    def gain(self, rounding: Rounding) -> float:
        """Return G over all elements of X together."""
        mean = self.sum_K.mean() / self.tokens
        moment = self.square_K.mean() / self.tokens
        return float(_gain(mean, moment, rounding))


def weight_omega(
    w_NK: Tensor,
    stats: InputStats,
    scheme: WeightScheme,
    *,
    rounding: Rounding,
    granularity: Granularity,
) -> float:
    """Return one operator's term of eq. (3)."""
    if granularity == "tensor":
        step_N1 = steps(w_NK.reshape(1, -1), replace(scheme, group_size=None))
        return float(w_NK.numel() * step_N1.square().sum() * stats.gain(rounding))
    size = scheme.group_size or w_NK.shape[1]
    step_NG = steps(w_NK, scheme)
    gain_G = torch.stack([part.sum() for part in stats.gain_K(rounding).split(size)])
    return float((step_NG.square() @ gain_G).sum())


def activation_omega(w_NK: Tensor, stats: InputStats, bits: int, rounding: Rounding) -> float:
    """Return the extra variance of W (x + dx) when x is rounded to `bits`, a step per token.

    |W|^2 times the mean squared step times 1/4 (deterministic) or 1/6 (stochastic).
    """
    step_square = stats.largest_square / stats.tokens / (2 ** (bits - 1) - 1) ** 2
    return float(w_NK.double().square().sum()) * step_square * share(rounding)


def steps(w_NK: Tensor, scheme: WeightScheme) -> Tensor:
    """Return the quantisation step S of each row and group, [N, G] in float64."""
    columns = w_NK.split(scheme.group_size or w_NK.shape[1], dim=1)
    found = []
    for w in columns:
        low, high = w.aminmax(dim=1)
        if scheme.symmetric:
            found.append(torch.maximum(low.abs(), high.abs()) / (2 ** (scheme.bits - 1) - 1))
        else:
            found.append((high - low) / (2**scheme.bits - 1))
    return torch.stack(found, dim=1).double()


def share(rounding: Rounding) -> float:
    """Return the variance of one rounded element, as a share of its squared step."""
    return 1 / 4 if rounding == "deterministic" else 1 / 6


def _gain(mean: Tensor, moment: Tensor, rounding: Rounding) -> Tensor:
    if rounding == "deterministic":
        return (moment - mean.square()).clamp(min=0) / 4
    return moment / 6
