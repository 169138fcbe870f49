"""Merge the parts of an attention step (kv_attend.py): out = sum_x 2**(lse_x - m) out_x / sum.

A program takes one query head and token, D_STEP channels; parts come X_STEP at a time. With EARLY
the kernel behind may start at once (it waits for this one before it reads), else when this one may
read itself: better where the parts of the next step would crowd onto the multiprocessors that
happen to be free.

B: requests.  Q: new tokens.  H: query heads.  G: key-value heads.  D: head_dim.  X: parts.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv_attend import LOWEST, MASKED, RING, TILE, packed_line


@triton.jit(do_not_specialize=["num_parts"])
def combine_parts(
    part_out, part_lse, out_ptr, starts, counts, num_parts,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    RING_PARTS: tl.constexpr, TILES: tl.constexpr, D_STEP: tl.constexpr, X_STEP: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = sum_x 2**(lse_x - max) out_x / sum_x 2**(lse_x - max) for one query head and token."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(0) % (C * Q)
    head = tl.program_id(0) // (C * Q)
    d = tl.program_id(1) * D_STEP + tl.arange(0, D_STEP)
    b = tl.program_id(2)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    since = packed_line(start)
    steps_all = packed_line(end - 1) // (TILE * TILES)
    shares = tl.minimum(steps_all, num_parts - RING_PARTS)
    parts = RING_PARTS + shares
    PART_TOKENS: tl.constexpr = RING // RING_PARTS
    first = ((b * G + head) * CHUNKS + col // R).to(tl.int64) * num_parts
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    m_i = LOWEST
    l_i = 0.0
    acc = tl.zeros([D_STEP], tl.float32)
    for x0 in range(0, parts, X_STEP):
        x = x0 + tl.arange(0, X_STEP)
        ring = x - shares
        live = tl.where(ring < 0, True, (since + ring * PART_TOKENS < end) & (x < parts))
        at = (first + tl.where(ring < 0, x, num_parts - RING_PARTS + ring)) * R + col % R
        lse = tl.load(part_lse + at, mask=live, other=MASKED)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        alpha = tl.exp2(m_i - m_new)
        w = tl.exp2(lse - m_new)
        o = tl.load(part_out + at[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        l_i = l_i * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(o * w[:, None], 0)
        m_i = m_new
    out = acc / tl.maximum(l_i, 1e-30)
    out_at = ((b * Q + col // C) * H + head * C + col % C) * D
    tl.store(out_ptr + out_at + d, out.to(out_ptr.dtype.element_ty))
