"""A mixture's prompt on Hopper, 16-bit w: both operands of wgmma from a ring in shared memory.

    w           [64, 64] by TMA, four a slot: two of each warpgroup (gluon_expert_item.py)
    x           [128, 64 columns] by TMA where it lies sorted by expert; SEEK, with cp.async from
                its tokens' rows, by four warps
    items       the warp that asks for w takes the next free one and publishes it

One product of a warpgroup is always in flight. Legend as in gluon_expert_item.py.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM300
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
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
    group_barrier,
    item_of,
    right_operand,
    tma_load,
)

# Triton's name since 3.9, else that of 3.6.
_copy = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.jit
def _dense_item(
    xs,
    outs,
    step,
    e,
    m0,
    end,
    n_tile,
    N,
    F,
    slots,
    WG: gl.constexpr,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    SEEK: gl.constexpr,
    NT: gl.constexpr,
):
    """One item of a warpgroup, NT rows of x; returns the next step."""
    ring, ring_w, ready, free = xs
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NT, 16])
    acc0 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    acc1 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    for k in range(slots):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES % 2)
        if SEEK:  # cp.async wrote x, wgmma reads it by another way
            fence_async_shared()
        x = right_operand(ring, slot, NT)
        made = warpgroup_mma(ring_w.index(slot * 4 + WG * 2), x, acc0, is_async=True)
        before = warpgroup_mma_wait(1, deps=[acc1])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
        acc1 = warpgroup_mma(
            ring_w.index(slot * 4 + WG * 2 + 1), x, warpgroup_mma_init(before), is_async=True
        )
        acc0 = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[made]))
        step += 1
    done = warpgroup_mma_wait(0, deps=(acc0, acc1))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    finish_item(done, outs, e, m0, end, n_tile, N, F, WG, FUSE, ACT, HAS_BIAS, GATHER, NT)
    return step


@gluon.jit
def _dense(
    common,
    WG: gl.constexpr,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    SEEK: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warpgroup's share of 16-bit items."""
    xs, outs, mailbox, _x_desc, _w_desc, blocks, count, N, F, slots, tiles = common
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = gl.load(count) * tiles
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < total:
        e, m0, end, n_tile = item_of(item, blocks, total, tiles, ROWS)
        if end - m0 <= TAIL:
            step = _dense_item(
                xs,
                outs,
                step,
                e,
                m0,
                end,
                n_tile,
                N,
                F,
                slots,
                WG,
                STAGES,
                FUSE,
                ACT,
                HAS_BIAS,
                GATHER,
                SEEK,
                TAIL,
            )
        else:
            step = _dense_item(
                xs,
                outs,
                step,
                e,
                m0,
                end,
                n_tile,
                N,
                F,
                slots,
                WG,
                STAGES,
                FUSE,
                ACT,
                HAS_BIAS,
                GATHER,
                SEEK,
                ROWS,
            )
        item = _receive(mailbox, turn)
        turn += 1


@gluon.jit
def _publish(mailbox, turn, item, WARPS: gl.constexpr):
    """Say which item comes after this program's item number `turn`."""
    ids, known, taken = mailbox
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if turn >= 2:
        mbarrier.wait(taken.index(turn % 2), (turn // 2 - 1) % 2)
    ids.index(turn % 2).store(gl.zeros([1], gl.int32, layout=ONE) + item)
    group_barrier()
    mbarrier.arrive(known.index(turn % 2))


@gluon.jit
def _receive(mailbox, turn):
    ids, known, taken = mailbox
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(known.index(turn % 2), turn // 2 % 2)
    item = gl.sum(ids.index(turn % 2).load(ALL), 0)
    group_barrier()  # every thread has read it
    mbarrier.arrive(taken.index(turn % 2))
    return item


@gluon.jit
def _rows(X, order, m0, end, top, K):
    """Where 64 columns of the tokens of 128 pairs begin: 16 bytes a lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LANES))
    token = gl.load(order + gl.minimum(m, end - 1)) // top
    k = gl.arange(0, DEEP, layout=gl.SliceLayout(0, LANES))
    return X + (token.to(gl.int64)[:, None] * K + k[None, :])


@gluon.jit
def _request(
    common,
    X,
    order,
    top,
    K,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    SEEK: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that asks for x and 16-bit w, and takes the next free item.

    SEEK: four warps, which gather x from its tokens' rows with cp.async.
    """
    xs, _outs, mailbox, x_desc, w_desc, blocks, count, N, F, slots, tiles = common
    ring, ring_w, ready, free = xs
    if PDL:
        gdc_wait()
    total, programs = gl.load(count) * tiles, gl.num_programs(0)
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < total:
        e, m0, end, n_tile = item_of(item, blocks, total, tiles, ROWS)
        if SEEK:
            at = _rows(X, order, m0, end, top, K)
        row = e * N + n_tile * (128 if FUSE else 256)
        for k in range(slots):
            slot = step % STAGES
            if step >= STAGES:
                mbarrier.wait(free.index(slot), (step // STAGES - 1) % 2)
            bar = ready.index(slot)
            if SEEK:
                mbarrier.expect(bar, 2 * 256 * DEEP)
                _copy(ring.index(slot), at + k * DEEP)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                mbarrier.expect(bar, 2 * (ROWS + 256) * DEEP)
                tma_load(x_desc, [m0, k * DEEP], bar, ring.index(slot))
            for i in gl.static_range(4):
                # FUSE: gate rows and up rows of each warpgroup.
                own = i // 2 * 64 + i % 2 * F if FUSE else i * 64
                tma_load(w_desc, [row + own, k * DEEP], bar, ring_w.index(slot * 4 + i))
            step += 1
        item = gl.atomic_add(count + 1, 1, sem="relaxed") + programs
        _publish(mailbox, turn, item, 4 if SEEK else 1)
        turn += 1
    if gl.atomic_add(count + 2, 1, sem="acq_rel") == programs - 1:  # who ends last leaves zeros
        gl.store(count + 1, 0)
        gl.store(count + 2, 0)


@gluon.jit(do_not_specialize=["limit", "slope", "slots", "tiles", "top"])
def dense_kernel(
    x_desc,
    w_desc,
    X,
    top,
    K,
    BIAS,
    Y,
    order,
    blocks,
    count,
    N,
    F,
    slots,
    tiles,
    limit,
    slope,
    STAGES: gl.constexpr,
    FUSE: gl.constexpr,
    ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr,
    SEEK: gl.constexpr,
    PDL: gl.constexpr,
):
    """16-bit w [E * N, K] in boxes of [64, 64], x [C, K] in boxes of [128, 64]."""
    DT: gl.constexpr = x_desc.dtype
    ring = gl.allocate_shared_memory(DT, [STAGES, ROWS, DEEP], x_desc.layout)
    ring_w = gl.allocate_shared_memory(DT, [STAGES * 4, 64, DEEP], w_desc.layout)
    staging = gl.allocate_shared_memory(DT, [2, ROWS, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ids = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for slot in gl.static_range(2):
        mbarrier.init(known.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=129 if SEEK else 1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    outs = (staging, Y, BIAS, order, limit, slope)
    xs = (ring, ring_w, ready, free)
    mailbox = (ids, known, taken)
    common = (xs, outs, mailbox, x_desc, w_desc, blocks, count, N, F, slots, tiles)
    gl.warp_specialize(
        [
            (_dense, (common, W0, STAGES, FUSE, ACT, HAS_BIAS, GATHER, SEEK, PDL)),
            (_dense, (common, W1, STAGES, FUSE, ACT, HAS_BIAS, GATHER, SEEK, PDL)),
            (_request, (common, X, order, top, K, STAGES, FUSE, SEEK, PDL)),
        ],
        [4, 4 if SEEK else 1],
        [REGISTERS.value, REGISTERS.value],
    )
