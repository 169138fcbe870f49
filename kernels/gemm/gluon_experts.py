"""Products of a mixture's experts with a prompt's rows on Hopper: x by TMA, wgmma, no gaps.

    program     persistent; an item is a block of `expert_blocks.py` (128 rows of x, or 64 where an
                expert has no more left) by OWN rows of w, those of an expert one after the other
    2 warpgroups, each two times 64 rows of w: FUSE, 64 gate rows and the 64 up rows beside them
    x           [128, 64 columns] by TMA into a ring of STAGES
    packed w    words -> registers -> (code - zero) * scale -> left operand, as gluon_kernel.py;
                the first warpgroup asks for x
    16-bit w    [64, 64] by TMA beside x; a warp of its own asks for both

What leaves passes through shared memory once, so that rows of y are written 16 bytes a lane: y's
rows past an expert's last are another program's. x lies sorted by expert
(`expert_blocks.gather_kernel`).

Legend: C pairs, K in, N out, F rows of y (N, or N / 2 gated); `height` 16-row blocks of an expert's
w, `groups` of 128 k, `slots` of 64 k.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.gated import gated
from llmpq.kernels.gemm.gluon_load import ask_ahead, load
from llmpq.kernels.gemm.gluon_unpack import operand, splat, zero_constants

# Triton's names since 3.9, else those of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)

ROWS, TAIL, DEEP = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64)
"""Rows of x of a block, of an expert's last where it has no more; columns of a slot."""
FAR = gl.constexpr(4)
"""k-groups between the L2's request for words and their use."""
REGISTERS = gl.constexpr(256)


@gluon.jit
def _item(item, blocks, total, tiles):
    """An item's expert, first row of x, its expert's end row, tile of w; past the end: the last."""
    item = gl.minimum(item, total - 1)
    at = blocks + item // tiles * 4
    e, first, end, before = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    own = (end - first + ROWS - 1) // ROWS
    place = item - before * tiles
    return e, first + place % own * ROWS, end, place // own


@gluon.jit
def _leave(
    acc, staging, Y, order, n0, m0, end, F, GATHER: gl.constexpr, NT: gl.constexpr
):  # fmt: skip
    """Store acc [64 of w, NT of x] into y by way of `staging` [128, 64]."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    part = staging
    if NT != ROWS:
        part = staging.slice(0, NT, dim=0)
    _barrier()  # what was there before has been read
    part.permute((1, 0)).store(acc.to(Y.dtype.element_ty))
    _barrier()
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
def _finish(
    done0, done1, outs, e, m0, end, n_tile, N, F, WG: gl.constexpr, FUSE: gl.constexpr,
    ACT: gl.constexpr, HAS_BIAS: gl.constexpr, GATHER: gl.constexpr, NT: gl.constexpr,
):  # fmt: skip
    """Bias, gate and store both sums of a warpgroup."""
    staging, Y, BIAS, order, limit, slope = outs
    own = staging.index(WG)
    if FUSE:
        n0 = n_tile * 128 + WG * 64
        done0 = _with_bias(done0, BIAS, e.to(gl.int64) * N + n0, F - n0, HAS_BIAS)
        done1 = _with_bias(done1, BIAS, e.to(gl.int64) * N + F + n0, F - n0, HAS_BIAS)
        _leave(gated(done0, done1, limit, slope, ACT), own, Y, order, n0, m0, end, F, GATHER, NT)
    else:
        n0 = n_tile * 256 + WG * 128
        done0 = _with_bias(done0, BIAS, e.to(gl.int64) * N + n0, F - n0, HAS_BIAS)
        _leave(done0, own, Y, order, n0, m0, end, F, GATHER, NT)
        done1 = _with_bias(done1, BIAS, e.to(gl.int64) * N + n0 + 64, F - n0 - 64, HAS_BIAS)
        _leave(done1, own, Y, order, n0 + 64, m0, end, F, GATHER, NT)


@gluon.jit
def _right(ring, slot, NT: gl.constexpr):
    x = ring.index(slot)
    if NT != ROWS:
        x = x.slice(0, NT, dim=0)
    return x.permute((1, 0))


@gluon.jit
def _dense_item(
    xs, outs, step, e, m0, end, n_tile, N, F, slots, WG: gl.constexpr, STAGES: gl.constexpr,
    FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr, GATHER: gl.constexpr,
    NT: gl.constexpr,
):  # fmt: skip
    """One item of a warpgroup, NT rows of x; returns the next step."""
    ring, ring_w, ready, free = xs
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NT, 16])
    acc0 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    acc1 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    for k in range(slots):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES % 2)
        x = _right(ring, slot, NT)
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
    _finish(
        done[0], done[1], outs, e, m0, end, n_tile, N, F, WG, FUSE, ACT, HAS_BIAS, GATHER, NT
    )  # fmt: skip
    return step


@gluon.jit
def _dense(
    common, WG: gl.constexpr, STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATHER: gl.constexpr, FREE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's share of 16-bit items."""
    xs, outs, told, _x_desc, _w_desc, blocks, count, N, F, slots, tiles = common
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = gl.load(count) * tiles
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < total:
        e, m0, end, n_tile = _item(item, blocks, total, tiles)
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
        item = _hear(told, turn) if FREE else item + gl.num_programs(0)
        turn += 1


@gluon.jit
def _tell(told, turn, item):
    """Say which item comes after this program's item number `turn`."""
    ids, known, taken = told
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if turn >= 2:
        mbarrier.wait(taken.index(turn % 2), (turn // 2 - 1) % 2)
    ids.index(turn % 2).store(gl.zeros([1], gl.int32, layout=ONE) + item)
    _barrier()
    mbarrier.arrive(known.index(turn % 2))


@gluon.jit
def _hear(told, turn):
    ids, known, taken = told
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(known.index(turn % 2), turn // 2 % 2)
    item = gl.sum(ids.index(turn % 2).load(ALL), 0)
    _barrier()  # every thread has read it
    mbarrier.arrive(taken.index(turn % 2))
    return item


@gluon.jit
def _request(
    common, STAGES: gl.constexpr, FUSE: gl.constexpr, FREE: gl.constexpr, PDL: gl.constexpr
):
    """The warp that asks for x and 16-bit w, and FREE, takes the next item that nobody has."""
    xs, _outs, told, x_desc, w_desc, blocks, count, N, F, slots, tiles = common
    ring, ring_w, ready, free = xs
    if PDL:
        gdc_wait()
    total, programs = gl.load(count) * tiles, gl.num_programs(0)
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < total:
        e, m0, _end, n_tile = _item(item, blocks, total, tiles)
        row = e * N + n_tile * (128 if FUSE else 256)
        for k in range(slots):
            slot = step % STAGES
            if step >= STAGES:
                mbarrier.wait(free.index(slot), (step // STAGES - 1) % 2)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * (ROWS + 256) * DEEP)
            _tma_load(x_desc, [m0, k * DEEP], bar, ring.index(slot))
            for i in gl.static_range(4):
                if FUSE:  # of each warpgroup gate rows, up rows
                    own = row + i // 2 * 64 + i % 2 * F
                else:
                    own = row + i * 64
                _tma_load(w_desc, [own, k * DEEP], bar, ring_w.index(slot * 4 + i))
            step += 1
        if FREE:
            item = gl.atomic_add(count + 1, 1, sem="relaxed") + programs
            _tell(told, turn, item)
        else:
            item += programs
        turn += 1
    if FREE:  # the last program to end leaves zeros
        if gl.atomic_add(count + 2, 1, sem="acq_rel") == programs - 1:
            gl.store(count + 1, 0)
            gl.store(count + 2, 0)


@gluon.jit(do_not_specialize=["limit", "slope", "slots", "tiles"])
def dense_kernel(
    x_desc, w_desc, BIAS, Y, order, blocks, count, N, F, slots, tiles, limit, slope,
    STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr, FREE: gl.constexpr, PDL: gl.constexpr,
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
    ids = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    xs = (ring, ring_w, ready, free)
    told = (ids, known, taken)
    common = (xs, outs, told, x_desc, w_desc, blocks, count, N, F, slots, tiles)
    gl.warp_specialize([
        (_dense, (common, W0, STAGES, FUSE, ACT, HAS_BIAS, GATHER, FREE, PDL)),
        (_dense, (common, W1, STAGES, FUSE, ACT, HAS_BIAS, GATHER, FREE, PDL)),
        (_request, (common, STAGES, FUSE, FREE, PDL)),
    ], [4, 1], [REGISTERS.value, REGISTERS.value])  # fmt: skip


@gluon.jit
def _words(
    ws, e, n_tile, group, WG: gl.constexpr, BITS: gl.constexpr, GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr, FUSE: gl.constexpr,
):  # fmt: skip
    """Words, scales and zeros of a warpgroup's two times 64 rows of one k-group."""
    P0, P1, S, Z, height, count_blocks, groups = ws
    first, second = _block(e, n_tile, height, WG, FUSE)
    return load(
        P0, P1, S, Z, first, count_blocks, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC
    ) + load(P0, P1, S, Z, second, count_blocks, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)


@gluon.jit
def _block(e, n_tile, height, WG: gl.constexpr, FUSE: gl.constexpr):
    """The 16-row blocks with which both halves of a warpgroup's rows begin."""
    if FUSE:
        first = e * height + n_tile * 8 + WG * 4
        return first, first + height // 2
    else:
        first = e * height + n_tile * 16 + WG * 8
        return first, first + 4


@gluon.jit
def _ahead(
    ws, e, n_tile, group, WG: gl.constexpr, BITS: gl.constexpr, GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr, FUSE: gl.constexpr,
):  # fmt: skip
    """Bring what `_words` will load to the L2."""
    P0, P1, S, Z, height, count_blocks, groups = ws
    first, second = _block(e, n_tile, height, WG, FUSE)
    ask_ahead(P0, P1, S, Z, first, count_blocks, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)
    ask_ahead(P0, P1, S, Z, second, count_blocks, groups, group, 0, 1, BITS, GROUPED, SYMMETRIC)


@gluon.jit
def _ask(x_desc, ring, ready, slot, m0, k, pred):
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * ROWS * DEEP, pred=pred)
    _tma_load(x_desc, [m0, k * DEEP], bar, ring.index(slot), pred=pred)


@gluon.jit
def _packed_item(
    xs, outs, ws, ahead, step, here, then, N, F, WG: gl.constexpr, BITS: gl.constexpr,
    GROUPED: gl.constexpr, SYMMETRIC: gl.constexpr, STAGES: gl.constexpr, FUSE: gl.constexpr,
    ACT: gl.constexpr, HAS_BIAS: gl.constexpr, GATHER: gl.constexpr, NT: gl.constexpr,
):  # fmt: skip
    """One item of a warpgroup; returns the next one's first words and the next step."""
    x_desc, ring, ready, free = xs
    e, m0, end, n_tile = here
    e2, m2, n_tile2, more = then
    groups = ws[6]
    DT: gl.constexpr = x_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    acc0 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    acc1 = warpgroup_mma_init(gl.zeros([64, NT], gl.float32, layout=ACC))
    before = gl.zeros([64, 64], DT, layout=LEFT)
    slots = groups * 2
    for group in range(groups):
        now = ahead
        ahead = _words(
            ws, e, n_tile, gl.minimum(group + 1, groups - 1), WG, BITS, GROUPED, SYMMETRIC, FUSE
        )  # fmt: skip
        far = gl.minimum(group + FAR, groups - 1)
        _ahead(ws, e, n_tile, far, WG, BITS, GROUPED, SYMMETRIC, FUSE)
        for c in gl.static_range(4):
            slot = step % STAGES
            if c % 2 == 0:
                if WG == 0:
                    k = group * 2 + c // 2 + STAGES - 2
                    if step >= 2:
                        mbarrier.wait(free.index((step - 2) % STAGES), (step - 2) // STAGES % 2)
                    _ask(
                        x_desc, ring, ready, (step + STAGES - 2) % STAGES,
                        gl.where(k < slots, m0, m2), gl.where(k < slots, k, k - slots),
                        (k < slots) | more,
                    )  # fmt: skip
                mbarrier.wait(ready.index(slot), step // STAGES % 2)
            words, scale, zero = now[c % 2]
            scales = splat(scale)
            zeros = zero_constants(zero, BITS, DT, SYMMETRIC)
            a = gl.convert_layout(
                operand(words, scales, zeros, c // 2, BITS, DT, SYMMETRIC), LEFT,
                assert_trivial=True,
            )  # fmt: skip
            if c % 2 == 0:
                acc0 = warpgroup_mma(a, _right(ring, slot, NT), acc0, is_async=True)
            else:
                acc1 = warpgroup_mma(a, _right(ring, slot, NT), acc1, is_async=True)
            warpgroup_mma_wait(1, deps=[before])
            before = a
            if c % 2 == 0:  # the slot before is multiplied
                bar = free.index((step + STAGES - 1) % STAGES)
                mbarrier.arrive(bar, pred=(group > 0) | (c > 0))
            else:
                step += 1
    done = warpgroup_mma_wait(0, deps=(acc0, acc1, before))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
    ahead = _first(ws, e2, n_tile2, WG, BITS, GROUPED, SYMMETRIC, FUSE)
    _finish(
        done[0], done[1], outs, e, m0, end, n_tile, N, F, WG, FUSE, ACT, HAS_BIAS, GATHER, NT
    )  # fmt: skip
    return ahead, step


@gluon.jit
def _first(
    ws, e, n_tile, WG: gl.constexpr, BITS: gl.constexpr, GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr, FUSE: gl.constexpr,
):  # fmt: skip
    """Load an item's first words and bring the next ones to the L2."""
    loaded = _words(ws, e, n_tile, e * 0, WG, BITS, GROUPED, SYMMETRIC, FUSE)
    for i in gl.static_range(1, FAR):
        group = gl.minimum(e * 0 + i, ws[6] - 1)
        _ahead(ws, e, n_tile, group, WG, BITS, GROUPED, SYMMETRIC, FUSE)
    return loaded


@gluon.jit
def _packed(
    common, WG: gl.constexpr, BITS: gl.constexpr, GROUPED: gl.constexpr, SYMMETRIC: gl.constexpr,
    STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's share of packed items."""
    xs, outs, ws, blocks, count, N, F, tiles = common
    x_desc, ring, ready, _free = xs
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total, programs = gl.load(count) * tiles, gl.num_programs(0)
    e, m0, end, n_tile = _item(gl.program_id(0), blocks, total, tiles)
    ahead = _first(ws, e, n_tile, WG, BITS, GROUPED, SYMMETRIC, FUSE)
    if WG == 0:
        for slot in gl.static_range(STAGES - 2):
            _ask(x_desc, ring, ready, slot, m0, slot, gl.program_id(0) < total)
    step = 0
    for item in range(gl.program_id(0), total, programs):
        e2, m2, end2, n_tile2 = _item(item + programs, blocks, total, tiles)
        here, then = (e, m0, end, n_tile), (e2, m2, n_tile2, item + programs < total)
        if end - m0 <= TAIL:
            ahead, step = _packed_item(
                xs, outs, ws, ahead, step, here, then, N, F, WG, BITS, GROUPED, SYMMETRIC, STAGES,
                FUSE, ACT, HAS_BIAS, GATHER, TAIL,
            )  # fmt: skip
        else:
            ahead, step = _packed_item(
                xs, outs, ws, ahead, step, here, then, N, F, WG, BITS, GROUPED, SYMMETRIC, STAGES,
                FUSE, ACT, HAS_BIAS, GATHER, ROWS,
            )  # fmt: skip
        e, m0, end, n_tile = e2, m2, end2, n_tile2


@gluon.jit(do_not_specialize=["limit", "slope", "height", "every", "groups", "tiles"])
def packed_kernel(
    x_desc, P0, P1, S, Z, BIAS, Y, order, blocks, count, N, F, height, every, groups, tiles,
    limit, slope, BITS: gl.constexpr, GROUPED: gl.constexpr, SYMMETRIC: gl.constexpr,
    STAGES: gl.constexpr, FUSE: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Packed w, `every` block of all experts; x [C, K] in boxes of [128, 64]."""
    DT: gl.constexpr = x_desc.dtype
    ring = gl.allocate_shared_memory(DT, [STAGES, ROWS, DEEP], x_desc.layout)
    staging = gl.allocate_shared_memory(DT, [2, ROWS, 64], x_desc.layout)
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
    gl.warp_specialize([
        (_packed, (common, W0, BITS, GROUPED, SYMMETRIC, STAGES, FUSE, ACT, HAS_BIAS, GATHER, PDL)),
        (_packed, (common, W1, BITS, GROUPED, SYMMETRIC, STAGES, FUSE, ACT, HAS_BIAS, GATHER, PDL)),
    ], [4], [REGISTERS.value])  # fmt: skip
