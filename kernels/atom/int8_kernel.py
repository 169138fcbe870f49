"""W4A4 with integer scales, for many tokens on Hopper, in Gluon: int8 tensor cores, one sum.

    w8 = code * steps[n, g]     nibbles -> int8 in registers: and, one multiply-add a word, xor
    a8 = code * steps[m, g]     bytes, as `steps_kernel` of round_kernels.py leaves them
    y  = sum(w8 a8) unit[n] unit[m] + sum(w_o a_o) scale_o[n] scale_o[m]

Steps are 1 to 15 in size (atom_rounding.py `integer_scales`), so that |code * steps| <= 120. Sums
of K < 149000 such products stay below 2^31; none is scaled before its last.

    program   128 rows of w x BM tokens, tile after tile
    warp      fetches k-groups of 128 into a ring through the copy engine: A and w, the outliers'
              two nibble planes behind them
    4 warps   64 rows of w: nibbles -> int8 in registers -> wgmma
    4 warps   the other 64 rows

An operand's half is made while the other half, or the last group's,
multiplies: products of one half are always in flight, waits name one, never zero, to a tile's end.

Off by default (`llmpq-quantize --integer-scales`): scales of so few steps cost quality. It stays
because no other form of W4A4 is beyond 1.6 times cuBLAS.

H200, Llama-3.1-8B's gate_up, cuBLAS bf16 beside it: 202 and 332 us at 1024 tokens, 817 and 1397 at
4096 (kernel alone, its prototype). No faster: five stages instead of
eight (210), operands made where the compiler likes, which is behind the wait (212).

    A [M, (G + 1) * 128]   int8: a8, then 128 outliers
    SI [N / 16, G, 16]     int8: steps of w, rows r and r + 8 of a block side by side
    UW [N], UA [MS]        float32: units
    OUTLIER [MS]           float32: the outliers' scale of a token
    P, S                   FRAGMENT planes and scales (atom_weight.py): G groups, then the outliers'
                           high and low nibbles

M tokens, N = out_features, G groups, BM tokens a tile, S stages.
"""

# mypy: ignore-errors
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from llmpq.kernels.atom.tile_codes import (
    halves,
    lane_operand,
    outlier_bytes,
    thread_barrier,
    tma_copy,
)
from llmpq.kernels.gemm.gluon.gluon_shares import segment_of, work


@gluon.jit
def _words(p_s, stage, HALF: gl.constexpr, packed: gl.constexpr, half: gl.constexpr):
    """The nibbles of a k-group's two halves, for 64 rows of w."""
    first, second = halves(p_s.index(stage).slice(HALF * 4, 4).load(packed))
    first = gl.convert_layout(first.reshape((4, 4, 2, 64)), half, assert_trivial=True)
    second = gl.convert_layout(second.reshape((4, 4, 2, 64)), half, assert_trivial=True)
    return first, second


@gluon.jit
def _scaled(byte, low, high, operand: gl.constexpr):
    """code * steps of the nibbles code + 8 of rows `low` (low nibbles) and `high`.

    A byte of u * steps + 128 - 8 * steps neither carries nor borrows. Not pure: an operand is made
    where it stands, between products.
    """
    wide = gl.zeros_like(byte).to(gl.int32)
    low_start = (low * (-0x08080808) + (-0x7F7F7F80))[:, :, :, None] + wide
    high_start = (high * (-0x08080808) + (-0x7F7F7F80))[:, :, :, None] + wide
    even = gl.inline_asm_elementwise(
        "{.reg .b32 t; and.b32 t, $1, 0x0f0f0f0f; mad.lo.u32 t, t, $2, $6;"
        "xor.b32 $0, t, 0x80808080;}",
        "=r,r,r,r,r,r,r,r,r,r",
        [byte, low[:, :, :, None] + wide, low_start],
        dtype=gl.uint8,
        is_pure=False,
        pack=4,
    )
    odd = gl.inline_asm_elementwise(
        "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 t, t, 0x0f0f0f0f; mad.lo.u32 t, t, $2, $6;"
        "xor.b32 $0, t, 0x80808080;}",
        "=r,r,r,r,r,r,r,r,r,r",
        [byte, high[:, :, :, None] + wide, high_start],
        dtype=gl.uint8,
        is_pure=False,
        pack=4,
    )
    return lane_operand(even, odd, operand).to(gl.int8, bitcast=True)


@gluon.jit
def _fetch(
    a_desc,
    p_desc,
    M,
    N,
    a_s,
    p_s,
    full,
    empty,
    G: gl.constexpr,
    OUTLIERS: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """The fetching warp: k-groups, then the outliers' high nibbles beside A's, then low ones."""
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 128)
    tiles = tiles_m * tiles_n
    groups = M * 0 + G
    segments, at = work(tiles, groups, tiles, False)
    step = 0
    for segment in range(segments):
        tm, tn, first, last, at, _ = segment_of(
            segment, at, tiles_m, tiles_n, groups, tiles, GROUP_M
        )
        for g in range(G + (2 if OUTLIERS else 0)):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if g == G + 1:
                mbarrier.expect(full.index(stage), 8192)
                tma_copy(p_desc, [tn * 8, g * 8, 0], full.index(stage), p_s.index(stage))
            else:
                mbarrier.expect(full.index(stage), BM * 128 + 8192)
                tma_copy(p_desc, [tn * 8, g * 8, 0], full.index(stage), p_s.index(stage))
                for i in gl.static_range(2):
                    tma_copy(
                        a_desc,
                        [tm * BM, g * 128 + i * 64],
                        full.index(stage),
                        a_s.index(2 * stage + i),
                    )
            step += 1


@gluon.jit
def _multiply(
    HALF: gl.constexpr,
    SI,
    UW,
    UA,
    OUTLIER,
    S,
    BIAS,
    RESIDUAL,
    Y,
    M,
    N,
    a_s,
    p_s,
    full,
    empty,
    G: gl.constexpr,
    SCALES: gl.constexpr,
    OUTLIERS: gl.constexpr,
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
    packed: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 4, 0]],
        lane_bases=[[0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 8, 128],
    )
    # A half of it: [block, rhi, rlo, c jj k3].
    half: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        lane_bases=[[0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 4, 2, 64],
    )
    rows: gl.constexpr = gl.SliceLayout(3, half)
    rows_out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, rows)))[:, None, None]
    rhi = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, rows)))[None, :, None]
    rlo = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, rows)))[None, None, :]
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 128)
    tiles = tiles_m * tiles_n
    groups = M * 0 + G
    segments, at = work(tiles, groups, tiles, False)
    step = 0
    for segment in range(segments):
        tm, tn, first_g, last_g, at, _ = segment_of(
            segment, at, tiles_m, tiles_n, groups, tiles, GROUP_M
        )
        n0 = tn * 128 + HALF * 64
        n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        n = gl.where(n < N, n, 0)
        m = tm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, mma))
        which = gl.minimum(n0 // 16 + block, N // 16 - 1)
        s_at = SI + which * (G * 16) + (2 * rhi + rlo) * 2
        low = gl.load(s_at).to(gl.int32)
        high = gl.load(s_at + 1).to(gl.int32)
        next_at = s_at + gl.minimum(1, G - 1) * 16
        low_next = gl.load(next_at)
        high_next = gl.load(next_at + 1)
        # The first group by itself, waited for: ptxas (12.8) finds registers for a loop whose sums
        # come from a product, not for one whose sums are zeros or read (C7512).
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        first, second = _words(p_s, stage, HALF, packed, half)
        acc = gl.zeros((64, BM), gl.int32, layout=mma)
        w = _scaled(first, low, high, operand)
        acc = warpgroup_mma(w, a_s.index(2 * stage).permute((1, 0)), acc, is_async=True)
        w = _scaled(second, low, high, operand)
        acc = warpgroup_mma(w, a_s.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        low = low_next.to(gl.int32)
        high = high_next.to(gl.int32)
        step += 1
        acc = warpgroup_mma_init(acc)
        before = stage  # the first round gives back none
        for g in range(1, G):
            stage = step % STAGES
            next_at = s_at + gl.minimum(g + 1, G - 1) * 16
            low_next = gl.load(next_at)
            high_next = gl.load(next_at + 1)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            first, second = _words(p_s, stage, HALF, packed, half)
            w0 = _scaled(first, low, high, operand)
            acc = warpgroup_mma(w0, a_s.index(2 * stage).permute((1, 0)), acc, is_async=True)
            # The last group's second half is done: its registers and its stage are free.
            low, high = warpgroup_mma_wait(1, deps=[low, high])
            if g > 1:
                thread_barrier()
                mbarrier.arrive(empty.index(before), count=1)
            w1 = _scaled(second, low, high, operand)
            acc = warpgroup_mma(w1, a_s.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
            # The first half is done, too.
            low, high = warpgroup_mma_wait(1, deps=[low_next.to(gl.int32), high_next.to(gl.int32)])
            before = stage
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        if G > 1:
            thread_barrier()
            mbarrier.arrive(empty.index(before), count=1)
        y = acc.to(gl.float32) * (gl.load(UW + n)[:, None] * gl.load(UA + m)[None, :])
        if OUTLIERS:
            stage = step % STAGES
            later = (step + 1) % STAGES
            so_at = S + (n // 16).to(gl.int64) * (SCALES * 16) + (n % 8) * 2 + n // 8 % 2
            so = gl.load(so_at + (G + 1) * 16).to(gl.float32)  # the low nibbles'
            sa = gl.load(OUTLIER + m)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            mbarrier.wait(full.index(later), ((step + 1) // STAGES) & 1)
            highs = halves(p_s.index(stage).slice(HALF * 4, 4).load(packed))
            lows = halves(p_s.index(later).slice(HALF * 4, 4).load(packed))
            total = gl.zeros((64, BM), gl.int32, layout=mma)
            for i in gl.static_range(2):
                w = outlier_bytes(highs[i], lows[i], operand)
                a = a_s.index(2 * stage + i).permute((1, 0))
                total = warpgroup_mma(w, a, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(empty.index(later), count=1)
            y = y + total.to(gl.float32) * (so[:, None] * sa[None, :])
            step += 2
        if HAS_BIAS:
            y = y + gl.load(BIAS + n).to(gl.float32)[:, None]
        y = gl.convert_layout(y.to(Y.dtype.element_ty).permute((1, 0)), rows_out)
        ym = tm * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, rows_out))
        yn = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, rows_out))
        out = ym.to(gl.int64)[:, None] * N + yn[None, :]
        live = (ym < M)[:, None] & (yn < N)[None, :]
        if HAS_RESIDUAL:
            more = gl.load(RESIDUAL + out, mask=live, other=0.0)
            y = (y.to(gl.float32) + more.to(gl.float32)).to(Y.dtype.element_ty)
        gl.store(Y + out, y, mask=live)


@gluon.jit(do_not_specialize=["M"])
def integer_kernel(
    a_desc,
    p_desc,
    SI,
    UW,
    UA,
    OUTLIER,
    S,
    BIAS,
    RESIDUAL,
    Y,
    M,
    N,
    G: gl.constexpr,
    SCALES: gl.constexpr,
    OUTLIERS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Y [M, N] = A W^T. Boxes of A: int8 [BM, 64]; of P: 8 KB."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    blocks: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    a_s = gl.allocate_shared_memory(gl.int8, [2 * STAGES, BM, 64], swizzled)
    p_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 8, 8, 128], blocks)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0,
                    SI,
                    UW,
                    UA,
                    OUTLIER,
                    S,
                    BIAS,
                    RESIDUAL,
                    Y,
                    M,
                    N,
                    a_s,
                    p_s,
                    full,
                    empty,
                    G,
                    SCALES,
                    OUTLIERS,
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
                    SI,
                    UW,
                    UA,
                    OUTLIER,
                    S,
                    BIAS,
                    RESIDUAL,
                    Y,
                    M,
                    N,
                    a_s,
                    p_s,
                    full,
                    empty,
                    G,
                    SCALES,
                    OUTLIERS,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                    BM,
                    STAGES,
                    GROUP_M,
                ),
            ),
            (
                _fetch,
                (a_desc, p_desc, M, N, a_s, p_s, full, empty, G, OUTLIERS, BM, STAGES, GROUP_M),
            ),
        ],
        [4, 1],
        [232, 40],
    )
