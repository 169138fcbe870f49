"""Weights asked of the L2 while the previous kernel still runs (PDL): no kernel writes them.

Moves no byte twice: what comes to the L2 early is read from there. Legend as in gemm_tiles.py.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_ahead(
    P0,
    P1,
    S,
    Z,
    blocks,
    groups,
    first,
    count,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Ask the L2 for `count` k-groups of a tile from `first` on: words, scales and zeros.

    One lane of a warp asks for a whole run (the instruction takes one address a warp at a time).
    """
    WORDS: tl.constexpr = 192 if BITS == 3 else 256
    thread = tl.arange(0, 32 * WM)
    for bh in tl.static_range(BH):
        if BATCH:
            block, each = bh + 0 * thread, tl.cdiv(count, WM)
            start = first + thread // 32 * each
            run = tl.minimum(each, tl.minimum(first + count, groups) - start)
        else:
            block, start = bh * WM + thread // 32, first + 0 * thread
            run = tl.minimum(count, groups - start)
        go = ((thread % 32 == 0) & (block < blocks) & (run > 0)).to(tl.int32)
        at = block * groups + start
        _fetch(P0 + at * WORDS, run * (4 * WORDS), go)
        if BITS == 8:
            _fetch(P1 + at * WORDS, run * (4 * WORDS), go)
        if GROUPED:
            _fetch(S + at * 8, run * 32, go)
            if not SYMMETRIC:
                _fetch(Z + at * 8, run * 32, go)


@triton.jit
def _fetch(pointers, nbytes, go):
    """Bring bytes at 16-byte aligned addresses to the L2 where `go`; nobody waits for them."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.b32 p, $3, 0;"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}",
        "=r,l,r,r",
        [pointers.to(tl.int64), nbytes, go],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
