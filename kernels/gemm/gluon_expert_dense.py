"""A mixture's prompt on Hopper, 16-bit w: both operands of wgmma from a ring in shared memory.

    w           [64, 64] by TMA, four a slot: two of each warpgroup (gluon_expert_item.py)
    x           [128, 64 columns] by TMA: it lies sorted by expert
    a warp      asks for both, takes the next item that nobody has, and says so

One product of a warpgroup is always in flight. Legend as in gluon_expert_item.py.
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

from llmpq.kernels.gemm.gluon_expert_item import (
    DEEP,
    LAG,
    REGISTERS,
    ROWS,
    TAIL,
    finish_item,
    group_barrier,
    item_of,
    right_of,
    tma_load,
)


@gluon.jit
def _dense_item(
    xs, outs, step, e, m0, end, n_tile, N, F, slots, WG: gl.constexpr, STAGES: gl.constexpr,
    FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr, GATHER: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """One item of a warpgroup, NT rows of x; returns the next step."""
    ring, ring_w, ready, free, lead = xs
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NT, 16])
    acc0 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    acc1 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    for k in range(slots):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES % 2)
        x = right_of(ring, slot, NT)
        made = warpgroup_mma(ring_w.index(slot * 4 + WG * 2), x, acc0, is_async=True)
        before = warpgroup_mma_wait(1, deps=[acc1])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
        if WG == 0:
            mbarrier.arrive(lead.index(0), pred=step == LAG)
        acc1 = warpgroup_mma(
            ring_w.index(slot * 4 + WG * 2 + 1), x, warpgroup_mma_init(before), is_async=True
        )
        acc0 = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[made]))
        step += 1
    done = warpgroup_mma_wait(0, deps=(acc0, acc1))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    finish_item(
        done, outs, e, m0, end, n_tile, N, F, WG, FUSE, ACT, HAS_BIAS, GATHER, NT
    )  # fmt: skip
    return step


@gluon.jit
def _dense(
    common, WG: gl.constexpr, STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's share of 16-bit items."""
    xs, outs, told, _x_desc, _w_desc, _blocks, _count, N, F, slots, _tiles = common
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e, m0, end, n_tile = _hear(told, 0)
    step, turn = 0, 1
    while end > 0:
        if WG == 1:
            if turn == 1:
                mbarrier.wait(xs[4].index(0), 0)
        if end - m0 <= TAIL:
            step = _dense_item(
                xs, outs, step, e, m0, end, n_tile, N, F, slots, WG, STAGES, FUSE, ACT, HAS_BIAS,
                GATHER, TAIL,
            )  # fmt: skip
        else:
            step = _dense_item(
                xs, outs, step, e, m0, end, n_tile, N, F, slots, WG, STAGES, FUSE, ACT, HAS_BIAS,
                GATHER, ROWS,
            )  # fmt: skip
        e, m0, end, n_tile = _hear(told, turn)
        turn += 1


@gluon.jit
def _tell(told, turn, e, m0, end, n_tile):
    """Say what this program's item number `turn` is; no end row: there is none."""
    facts, known, taken = told
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if turn >= 2:
        mbarrier.wait(taken.index(turn % 2), (turn // 2 - 1) % 2)
    i = gl.arange(0, 4, layout=ONE)
    fact = gl.where(i < 2, gl.where(i == 0, e, m0), gl.where(i == 2, end, n_tile))
    facts.index(turn % 2).store(fact)
    group_barrier()
    mbarrier.arrive(known.index(turn % 2))


@gluon.jit
def _hear(told, turn):
    """Return an item's expert, first row of x, its expert's end row and tile of w."""
    facts, known, taken = told
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    mbarrier.wait(known.index(turn % 2), turn // 2 % 2)
    fact, i = facts.index(turn % 2).load(ALL), gl.arange(0, 4, layout=ALL)
    e, m0 = gl.sum(gl.where(i == 0, fact, 0), 0), gl.sum(gl.where(i == 1, fact, 0), 0)
    end, n_tile = gl.sum(gl.where(i == 2, fact, 0), 0), gl.sum(gl.where(i == 3, fact, 0), 0)
    group_barrier()  # every thread has read it
    mbarrier.arrive(taken.index(turn % 2))
    return e, m0, end, n_tile


@gluon.jit
def _request(common, STAGES: gl.constexpr, FUSE: gl.constexpr, PDL: gl.constexpr):
    """The warp that asks for x and w, and takes the next item that nobody has."""
    xs, _outs, told, x_desc, w_desc, blocks, count, N, F, slots, tiles = common
    if PDL:
        gdc_wait()
    total, programs = gl.load(count) * tiles, gl.num_programs(0)
    step, turn = 0, 1
    item = gl.program_id(0)
    e, m0, end, n_tile = item_of(item, blocks, total, tiles, ROWS)
    _tell(told, 0, e, m0, gl.where(item < total, end, 0), n_tile)
    while item < total:
        row = e * N + n_tile * (128 if FUSE else 256)
        for k in range(2):
            _ask(xs, x_desc, w_desc, m0, row, F, k, step, STAGES, FUSE)
            step += 1
        # What comes next is found while enough is on its way.
        item = gl.atomic_add(count + 1, 1, sem="relaxed") + programs
        e2, m2, end, n_tile = item_of(item, blocks, total, tiles, ROWS)
        _tell(told, turn, e2, m2, gl.where(item < total, end, 0), n_tile)
        turn += 1
        for k in range(2, slots):
            _ask(xs, x_desc, w_desc, m0, row, F, k, step, STAGES, FUSE)
            step += 1
        e, m0 = e2, m2
    if gl.atomic_add(count + 2, 1, sem="acq_rel") == programs - 1:  # who ends last leaves zeros
        gl.store(count + 1, 0)
        gl.store(count + 2, 0)


@gluon.jit
def _ask(
    xs, x_desc, w_desc, m0, row, F, k, step, STAGES: gl.constexpr, FUSE: gl.constexpr
):  # fmt: skip
    """Ask for 64 columns of x and w once the slot is free."""
    ring, ring_w, ready, free, _lead = xs
    slot = step % STAGES
    if step >= STAGES:
        mbarrier.wait(free.index(slot), (step // STAGES - 1) % 2)
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * (ROWS + 256) * DEEP)
    tma_load(x_desc, [m0, k * DEEP], bar, ring.index(slot))
    for i in gl.static_range(4):
        # FUSE: gate rows and up rows of each warpgroup.
        own = i // 2 * 64 + i % 2 * F if FUSE else i * 64
        tma_load(w_desc, [row + own, k * DEEP], bar, ring_w.index(slot * 4 + i))


@gluon.jit(do_not_specialize=["limit", "slope", "slots", "tiles"])
def dense_kernel(
    x_desc, w_desc, BIAS, Y, order, blocks, count, N, F, slots, tiles, limit, slope,
    STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16-bit w [E * N, K] in boxes of [64, 64], x [C, K] in boxes of [128, 64]."""
    DT: gl.constexpr = x_desc.dtype
    ring = gl.allocate_shared_memory(DT, [STAGES, ROWS, DEEP], x_desc.layout)
    ring_w = gl.allocate_shared_memory(DT, [STAGES * 4, 64, DEEP], w_desc.layout)
    staging = gl.allocate_shared_memory(DT, [2, ROWS, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    facts = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(lead.index(0), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(known.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    outs = (staging, Y, BIAS, order, limit, slope)
    xs = (ring, ring_w, ready, free, lead)
    told = (facts, known, taken)
    common = (xs, outs, told, x_desc, w_desc, blocks, count, N, F, slots, tiles)
    gl.warp_specialize([
        (_dense, (common, W0, STAGES, FUSE, ACT, HAS_BIAS, GATHER, PDL)),
        (_dense, (common, W1, STAGES, FUSE, ACT, HAS_BIAS, GATHER, PDL)),
        (_request, (common, STAGES, FUSE, PDL)),
    ], [4, 1], [REGISTERS.value, REGISTERS.value])  # fmt: skip
