"""A quarter of a k-group of 4- or 8-bit codes, words to registers: 32 k that surely share a scale.

    chunk (h, j)   k = 64 h + 32 j + (0..31): the words jj/2 = j of a lane, one half h of each
    lookup         a number of 16 is found by bytes: two permutations pick from the lower and the
                   upper eight entries, the code's top bit chooses. 12 instructions for 4 codes
    linear         code - zero by the magic numbers of unpack_assembly.py

Numbers are exact, but for those of a table, which are rounded to x's dtype. Legend as in
packed_operands.py; BITS 0: codes of a table, whose nibbles lie (h, r3, k0), k0 fastest.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import functools
import struct

import triton
import triton.language as tl

from llmpq.kernels.gemm.packed_operands import pair_floats

_MAGIC = {"f16": "0x64006400", "bf16": "0x43004300"}


def lookup_assembly(table: tuple[float, ...], kind: str, half: int, *, scaled: bool = False) -> str:
    """Return the text that makes four codes of a word's half h numbers: outputs (r3, k0).

    `kind`: "f16" or "bf16". `scaled`: operands behind the word are scales of r3 = 0 and 1, and of
    bfloat16 what these lack of the float16 that they were.
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
    for i, pair in enumerate("ab" if scaled else ""):
        if kind == "f16":
            body += f"mul.rn.f16x2 {pair}, {pair}, ${5 + i};"
        else:
            body += f"mov.b32 t, 0x80008000;fma.rn.bf16x2 t, {pair}, ${7 + i}, t;"
            body += f"fma.rn.bf16x2 {pair}, {pair}, ${5 + i}, t;"
    body += "mov.b32 {$0, $1}, a;mov.b32 {$2, $3}, b;"
    return "{.reg .b32 c, m, l, h, a, b, t, u;" + body + "}"


def _bfloat16(value: float) -> int:
    """Return the bits of a number in bfloat16, rounded to nearest."""
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def _pick(target: str, source: str, mask: int, magic: str) -> str:
    return f"lop3.b32 {target}, {source}, {mask * 0x10001:#010x}, {magic}, 0xea;"


@functools.cache
def linear_assembly(
    bits: int, kind: str, half: int, symmetric: bool, *, scaled: bool = False
) -> str:
    """Return the text that makes four codes of a half code - zero: outputs (r3, k0).

    Operands: words (8 bits: high and low plane), then, not symmetric, zeros of r3 = 0 and 1, then,
    `scaled`, scales.
    Code and zero are exact, their difference is rounded where the zero is no whole number.
    """
    magic, z = _MAGIC[kind], 2 ** (bits - 1) if symmetric else 0
    body = "mov.b32 k, 0x3f803f80;mov.b32 o, 0xbf80bf80;"
    for r in range(2):
        p, i = f"p{r}", 2 * half + r
        if kind == "f16":
            if bits == 4:
                body += f"shr.b32 t, $4, {8 * half};" + _pick(p, "t", 0xF << 4 * r, magic)
            else:
                body += "shl.b32 t, $4, 4;" if i == 0 else f"shr.b32 t, $4, {4 * i - 4};"
                body += f"shr.b32 u, $5, {4 * i};" + _pick(p, "t", 0xF0, magic)
                body += _pick(p, "u", 0xF, p)
            if bits == 4 and r == 1:  # (1024 + 16 code) / 16 - (64 + zero)
                body += f"mov.b32 v, {_float16(-64.0 - z):#010x};mov.b32 u, 0x2c002c00;"
                body += f"fma.rn.f16x2 {p}, {p}, u, v;"
            else:
                body += f"mov.b32 v, {_float16(1024.0 + z):#010x};sub.rn.f16x2 {p}, {p}, v;"
            if not symmetric:
                body += f"sub.rn.f16x2 {p}, {p}, ${4 + bits // 4 + r};"
        else:
            body += f"shr.b32 t, $4, {4 * i};" + _pick(p, "t", 0xF, magic)
            if bits == 4:
                body += f"mov.b32 v, {_pair(-128.0 - z):#010x};fma.rn.bf16x2 {p}, {p}, k, v;"
            else:  # 16 (128 + high) - 16 (128 + zero / 16), and the low nibble
                body += f"mov.b32 v, {_pair(-2048.0 - z):#010x};mov.b32 u, 0x41804180;"
                body += f"fma.rn.bf16x2 {p}, {p}, u, v;"
                body += f"shr.b32 t, $5, {4 * i};" + _pick("t", "t", 0xF, magic)
                body += f"mov.b32 v, {_pair(-128.0):#010x};fma.rn.bf16x2 t, t, k, v;"
                body += f"fma.rn.bf16x2 {p}, t, k, {p};"
            if not symmetric:
                body += f"fma.rn.bf16x2 {p}, ${4 + bits // 4 + r}, o, {p};"
        if scaled:
            by = f"${4 + bits // 4 + (0 if symmetric else 2) + r}"
            body += (
                f"mul.rn.f16x2 {p}, {p}, {by};"
                if kind == "f16"
                else f"mov.b32 u, 0x80008000;fma.rn.bf16x2 {p}, {p}, {by}, u;"
            )
    body += "mov.b32 {$0, $1}, p0;mov.b32 {$2, $3}, p1;"
    return "{.reg .b32 t, u, k, v, o, p0, p1;" + body + "}"


def _float16(value: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", value))[0]) * 0x10001


def _pair(value: float) -> int:
    return _bfloat16(value) * 0x10001


@triton.jit
def load_quarter(
    base, left, groups, group, J: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """Words jj/2 = J of a tile's k-group: (bh, warp, lane, 4)."""
    f = tl.arange(0, BH * WM * 128)
    inner, warp, bh = J * 128 + f % 128, f // 128 % WM, f // (128 * WM)
    if BATCH:
        at = tl.minimum(bh, left - 1) * groups * 256 + warp * 256 + inner
    else:
        at = tl.minimum(bh * WM + warp, left - 1) * groups * 256 + inner
    return tl.load(base + group * 256 + at, eviction_policy="evict_first")


@triton.jit
def load_parts(
    base, left, groups, group, PARTS: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """Scales (or zeros) of rows r and r + 8 of every part, 32-bit pairs: (bh, warp, r, c)."""
    f = tl.arange(0, BH * WM * 32)
    warp, bh = f // 32 % WM, f // (32 * WM)
    if BATCH:
        at = tl.minimum(bh, left - 1) * groups * (8 * PARTS) + warp * (8 * PARTS) + f // 4 % 8
    else:
        at = tl.minimum(bh * WM + warp, left - 1) * groups * (8 * PARTS) + f // 4 % 8
    out = ()
    for part in tl.static_range(PARTS):
        out += (tl.load(base + group * (8 * PARTS) + part * 8 + at),)
    return out


@triton.jit
def _repeated(t, LANES: tl.constexpr):
    """Per-lane values for each of a lane's four words."""
    return tl.reshape(tl.broadcast_to(tl.reshape(t, (LANES, 1)), (LANES, 4)), (LANES * 4,))


@triton.jit
def _asked(
    words, zeros, ASM: tl.constexpr, INPUTS: tl.constexpr, DT: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    given = words
    for i in tl.static_range(len(zeros)):
        given += (_repeated(zeros[i], LANES),)
    KINDS: tl.constexpr = "=h,=h,=h,=h" + ",r" * INPUTS
    if DT == tl.float16:
        return tl.inline_asm_elementwise(
            ASM, KINDS, given, dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            ASM, KINDS, given, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )


@triton.jit
def _by_shifts(
    words, zeros, T, HALF: tl.constexpr, BITS: tl.constexpr, SYMMETRIC: tl.constexpr,
    DT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What the assembly does, for the interpreter."""
    out = ()
    for r3 in tl.static_range(2):
        for k0 in tl.static_range(2):
            if BITS == 0:
                number = tl.load(T + (words[0] >> (16 * HALF + 8 * r3 + 4 * k0) & 15))
            else:
                at = 16 * k0 + 8 * HALF + 4 * r3
                code = words[0] >> at & 15
                if BITS == 8:
                    code = code * 16 + (words[1] >> at & 15)
                if SYMMETRIC:
                    number = (code - (1 << (BITS - 1))).to(tl.float32)
                else:
                    number = code.to(tl.float32) - _repeated(zeros[r3], LANES)
            out += (number.to(DT),)
    return out


@triton.jit
def chunk(
    words, zero, T, ASM: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr,
    BATCH: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Numbers of half HALF of words (bh, warp, lane, 4): an operand [(warp,) rows, 32 k]."""
    LANES: tl.constexpr = BH * WM * 32
    zeros = ()
    if BITS > 0 and not SYMMETRIC:
        if INTERPRET:
            zeros = pair_floats(zero, DT)
        else:
            zeros = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, $2, 0x1010;prmt.b32 $1, $2, $2, 0x3232;",
                "=r,=r,r", [zero], dtype=(tl.int32,) * 2, is_pure=True, pack=1,
            )  # fmt: skip
    if INTERPRET:
        o = _by_shifts(words, zeros, T, HALF, BITS, SYMMETRIC, DT, LANES)
    else:
        o = _asked(words, zeros, ASM, len(words) + len(zeros), DT, LANES)
    t = tl.join(tl.join(o[0], o[1]), tl.join(o[2], o[3]))
    # bh, warp, r, c, jj%2, k3 | k0, r3 to (warp,) bh, (warp,) r3, r | jj%2, k3, c, k0
    t = tl.reshape(t, (BH, WM, 8, 4, 2, 2, 2, 2))
    if BATCH:
        t = tl.permute(t, (1, 0, 7, 2, 4, 5, 3, 6))
    else:
        t = tl.permute(t, (0, 1, 7, 2, 4, 5, 3, 6))
    if BATCH:
        return tl.reshape(t, (WM, BH * 16, 32))
    else:
        return tl.reshape(t, (BH * WM * 16, 32))
