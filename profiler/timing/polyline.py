"""A polyline in the new tokens beside a few shape terms, fitted to samples in one go.

A GPU takes another kernel every so many rows of a product, so the time of a layer's products is a
curve in the new tokens that no fixed term follows; attention is linear in what it reads. Both are
found together: a polyline is a sum of hats, one a knot, whose coefficients are its values.

S samples, K knots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase

Array = NDArray[np.float64]

CURVE_TERMS: dict[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("v", "v*s^2", "v*s*p", "p"),
    Phase.DECODE: ("v*(t+s)", "t+s"),
    Phase.VERIFY: ("v*(t+s)", "t+s"),
}
"""What depends on more than the new tokens: attention, with its tiles of every prompt."""

MIN_KNOTS = 4
POINTS_A_KNOT = 1.2
"""Samples that there must be for every knot: some have the same tokens in other shapes."""


def choose_knots(tokens: Sequence[float]) -> list[float]:
    """Return the distinct token counts, none where the samples are too few for as many knots."""
    knots = sorted(set(tokens))
    return knots if len(tokens) >= POINTS_A_KNOT * len(knots) else []


def hats(knots: Sequence[float], tokens: Array) -> Array:
    """Return [S, K]: each sample's weight on the knots at both sides of it.

    Beyond the last knot the last piece goes on, before the first one the first value stays.
    """
    at_K = np.asarray(knots, dtype=np.float64)
    x_S = np.maximum(tokens, at_K[0])
    left_S = np.clip(np.searchsorted(at_K, x_S, side="right") - 1, 0, len(at_K) - 2)
    share_S = (x_S - at_K[left_S]) / (at_K[left_S + 1] - at_K[left_S])
    weights = np.zeros((len(x_S), len(at_K)))
    rows = np.arange(len(x_S))
    weights[rows, left_S] = 1 - share_S
    weights[rows, left_S + 1] = share_S
    return weights
