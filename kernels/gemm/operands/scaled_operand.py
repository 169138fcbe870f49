"""Words to operands that are values times scales, in registers: what gemv.py and
splitk_gemm.py multiply where a k-group of a row has more scales than one, or codes of a table.

    FORM     values                                     scales
    parts    code - zero of 3, 4 or 8 bits               GROUPED of a k-group, in x's dtype
    nf4 ...  of a table, in x's dtype                    GROUPED of a k-group, float16
    e2m1     E2M1                                        4 exponents (MXFP4)
    nvfp4    E2M1                                        8 of E4M3, and a factor of every row

Scales are multiplied in, rounded once (E2M1: exact), so that a k-group is one product. Legend as in
packed_operands.py; ASM: code_assembly.py's text. (h, r3, k0): bits of a row's and of k's number by
by which the values of a word are separated (packed_operands.py).
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.gemm.operands.code_assembly import SUMS
from llmpq.kernels.gemm.operands.e2m1_operand import (
    NVFP4_SHARE,
    load_e2m1,
    load_nvfp4,
    spread_parts,
    unpack_e2m1,
    unpack_nvfp4,
)
from llmpq.kernels.gemm.operands.packed_operands import load_words, pair_floats, placed
from llmpq.kernels.gemm.operands.unpack_shifts import interpret3, join8, join32

NF4, FP4, IQ4 = (tl.constexpr(v.values) for v in (Codebook.NF4, Codebook.FP4, Codebook.IQ4))
SHARE = tl.constexpr(NVFP4_SHARE)
_SPLAT = tl.constexpr("prmt.b32 $0, $2, $2, 0x1010;prmt.b32 $1, $2, $2, 0x3232;")
_SUMS = tl.constexpr(SUMS)


@triton.constexpr_function
def scale_words(form, grouped):
    """Return the 32-bit words of scales of 16 rows of a k-group."""
    return {"e2m1": 16, "nvfp4": 32}.get(form, 8 * max(1, int(grouped)))


@triton.jit
def load_parts(
    base,
    blocks,
    groups,
    group,
    PARTS: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Scales (or zeros) of rows r and r + 8 of every part, 32-bit pairs: (bh, warp, r, c)."""
    f = tl.arange(0, BH * WM * 32)
    warp, bh = f // 32 % WM, f // (32 * WM)
    if BATCH:
        at = tl.minimum(bh, blocks - 1) * groups * (8 * PARTS) + warp * (8 * PARTS) + f // 4 % 8
    else:
        at = tl.minimum(bh * WM + warp, blocks - 1) * groups * (8 * PARTS) + f // 4 % 8
    out = ()
    for part in tl.static_range(PARTS):
        out += (tl.load(base + group * (8 * PARTS) + part * 8 + at),)
    return out


@triton.jit
def load_scaled(
    P0,
    P1,
    S,
    Z,
    blocks,
    groups,
    group,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Words, scales and zeros of a tile's k-group."""
    if FORM == "e2m1":
        words, scales = load_e2m1(P0, S, blocks, groups, group, BH, WM, BATCH)
        return (words,), (scales,), ()
    elif FORM == "nvfp4":
        words, scales = load_nvfp4(P0, S, blocks, groups, group, BH, WM, BATCH)
        return (words,), (scales,), ()
    else:
        WORDS: tl.constexpr = 192 if BITS == 3 else 256
        words = (load_words(P0, blocks, groups, group, WORDS, 0, BH, WM, BATCH),)
        if BITS == 3:
            words += (load_words(P0, blocks, groups, group, WORDS, 1, BH, WM, BATCH),)
            words += (load_words(P0, blocks, groups, group, WORDS, 2, BH, WM, BATCH),)
        elif BITS == 8:
            words += (load_words(P1, blocks, groups, group, WORDS, 0, BH, WM, BATCH),)
        zeros = ()
        if not SYMMETRIC:
            zeros = load_parts(Z, blocks, groups, group, GROUPED, BH, WM, BATCH)
        return words, load_parts(S, blocks, groups, group, GROUPED, BH, WM, BATCH), zeros


@triton.jit
def _each(pairs, SUM: tl.constexpr, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """The two values of 32-bit pairs, each doubled; SUM: of float16, as sums in bfloat16."""
    if INTERPRET:
        return pair_floats(pairs, DT)
    elif SUM:
        return tl.inline_asm_elementwise(
            _SUMS, "=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _SPLAT, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )


@triton.jit
def _of_half(
    pairs,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    SUM: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scales (or zeros) of one half's rows for each word of a lane."""
    first = _each(pairs[HALF * PARTS // 2], SUM, DT, INTERPRET)
    second = _each(pairs[(2 * HALF + 1) * PARTS // 4], SUM, DT, INTERPRET)
    out = ()
    for i in tl.static_range(len(first)):
        out += (spread_parts(first[i], second[i], BH, WM),)
    return out


@triton.jit
def _chosen(code, FORM: tl.constexpr):
    """The values of codes, one entry of the table after the other: for the interpreter."""
    number = code.to(tl.float32) * 0.0
    for i in tl.static_range(16):
        if FORM == "nf4":
            number = tl.where(code == i, NF4[i], number)
        elif FORM == "fp4":
            number = tl.where(code == i, FP4[i], number)
        else:
            number = tl.where(code == i, IQ4[i], number)
    return number


@triton.jit
def _rounded(number, DT: tl.constexpr):
    """Float32 to nearest in DT: the interpreter cuts bfloat16 off."""
    if DT == tl.bfloat16:
        bits = number.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
        number = bits.to(tl.float32, bitcast=True)
    return number.to(DT)


@triton.jit
def _by_shifts(
    words,
    scales,
    zeros,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DT: tl.constexpr,
):
    """What the assembly does, for the interpreter: (h, r3, k0)."""
    out = ()
    for h in tl.static_range(2):
        for r3 in tl.static_range(2):
            for k0 in tl.static_range(2):
                if FORM == "parts":
                    code = words[0] >> (16 * k0 + 8 * h + 4 * r3) & 15
                    if BITS == 8:
                        code = code * 16 + (words[1] >> (16 * k0 + 8 * h + 4 * r3) & 15)
                    number = code.to(tl.float32)
                    if SYMMETRIC:
                        number -= 1 << (BITS - 1)
                    else:
                        number -= zeros[h][r3]
                else:
                    code = words[0] >> (16 * h + 8 * r3 + 4 * k0) & 7
                    code |= (words[0] >> (16 * r3 + 8 * k0 + 7 - 4 * h) & 1) << 3
                    number = _chosen(code, FORM)
                out += (_rounded(_rounded(number, DT).to(tl.float32) * scales[h][r3], DT),)
    return out


@triton.jit
def _made(
    words,
    scales,
    zeros,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Eight scaled values (h, r3, k0) of every word."""
    TABLE: tl.constexpr = FORM != "parts"
    SUM: tl.constexpr = TABLE and DT == tl.bfloat16
    SDT: tl.constexpr = tl.float16 if TABLE else DT
    s0 = _of_half(scales, 0, GROUPED, SUM, SDT, BH, WM, INTERPRET)
    s1 = _of_half(scales, 1, GROUPED, SUM, SDT, BH, WM, INTERPRET)
    z0, z1 = (), ()
    if not SYMMETRIC:
        z0 = _of_half(zeros, 0, GROUPED, False, DT, BH, WM, INTERPRET)
        z1 = _of_half(zeros, 1, GROUPED, False, DT, BH, WM, INTERPRET)
    if INTERPRET:
        return _by_shifts(words, (s0, s1), (z0, z1), FORM, BITS, SYMMETRIC, DT)
    else:
        given = words + z0 + s0 + z1 + s1
        KINDS: tl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h" + ",r" * len(given)
        if DT == tl.float16:
            return tl.inline_asm_elementwise(
                ASM, KINDS, given, dtype=(tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, KINDS, given, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
            )


@triton.jit
def _of_thirds(
    pairs,
    PARTS: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scales (or zeros) of a lane's three words: (share of a half h, r3)."""
    SHARES: tl.constexpr = PARTS // 2
    out = ()
    for share in tl.static_range(SHARES):
        lower = _each(pairs[share], False, DT, INTERPRET)
        upper = _each(pairs[SHARES + share], False, DT, INTERPRET)
        for r3 in tl.static_range(2):
            out += (tl.reshape(tl.join(lower[r3], upper[r3]), (BH * WM * 64,)),)
    return out


@triton.jit
def _thirds_by_shifts(words, scales, zeros, PARTS: tl.constexpr, DT: tl.constexpr):
    """What `thirds_assembly` does, for the interpreter; no zeros: symmetric."""
    codes = interpret3(words, (0.0, 0.0), tl.float32)
    out = ()
    for i in tl.static_range(32):
        own: tl.constexpr = 2 * (i // 16 if PARTS == 4 else 0) + i // 2 % 2
        number = codes[i] - (zeros[own] if len(zeros) else 4)
        out += (_rounded(_rounded(number, DT).to(tl.float32) * scales[own], DT),)
    return out


@triton.jit
def _thirds(
    words,
    scales,
    zeros,
    ASM: tl.constexpr,
    PARTS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """32 scaled values (jj, k3, r3, k0) of every three words."""
    s = _of_thirds(scales, PARTS, DT, BH, WM, INTERPRET)
    z = ()
    if not SYMMETRIC:
        z = _of_thirds(zeros, PARTS, DT, BH, WM, INTERPRET)
    if INTERPRET:
        return _thirds_by_shifts(words, s, z, PARTS, DT)
    else:
        given = words + z + s
        KINDS: tl.constexpr = "=h" + ",=h" * 31 + ",r" * len(given)
        if DT == tl.float16:
            return tl.inline_asm_elementwise(
                ASM, KINDS, given, dtype=(tl.float16,) * 32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, KINDS, given, dtype=(tl.bfloat16,) * 32, is_pure=True, pack=1
            )


@triton.jit
def scaled_operand(
    tile,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BITS: tl.constexpr,
    GROUPED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`load_scaled` to an operand [(warp,) rows, 128 k], k ordered as packed_operands.unpack."""
    words, scales, zeros = tile
    if FORM == "e2m1":
        return unpack_e2m1(words[0], scales[0], DT, BH, WM, KWIDTH4, INTERPRET, BATCH)
    elif FORM == "nvfp4":
        return unpack_nvfp4(words[0], scales[0], DT, BH, WM, KWIDTH4, INTERPRET, BATCH)
    elif BITS == 3:
        o = _thirds(words, scales, zeros, ASM, GROUPED, SYMMETRIC, DT, BH, WM, INTERPRET)
        return placed(join32(o), BITS, BH, WM, KWIDTH4, BATCH)
    else:
        o = _made(words, scales, zeros, FORM, ASM, BITS, GROUPED, SYMMETRIC, DT, BH, WM, INTERPRET)
        t = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
        return placed(t, BITS, BH, WM, KWIDTH4, BATCH)
