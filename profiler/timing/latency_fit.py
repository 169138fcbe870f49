"""Linear latency models from samples, by scikit-learn: non-negative, on relative error, held out.

One regime is tried first. Where its held-out error misses the target, two regimes are fitted whose
maximum is the time (a floor and a slope, say), then a polyline in the new tokens beside the terms
of attention (polyline.py); two are taken if they are clearly better on held-out samples, a polyline
if it is better at all: it goes through what a form of a kernel's tiles costs. Knows no
torch: values in, coefficients out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import (
    TERMS,
    ErrorStats,
    Padding,
    Phase,
    Regime,
    new_tokens,
    term_values,
)
from llmpq.profiler.timing.polyline import CURVE_TERMS, MIN_KNOTS, choose_knots, hats
from llmpq.sizes.attended_keys import Windows

Array = NDArray[np.float64]

FEWEST_SHAPES = 3
"""Shapes that a fit needs."""
TARGET_ERROR = 0.05
"""Mean held-out error above which a second regime is tried."""
CLEARLY = 0.8
"""A second regime must bring the held-out error below this share of the first one's."""
FOLDS = 5
BEHIND = ("v*s*p", "p")
"""Terms that only chunks behind other tokens can be fitted with."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured shape: v requests, length s or t+s, q new tokens."""

    v: int
    length: int
    q_len: int = 1
    start: int = 0
    """Tokens before a prompt's chunk."""
    windows: Windows = ()
    """Of the layers that were timed."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Regimes whose maximum is the time, and their error on samples they were not fitted to."""

    regimes: tuple[Regime, ...]
    held_out: ErrorStats


def fit_latency(
    phase: Phase,
    points: Sequence[Point],
    *,
    terms: Sequence[str] | None = None,
    target: float = TARGET_ERROR,
    padding: Padding = "none",
) -> Fit:
    """Fit one or two regimes or a curve to the points; `terms` limits the shape terms used.

    `padding`: of the steps that were timed.
    """
    behind = any(point.start for point in points)
    names = tuple(name for name in terms or TERMS[phase] if behind or name not in BEHIND)
    if len(points) < FEWEST_SHAPES:
        raise ValueError(
            f"{len(points)} samples are too few to fit {phase.value} times to {len(names)} terms; "
            f"take at least {FEWEST_SHAPES} shapes (larger --max-batch or --max-len)"
        )
    rows = [_values(phase, p, padding) for p in points]
    x_SK = np.array([[row[name] for name in names] for row in rows])
    y_S = np.array([p.seconds for p in points])
    one = _cross_check(x_SK, y_S, 1)
    count, held_out = 1, one
    if one.mean() > target and len(points) >= 8:
        two = _cross_check(x_SK, y_S, 2)
        if two.mean() < CLEARLY * one.mean():
            count, held_out = 2, two
    if held_out.mean() > target and (phase is not Phase.PREFILL or terms is None):
        curve = _Curve.of(phase, points, names, padding)
        if curve is not None and (errors := curve.cross_check()).mean() < held_out.mean():
            return Fit(regimes=(curve.fit(),), held_out=_stats(errors))
    coefficients = _fit_max(x_SK, y_S, count)
    return Fit(
        regimes=tuple(_regime(names, c_K) for c_K in coefficients), held_out=_stats(held_out)
    )


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return alpha_s and beta_s_per_byte of messages, non-negative, on relative error."""
    x_SK = np.array([[1.0, float(size)] for size in sizes])
    alpha, beta = _solve(x_SK, np.array(seconds, dtype=float))
    return float(alpha), float(beta)


def fit_rounds(
    sizes: Sequence[int], rounds_s: Sequence[float], burst_s: float
) -> tuple[float, float, float]:
    """Return alpha_s, beta_s_per_byte and what of alpha occupies the way, of two hosts apart.

    A round is a message of a size, and an answer of next to no bytes: alpha twice. `burst_s`:
    between two of the smallest messages that follow each other.
    """
    both_s, beta_s_per_byte = fit_link(sizes, rounds_s)
    alpha_s = both_s / 2
    occupied_s = max(0.0, burst_s - beta_s_per_byte * sizes[0])
    return alpha_s, beta_s_per_byte, min(alpha_s, occupied_s)


def _stats(errors: Array) -> ErrorStats:
    return ErrorStats(
        mean=float(errors.mean()), p95=float(np.quantile(errors, 0.95)), samples=len(errors)
    )


@dataclass(frozen=True)
class _Curve:
    """Samples to fit a polyline in the new tokens and the terms beside it to."""

    names: tuple[str, ...]
    x_SK: Array
    tokens_S: Array
    y_S: Array

    @classmethod
    def of(
        cls, phase: Phase, points: Sequence[Point], names: Sequence[str], padding: Padding
    ) -> _Curve | None:
        """Return the samples, None if they have too few token counts for a curve."""
        beside = tuple(name for name in CURVE_TERMS[phase] if name in names)
        tokens = [
            new_tokens(phase, v=p.v, length=p.length, q_len=p.q_len, padding=padding)
            for p in points
        ]
        if len(choose_knots(tokens)) < MIN_KNOTS:
            return None
        rows = [_values(phase, p, padding) for p in points]
        return cls(
            beside,
            np.array([[row[name] for name in beside] for row in rows]).reshape(len(rows), -1),
            np.array(tokens, dtype=np.float64),
            np.array([p.seconds for p in points]),
        )

    def fit(self) -> Regime:
        """Return the regime of all samples."""
        knots, c = self._solve(np.ones(len(self.y_S), dtype=bool))
        values, beside = c[: len(knots)], c[len(knots) :]
        return Regime(
            terms=_positive(self.names, beside),
            curve=tuple((k, float(v)) for k, v in zip(knots, values, strict=True)),
        )

    def cross_check(self) -> Array:
        """Return each sample's relative error under a fit to the other folds."""
        errors = np.zeros(len(self.y_S))
        for fold in _folds(len(self.y_S)):
            kept_S = np.ones(len(self.y_S), dtype=bool)
            kept_S[fold] = False
            knots, c = self._solve(kept_S)
            x_SK = np.hstack((hats(knots, self.tokens_S[fold]), self.x_SK[fold]))
            errors[fold] = np.abs(x_SK @ c - self.y_S[fold]) / self.y_S[fold]
        return errors

    def _solve(self, kept_S: NDArray[np.bool_]) -> tuple[list[float], Array]:
        knots = sorted(set(self.tokens_S[kept_S].tolist()))
        x_SK = np.hstack((hats(knots, self.tokens_S[kept_S]), self.x_SK[kept_S]))
        return knots, _solve(x_SK, self.y_S[kept_S])


def _regime(names: Sequence[str], c_K: Array) -> Regime:
    return Regime(terms=_positive(names, c_K) or {"1": 0.0})


def _positive(names: Sequence[str], c_K: Array) -> dict[str, float]:
    """Return the terms that count; what was measured as nothing behind a chunk is said."""
    pairs = zip(names, c_K, strict=True)
    return {name: float(c) for name, c in pairs if c > 0 or name == BEHIND[0]}


def _values(phase: Phase, p: Point, padding: Padding) -> dict[str, float]:
    return term_values(
        phase,
        v=p.v,
        length=p.length,
        q_len=p.q_len,
        start=p.start,
        padding=padding,
        windows=p.windows,
    )


def _solve(x_SK: Array, y_S: Array) -> Array:
    """Return the c >= 0 with the least sum of ((x c - y) / y)^2."""
    from sklearn.linear_model import LinearRegression

    scale_K = x_SK.max(axis=0)
    scale_K[scale_K == 0] = 1.0
    relative = x_SK / scale_K / y_S[:, None]
    fitted = LinearRegression(fit_intercept=False, positive=True).fit(relative, np.ones(len(y_S)))
    coefficients: Array = fitted.coef_ / scale_K
    return coefficients


def _errors(coefficients: Sequence[Array], x_SK: Array, y_S: Array) -> Array:
    """Return the relative error of the regimes' maximum at each sample."""
    predicted = np.max([x_SK @ c_K for c_K in coefficients], axis=0)
    errors: Array = np.abs(predicted - y_S) / y_S
    return errors


def _fit_max(x_SK: Array, y_S: Array, count: int) -> list[Array]:
    """Fit `count` regimes so that their maximum is near the samples.

    Two regimes: split the samples by each shape term and by time, fit each side, hand every sample
    to the regime that is larger there, and repeat; the best of all starts is taken.
    """
    single = [_solve(x_SK, y_S)]
    if count == 1:
        return single
    best, best_loss = single, _loss(single, x_SK, y_S)
    starts = [y_S, *(x_SK[:, k] for k in range(x_SK.shape[1]) if np.ptp(x_SK[:, k]) > 0)]
    for key_S in starts:
        upper_S = key_S > np.median(key_S)
        for _ in range(6):
            if min(upper_S.sum(), (~upper_S).sum()) < 3:
                break
            pair = [_solve(x_SK[upper_S], y_S[upper_S]), _solve(x_SK[~upper_S], y_S[~upper_S])]
            loss = _loss(pair, x_SK, y_S)
            if loss < best_loss:
                best, best_loss = pair, loss
            assigned_S = x_SK @ pair[0] > x_SK @ pair[1]
            if (assigned_S == upper_S).all():
                break
            upper_S = assigned_S
    return best


def _loss(coefficients: Sequence[Array], x_SK: Array, y_S: Array) -> float:
    return float(np.square(_errors(coefficients, x_SK, y_S)).mean())


def _folds(count: int) -> list[NDArray[np.int64]]:
    """Return the samples in `FOLDS` random parts, the same ones every time."""
    order = np.random.default_rng(0).permutation(count)
    return np.array_split(order, min(FOLDS, count))


def _cross_check(x_SK: Array, y_S: Array, count: int) -> Array:
    """Return each sample's relative error under a fit to the other folds (seeded shuffle)."""
    errors = np.zeros(len(y_S))
    for fold in _folds(len(y_S)):
        rest = np.setdiff1d(np.arange(len(y_S)), fold)
        errors[fold] = _errors(_fit_max(x_SK[rest], y_S[rest], count), x_SK[fold], y_S[fold])
    return errors
