"""y = x w^T with w in E4M3, as tensor cores take it: words to registers, no shared memory.

    word [ k0 r3 bytes ]      two rows r3 = 0, 1 of neighbours k0 = 0, 1   (weights/fp8_weight.py)
        r3 = 1   (w & sign) | (w >> 1 & rest)         float16 pair of 2^-8 the values
        r3 = 0   the same of w << 8
    bfloat16: three bits further right, times 2^120

    up to 8 rows of x   program = 16 BH rows of w, its WM warps take the k-groups in turn
    more                program = 16 BH WM rows of w x BM rows of x x a share of K
    dequantise          program = 16 BH WM rows of w x a k-group

What gemv.py and splitk_gemm.py do with codes of integers, scales in float32. A scale is of
`rows` x `columns` of w, `wide` scales a row of them; SHARED: of all columns.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.float_codes.e4m3_kernel import halves
from llmpq.kernels.gemm.operands.k_group import first_group, load_x_step
from llmpq.kernels.gemm.operands.packed_operands import dot, finish, load_words
from llmpq.kernels.gemm.operands.unpack_assembly import O8I2, assembly_text
from llmpq.kernels.gemm.operands.unpack_shifts import join8


def _numbers(shift: int, mask: int, factor: int | None) -> str:
    """Pairs of (h, r3) of words $8 and $9; `shift`: bits the number moves right of the sign."""
    body = "" if factor is None else f"mov.b32 k, {factor:#010x};mov.b32 z0, 0x80008000;"
    for h in range(2):
        word, (low, high) = f"${8 + h}", (f"p{2 * h}", f"p{2 * h + 1}")
        body += f"shl.b32 t, {word}, {8 - shift};and.b32 t, t, {mask:#010x};"
        body += f"shl.b32 u, {word}, 8;lop3.b32 {low}, u, 0x80008000, t, 0xea;"
        body += f"shr.b32 v, {word}, {shift};and.b32 v, v, {mask:#010x};"
        body += f"lop3.b32 {high}, {word}, 0x80008000, v, 0xea;"
        if factor is not None:
            body += f"fma.rn.bf16x2 {low}, {low}, k, z0;fma.rn.bf16x2 {high}, {high}, k, z0;"
    return assembly_text(body, 4)


FE, BE = (
    tl.constexpr(_numbers(1, 0x3F803F80, None)),
    tl.constexpr(_numbers(4, 0x07F007F0, 0x7B807B80)),
)


@triton.jit
def _by_shifts(words, DT: tl.constexpr):
    """What the assembly does, for the interpreter."""
    out = ()
    for h in tl.static_range(2):
        for r in tl.static_range(2):
            for k in tl.static_range(2):
                code = ((words[h] >> (16 * k + 8 * r)) & 255).to(tl.uint8)
                number = halves(code, True)
                if DT == tl.bfloat16:
                    number = (number.to(tl.float32) * 256.0).to(tl.bfloat16)
                out = out + (number,)
    return join8(out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7])


@triton.jit
def unpack(
    words,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Words as an operand [(warp,) rows, 128 k]; of float16 2^-8 of the values."""
    if INTERPRET:
        t = _by_shifts(words, DT)
    else:
        if DT == tl.float16:
            o = tl.inline_asm_elementwise(
                FE, O8I2, [words[0], words[1]], dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            o = tl.inline_asm_elementwise(
                BE, O8I2, [words[0], words[1]], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
            )
        t = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    # bh, jj/2, warp, r, c, jj%2, k3 | k0, r3, h  ->  warp, bh, r3, r | h, jj/2, jj%2, k3, c, k0
    t = tl.reshape(t, (BH, 2, WM, 8, 4, 2, 2, 2, 2, 2))
    t = tl.permute(t, (2, 0, 8, 3, 9, 1, 5, 6, 4, 7))
    if KWIDTH4:
        t = tl.permute(t, (0, 1, 2, 3, 4, 5, 6, 8, 7, 9))
    if BATCH:
        return tl.reshape(t, (WM, BH * 16, 128))
    else:
        t = tl.permute(t, (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
        return tl.reshape(t, (BH * WM * 16, 128))


@triton.jit
def load_codes(
    W, half, left, groups, group, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr
):
    """Words of one k-group (BATCH: of WM); `half`: words of all h = 0."""
    return (
        load_words(W, left, groups, group, 256, 0, BH, WM, BATCH),
        load_words(W + half, left, groups, group, 256, 0, BH, WM, BATCH),
    )


@triton.jit
def _scale_batch(
    s_at, group, columns, live, BH: tl.constexpr, WM: tl.constexpr, SHARED: tl.constexpr
):
    """Scales [WM, 16 BH] of the rows at `s_at`, for each warp's k-group."""
    if SHARED:
        at = s_at[None, :] + tl.zeros([WM, BH * 16], tl.int32)
    else:
        at = s_at[None, :] + ((group + tl.arange(0, WM)) * 128 // columns)[:, None]
    return tl.load(at, mask=live[None, :], other=0.0)


@triton.jit(do_not_specialize=["M", "rows", "columns"])
def e4m3_gemv_kernel(
    X,
    W,
    S,
    BIAS,
    RESIDUAL,
    Y,
    M,
    N,
    K,
    rows,
    columns,
    wide,
    half,
    groups,
    SHARED: tl.constexpr,
    EVEN_G: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    STEPS: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y = x w^T for M <= 8: STEPS * WM >= groups; steps past the last group are multiplied by 0."""
    DT: tl.constexpr = X.dtype.element_ty
    block = tl.program_id(0) * BH
    left = N // 16 - block
    W += block.to(tl.int64) * groups * 256
    n = block * 16 + tl.arange(0, BH * 16)
    live = n < N
    s_at = S + (n // rows).to(tl.int64) * wide
    tiles = ()
    for i in tl.static_range(min(D, STEPS)):
        g = first_group(i * WM, groups, WM, EVEN_G)
        tiles += (
            (
                load_codes(W, half, left, groups, g, BH, WM, True),
                _scale_batch(s_at, g, columns, live, BH, WM, SHARED),
            ),
        )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([WM, BH * 16, 8], tl.float32)
    for i in tl.static_range(STEPS):
        if i + D < STEPS:
            g = first_group((i + D) * WM, groups, WM, EVEN_G)
            tiles += (
                (
                    load_codes(W, half, left, groups, g, BH, WM, True),
                    _scale_batch(s_at, g, columns, live, BH, WM, SHARED),
                ),
            )
        x = load_x_step(X, i, M, K, groups, WM, True, EVEN_G)
        words, scale = tiles[i]
        w = unpack(words, DT, BH, WM, True, True, INTERPRET)
        t = dot(w, x, tl.zeros([WM, BH * 16, 8], tl.float32), INTERPRET)
        acc += t * scale[:, :, None]
    total = tl.sum(acc, axis=0)
    if DT == tl.float16:
        total *= 256.0
    finish(total, Y, BIAS, RESIDUAL, block * 16, 0, M, N, N, BH * 16, 8, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def step(
    acc,
    words,
    scale,
    x,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [16 BH WM, BM] += scale (values x) of one k-group."""
    w = unpack(words, DT, BH, WM, False, KWIDTH4, INTERPRET)
    t = dot(w, x, tl.zeros([BH * WM * 16, BM], tl.float32), INTERPRET)
    return acc + t * scale[:, None]


@triton.jit
def columns_of(KWIDTH4: tl.constexpr):
    """The k of a k-group in the order of `unpack`."""
    k = tl.arange(0, 128)
    if KWIDTH4:
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    return k


@triton.jit(do_not_specialize=["M", "rows", "columns", "split"])
def e4m3_splitk_kernel(
    X,
    W,
    S,
    BIAS,
    RESIDUAL,
    Y,
    PARTIAL,
    ARRIVED,
    M,
    N,
    K,
    rows,
    columns,
    wide,
    half,
    groups,
    split,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y = x w^T, grid (tiles of x, tiles of w, split)."""
    DT: tl.constexpr = X.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    m0, tile, part = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2)
    block = tile * (BN // 16)
    left = N // 16 - block
    W += block.to(tl.int64) * groups * 256
    n = block * 16 + tl.arange(0, BN)
    live = n < N
    s_at = S + (n // rows).to(tl.int64) * wide
    first, last = part * groups // split, (part + 1) * groups // split
    m = m0 + tl.arange(0, BM)
    row_ok = (m < M)[None, :]
    x_at = X + m.to(tl.int64)[None, :] * K + columns_of(KWIDTH4)[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    scale = tl.load(s_at, mask=live, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for g in tl.range(first, last, num_stages=STAGES):
        words = load_codes(W, half, left, groups, g, BH, WM, False)
        if not SHARED:
            scale = tl.load(s_at + g * 128 // columns, mask=live, other=0.0)
        x = tl.load(x_at + g * 128, mask=row_ok, other=0.0)
        acc = step(acc, words, scale, x, DT, BH, WM, BM, KWIDTH4, INTERPRET)
    if DT == tl.float16:
        acc *= 256.0
    if not SPLIT:
        finish(acc, Y, BIAS, RESIDUAL, block * 16, m0, M, N, N, BN, BM, HAS_BIAS, HAS_RESIDUAL)
    else:
        slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        shared = tile * tl.num_programs(0) + tl.program_id(0)
        slab = PARTIAL + shared.to(tl.int64) * split * (BN * BM)
        tl.store(slab + part * (BN * BM) + slot, acc)
        tl.debug_barrier()  # every thread's sums are written before this program counts itself
        before = tl.atomic_add(ARRIVED + shared, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for share in range(split):
                total += tl.load(slab + share * (BN * BM) + slot, cache_modifier=".cg")
            finish(
                total, Y, BIAS, RESIDUAL, block * 16, m0, M, N, N, BN, BM, HAS_BIAS, HAS_RESIDUAL
            )
            tl.store(ARRIVED + shared, 0)


@triton.jit(do_not_specialize=["rows", "columns"])
def e4m3_blocks_kernel(
    W,
    S,
    OUT,
    N,
    K,
    rows,
    columns,
    wide,
    half,
    groups,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """OUT [N, K] = w, rounded once; grid (tiles of rows, k-groups)."""
    block, group = tl.program_id(0) * (BH * WM), tl.program_id(1)
    W += block.to(tl.int64) * groups * 256
    words = load_codes(W, half, N // 16 - block, groups, group, BH, WM, False)
    w = unpack(words, tl.float16, BH, WM, False, False, INTERPRET).to(tl.float32) * 256.0
    n = block * 16 + tl.arange(0, BH * WM * 16)
    s_at = S + (n // rows).to(tl.int64) * wide + group * 128 // columns
    w *= tl.load(s_at, mask=n < N, other=0.0)[:, None]
    at = n.to(tl.int64)[:, None] * K + group * 128 + tl.arange(0, 128)[None, :]
    tl.store(OUT + at, w.to(OUT.dtype.element_ty), mask=(n < N)[:, None])
