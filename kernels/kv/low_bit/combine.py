"""Merge the parts of an attention step (attend.py): out = sum_x 2**(lse_x - m) out_x / sum.

A sink is one more part, without output. A program takes N_STEP query heads and tokens, D_STEP
channels; parts come X_STEP at a time (kv_plan.combine_steps: few programs, so that they all wait at
once for the parts to end). With EARLY the kernel behind may start at once (it waits for this one
before it reads), else when this one may read itself: better where the parts of the next step would
crowd onto the multiprocessors that happen to be free.

B: requests.  Q: new tokens.  H: query heads.  G: key-value heads.  D: head_dim.  X: parts.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.kv.low_bit.attend import TILE, first_step
from llmpq.kernels.kv.low_bit.ring_attend import LOG2_E, LOWEST, MASKED, RING, packed_line


@triton.jit(do_not_specialize=["num_parts", "window"])
def combine_parts(
    part_out, part_lse, out_ptr, starts, counts, sinks, num_parts, window,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    RING_PARTS: tl.constexpr, TILES: tl.constexpr, N_STEP: tl.constexpr, D_STEP: tl.constexpr,
    X_STEP: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out = sum_x 2**(lse_x - max) out_x / sum_x 2**(lse_x - max) for N_STEP heads and tokens."""
    C: tl.constexpr = H // G
    CHUNKS: tl.constexpr = (C * Q + R - 1) // R
    PART_TOKENS: tl.constexpr = RING // RING_PARTS
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * N_STEP + tl.arange(0, N_STEP)  # request, key-value head, column
    d = tl.program_id(1) * D_STEP + tl.arange(0, D_STEP)
    b = n // (H * Q)
    head = n // (C * Q) % G
    col = n % (C * Q)
    start = tl.load(starts + b)
    end = start + tl.load(counts + b)
    steps_all = packed_line(end - 1) // (TILE * TILES)
    steps_all = tl.maximum(steps_all - first_step(start, window, TILE * TILES, WINDOWED), 0)
    shares = tl.minimum(steps_all, num_parts - RING_PARTS)[:, None]
    since = packed_line(start)[:, None]
    end = end[:, None]
    first = (((b * G + head) * CHUNKS + col // R).to(tl.int64) * num_parts)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    m_i = tl.full([N_STEP], LOWEST, tl.float32)
    l_i = tl.zeros([N_STEP], tl.float32)
    if SINKS:
        m_i = tl.load(sinks + head * C + col % C).to(tl.float32) * LOG2_E
        l_i += 1.0
    acc = tl.zeros([N_STEP, D_STEP], tl.float32)
    for x0 in range(0, num_parts, X_STEP):
        x = x0 + tl.arange(0, X_STEP)[None, :]
        ring = x - (num_parts - RING_PARTS)
        ring_live = (since + ring * PART_TOKENS < end) & (x < num_parts)
        live = tl.where(ring < 0, x < shares, ring_live)
        at = (first + x) * R + (col % R)[:, None]
        lse = tl.load(part_lse + at, mask=live, other=MASKED)
        o_at = part_out + at[:, :, None] * D + d[None, None, :]
        o = tl.load(o_at, mask=live[:, :, None], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 1))
        alpha = tl.exp2(m_i - m_new)
        w = tl.exp2(lse - m_new[:, None])
        l_i = l_i * alpha + tl.sum(w, 1)
        acc = acc * alpha[:, None] + tl.sum(o * w[:, :, None], 1)
        m_i = m_new
    out = acc / tl.maximum(l_i, 1e-30)[:, None]
    out_at = ((b * Q + col // C) * H + head * C + col % C) * D
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out)
