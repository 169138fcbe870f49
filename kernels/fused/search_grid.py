"""Round-to-nearest with a clip search on a GPU, in one pass over the weight.

    per group:  for each clip: scale (rounded to its stored type), zero, codes, squared error
                keep the scale and zero of the least error; then the codes

What `quantize_codes` (weights/round_to_nearest.py) finds by torch's operators, in fifteen passes
for each of up to 21 clips. A program holds its groups in registers for all clips. Bytes: w once,
codes, scales and zeros once. Sums of squares are added in another order than torch's, so that of
clips as good as each other another may win.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Weights of a program."""


@triton.jit
def _grid(low, high, clip, factor, least, levels, half, SYMMETRIC: tl.constexpr, DT: tl.constexpr):
    """Scale and zero of each group for one clip; `factor`: clip over the number of steps."""
    span = tl.maximum(tl.abs(low), tl.abs(high)) if SYMMETRIC else high - low
    s = tl.maximum((span * factor).to(DT).to(tl.float32), least)
    if SYMMETRIC:
        z = s * 0.0 + half
    else:
        # Adding 1.5 * 2^23 rounds half to even.
        z = (tl.div_rn(-low * clip, s) + 12582912.0) - 12582912.0
        z = tl.minimum(tl.maximum(z, 0.0), levels)
    return s, z


@triton.jit
def _codes(w, s, z, levels):
    q = tl.div_rn(w, tl.broadcast_to(s[:, None], w.shape))
    q = (q + 12582912.0) - 12582912.0 + z[:, None]
    return tl.minimum(tl.maximum(q, 0.0), levels)


@triton.jit
def search_kernel(
    W,
    CLIPS,
    CODES,
    SCALE,
    ZERO,
    num_groups,
    groups,
    K,
    w_stride,
    clips,
    least,
    levels,
    half,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """One program: ROWS groups of GROUP weights."""
    DT: tl.constexpr = SCALE.dtype.element_ty
    of = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = of < num_groups
    row, column = of // groups, (of % groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    live = here[:, None] & (column < K)
    w = tl.load(W + row[:, None] * w_stride + column, mask=live, other=0.0).to(tl.float32)
    low, high = tl.min(w, axis=1), tl.max(w, axis=1)
    if not SYMMETRIC:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    first = tl.load(CLIPS)
    s, z = _grid(low, high, first, tl.load(CLIPS + 1), least, levels, half, SYMMETRIC, DT)
    if clips > 1:
        best = s * 0.0 + float("inf")
        for i in range(clips):
            clip, factor = tl.load(CLIPS + 2 * i), tl.load(CLIPS + 2 * i + 1)
            tried, zero = _grid(low, high, clip, factor, least, levels, half, SYMMETRIC, DT)
            off = (_codes(w, tried, zero, levels) - zero[:, None]) * tried[:, None] - w
            error = tl.sum(off * off, axis=1)
            better = error < best
            s, z = tl.where(better, tried, s), tl.where(better, zero, z)
            best = tl.where(better, error, best)
    at = of[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    codes = _codes(w, s, z, levels).to(tl.uint8)
    tl.store(CODES + at, codes, mask=here[:, None] & (column >= 0))
    tl.store(SCALE + of, s.to(DT), mask=here)
    if not SYMMETRIC:
        tl.store(ZERO + of, z.to(DT), mask=here)


def search_grid(
    w_NK: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    clips: Sequence[float],
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes uint8 [N, Kp], scales [N, G] and, if asymmetric, zeros [N, G] of w [N, K].

    `group`: weights with one scale, a power of two; K is filled up with zeros to whole groups of
    128. `clips`: what is tried, the first alone where it is one.
    """
    n, k = w_NK.shape
    w_NK = w_NK if w_NK.stride(1) == 1 else w_NK.contiguous()
    padded = triton.cdiv(k, 128) * 128
    groups = padded // group
    codes = torch.empty(n, padded, dtype=torch.uint8, device=w_NK.device)
    scale = torch.empty(n, groups, dtype=scale_dtype, device=w_NK.device)
    zero = None if symmetric else torch.empty_like(scale)
    rows = _TILE // group
    search_kernel[(triton.cdiv(n * groups, rows),)](
        w_NK,
        _clips(tuple(clips), bits, symmetric, w_NK.device),
        codes,
        scale,
        scale if zero is None else zero,
        n * groups,
        groups,
        k,
        w_NK.stride(0),
        len(clips),
        float(torch.finfo(scale_dtype).tiny),
        float(2**bits - 1),
        float(2 ** (bits - 1)),
        GROUP=group,
        ROWS=rows,
        SYMMETRIC=symmetric,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return codes, scale, zero


@functools.cache
def _clips(clips: tuple[float, ...], bits: int, symmetric: bool, device: torch.device) -> Tensor:
    """Return each clip and that over the steps of a grid."""
    steps = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    pairs = [(clip, clip / steps) for clip in clips]
    return torch.tensor(pairs, dtype=torch.float32, device=device)
