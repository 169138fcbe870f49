"""W4A4 for many tokens on Hopper, in Gluon: fp8 tensor cores fed by one warp, two groups of four.

    program   256 rows of w x BM tokens, tile after tile
    warp      fetches k-groups of 128 into a ring: A and w through the copy engine, A's scales
    4 warps   128 rows of w, 64 at a time: nibbles -> e4m3 in registers -> wgmma
              -> acc += part * sw * sa
    4 warps   the other 128 rows; while one group of warps scales, the other one multiplies

A nibble u = code + 8 becomes the e4m3 number code * 2^-9 by four instructions a word of four
bytes: |u - 8| in subnormals and the first binade, which are one linear scale, and the sign bit. All
sums stay below 2^14: exact in fp8 tensor cores.

What was slower (H200, M = 1024, against cuBLAS bf16): nibbles as they lie, the sums started at what
undoes their offset, 0.8x: reading two vectors a k-group from shared memory into every thread took
as long as the product (128 bytes a clock). The scales sw sa as a product of K = 16 on the tensor
cores, tiles of 128 x 128, 1.05x: 28 KB a k-group and tile are what the L2 gives (5.8 TB/s).

    A [M, (G + 1) * 128]   codes as bytes of e4m3, the outliers' last 128 as int8
    SA [G + 1, MS]         float32: a token's scale per group, then its outliers'
    P, S                   FRAGMENT planes and scales (atom_tiles.py): G groups, then the outliers'
                           high and low nibbles (and a third group, which only the decode form uses)

The channels of a group are stored so that the words of a lane are its fp8 operand, in order
(atom_tiles.py `fragment_order`).

M tokens, N = out_features, G groups, BM tokens a tile, S stages.
"""

# mypy: ignore-errors
# ruff: noqa: SIM113
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton renamed these between 3.6 and 3.9.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_scales = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile of tokens and tile of rows: GROUP_M tiles of tokens walk w together."""
    width = GROUP_M * tiles_n
    first_m = tile // width * GROUP_M
    count_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % width % count_m, tile % width // count_m


@gluon.jit
def _halves(byte):
    """Bytes of 4 blocks [4, 8, 128] as k 0 .. 63 and 64 .. 127 of their k-group."""
    return gl.split(byte.reshape((4, 2, 4, 128)).permute((0, 2, 3, 1)))


@gluon.jit
def _operand(even, odd, operand: gl.constexpr):
    """Bytes of 4 blocks as lanes hold them, rows r and r + 8, as the left operand [64, 64].

    [block, rhi, rlo c jj k3 b] and r3 to rows (block r3 r) and columns (jj k3 c b).
    """
    both = gl.join(even, odd).reshape((4, 4, 2, 4, 2, 2, 4, 2))
    both = both.permute((0, 7, 1, 2, 4, 5, 3, 6)).reshape((64, 64))
    return gl.convert_layout(both, operand, assert_trivial=True)


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
    return _operand(even, odd, operand).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _bytes(high, low, operand: gl.constexpr):
    """16 * high + low - 128 of two nibble planes, as int8."""
    even = gl.inline_asm_elementwise(
        "{.reg .b32 t, u; shl.b32 t, $1, 4; and.b32 t, t, 0xf0f0f0f0; and.b32 u, $2, 0x0f0f0f0f;"
        "or.b32 t, t, u; xor.b32 $0, t, 0x80808080;}",
        "=r,r,r",
        [high, low],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    odd = gl.inline_asm_elementwise(
        "{.reg .b32 t, u; and.b32 t, $1, 0xf0f0f0f0; shr.b32 u, $2, 4; and.b32 u, u, 0x0f0f0f0f;"
        "or.b32 t, t, u; xor.b32 $0, t, 0x80808080;}",
        "=r,r,r",
        [high, low],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    return _operand(even, odd, operand).to(gl.int8, bitcast=True)


@gluon.jit
def _fetch(
    a_desc, o_desc, p_desc, SA, M, N, MS, a_s, p_s, s_s, ao_s, po_s, full, scaled, empty, ofull,
    oempty, G: gl.constexpr, OUTLIERS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """The fetching warp: k-group after k-group, tile after tile."""
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 256)
    step = 0
    done = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tm, tn = _place(tile, tiles_m, tiles_n, GROUP_M)
        if OUTLIERS:
            mbarrier.wait(oempty, (done & 1) ^ 1)
            mbarrier.expect(ofull, BM * 128 + 32768)
            for i in gl.static_range(2):
                _copy(o_desc, [tm * BM, G * 128 + i * 64], ofull, ao_s.index(i))
                _copy(p_desc, [tn * 16, (G + i) * 8, 0], ofull, po_s.index(i))
        at = SA + tm * BM + gl.arange(0, BM, layout=lanes)
        for g in range(G):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BM * 128 + 16384)
            _copy(p_desc, [tn * 16, g * 8, 0], full.index(stage), p_s.index(stage))
            for i in gl.static_range(2):
                _copy(
                    a_desc,
                    [tm * BM, g * 128 + i * 64],
                    full.index(stage),
                    a_s.index(2 * stage + i),
                )
            _copy_scales(s_s.index(stage), at + g * MS)
            async_copy.mbarrier_arrive(scaled.index(stage), increment_count=False)
            step += 1
        done += 1


@gluon.jit
def _scale_at(S, n, N, SCALES: gl.constexpr):
    """Where row n's scales begin."""
    n = gl.where(n < N, n, 0)
    return S + (n // 16).to(gl.int64) * (SCALES * 16) + (n % 8) * 2 + n // 8 % 2


@gluon.jit
def _outliers(
    po_s, ao_s, so, sa, block: gl.constexpr, BM: gl.constexpr, mma: gl.constexpr,
    operand: gl.constexpr, packed: gl.constexpr,
):  # fmt: skip
    """The outliers' product of 64 rows, in units of the fp8 sums; `so` scales low nibbles."""
    high = _halves(po_s.index(0).slice(block, 4).load(packed))
    low = _halves(po_s.index(1).slice(block, 4).load(packed))
    total = gl.zeros((64, BM), gl.int32, layout=mma)
    for i in gl.static_range(2):
        w8 = _bytes(high[i], low[i], operand)
        total = warpgroup_mma(w8, ao_s.index(i).permute((1, 0)), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    return total.to(gl.float32) * (so.to(gl.float32) * 0.001953125)[:, None] * sa[None, :]


@gluon.jit
def _group(
    acc, p_s, a_s, s_s, sw, stage, block: gl.constexpr, BM: gl.constexpr, mma: gl.constexpr,
    operand: gl.constexpr, packed: gl.constexpr,
):  # fmt: skip
    """acc of 64 rows and one k-group's scaled product."""
    first, second = _halves(p_s.index(stage).slice(block, 4).load(packed))
    part = gl.zeros((64, BM), gl.float32, layout=mma)
    a = a_s.index(2 * stage).permute((1, 0))
    part = warpgroup_mma(_nibbles(first, operand), a, part, is_async=True)
    a = a_s.index(2 * stage + 1).permute((1, 0))
    part = warpgroup_mma(_nibbles(second, operand), a, part, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    # Read only now: 32 more registers before would spill.
    sa = s_s.index(stage).load(gl.SliceLayout(0, mma))
    return acc + (part * sa[None, :]) * sw.to(gl.float32)[:, None]


@gluon.jit
def _store(
    acc, BIAS, RESIDUAL, Y, M, N, m0, n0, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BM: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Write 64 rows of w's outputs."""
    rows_out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc = acc * 512.0
    if HAS_BIAS:
        n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        acc = acc + gl.load(BIAS + gl.where(n < N, n, 0)).to(gl.float32)[:, None]
    y = gl.convert_layout(acc.to(Y.dtype.element_ty).permute((1, 0)), rows_out)
    ym = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, rows_out))
    yn = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, rows_out))
    at = ym.to(gl.int64)[:, None] * N + yn[None, :]
    live = (ym < M)[:, None] & (yn < N)[None, :]
    if HAS_RESIDUAL:
        more = gl.load(RESIDUAL + at, mask=live, other=0.0)
        y = (y.to(gl.float32) + more.to(gl.float32)).to(Y.dtype.element_ty)
    gl.store(Y + at, y, mask=live)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, SA, S, BIAS, RESIDUAL, Y, M, N, MS,
    a_s, p_s, s_s, ao_s, po_s, full, scaled, empty, ofull, oempty,
    G: gl.constexpr, SCALES: gl.constexpr, OUTLIERS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Four warps: half of a tile's rows, 64 and 64."""
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
    UP: gl.constexpr = HALF * 8
    DOWN: gl.constexpr = HALF * 8 + 4
    tiles_m, tiles_n = gl.cdiv(M, BM), gl.cdiv(N, 256)
    step = 0
    done = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tm, tn = _place(tile, tiles_m, tiles_n, GROUP_M)
        n0 = tn * 256 + HALF * 128
        row = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        up_at = _scale_at(S, row, N, SCALES)
        down_at = _scale_at(S, row + 64, N, SCALES)
        if OUTLIERS:
            m = tm * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, mma))
            sa = gl.load(SA + G * MS + m)
            so_up = gl.load(up_at + (G + 1) * 16)
            so_down = gl.load(down_at + (G + 1) * 16)
            mbarrier.wait(ofull, done & 1)
            up = _outliers(po_s, ao_s, so_up, sa, UP, BM, mma, operand, packed)
            down = _outliers(po_s, ao_s, so_down, sa, DOWN, BM, mma, operand, packed)
            _barrier()
            mbarrier.arrive(oempty, count=1)
        else:
            up = gl.zeros((64, BM), gl.float32, layout=mma)
            down = gl.zeros((64, BM), gl.float32, layout=mma)
        sw_up = gl.load(up_at)
        sw_down = gl.load(down_at)
        for g in range(G):
            stage = step % STAGES
            after = min(g + 1, G - 1) * 16
            next_up = gl.load(up_at + after)
            next_down = gl.load(down_at + after)
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            mbarrier.wait(scaled.index(stage), (step // STAGES) & 1)
            up = _group(up, p_s, a_s, s_s, sw_up, stage, UP, BM, mma, operand, packed)
            down = _group(down, p_s, a_s, s_s, sw_down, stage, DOWN, BM, mma, operand, packed)
            _barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            sw_up = next_up
            sw_down = next_down
            step += 1
        done += 1
        m0 = tm * BM
        _store(up, BIAS, RESIDUAL, Y, M, N, m0, n0, HAS_BIAS, HAS_RESIDUAL, BM, mma)
        _store(down, BIAS, RESIDUAL, Y, M, N, m0, n0 + 64, HAS_BIAS, HAS_RESIDUAL, BM, mma)


@gluon.jit
def wgmma_kernel(
    a_desc, o_desc, p_desc, SA, S, BIAS, RESIDUAL, Y, M, N, MS,
    G: gl.constexpr, SCALES: gl.constexpr, OUTLIERS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Y [M, N] = A W^T. Boxes of A: [BM, 64], as e4m3 (a_desc) and int8 (o_desc); of P: 16 KB."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    blocks: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_s = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BM, 64], swizzled)
    p_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 8, 128], blocks)
    s_s = gl.allocate_shared_memory(gl.float32, [STAGES, BM], flat)
    ao_s = gl.allocate_shared_memory(gl.int8, [2, BM, 64], swizzled)
    po_s = gl.allocate_shared_memory(gl.uint8, [2, 16, 8, 128], blocks)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scaled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ofull = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    oempty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(scaled.index(i), count=32)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ofull, count=1)
    mbarrier.init(oempty, count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, SA, S, BIAS, RESIDUAL, Y, M, N, MS,
                    a_s, p_s, s_s, ao_s, po_s, full, scaled, empty, ofull, oempty,
                    G, SCALES, OUTLIERS, HAS_BIAS, HAS_RESIDUAL, BM, STAGES, GROUP_M,
                ),
            ),
            (
                _multiply,
                (
                    1, SA, S, BIAS, RESIDUAL, Y, M, N, MS,
                    a_s, p_s, s_s, ao_s, po_s, full, scaled, empty, ofull, oempty,
                    G, SCALES, OUTLIERS, HAS_BIAS, HAS_RESIDUAL, BM, STAGES, GROUP_M,
                ),
            ),
            (
                _fetch,
                (
                    a_desc, o_desc, p_desc, SA, M, N, MS,
                    a_s, p_s, s_s, ao_s, po_s, full, scaled, empty, ofull, oempty,
                    G, OUTLIERS, BM, STAGES, GROUP_M,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
