"""y = x w^T with w in E4M3: codes become 16-bit values in registers, on any GPU, exactly.

    byte [ s eeee mmm ]   float16   s 0eeee mmm0000000   2^-8 of the number   bits moved, no more
                          bfloat16  s 0000eeee mmm0000   2^-120 of it, times 2^120
    program = BN rows of w x BM rows of x x a share of K
        codes --> registers --> values --> left operand of the tensor cores
        acc += scale * (values x) of BK columns
    Shares of a tile leave float32 sums; the last one to arrive adds them in order (arrivals.py).

A scale is of `rows` x `columns` of w. Moves a byte a weight, and 4 / (rows columns) of scales.

M rows of x, K in, N out.
"""

# mypy: ignore-errors
# (A Triton body is not Python: values change type as it is traced.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.operands.packed_operands import finish


@triton.jit
def halves(code, INTERPRET: tl.constexpr):
    """Uint8 codes as float16 of 2^-8 their values."""
    if INTERPRET:
        wide = code.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 s, a, 1;
            shr.b32 t, b, 1;
            and.b32 s, s, 0x3f803f80;
            and.b32 t, t, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, s, 0xea;
            lop3.b32 $1, b, 0x80008000, t, 0xea;
            }""",
            "=r,=r,r",
            [code],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def values(code, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """Uint8 codes as values: of bfloat16 themselves, of float16 2^-8 of them."""
    if tl.float16 == DT:
        return halves(code, INTERPRET)
    elif INTERPRET:
        return (halves(code, INTERPRET).to(tl.float32) * 256.0).to(tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t, z, f;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 s, a, 4;
            shr.b32 t, b, 4;
            and.b32 s, s, 0x07f007f0;
            and.b32 t, t, 0x07f007f0;
            lop3.b32 s, a, 0x80008000, s, 0xea;
            lop3.b32 t, b, 0x80008000, t, 0xea;
            mov.b32 z, 0x80008000;
            mov.b32 f, 0x7b807b80;
            fma.rn.bf16x2 $0, s, f, z;
            fma.rn.bf16x2 $1, t, f, z;
            }""",
            "=r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def dot(w, x, acc, INTERPRET: tl.constexpr):
    """acc + w x."""
    if INTERPRET:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def scales(s_at, k0, live, columns, SHARED: tl.constexpr):
    """Scales of BN rows of w at columns k0; SHARED: of all columns."""
    if SHARED:
        return tl.load(s_at, mask=live, other=0.0)
    else:
        return tl.load(s_at + k0 // columns, mask=live, other=0.0)


@triton.jit
def multiply(
    acc,
    code,
    scale,
    x,
    DT: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [BN, BM] += scale (values of code [BN, BK]) x [BK, BM].

    A sum of its own each time, of a channel's scale too: Triton 3.6 pipelines a sum that wgmma
    carries on without waiting for it to have read the operand that the next step unpacks.
    """
    t = dot(values(code, DT, INTERPRET), x, tl.zeros([BN, BM], tl.float32), INTERPRET)
    return acc + t * scale[:, None]


@triton.jit(do_not_specialize=["M", "rows", "columns", "split"])
def e4m3_kernel(
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
    split,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y = x w^T, grid (tiles of x, tiles of w, split); `wide`: scales of a row of w."""
    DT: tl.constexpr = X.dtype.element_ty
    m0, n0, part = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    n, k, m = n0 + tl.arange(0, BN), tl.arange(0, BK), m0 + tl.arange(0, BM)
    live, row_ok = n < N, (m < M)[None, :]
    w_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    s_at = S + (n // rows).to(tl.int64) * wide
    x_at = X + m.to(tl.int64)[None, :] * K + k[:, None]
    steps = (K + BK - 1) // BK
    first, last = part * steps // split, (part + 1) * steps // split
    acc = tl.zeros([BN, BM], tl.float32)
    scale = scales(s_at, 0, live, columns, True)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for step in tl.range(first, last, num_stages=STAGES):
        k0 = step * BK
        keep = row_ok
        if not EVEN_K:
            keep = keep & (k0 + k < K)[:, None]
        x = tl.load(x_at + k0, mask=keep, other=0.0)
        w_keep = live[:, None]
        if not EVEN_K:
            w_keep = w_keep & (k0 + k < K)[None, :]
        code = tl.load(w_at + k0, mask=w_keep, other=0)
        if not SHARED:
            scale = scales(s_at, k0, live, columns, False)
        acc = multiply(acc, code, scale, x, DT, BN, BM, INTERPRET)
    if tl.float16 == DT:
        acc *= 256.0
    if not SPLIT:
        finish(acc, Y, BIAS, RESIDUAL, n0, m0, M, N, N, BN, BM, HAS_BIAS, HAS_RESIDUAL)
    else:
        slot = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        shared = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        slab = PARTIAL + shared.to(tl.int64) * split * (BN * BM)
        tl.store(slab + part * (BN * BM) + slot, acc)
        tl.debug_barrier()  # every thread's sums are written before this program counts itself
        before = tl.atomic_add(ARRIVED + shared, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for share in range(split):
                total += tl.load(slab + share * (BN * BM) + slot, cache_modifier=".cg")
            finish(total, Y, BIAS, RESIDUAL, n0, m0, M, N, N, BN, BM, HAS_BIAS, HAS_RESIDUAL)
            tl.store(ARRIVED + shared, 0)


@triton.jit(do_not_specialize=["rows", "columns"])
def e4m3_dequantize_kernel(
    W,
    S,
    OUT,
    N,
    K,
    rows,
    columns,
    wide,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """OUT [N, K] = w, rounded once; grid (tiles of rows, tiles of columns)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    keep = (n < N)[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    w = halves(tl.load(W + at, mask=keep, other=0), INTERPRET).to(tl.float32) * 256.0
    s_at = (n // rows).to(tl.int64)[:, None] * wide + (k // columns)[None, :]
    w *= tl.load(S + s_at, mask=keep, other=0.0)
    tl.store(OUT + at, w.to(OUT.dtype.element_ty), mask=keep)
