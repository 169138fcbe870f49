"""Shared by the Gluon programs of a mixture's prompts: items, their order, how sums are stored.

    program     persistent, a multiprocessor's only one; an item is a block of `expert_blocks.py`
                (128 rows of x, or 64 where an expert has no more left) by OWN rows of w
    2 warpgroups, each two times 64 rows of w: FUSE, 64 gate rows and the 64 up rows beside them

Sums pass through shared memory once, so that rows of y are written 16 bytes a lane; y's rows past
an expert's last are another program's. `gluon_expert_dense.py` and
`gluon_expert_packed.py` are the kernels.

Legend: C pairs, K in, N out, F rows of y (N, or N / 2 gated), `slots` of 64 k.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM300
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from llmpq.kernels.gemm.experts.gated import gated

# Triton's names since 3.9, else those of 3.6.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)

ROWS, TAIL, DEEP = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64)
"""Rows of x of a block, of an expert's last where it has no more; columns of a slot."""
REGISTERS = gl.constexpr(256)


@gluon.jit
def item_of(item, blocks, total, tiles, BLOCK: gl.constexpr):
    """An item's expert, first row of x, its expert's end row, tile of w; past the end: the last."""
    item = gl.minimum(item, total - 1)
    at = blocks + item // tiles * 4
    e, first, end, before = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    own = (end - first + BLOCK - 1) // BLOCK
    place = item - before * tiles
    return e, first + place % own * BLOCK, end, place // own


@gluon.jit
def _store_rows(acc, staging, Y, order, n0, m0, end, F, GATHER: gl.constexpr, NT: gl.constexpr):
    """Store acc [64 of w, NT of x] into y by way of `staging` [128, 64]."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    part = staging
    if NT != staging.shape[0]:
        part = staging.slice(0, NT, dim=0)
    group_barrier()  # what was there before has been read
    part.permute((1, 0)).store(acc.to(Y.dtype.element_ty))
    group_barrier()
    y = part.load(OUT)
    m = m0 + gl.arange(0, NT, layout=gl.SliceLayout(1, OUT))
    n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
    to = m
    if not GATHER:
        to = gl.load(order + m, mask=m < end, other=0)
    at = to.to(gl.int64)[:, None] * F + n[None, :]
    gl.store(Y + at, y, mask=(m < end)[:, None] & (n < F)[None, :])


@gluon.jit
def _with_bias(acc, BIAS, row, left, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        n = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(BIAS + row + n, mask=n < left, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def finish_item(
    done,
    outs,
    e,
    m0,
    end,
    n_tile,
    N,
    F,
    WG: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    NT: gl.constexpr,
):
    """Bias, gate and store the sums of a warpgroup, of 64 rows of w each."""
    staging, Y, BIAS, order, limit, slope = outs
    own = staging.index(WG)
    at = e.to(gl.int64) * N
    if FUSE:
        n0 = n_tile * 128 + WG * 64
        gate = _with_bias(done[0], BIAS, at + n0, F - n0, HAS_BIAS)
        up = _with_bias(done[1], BIAS, at + F + n0, F - n0, HAS_BIAS)
        _store_rows(gated(gate, up, limit, slope, ACT), own, Y, order, n0, m0, end, F, GATHER, NT)
    else:
        PARTS: gl.constexpr = len(done)
        for i in gl.static_range(PARTS):
            n0 = (n_tile * 2 + WG) * (64 * PARTS) + i * 64
            made = _with_bias(done[i], BIAS, at + n0, F - n0, HAS_BIAS)
            _store_rows(made, own, Y, order, n0, m0, end, F, GATHER, NT)


@gluon.jit
def right_operand(ring, slot, NT: gl.constexpr):
    """NT rows of x in a slot, as a right operand."""
    x = ring.index(slot)
    if NT != x.shape[0]:
        x = x.slice(0, NT, dim=0)
    return x.permute((1, 0))
