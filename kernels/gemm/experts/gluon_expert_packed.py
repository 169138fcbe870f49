"""A mixture's prompt on Hopper, packed w: wgmma fed from registers, x by TMA.

    words -> registers -> (code - zero) * scale -> left operand, 64 k at a time, as wgmma_gemm.py
    BROAD: tiles of 256 rows of x, 128 of w: words are unpacked half as often; not of gated rows
    x [128, 64 columns], sorted by expert (`expert_blocks.gather_kernel`) -> TMA -> ring of STAGES

The first warpgroup asks for x, STAGES - BACK slots ahead, also across items. Legend as in
gluon_expert_item.py; `height` 16-row blocks of an expert's w, `every` of all experts, `groups` of
128 k. SYMMETRIC "e2m1": MXFP4's words, code * scale -> left operand (gluon_e2m1.py).
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM300
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.experts.gluon_expert_item import (
    DEEP,
    REGISTERS,
    ROWS,
    TAIL,
    finish_item,
    item_of,
    right_operand,
    tma_load,
)
from llmpq.kernels.gemm.gluon.gluon_e2m1 import e2m1_operand
from llmpq.kernels.gemm.gluon.gluon_load import load, prefetch_ahead
from llmpq.kernels.gemm.gluon.gluon_unpack import operand, splat, zero_constants

FAR = gl.constexpr(4)
"""k-groups between the L2's request for words and their use."""


@gluon.constexpr_function
def _back(broad):
    """Slots by which x is asked for less early than the ring allows: so far may they drift."""
    return 3 if broad else 2


@gluon.jit
def _words(
    ws,
    e,
    n_tile,
    group,
    WG: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    FUSE: gl.constexpr,
    BROAD: gl.constexpr,
):
    """Words, scales and zeros of a warpgroup's two times 64 rows of one k-group."""
    P0, P1, S, Z, height, every, groups = ws
    first, second = _block(e, n_tile, height, WG, FUSE, BROAD)
    some = load(P0, P1, S, Z, first, every, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)
    if not BROAD:
        some = some + load(
            P0, P1, S, Z, second, every, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC
        )
    return some


@gluon.jit
def _block(e, n_tile, height, WG: gl.constexpr, FUSE: gl.constexpr, BROAD: gl.constexpr):
    """The 16-row blocks with which both halves of a warpgroup's rows begin; BROAD: the only one."""
    if FUSE:
        first = e * height + n_tile * 8 + WG * 4
        return first, first + height // 2
    elif BROAD:
        first = e * height + n_tile * 8 + WG * 4
        return first, first
    else:
        first = e * height + n_tile * 16 + WG * 8
        return first, first + 4


@gluon.jit
def _ahead(
    ws,
    e,
    n_tile,
    group,
    WG: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    FUSE: gl.constexpr,
    BROAD: gl.constexpr,
):
    """Bring what `_words` will load to the L2."""
    P0, P1, S, Z, height, every, groups = ws
    first, second = _block(e, n_tile, height, WG, FUSE, BROAD)
    prefetch_ahead(P0, P1, S, Z, first, every, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)
    if not BROAD:
        prefetch_ahead(P0, P1, S, Z, second, every, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)


@gluon.jit
def _ask(x_desc, ring, ready, slot, m0, k, pred, BLOCK: gl.constexpr):
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * BLOCK * DEEP, pred=pred)
    tma_load(x_desc, [m0, k * DEEP], bar, ring.index(slot), pred=pred)


@gluon.jit
def _packed_item(
    xs,
    outs,
    ws,
    ahead,
    step,
    here,
    then,
    N,
    F,
    WG: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    BROAD: gl.constexpr,
    BLOCK: gl.constexpr,
    NT: gl.constexpr,
):
    """One item of a warpgroup; returns the next one's first words and the next step."""
    BACK: gl.constexpr = _back(BROAD)
    x_desc, ring, ready, free = xs
    e, m0, end, n_tile = here
    e2, m2, n_tile2, more = then
    groups = ws[6]
    DT: gl.constexpr = x_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    PARTS: gl.constexpr = 1 if BROAD else 2  # times 64 rows of w
    acc = ()
    for _part in gl.static_range(PARTS):
        acc = acc + (warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC)),)
    before = gl.zeros([64, 64], DT, layout=LEFT)
    slots = groups * 2
    for group in range(groups):
        now = ahead
        ahead = _words(
            ws,
            e,
            n_tile,
            gl.minimum(group + 1, groups - 1),
            WG,
            BITS,
            GROUPED,
            SYMMETRIC,
            FUSE,
            BROAD,
        )
        far = gl.minimum(group + FAR, groups - 1)
        _ahead(ws, e, n_tile, far, WG, BITS, GROUPED, SYMMETRIC, FUSE, BROAD)
        for c in gl.static_range(2 * PARTS):
            slot = step % STAGES
            if c % PARTS == 0:
                if WG == 0:
                    k = group * 2 + c // PARTS + STAGES - BACK
                    if step >= BACK:
                        mbarrier.wait(
                            free.index((step - BACK) % STAGES), (step - BACK) // STAGES % 2
                        )
                    _ask(
                        x_desc,
                        ring,
                        ready,
                        (step + STAGES - BACK) % STAGES,
                        gl.where(k < slots, m0, m2),
                        gl.where(k < slots, k, k - slots),
                        (k < slots) | more,
                        BLOCK,
                    )
                mbarrier.wait(ready.index(slot), step // STAGES % 2)
            words, scale, zero = now[c % PARTS]
            if SYMMETRIC == "e2m1":
                w = e2m1_operand(words[0], scale, c // PARTS, DT)
            else:
                zeros = zero_constants(zero, BITS, DT, SYMMETRIC)
                w = operand(words, splat(scale), zeros, c // PARTS, BITS, DT, SYMMETRIC)
            a = gl.convert_layout(w, LEFT, assert_trivial=True)
            made = warpgroup_mma(a, right_operand(ring, slot, NT), acc[c % PARTS], is_async=True)
            warpgroup_mma_wait(1, deps=[before])
            before = a
            acc = acc[: c % PARTS] + (made,) + acc[c % PARTS + 1 :]
            if c % PARTS == 0:  # the slot before is multiplied
                bar = free.index((step + STAGES - 1) % STAGES)
                mbarrier.arrive(bar, pred=(group > 0) | (c > 0))
            if c % PARTS == PARTS - 1:
                step += 1
    done = warpgroup_mma_wait(0, deps=acc + (before,))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    ahead = _first(ws, e2, n_tile2, WG, BITS, GROUPED, SYMMETRIC, FUSE, BROAD)
    finish_item(done[:PARTS], outs, e, m0, end, n_tile, N, F, WG, FUSE, ACT, HAS_BIAS, GATHER, NT)
    return ahead, step


@gluon.jit
def _first(
    ws,
    e,
    n_tile,
    WG: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    FUSE: gl.constexpr,
    BROAD: gl.constexpr,
):
    """Load an item's first words and bring the next ones to the L2."""
    loaded = _words(ws, e, n_tile, e * 0, WG, BITS, GROUPED, SYMMETRIC, FUSE, BROAD)
    for i in gl.static_range(1, FAR):
        group = gl.minimum(e * 0 + i, ws[6] - 1)
        _ahead(ws, e, n_tile, group, WG, BITS, GROUPED, SYMMETRIC, FUSE, BROAD)
    return loaded


@gluon.jit
def _packed(
    common,
    WG: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    BROAD: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warpgroup's share of packed items."""
    BACK: gl.constexpr = _back(BROAD)
    xs, outs, ws, blocks, count, N, F, tiles = common
    x_desc, ring, ready, _free = xs
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total, programs = gl.load(count) * tiles, gl.num_programs(0)
    e, m0, end, n_tile = item_of(gl.program_id(0), blocks, total, tiles, BLOCK)
    ahead = _first(ws, e, n_tile, WG, BITS, GROUPED, SYMMETRIC, FUSE, BROAD)
    if WG == 0:
        for slot in gl.static_range(STAGES - BACK):
            _ask(x_desc, ring, ready, slot, m0, slot, gl.program_id(0) < total, BLOCK)
    step = 0
    for item in range(gl.program_id(0), total, programs):
        e2, m2, end2, n_tile2 = item_of(item + programs, blocks, total, tiles, BLOCK)
        here, then = (e, m0, end, n_tile), (e2, m2, n_tile2, item + programs < total)
        if end - m0 <= TAIL:
            ahead, step = _packed_item(
                xs,
                outs,
                ws,
                ahead,
                step,
                here,
                then,
                N,
                F,
                WG,
                BITS,
                GROUPED,
                SYMMETRIC,
                STAGES,
                FUSE,
                ACT,
                HAS_BIAS,
                GATHER,
                BROAD,
                BLOCK,
                TAIL,
            )
        else:
            if BROAD:
                if end - m0 <= ROWS:
                    ahead, step = _packed_item(
                        xs,
                        outs,
                        ws,
                        ahead,
                        step,
                        here,
                        then,
                        N,
                        F,
                        WG,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        STAGES,
                        FUSE,
                        ACT,
                        HAS_BIAS,
                        GATHER,
                        BROAD,
                        BLOCK,
                        ROWS,
                    )
                else:
                    ahead, step = _packed_item(
                        xs,
                        outs,
                        ws,
                        ahead,
                        step,
                        here,
                        then,
                        N,
                        F,
                        WG,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        STAGES,
                        FUSE,
                        ACT,
                        HAS_BIAS,
                        GATHER,
                        BROAD,
                        BLOCK,
                        BLOCK,
                    )
            else:  # a third body that is the second makes ptxas wait for every product
                ahead, step = _packed_item(
                    xs,
                    outs,
                    ws,
                    ahead,
                    step,
                    here,
                    then,
                    N,
                    F,
                    WG,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    STAGES,
                    FUSE,
                    ACT,
                    HAS_BIAS,
                    GATHER,
                    BROAD,
                    BLOCK,
                    BLOCK,
                )
        e, m0, end, n_tile = e2, m2, end2, n_tile2


@gluon.jit(do_not_specialize=["limit", "slope", "height", "every", "groups", "tiles"])
def packed_kernel(
    x_desc,
    P0,
    P1,
    S,
    Z,
    BIAS,
    Y,
    order,
    blocks,
    count,
    N,
    F,
    height,
    every,
    groups,
    tiles,
    limit,
    slope,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    BROAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """Packed w, `every` block of all experts; x [C, K] in boxes of [128, 64]."""
    DT: gl.constexpr = x_desc.dtype
    BLOCK: gl.constexpr = 256 if BROAD else 128
    ring = gl.allocate_shared_memory(DT, [STAGES, BLOCK, DEEP], x_desc.layout)
    staging = gl.allocate_shared_memory(DT, [2, BLOCK, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    outs = (staging, Y, BIAS, order, limit, slope)
    xs, ws = (x_desc, ring, ready, free), (P0, P1, S, Z, height, every, groups)
    common = (xs, outs, ws, blocks, count, N, F, tiles)
    gl.warp_specialize(
        [
            (
                _packed,
                (
                    common,
                    W0,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    STAGES,
                    FUSE,
                    ACT,
                    HAS_BIAS,
                    GATHER,
                    BROAD,
                    BLOCK,
                    PDL,
                ),
            ),
            (
                _packed,
                (
                    common,
                    W1,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                    STAGES,
                    FUSE,
                    ACT,
                    HAS_BIAS,
                    GATHER,
                    BROAD,
                    BLOCK,
                    PDL,
                ),
            ),
        ],
        [4],
        [REGISTERS.value],
    )
