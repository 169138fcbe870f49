"""Cost entries of a model from tables of kernels that others measured: products, attention, ends.

A layer is its products (and what is computed on each token beside them), a polyline in the tokens
of a step, and its attention, fitted in the terms of cost entries with non-negative coefficients
and on relative error. Nothing is padded: tables are of the kernels, not of an engine's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.costs.cost_model import ErrorStats, LatencyEntry, Part, Phase, Regime
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.attended_keys import Windows, attended_keys, twice_the_pairs
from llmpq.workload import Dtype

MOST_TOKENS, MOST_KEYS = 2**14, 2**18
"""Tokens of prompts in a step, and keys of its decoding rows, up to which tables are fitted."""
LEAST_KEYS = 2**13
"""Keys of decoding rows below which their attention is mostly a kernel's launch."""
Curve = tuple[tuple[float, float], ...]
"""(tokens, seconds), tokens ascending."""


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Measured attention of one layer."""

    prompts: Sequence[tuple[int, int, int, float]]
    """(rows, tokens of each, tokens before them, seconds)"""
    decoding: Sequence[tuple[int, int, float]]
    """(rows, keys of each, seconds)"""
    mixed: Sequence[tuple[int, int, int, int, float]] = ()
    """(tokens of a chunk, tokens before it, decoding rows, keys of each, seconds of all)"""
    windows: Windows = ()


def layer_entries(
    kind: str,
    products: Mapping[Precision, Curve],
    attention: AttentionTimes,
    *,
    dtype: Dtype,
) -> list[LatencyEntry]:
    """Return the entries of a layer in both phases at each precision."""
    prompts, prompts_error = prompt_terms(attention)
    rows, keys, error = decode_terms(attention)
    mixed = mixed_attention(attention, keys.get("v*(t+s)", 0.0))
    shared = {
        "device_kind": kind,
        "kv": KVPrecision.KV16,
        "dtype": dtype,
        "windows": attention.windows,
    }
    found = []
    for precision, curve in products.items():
        own = {**shared, "part": "layer", "precision": precision, "source": "profile"}
        regime = Regime(terms=prompts, curve=thinned(curve))
        prefill = {"phase": Phase.PREFILL, "held_out_error": prompts_error, "regimes": (regime,)}
        regime = Regime(terms=keys, curve=thinned(summed((curve, rows))))
        decode = {"phase": Phase.DECODE, "held_out_error": error, "regimes": (regime,)}
        found += [
            LatencyEntry.model_validate({**own, **prefill}),
            LatencyEntry.model_validate({**own, **decode, "mixed_attention": mixed}),
        ]
    return found


def end_entries(kind: str, part: Part, curve: Curve, *, dtype: Dtype) -> list[LatencyEntry]:
    """Return the entries of the embedding or the head in both phases, by tokens or rows.

    The head works on the last token of a row: of prompts, too, only rows count.
    """
    slope = max(0.0, (curve[-1][1] - curve[0][1]) / (curve[-1][0] - curve[0][0]))
    by_rows = Regime(terms={"1": curve[0][1], "v": slope})
    found = []
    for phase in (Phase.PREFILL, Phase.DECODE):
        plain = part == "head" and phase is Phase.PREFILL
        found.append(
            LatencyEntry(
                device_kind=kind,
                part=part,
                phase=phase,
                precision=Precision.W16A16,
                dtype=dtype,
                regimes=(by_rows if plain else Regime(terms={}, curve=curve),),
                source="profile",
            )
        )
    return found


def prompt_terms(attention: AttentionTimes) -> tuple[dict[str, float], ErrorStats]:
    """Return the terms of attention within prompts and to what stands before them."""
    rows = np.array([row for row in attention.prompts if row[0] * row[1] <= MOST_TOKENS])
    v, s, p, seconds = rows.T
    windows = attention.windows
    columns = {"1": np.ones(len(v)), "v*s": v * s, "v*s^2": v * twice_the_pairs(s, windows)}
    if p.any():
        columns["v*s*p"] = v * s * attended_keys(p, windows)
    return _fitted(columns, seconds)


def decode_terms(attention: AttentionTimes) -> tuple[Curve, dict[str, float], ErrorStats]:
    """Return attention of decoding rows: what rows take without keys, and the terms of keys.

    The first is free for every number of rows, as kernels split them over a GPU in their own ways.
    """
    rows = [row for row in attention.decoding if row[0] * row[1] <= MOST_KEYS]
    v, keys, seconds = np.array(rows, dtype=np.float64).T
    keys = np.asarray(attended_keys(keys, attention.windows))
    sizes = sorted(set(v.tolist()))
    columns = {f"of {size:g}": (v == size).astype(np.float64) for size in sizes}
    terms, error = _fitted({**columns, "v*(t+s)": v * keys}, seconds)
    curve = tuple((size, terms.pop(f"of {size:g}", 0.0)) for size in sizes)
    return curve, terms, error


def mixed_attention(attention: AttentionTimes, per_key_s: float) -> float:
    """Return how many times `per_key_s` decoding rows take a key beside a chunk, the median."""
    chunks = {(s, p): seconds for v, s, p, seconds in attention.prompts if v == 1}
    found = [
        (seconds - chunks[s, p]) / (per_key_s * v * keys)
        for s, p, v, keys, seconds in attention.mixed
        if LEAST_KEYS <= v * keys <= MOST_KEYS and (s, p) in chunks
    ]
    return max(1.0, float(np.median(found))) if found and per_key_s else 1.0


def _fitted(
    columns: Mapping[str, np.ndarray], seconds: np.ndarray
) -> tuple[dict[str, float], ErrorStats]:
    """Return non-negative coefficients and their relative error.

    Errors weigh by the root of the time: short kernels count by their share, long ones by seconds.
    Columns whose coefficient would be negative are left out, the most negative first.
    """
    left, weight = list(columns), 1 / np.sqrt(seconds)
    while True:
        table = np.stack([columns[name] * weight for name in left], axis=1)
        scale = np.linalg.norm(table, axis=0)
        found = np.linalg.lstsq(table / scale, seconds * weight, rcond=None)[0]
        if (found >= 0).all():
            break
        left.pop(int(np.argmin(found)))
    coefficients = found / scale
    errors = np.abs(
        sum(c * columns[n] for n, c in zip(left, coefficients, strict=True)) / seconds - 1
    )
    stats = ErrorStats(
        mean=float(errors.mean()), p95=float(np.quantile(errors, 0.95)), samples=len(seconds)
    )
    return {n: float(c) for n, c in zip(left, coefficients, strict=True)}, stats


def summed(curves: Sequence[Curve]) -> Curve:
    """Return the sum of polylines, at every point of any of them."""
    points = sorted({x for curve in curves for x, _ in curve})
    regimes = [Regime(terms={}, curve=curve) for curve in curves]
    return tuple((x, sum(regime.curve_s(x) for regime in regimes)) for x in points)


def thinned(curve: Curve, error: float = 0.002) -> Curve:
    """Return a polyline with fewer points, which is nowhere further off than a share of it."""
    kept, at = [curve[0]], 0
    while at < len(curve) - 1:
        end = at + 1
        while end + 1 < len(curve) and _straight(curve[at : end + 2], error):
            end += 1
        kept.append(curve[end])
        at = end
    return tuple(kept)


def _straight(points: Curve, error: float) -> bool:
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0)
    return all(abs(y0 + slope * (x - x0) - y) <= error * y for x, y in points[1:-1])
