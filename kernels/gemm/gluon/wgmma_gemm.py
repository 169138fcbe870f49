"""y = x w^T for many rows of x on Hopper: wgmma fed from registers, x through a TMA ring.

    WGS warpgroups (two or three), each 64 * BH rows of w:
        words -> registers -> (code - zero) * scale -> left operand of wgmma, 64 k at a time
        x [BT + EXTRA rows, 128 k] -> TMA -> rings of STAGES in shared memory -> right operands
    the first one also asks for x: STAGES - 2 k-groups ahead, once all have done with a slot

While the tensor cores multiply 64 k, a warpgroup unpacks the next 64 into other registers and then
waits for the product before: one is always in flight, and warpgroups never synchronise. Programs
are persistent; an item is a tile of 64 * WGS * BH rows of w and BT + EXTRA rows of x (160 are 128
and 32: Triton's shapes are powers of two), or a share of its K. The next item's words and x are on
their way during the epilogue. Shares leave float32 sums in a workspace, the last to arrive adds
them in order: no float atomics.

Legend: M rows of x, K in, N out; `blocks` of 16 rows of w, `groups` of 128 k.
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

from llmpq.kernels.gemm.gluon.gluon_load import load, load_first, prefetch_ahead
from llmpq.kernels.gemm.gluon.gluon_parts import operand_of
from llmpq.kernels.gemm.gluon.gluon_shares import add_shares, segment_of, work

# Triton's names since 3.9, else those of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
_tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)

# All that two warpgroups alone on a multiprocessor can have. Where there is less (three warpgroups,
# two programs a multiprocessor) Triton then moves no registers between warps (setmaxnreg): ptxas
# makes every wgmma synchronous once a warpgroup gives some back below its first share.
REGISTERS = gl.constexpr(256)


@gluon.jit
def _start(tile_m, m_tiles, M, BT: gl.constexpr):
    """First row of a tile of x: tiles end at M, and the first has rows of the second if need be.

    Rows past the end, which TMA fills with zeros, take longer than rows that exist. Those that two
    tiles share are multiplied twice and stored by the second.
    """
    return gl.maximum(tile_m * BT + (M - m_tiles * BT), 0)


@gluon.jit
def _load_x(xs, ready, slot, m0, k, pred, BT: gl.constexpr, EXTRA: gl.constexpr, KS: gl.constexpr):
    """Ask for KS columns of a tile of x."""
    x_desc, ring, x2_desc, ring2 = xs
    bar = ready.index(slot)
    mbarrier.expect(bar, 2 * (BT + EXTRA) * KS, pred=pred)
    _tma_load(x_desc, [m0, k * KS], bar, ring.index(slot), pred=pred)
    if EXTRA:
        _tma_load(x2_desc, [m0 + BT, k * KS], bar, ring2.index(slot), pred=pred)


@gluon.jit
def _ask_x(
    xs,
    ready,
    slot,
    x,
    segments,
    M,
    m_tiles,
    n_tiles,
    groups,
    whole,
    together,
    SPLIT: gl.constexpr,
    BT: gl.constexpr,
    EXTRA: gl.constexpr,
    KS: gl.constexpr,
):
    """Ask for the next KS columns of x; x: segment, first row, column, where both end, what after.

    Returns what to ask for then.
    """
    segment, m0, k, end, after = x
    _load_x(xs, ready, slot, m0, k, segment < segments, BT, EXTRA, KS)
    k += 1
    if k == end:
        segment += 1
        tile_m, _, first, last, after, _ = segment_of(
            segment, after, m_tiles, n_tiles, groups, whole, together, SPLIT
        )
        m0, k, end = _start(tile_m, m_tiles, M, BT + EXTRA), first * (128 // KS), last * (128 // KS)
    return segment, m0, k, end, after


@gluon.jit
def _request(
    common,
    BT: gl.constexpr,
    EXTRA: gl.constexpr,
    KS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warp of its own that asks for x."""
    xs, ready, free = (common[0], common[3], common[7], common[10]), common[4], common[5]
    M, m_tiles, n_tiles = common[20], common[22], common[23]
    groups, whole, together = common[25], common[26], common[27]
    SLOTS: gl.constexpr = 128 // KS
    segments, at = work(m_tiles * n_tiles, groups, whole, SPLIT)
    if PDL:
        gdc_wait()
    step = 0
    for segment in range(segments):
        tile_m, _tile_n, first, last, at, _tile = segment_of(
            segment, at, m_tiles, n_tiles, groups, whole, together, SPLIT
        )
        m0 = _start(tile_m, m_tiles, M, BT + EXTRA)
        for k in range(first * SLOTS, last * SLOTS):
            if step >= STAGES:
                mbarrier.wait(free.index(step % STAGES), (step // STAGES - 1) % 2)
            _load_x(xs, ready, step % STAGES, m0, k, True, BT, EXTRA, KS)
            step += 1


@gluon.jit
def _store(
    acc,
    y_desc,
    head_desc,
    staging,
    BIAS,
    RESIDUAL,
    first,
    m0,
    n0,
    M,
    N,
    rows,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BT: gl.constexpr,
):
    """Add bias and residual to acc [64 of w, BT of x] and store it, transposed, into y."""
    ACC: gl.constexpr = acc.type.layout
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    m = gl.arange(0, BT, layout=gl.SliceLayout(0, ACC))
    if HAS_BIAS:
        bias = gl.load(BIAS + n0 + n, mask=n0 + n < rows, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if HAS_RESIDUAL:
        at = (m0 + m).to(gl.int64)[None, :] * N + (n0 + n)[:, None]
        keep = (m0 + m < M)[None, :] & (n0 + n < rows)[:, None]
        acc += gl.load(RESIDUAL + at, mask=keep, other=0.0).to(gl.float32)
    _barrier()  # the store of the tile before has left the staging buffer in every thread
    staging.permute((1, 0)).store(acc.to(y_desc.dtype))
    fence_async_shared()
    _barrier()
    if first:  # rows that the second tile stores lie past this view's end
        _tma_store(head_desc, [m0, n0], staging)
    else:
        _tma_store(y_desc, [m0, n0], staging)


@gluon.constexpr_function
def _rows_of(chunk, bh, ks):
    """Which 64 rows a chunk multiplies: halves of a k-group take turns where a slot has both."""
    return chunk // 2 if ks == 128 else chunk % bh


@gluon.constexpr_function
def _half_of(chunk, bh, ks):
    return chunk % 2 if ks == 128 else chunk // bh


@gluon.jit
def _replaced(items, item, at: gl.constexpr):
    return items[:at] + (item,) + items[at + 1 :]


@gluon.jit
def _multiply(
    common,
    WG: gl.constexpr,
    WGS: gl.constexpr,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SPLIT: gl.constexpr,
    BH: gl.constexpr,
    BT: gl.constexpr,
    EXTRA: gl.constexpr,
    KS: gl.constexpr,
    STAGES: gl.constexpr,
    FAR: gl.constexpr,
    LATE: gl.constexpr,
    PDL: gl.constexpr,
    ASKER: gl.constexpr,
):
    """One warpgroup: 64 * BH rows of w of every tile."""
    x_desc, y_desc, head_desc, ring, ready, free, staging = common[:7]
    x2_desc, y2_desc, head2_desc, ring2, staging2 = common[7:12]
    P0, P1, S, Z, BIAS, RESIDUAL, PARTIAL, ARRIVED = common[12:20]
    M, N, m_tiles, n_tiles, blocks, groups, whole, together = common[20:]
    xs = (x_desc, ring, x2_desc, ring2)
    DT: gl.constexpr = x_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    if EXTRA:
        ACC2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA, 16])
        LEFT2: gl.constexpr = gl.DotOperandLayout(0, ACC2, 2)
    SLOTS: gl.constexpr = 128 // KS  # of a k-group
    CHUNKS: gl.constexpr = 2 * BH // SLOTS  # of a slot
    HIGH: gl.constexpr = 4 * WGS * BH  # 16-row blocks of a tile
    ASKS: gl.constexpr = WG == 0 and not ASKER
    rest = m_tiles * n_tiles - whole
    segments, at = work(m_tiles * n_tiles, groups, whole, SPLIT)
    tile_m, tile_n, first, last, at, tile = segment_of(
        0, at, m_tiles, n_tiles, groups, whole, together, SPLIT
    )
    if PDL:
        gdc_launch_dependents()
    ahead = load_first(
        P0,
        P1,
        S,
        Z,
        tile_n * HIGH,
        blocks,
        groups,
        first,
        last,
        WG,
        BH,
        BITS,
        GROUPED,
        SYMMETRIC,
        FAR,
    )
    if PDL:  # words are no kernel's output; everything else may be
        gdc_wait()
    if ASKS:  # the next x to ask for
        x = (0, _start(tile_m, m_tiles, M, BT + EXTRA), first * SLOTS, last * SLOTS, at)
        for slot in gl.static_range(STAGES - 2):
            x = _ask_x(
                xs,
                ready,
                slot,
                x,
                segments,
                M,
                m_tiles,
                n_tiles,
                groups,
                whole,
                together,
                SPLIT,
                BT,
                EXTRA,
                KS,
            )
    step = 0
    for segment in range(segments):
        block = tile_n * HIGH
        acc = ()
        for _bh in gl.static_range(BH):
            acc = acc + (warpgroup_mma_init(gl.zeros([64, BT], gl.float32, layout=ACC)),)
        if EXTRA:
            tail = gl.zeros([64, EXTRA], gl.float32, layout=ACC2)
        before = gl.zeros([64, 64], DT, layout=LEFT)
        for group in range(first, last):
            now = ahead
            ahead = load(
                P0,
                P1,
                S,
                Z,
                block,
                blocks,
                groups,
                gl.minimum(group + 1, last - 1),
                WG,
                BH,
                BITS,
                GROUPED,
                SYMMETRIC,
            )
            if FAR > 0:
                prefetch_ahead(
                    P0,
                    P1,
                    S,
                    Z,
                    block,
                    blocks,
                    groups,
                    gl.minimum(group + FAR, last - 1),
                    WG,
                    BH,
                    BITS,
                    GROUPED,
                    SYMMETRIC,
                )
            for c in gl.static_range(2 * BH):
                if c % CHUNKS == 0:
                    if ASKS and not LATE:
                        if step >= 2:
                            mbarrier.wait(free.index((step - 2) % STAGES), (step - 2) // STAGES % 2)
                        x = _ask_x(
                            xs,
                            ready,
                            (step + STAGES - 2) % STAGES,
                            x,
                            segments,
                            M,
                            m_tiles,
                            n_tiles,
                            groups,
                            whole,
                            together,
                            SPLIT,
                            BT,
                            EXTRA,
                            KS,
                        )
                    mbarrier.wait(ready.index(step % STAGES), step // STAGES % 2)
                words, scale, zero = now[_rows_of(c, BH, KS)]
                w = operand_of(
                    words, scale, zero, _half_of(c, BH, KS), BITS, DT, SYMMETRIC, GROUPED
                )
                a = gl.convert_layout(w, LEFT, assert_trivial=True)
                right = ring.index(step % STAGES)
                if KS == 128:
                    right = right.slice(_half_of(c, BH, KS) * 64, 64, dim=1)
                if EXTRA:  # first: one product alone is in flight at the loop's end
                    a2 = gl.convert_layout(a, LEFT2, assert_trivial=True)
                    right2 = ring2.index(step % STAGES)
                    if KS == 128:
                        right2 = right2.slice(_half_of(c, BH, KS) * 64, 64, dim=1)
                    made2 = warpgroup_mma(a2, right2.permute((1, 0)), tail, is_async=True)
                    warpgroup_mma_wait(1, deps=[before])
                made = warpgroup_mma(
                    a, right.permute((1, 0)), acc[_rows_of(c, BH, KS)], is_async=True
                )
                if EXTRA:
                    tail = warpgroup_mma_wait(1, deps=[made2])
                else:
                    warpgroup_mma_wait(1, deps=[before])
                before = a
                acc = _replaced(acc, made, _rows_of(c, BH, KS))
                if c % CHUNKS == 0:
                    if ASKS and LATE:
                        if step >= 2:
                            mbarrier.wait(free.index((step - 2) % STAGES), (step - 2) // STAGES % 2)
                        x = _ask_x(
                            xs,
                            ready,
                            (step + STAGES - 2) % STAGES,
                            x,
                            segments,
                            M,
                            m_tiles,
                            n_tiles,
                            groups,
                            whole,
                            together,
                            SPLIT,
                            BT,
                            EXTRA,
                            KS,
                        )
                if c % CHUNKS == 0:  # the slot before is multiplied
                    bar = free.index((step + STAGES - 1) % STAGES)
                    mbarrier.arrive(bar, pred=(group > first) | (c >= CHUNKS))
                if c % CHUNKS == CHUNKS - 1:
                    step += 1
        done = warpgroup_mma_wait(0, deps=acc + (before,))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        m0 = _start(tile_m, m_tiles, M, BT + EXTRA)
        n0, shared = block * 16 + WG * (64 * BH), tile - whole
        tile_m, tile_n, first, last, at, tile = segment_of(
            gl.minimum(segment + 1, segments - 1),
            at,
            m_tiles,
            n_tiles,
            groups,
            whole,
            together,
            SPLIT,
        )
        ahead = load_first(
            P0,
            P1,
            S,
            Z,
            tile_n * HIGH,
            blocks,
            groups,
            first,
            last,
            WG,
            BH,
            BITS,
            GROUPED,
            SYMMETRIC,
            FAR,
        )
        tma.store_wait(0)
        for bh in gl.static_range(BH):
            sums = done[bh]
            last_one = True
            if SPLIT:
                if shared >= 0:
                    sums, last_one = add_shares(
                        sums, PARTIAL, ARRIVED, shared, rest, groups, WG * BH + bh, WGS * BH, BT
                    )
            if last_one:
                _store(
                    sums,
                    y_desc,
                    head_desc,
                    staging.index(WG * BH + bh),
                    BIAS,
                    RESIDUAL,
                    m0 == 0,
                    m0,
                    n0 + bh * 64,
                    M,
                    N,
                    blocks * 16,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    BT,
                )
        if EXTRA:
            last_one = True
            if SPLIT:
                if shared >= 0:
                    tail, last_one = add_shares(
                        tail,
                        PARTIAL + gl.num_programs(0) * (2 * WGS * 64 * BT),
                        ARRIVED + rest * WGS,
                        shared,
                        rest,
                        groups,
                        WG,
                        WGS,
                        EXTRA,
                    )
            if last_one:
                _store(
                    tail,
                    y2_desc,
                    head2_desc,
                    staging2.index(WG),
                    BIAS,
                    RESIDUAL,
                    m0 == 0,
                    m0 + BT,
                    n0,
                    M,
                    N,
                    blocks * 16,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    EXTRA,
                )
    tma.store_wait(0)


_SIZES = ["M", "N", "m_tiles", "n_tiles", "blocks", "groups", "whole", "together"]


@gluon.jit(do_not_specialize=_SIZES)
def wgmma_gemm_kernel(
    x_desc,
    y_desc,
    head_desc,
    x2_desc,
    y2_desc,
    head2_desc,
    P0,
    P1,
    S,
    Z,
    BIAS,
    RESIDUAL,
    PARTIAL,
    ARRIVED,
    M,
    N,
    m_tiles,
    n_tiles,
    blocks,
    groups,
    whole,
    together,
    BITS: gl.constexpr,
    GROUPED: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SPLIT: gl.constexpr,
    BH: gl.constexpr,
    BT: gl.constexpr,
    EXTRA: gl.constexpr,
    KS: gl.constexpr,
    STAGES: gl.constexpr,
    FAR: gl.constexpr,
    LATE: gl.constexpr,
    PDL: gl.constexpr,
    WGS: gl.constexpr,
    ASKER: gl.constexpr,
):
    """y = x w^T over a persistent one-dimensional grid of WGS times 4 warps.

    Descriptors: x [M, K] in boxes of [BT, KS]; y [M, 16 * blocks] in boxes of [BT, 64], and
    those of its rows that the first tile of x stores. The EXTRA rows of a tile, if any, have their
    own descriptors, ring and sums.
    """
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BT, KS], x_desc.layout)
    staging = gl.allocate_shared_memory(y_desc.dtype, [WGS * BH, BT, 64], y_desc.layout)
    ring2 = ring
    staging2 = staging
    if EXTRA:
        ring2 = gl.allocate_shared_memory(x_desc.dtype, [STAGES, EXTRA, KS], x_desc.layout)
        staging2 = gl.allocate_shared_memory(y_desc.dtype, [WGS, EXTRA, 64], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=WGS)
    fence_async_shared()
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    W2: gl.constexpr = 2
    common = (
        x_desc,
        y_desc,
        head_desc,
        ring,
        ready,
        free,
        staging,
        x2_desc,
        y2_desc,
        head2_desc,
        ring2,
        staging2,
        P0,
        P1,
        S,
        Z,
        BIAS,
        RESIDUAL,
        PARTIAL,
        ARRIVED,
        M,
        N,
        m_tiles,
        n_tiles,
        blocks,
        groups,
        whole,
        together,
    )
    if ASKER:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        common,
                        W0,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
                (
                    _multiply,
                    (
                        common,
                        W1,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
                (_request, (common, BT, EXTRA, KS, STAGES, SPLIT, PDL)),
            ],
            [4, 1],
            [REGISTERS.value, REGISTERS.value],
        )
    elif WGS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        common,
                        W0,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
                (
                    _multiply,
                    (
                        common,
                        W1,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
            ],
            [4],
            [REGISTERS.value],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        common,
                        W0,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
                (
                    _multiply,
                    (
                        common,
                        W1,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
                (
                    _multiply,
                    (
                        common,
                        W2,
                        WGS,
                        BITS,
                        GROUPED,
                        SYMMETRIC,
                        HAS_BIAS,
                        HAS_RESIDUAL,
                        SPLIT,
                        BH,
                        BT,
                        EXTRA,
                        KS,
                        STAGES,
                        FAR,
                        LATE,
                        PDL,
                        ASKER,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS.value] * 2,
        )
