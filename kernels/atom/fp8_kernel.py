"""W4A4 for many tokens on Hopper, in Gluon: fp8 tensor cores fed by one warp, two groups of four.

    program   128 rows of w x BM tokens, tile after tile; with SPLIT the K of the last tiles, which
              fill no wave of programs, is shared out (gemm/gluon/gluon_shares.py)
    warp      fetches k-groups of 128 into a ring through the copy engine: A, w, A's scales
    4 warps   64 rows of w: nibbles -> e4m3 in registers -> wgmma -> acc += part * scales
    4 warps   the other 64 rows; while one group of warps scales, the other one multiplies

A nibble u = code + 8 becomes the e4m3 number code * 2^-9 by four instructions a word of four
bytes: |u - 8| in subnormals and the first binade, which are one linear scale, and the sign bit.
A's codes are such values, too. All sums stay below 2^14 steps: exact in fp8 tensor cores.

The scales sw[n] sa[m] of a tile are a product too, of K = 16: sa as three bfloat16 values that sum
to it, sw beside each.

What was slower (H200, a layer of Llama-3.1-8B at M = 1024; cuBLAS bf16 = 1, this file 1.02 to 1.05,
1.15 at M = 4096):
    0.6   eight warps in step, one tile of 128 x 128 (or two of 64 tokens a multiprocessor, 0.7)
    0.82  sa and what undoes the nibbles' offset read from shared memory into every thread: 128
          bytes a clock serve both these reads and the tensor cores
    0.84  sa alone read so while products run (a thread's 32 values: 16 loads, 64 products more)
    0.94  256 rows of w a tile, sa read so: a third less traffic from the L2, more waits
    0.99  two halves of 64 tokens, one's products while the other's sums are scaled; 0.4 with the
          next group's words fetched ahead: registers spill
    1.00  the groups of warps in strict turns at the tensor cores (a barrier each way)
ptxas makes products that a loop's next round waits for synchronous (C7514): no pipeline across k.

    A [M, (G + 1) * 128]   bytes: code * 2^-9 as e4m3, the outliers' last 128 as int8
    T [G, 3, MS]           bfloat16: three terms of a token's scale per group; boxes of 16 rows get
                           zeros for the others
    OUTLIER [MS]           float32: its outliers' scale
    P, S                   FRAGMENT planes and scales (atom_weight.py): G groups, then the outliers'
                           high and low nibbles (and a third group, which only the decode form uses)

The channels of a group are stored so that the words of a lane are its fp8 operand, in order
(weights/atom_weight.py `fragment_order`).

M tokens, N = out_features, G groups, BM tokens a tile, S stages.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM113
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from llmpq.kernels.atom.tile_codes import (
    halves,
    lane_operand,
    outlier_bytes,
    thread_barrier,
    tma_copy,
)
from llmpq.kernels.gemm.gluon.gluon_shares import add_shares, segment_of, work


@gluon.jit
def _nibbles(byte, operand: gl.constexpr):
    """code * 2^-9 of the nibbles code + 8, as e4m3."""
    even = gl.inline_asm_elementwise(
        "{.reg .b32 t, u, e, z; mov.b32 e, 0x08080808; mov.b32 z, 0; and.b32 t, $1, 0x0f0f0f0f;"
        "vabsdiff4.u32.u32.u32 t, t, e, z; shl.b32 u, $1, 4; lop3.b32 $0, t, u, 0x80808080, 0xf2;}",
        "=r,r",
        [byte],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    odd = gl.inline_asm_elementwise(
        "{.reg .b32 t, e, z; mov.b32 e, 0x08080808; mov.b32 z, 0; shr.b32 t, $1, 4;"
        "and.b32 t, t, 0x0f0f0f0f; vabsdiff4.u32.u32.u32 t, t, e, z;"
        "lop3.b32 $0, t, $1, 0x80808080, 0xf2;}",
        "=r,r",
        [byte],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    return lane_operand(even, odd, operand).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _fetch(
    a_desc,
    o_desc,
    p_desc,
    t_desc,
    M,
    N,
    whole,
    a_s,
    p_s,
    t_s,
    ao_s,
    po_s,
    full,
    empty,
    ofull,
    oempty,
    G: gl.constexpr,
    OUTLIERS: gl.constexpr,
    SPLIT: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """The fetching warp: k-group after k-group, tile after tile."""
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 128)
    groups = M * 0 + G
    segments, at = work(tiles_m * tiles_n, groups, whole, SPLIT)
    step = 0
    done = 0
    for segment in range(segments):
        tm, tn, first, last, at, _ = segment_of(
            segment, at, tiles_m, tiles_n, groups, whole, GROUP_M
        )
        g0, g1 = (first, last) if SPLIT else (0, G)
        if OUTLIERS:
            if g0 == 0:
                mbarrier.wait(oempty, (done & 1) ^ 1)
                mbarrier.expect(ofull, BM * 128 + 16384)
                tma_copy(o_desc, [tm * BM, G * 128], ofull, ao_s.index(0))
                tma_copy(o_desc, [tm * BM, G * 128 + 64], ofull, ao_s.index(1))
                tma_copy(p_desc, [tn * 8, G * 8, 0], ofull, po_s.index(0))
                tma_copy(p_desc, [tn * 8, G * 8 + 8, 0], ofull, po_s.index(1))
                done += 1
        for g in range(g0, g1):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BM * 160 + 8192)
            tma_copy(p_desc, [tn * 8, g * 8, 0], full.index(stage), p_s.index(stage))
            for i in gl.static_range(2):
                tma_copy(
                    a_desc,
                    [tm * BM, g * 128 + i * 64],
                    full.index(stage),
                    a_s.index(2 * stage + i),
                )
            tma_copy(t_desc, [g, 0, tm * BM], full.index(stage), t_s.index(stage))
            step += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr,
    OUTLIER,
    S,
    BIAS,
    RESIDUAL,
    Y,
    PARTIAL,
    ARRIVED,
    M,
    N,
    whole,
    a_s,
    p_s,
    t_s,
    ao_s,
    po_s,
    full,
    empty,
    ofull,
    oempty,
    G: gl.constexpr,
    SCALES: gl.constexpr,
    OUTLIERS: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Four warps: half of a tile's rows."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 32]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    mma16: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    operand16: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma16, k_width=2)
    term = gl.arange(0, 16, layout=gl.SliceLayout(0, operand16))[None, :]
    packed: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 4, 0]],
        lane_bases=[[0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 8, 128],
    )
    rows_out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 128)
    groups = M * 0 + G
    segments, at = work(tiles_m * tiles_n, groups, whole, SPLIT)
    step = 0
    done = 0
    for segment in range(segments):
        tm, tn, from_g, to_g, at, tile = segment_of(
            segment, at, tiles_m, tiles_n, groups, whole, GROUP_M
        )
        g0, g1 = (from_g, to_g) if SPLIT else (0, G)
        n0 = tn * 128 + HALF * 64
        n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        n = gl.where(n < N, n, 0)
        row = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, operand16))
        row = gl.where(row < N, row, 0)
        w_at = S + (row // 16).to(gl.int64) * (SCALES * 16) + (row % 8) * 2 + row // 8 % 2
        s_at = S + (n // 16).to(gl.int64) * (SCALES * 16) + (n % 8) * 2 + n // 8 % 2
        acc = gl.zeros((64, BM), gl.float32, layout=mma)
        if OUTLIERS:
            if g0 == 0:
                m = tm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, mma))
                sa = gl.load(OUTLIER + m)
                # The low nibbles' scale, in units of the fp8 sums.
                so = gl.load(s_at + (G + 1) * 16).to(gl.float32) * 2.0**-18
                mbarrier.wait(ofull, done & 1)
                highs = halves(po_s.index(0).slice(HALF * 4, 4).load(packed))
                lows = halves(po_s.index(1).slice(HALF * 4, 4).load(packed))
                total = gl.zeros((64, BM), gl.int32, layout=mma)
                for i in gl.static_range(2):
                    w8 = outlier_bytes(highs[i], lows[i], operand)
                    total = warpgroup_mma(w8, ao_s.index(i).permute((1, 0)), total, is_async=True)
                total = warpgroup_mma_wait(0, deps=[total])
                thread_barrier()
                mbarrier.arrive(oempty, count=1)
                acc = total.to(gl.float32) * so[:, None] * sa[None, :]
                done += 1
        sw = gl.load(w_at + g0 * 16)
        for g in range(g0, g1):
            stage = step % STAGES
            sw_next = gl.load(w_at + gl.minimum(g + 1, g1 - 1) * 16)
            wide = sw.to(gl.float32)[:, None]
            sw_high = gl.where(term < 3, wide, 0.0).to(gl.bfloat16)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            first, second = halves(p_s.index(stage).slice(HALF * 4, 4).load(packed))
            # The scales' product runs while the first half's operand is made, that half's while
            # the second's is.
            scale = gl.zeros((64, BM), gl.float32, layout=mma16)
            scale = warpgroup_mma(sw_high, t_s.index(stage).reshape((16, BM)), scale, is_async=True)
            if S.dtype.element_ty == gl.float16:
                # 11 bits of mantissa are two bfloat16 values.
                rest = gl.where(term < 3, wide, 0.0) - sw_high.to(gl.float32)
                scale = warpgroup_mma(
                    rest.to(gl.bfloat16), t_s.index(stage).reshape((16, BM)), scale, is_async=True
                )
            part = gl.zeros((64, BM), gl.float32, layout=mma)
            a = a_s.index(2 * stage).permute((1, 0))
            part = warpgroup_mma(_nibbles(first, operand), a, part, is_async=True)
            a = a_s.index(2 * stage + 1).permute((1, 0))
            part = warpgroup_mma(_nibbles(second, operand), a, part, is_async=True)
            part, scale = warpgroup_mma_wait(0, deps=[part, scale])
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            acc = acc + part * gl.convert_layout(scale, mma, assert_trivial=True)
            sw = sw_next
            step += 1
        last_one = True
        if SPLIT:
            if tile >= whole:
                acc, last_one = add_shares(
                    acc,
                    PARTIAL,
                    ARRIVED,
                    tile - whole,
                    tiles_m * tiles_n - whole,
                    groups,
                    HALF,
                    2,
                    BM,
                )
        if last_one:
            if HAS_BIAS:
                acc = acc + (gl.load(BIAS + n).to(gl.float32) * 2.0**-18)[:, None]
            y = gl.convert_layout((acc * 2.0**18).to(Y.dtype.element_ty).permute((1, 0)), rows_out)
            ym = tm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, rows_out))
            yn = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, rows_out))
            out = ym.to(gl.int64)[:, None] * N + yn[None, :]
            live = (ym < M)[:, None] & (yn < N)[None, :]
            if HAS_RESIDUAL:
                more = gl.load(RESIDUAL + out, mask=live, other=0.0)
                y = (y.to(gl.float32) + more.to(gl.float32)).to(Y.dtype.element_ty)
            gl.store(Y + out, y, mask=live)


@gluon.jit(do_not_specialize=["M", "whole"])
def wgmma_kernel(
    a_desc,
    o_desc,
    p_desc,
    t_desc,
    OUTLIER,
    S,
    BIAS,
    RESIDUAL,
    Y,
    PARTIAL,
    ARRIVED,
    M,
    N,
    whole,
    G: gl.constexpr,
    SCALES: gl.constexpr,
    OUTLIERS: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Y [M, N] = A W^T. Boxes of A: [BM, 64], as e4m3 (a_desc) and int8 (o_desc); of P: 8 KB."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    blocks: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    a_s = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BM, 64], swizzled)
    p_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 8, 8, 128], blocks)
    terms: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    t_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 16, BM], terms)
    ao_s = gl.allocate_shared_memory(gl.int8, [2, BM, 64], swizzled)
    po_s = gl.allocate_shared_memory(gl.uint8, [2, 8, 8, 128], blocks)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ofull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    oempty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ofull, count=1)
    mbarrier.init(oempty, count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0,
                    OUTLIER,
                    S,
                    BIAS,
                    RESIDUAL,
                    Y,
                    PARTIAL,
                    ARRIVED,
                    M,
                    N,
                    whole,
                    a_s,
                    p_s,
                    t_s,
                    ao_s,
                    po_s,
                    full,
                    empty,
                    ofull,
                    oempty,
                    G,
                    SCALES,
                    OUTLIERS,
                    SPLIT,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    BM,
                    STAGES,
                    GROUP_M,
                ),
            ),
            (
                _multiply,
                (
                    1,
                    OUTLIER,
                    S,
                    BIAS,
                    RESIDUAL,
                    Y,
                    PARTIAL,
                    ARRIVED,
                    M,
                    N,
                    whole,
                    a_s,
                    p_s,
                    t_s,
                    ao_s,
                    po_s,
                    full,
                    empty,
                    ofull,
                    oempty,
                    G,
                    SCALES,
                    OUTLIERS,
                    SPLIT,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    BM,
                    STAGES,
                    GROUP_M,
                ),
            ),
            (
                _fetch,
                (
                    a_desc,
                    o_desc,
                    p_desc,
                    t_desc,
                    M,
                    N,
                    whole,
                    a_s,
                    p_s,
                    t_s,
                    ao_s,
                    po_s,
                    full,
                    empty,
                    ofull,
                    oempty,
                    G,
                    OUTLIERS,
                    SPLIT,
                    BM,
                    STAGES,
                    GROUP_M,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
