"""y = x w^T with 4-bit codes of a table, words to registers: formats/table_weight.py, FRAGMENT.

    program   BN = 16 * BH * WM rows of w x BM rows of x x a share of K
    mxfp4     words --> registers --> code * its group's power of two, exactly --> left operand
    nvfp4     the same with its group's E4M3, exact, too; a row's factor comes last
    others    words --> registers --> numbers of the table, in x's dtype --> left operand of one
              product a group of 64 (two a k-group) or 32 (four), whose float32 sums are scaled

A number of 16 is looked up by bytes: two permutations pick from its lower and upper eight entries,
the code's top bit chooses. 26 instructions of integers for 8 codes; of MXFP4 11 to 13.
Shares of K leave float32 sums in a workspace; the last one to arrive adds them in order.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import struct

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.gemm.float_codes.e2m1_operand import (
    NVFP4_SHARE,
    SCALE_WORDS,
    load_e2m1,
    load_nvfp4,
    own_sum,
    unpack_e2m1,
    unpack_nvfp4,
)
from llmpq.kernels.gemm.packed_operands import (
    accumulator_scale,
    dot,
    finish,
    load_pairs,
    load_words,
)

SHARE = tl.constexpr(NVFP4_SHARE)


def lookup_assembly(table: tuple[float, ...], kind: str, half: int) -> str:
    """Return the text that makes four codes of a word's half h numbers: outputs (r3, k0).

    `kind`: "f16" or "bf16".
    """
    if kind == "f16":
        words = [struct.unpack("<H", struct.pack("<e", value))[0] for value in table]
    else:
        words = [_bfloat16(value) for value in table]
    body = f"shr.b32 c, $4, {16 * half};" if half else "mov.b32 c, $4;"
    body += "shr.b32 m, c, 3;and.b32 m, m, 0x00001111;and.b32 c, c, 0x00007777;"
    body += "prmt.b32 m, 0x0000ff00, 0, m;"
    for name, shift in (("l", 0), ("h", 8)):
        four = [sum((words[4 * i + j] >> shift & 255) << 8 * j for j in range(4)) for i in range(4)]
        for i, target in enumerate(("a", "b")):
            body += f"mov.b32 t, {four[2 * i]:#010x};mov.b32 u, {four[2 * i + 1]:#010x};"
            body += f"prmt.b32 {target}, t, u, c;"
        body += f"lop3.b32 {name}, a, b, m, 0xd8;"
    body += "prmt.b32 a, l, h, 0x5140;prmt.b32 b, l, h, 0x7362;"
    body += "mov.b32 {$0, $1}, a;mov.b32 {$2, $3}, b;"
    return "{.reg .b32 c, m, l, h, a, b, t, u;" + body + "}"


def _bfloat16(value: float) -> int:
    """Return the bits of a number in bfloat16, rounded to nearest."""
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@triton.jit
def _looked_up(words, T, ASM: tl.constexpr, HALF: tl.constexpr, DT: tl.constexpr,
               INTERPRET: tl.constexpr):  # fmt: skip
    """Numbers of a half's four codes (r3, k0) of each word, as [..., k0, r3]."""
    if INTERPRET:
        c = words >> (16 * HALF)
        o = (
            tl.load(T + (c & 15)).to(DT), tl.load(T + (c >> 4 & 15)).to(DT),
            tl.load(T + (c >> 8 & 15)).to(DT), tl.load(T + (c >> 12 & 15)).to(DT),
        )  # fmt: skip
    elif DT == tl.float16:
        o = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    else:
        o = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    return tl.join(tl.join(o[0], o[1]), tl.join(o[2], o[3]))


@triton.jit
def _half_operand(
    words, T, ASM: tl.constexpr, HALF: tl.constexpr, DT: tl.constexpr, BH: tl.constexpr,
    WM: tl.constexpr, KWIDTH4: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Numbers of one half as [rows, jj/2, 32 k]."""
    t = _looked_up(words, T, ASM, HALF, DT, INTERPRET)
    # bh, jj/2, warp, r, c, jj%2, k3 | k0, r3 to bh, warp, r3, r | jj/2, jj%2, k3, c, k0
    t = tl.reshape(t, (BH, 2, WM, 8, 4, 2, 2, 2, 2))
    t = tl.permute(t, (0, 2, 8, 3, 1, 5, 6, 4, 7))
    if KWIDTH4:
        t = tl.permute(t, (0, 1, 2, 3, 4, 5, 7, 6, 8))
    return tl.reshape(t, (BH * WM * 16, 2, 32))


@triton.jit
def _load_form(
    P, S, left, groups, g, PARTS: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr
):  # fmt: skip
    """Words and scales of a k-group; PARTS 0: MXFP4's, 8: NVFP4's."""
    if PARTS == 0:
        words, scale = load_e2m1(P, S, left, groups, g, BH, WM)
        return words, (scale,)
    elif PARTS == 8:
        words, scale = load_nvfp4(P, S, left, groups, g, BH, WM)
        return words, (scale,)
    else:
        words = load_words(P, left, groups, g, 256, 0, BH, WM, False)
        scales = ()
        for part in tl.static_range(PARTS):
            scales += (load_pairs(S, left, groups * PARTS, g * PARTS + part, BH, WM, False),)
        return words, scales


@triton.jit
def _exact(
    words, scale, PARTS: tl.constexpr, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    KWIDTH4: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """w [rows, 128 k] of E2M1 with its scales."""
    if PARTS == 0:
        return unpack_e2m1(words, scale, DT, BH, WM, KWIDTH4, INTERPRET)
    else:
        return unpack_nvfp4(words, scale, DT, BH, WM, KWIDTH4, INTERPRET)


@triton.jit
def _load_x(at, k, row_ok, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at + k[:, None], mask=row_ok, other=0.0)
    else:
        return tl.load(at + k[:, None], mask=row_ok & (k < K)[:, None], other=0.0)


@triton.jit
def _scaled_sum(
    w, x, pairs, BN: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """scale * (w x) of one group."""
    t = dot(w, x, tl.zeros([BN, BM], tl.float32), INTERPRET)
    s = accumulator_scale(pairs, tl.float16, BH, WM, False)
    return tl.reshape(tl.reshape(t, (BN, BM // 8, 4, 2)) * s, (BN, BM))


@triton.jit(do_not_specialize=["M", "blocks", "groups", "split"])
def table_tile_kernel(
    X, P, S, T, F, BIAS, RESIDUAL, Y, PARTIAL, ARRIVED, M, N, K, blocks, groups, split,
    PARTS: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, BH: tl.constexpr,
    WM: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    KWIDTH4: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y = x w^T, grid (tiles of BM rows of x, tiles of rows of w, split)."""
    DT: tl.constexpr = X.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    WHOLE: tl.constexpr = PARTS % 8 == 0
    S_WORDS: tl.constexpr = 2 * SCALE_WORDS if PARTS == 8 else SCALE_WORDS if WHOLE else 8 * PARTS
    m0 = tl.program_id(0) * BM
    tile, part = tl.program_id(1), tl.program_id(2)
    block = tile * (BN // 16)
    left = blocks - block
    P += block.to(tl.int64) * groups * 256
    S += block * groups * S_WORDS
    first, last = part * groups // split, (part + 1) * groups // split
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDTH: tl.constexpr = 128 if WHOLE else 128 // PARTS
    k = tl.arange(0, WIDTH)
    if KWIDTH4:  # as tile_kernel.py
        k = k // 16 * 16 + k // 2 % 2 * 8 + k // 4 % 4 * 2 + k % 2
    row_ok = (m0 + tl.arange(0, BM) < M)[None, :]
    at = X + (m0 + tl.arange(0, BM)).to(tl.int64)[None, :] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for g in tl.range(first, last, num_stages=STAGES):
        words, scales = _load_form(P, S, left, groups, g, PARTS, BH, WM)
        if WHOLE:
            x = _load_x(at, g * 128 + k, row_ok, K, EVEN_K)
            w = _exact(words, scales[0], PARTS, DT, BH, WM, KWIDTH4, INTERPRET)
            t = dot(w, x, tl.zeros([BN, BM], tl.float32), INTERPRET)
            acc += own_sum(t, INTERPRET)
        else:
            for half in tl.static_range(2):
                w = _half_operand(
                    words, T, ASM1 if half else ASM0, half, DT, BH, WM, KWIDTH4, INTERPRET
                )
                if PARTS == 2:
                    x = _load_x(at, g * 128 + half * 64 + k, row_ok, K, EVEN_K)
                    w = tl.reshape(w, (BN, 64))
                    acc += _scaled_sum(w, x, scales[half], BN, BM, BH, WM, INTERPRET)
                else:
                    w0, w1 = tl.split(tl.permute(w, (0, 2, 1)))
                    x0 = _load_x(at, g * 128 + half * 64 + k, row_ok, K, EVEN_K)
                    acc += _scaled_sum(w0, x0, scales[2 * half], BN, BM, BH, WM, INTERPRET)
                    x1 = _load_x(at, g * 128 + half * 64 + 32 + k, row_ok, K, EVEN_K)
                    acc += _scaled_sum(w1, x1, scales[2 * half + 1], BN, BM, BH, WM, INTERPRET)
    n0, end = block * 16, blocks * 16
    if PARTS == 8:
        row = tl.minimum(n0 + tl.arange(0, BN), N - 1)
        acc *= tl.load(F + row)[:, None] * SHARE
    if not SPLIT:
        finish(acc, Y, BIAS, RESIDUAL, n0, m0, M, N, end, BN, BM, HAS_BIAS, HAS_RESIDUAL)
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
            finish(total, Y, BIAS, RESIDUAL, n0, m0, M, N, end, BN, BM, HAS_BIAS, HAS_RESIDUAL)
            tl.store(ARRIVED + shared, 0)


@triton.jit
def table_words_kernel(
    P, S, T, F, OUT, K, blocks, groups,
    PARTS: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, EVEN_K: tl.constexpr,
    BH: tl.constexpr, WM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """OUT [16 * blocks, K] = w; grid (row tiles, k-groups)."""
    DT: tl.constexpr = OUT.dtype.element_ty
    BN: tl.constexpr = BH * WM * 16
    WHOLE: tl.constexpr = PARTS % 8 == 0
    S_WORDS: tl.constexpr = 2 * SCALE_WORDS if PARTS == 8 else SCALE_WORDS if WHOLE else 8 * PARTS
    block, g = tl.program_id(0) * (BH * WM), tl.program_id(1)
    left = blocks - block
    P += block.to(tl.int64) * groups * 256
    S += block * groups * S_WORDS
    words, scales = _load_form(P, S, left, groups, g, PARTS, BH, WM)
    row = block * 16 + tl.arange(0, BN)
    to = OUT + row.to(tl.int64)[:, None] * K
    keep = (row < blocks * 16)[:, None]
    if WHOLE:
        k = g * 128 + tl.arange(0, 128)
        w = _exact(words, scales[0], PARTS, DT, BH, WM, False, INTERPRET)
        if PARTS == 8:
            factor = tl.load(F + tl.minimum(row, blocks * 16 - 1)) * SHARE
            w = (w.to(tl.float32) * factor[:, None]).to(DT)
        tl.store(to + k[None, :], w, mask=keep if EVEN_K else keep & (k < K)[None, :])
    else:
        for half in tl.static_range(2):
            w = _half_operand(words, T, ASM1 if half else ASM0, half, DT, BH, WM, False, INTERPRET)
            w0, w1 = tl.split(tl.permute(w, (0, 2, 1)))
            for i in tl.static_range(2):
                pairs = scales[half] if PARTS == 2 else scales[2 * half + i]
                s = accumulator_scale(pairs, tl.float16, BH, WM, False)
                part = (w1 if i else w0).to(tl.float32)
                part = tl.reshape(tl.reshape(part, (BN, 4, 4, 2)) * s, (BN, 32))
                k = g * 128 + half * 64 + i * 32 + tl.arange(0, 32)
                ok = keep if EVEN_K else keep & (k < K)[None, :]
                tl.store(to + k[None, :], part.to(DT), mask=ok)
