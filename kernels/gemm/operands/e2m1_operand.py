"""MXFP4 words to tensor-core operands: E2M1 codes times their group's power of two, exactly.

A code's three bits, shifted to where a 16-bit float has its last bits of exponent and its first of
mantissa, are a float of 2^-126 (bfloat16) or 2^-14 (float16) its value, subnormal ones too; one
multiplication by 2^126 (2^14) of the scale makes it the weight. weights/codebook_weight.py draws
the words and the scales, which hold 2 at most, so that their multiple is finite.

    instructions per 8 codes    bfloat16 11 int + 4 fp    float16 13 int + 4 fp
    per 64 codes of a lane      8 scales, 2 int each      8 scales, 4 each

Legend as in packed_operands.py: a tile is 16 * BH * WM rows of one k-group.
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Triton body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

import triton
import triton.language as tl

from llmpq.kernels.gemm.operands.packed_operands import load_words, placed
from llmpq.kernels.gemm.operands.unpack_assembly import O8I5, assembly_text
from llmpq.kernels.gemm.operands.unpack_shifts import join8

SCALE_WORDS = tl.constexpr(16)
"""int32 words of the scales of 16 rows of a k-group."""


def _shifted(word: str, by: int, to: str) -> tuple[str, str]:
    """Return the text that shifts a word left, or right by so many less than 0, and the result."""
    if by == 0:
        return "", word
    return f"sh{'l' if by > 0 else 'r'}.b32 {to}, {word}, {abs(by)};", to


SHIFTS = {
    "bf16": (0x01C0, ((0, 0), (3, 3), (-3, 1), (6, 2))),
    "f16": (0x0E00, ((3, 0), (6, 3), (0, 1), (9, 2))),
}
"""Mask of a code's three bits; of every pair, shifts that bring those and its sign in place."""
TIMES = {"bf16": "fma.rn.bf16x2 {p}, {p}, {s}, k;", "f16": "mul.rn.f16x2 {p}, {p}, {s};"}
"""A product; of bfloat16 a sum with -0."""


def pairs_of(kind: str, pairs: tuple[int, ...], word: str, scales: tuple[str, ...]) -> str:
    """Return the text that makes p0, p1, ... of a word's pairs (h, r3), each times its scale.

    It uses registers t, u and k.
    """
    mask, shifts = SHIFTS[kind]
    body = "mov.b32 k, 0x80008000;"
    for i, (pair, scale) in enumerate(zip(pairs, scales, strict=True)):
        low, high = shifts[pair]
        text, source = _shifted(word, low, "t")
        if low == high:
            body += text + f"and.b32 p{i}, {source}, {mask * 0x10001 | 0x80008000:#010x};"
        else:
            body += text + f"and.b32 t, {source}, {mask * 0x10001:#010x};"
            text, source = _shifted(word, high, "u")
            body += text + f"lop3.b32 p{i}, {source}, k, t, 0xea;"
        body += TIMES[kind].format(p=f"p{i}", s=scale)
    return body


def _eight(kind: str) -> str:
    scales = tuple(f"${9 + i}" for i in range(4))
    return assembly_text(pairs_of(kind, (0, 1, 2, 3), "$8", scales), 4)


B_E2M1, F_E2M1 = tl.constexpr(_eight("bf16")), tl.constexpr(_eight("f16"))


def _scales(each: str) -> str:
    """Return the text that makes four bytes of exponents pairs of equal multipliers."""
    body = "".join(each.format(i=i) for i in range(4))
    return f"{{.reg .b32 t, z; .reg .f32 f; mov.b32 z, 0;{body}}}"


B_SCALES = tl.constexpr(  # (e + 126) << 7 in both halves
    _scales("prmt.b32 t, $4, z, 0x4{i}4{i};mad.lo.u32 ${i}, t, 128, 0x3f003f00;")
)
F_SCALES = tl.constexpr(  # e << 23 is the power in float32
    _scales(
        "prmt.b32 t, $4, z, 0x444{i};shl.b32 t, t, 23;mov.b32 f, t;mul.f32 f, f, 0f46800000;"
        "cvt.rn.f16x2.f32 ${i}, f, f;"
    )
)


B_FLOATS, F_FLOATS = (  # E4M3 is 2^-120 of a float32: 2^118 and 2^6 of it
    tl.constexpr(
        _scales(
            "prmt.b32 t, $4, z, 0x444{i};shl.b32 t, t, 20;mov.b32 f, t;mul.f32 f, f, 0f7b800000;"
            f"mul.f32 f, f, {times};cvt.rn.{kind}.f32 ${{i}}, f, f;"
        )
    )
    for kind, times in (("bf16x2", "0f7a800000"), ("f16x2", "0f42800000"))
)
NVFP4_SHARE = 256.0
"""Of NVFP4's values, what `unpack_nvfp4` makes: a row's factor is so much larger."""


@triton.jit
def load_e2m1(
    P, S, blocks, groups, group, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr = False
):
    """A tile's words and, (bh, warp, r, c, h), the eight bytes of scales of every lane."""
    words = load_words(P, blocks, groups, group, 256, 0, BH, WM, BATCH)
    f = tl.arange(0, BH * WM * 64)
    if BATCH:
        at = tl.minimum(f // (64 * WM), blocks - 1) * groups * 16 + f // 64 % WM * 16
    else:
        block = tl.minimum(f // (64 * WM) * WM + f // 64 % WM, blocks - 1)
        at = block * groups * 16
    at += f // 8 % 8 * 2 + f % 2
    return words, tl.load(S + group * 16 + at)


@triton.jit
def spread_parts(first, second, BH: tl.constexpr, WM: tl.constexpr):
    """Codebook (bh, warp, r, c) of jj/2 = 0 and 1 as one for each word of the lane."""
    t = tl.reshape(tl.join(first, second), (BH, WM, 8, 4, 2))
    t = tl.reshape(tl.permute(t, (0, 4, 1, 2, 3)), (BH, 2, WM, 8, 4, 1))
    return tl.reshape(tl.broadcast_to(t, (BH, 2, WM, 8, 4, 4)), (BH * WM * 256,))


@triton.jit
def _multipliers(bytes4, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """Four bytes of exponents (jj/2, r3) as pairs, or in the interpreter as float32."""
    if INTERPRET:
        return (
            ((bytes4 & 255) << 23).to(tl.float32, bitcast=True),
            ((bytes4 >> 8 & 255) << 23).to(tl.float32, bitcast=True),
            ((bytes4 >> 16 & 255) << 23).to(tl.float32, bitcast=True),
            ((bytes4 >> 24 & 255) << 23).to(tl.float32, bitcast=True),
        )
    elif DT == tl.float16:
        return tl.inline_asm_elementwise(
            F_SCALES, "=r,=r,=r,=r,r", [bytes4], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            B_SCALES, "=r,=r,=r,=r,r", [bytes4], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )


@triton.jit
def load_nvfp4(
    P, S, blocks, groups, group, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr = False
):
    """A tile's words and, (bh, warp, r, c, jj), the sixteen bytes of scales of every lane."""
    words = load_words(P, blocks, groups, group, 256, 0, BH, WM, BATCH)
    f = tl.arange(0, BH * WM * 128)
    if BATCH:
        at = tl.minimum(f // (128 * WM), blocks - 1) * groups * 32 + f // 128 % WM * 32
    else:
        block = tl.minimum(f // (128 * WM) * WM + f // 128 % WM, blocks - 1)
        at = block * groups * 32
    at += f // 16 % 8 * 4 + f % 4
    return words, tl.load(S + group * 32 + at)


@triton.jit
def _floats(byte, SHIFT: tl.constexpr):
    b = byte >> SHIFT & 127
    return (b << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * 0.00390625


@triton.jit
def _float_multipliers(bytes4, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """Four E4M3 bytes (h, r3) as pairs, or in the interpreter as float32."""
    if INTERPRET:
        return _floats(bytes4, 0), _floats(bytes4, 8), _floats(bytes4, 16), _floats(bytes4, 24)
    elif DT == tl.float16:
        return tl.inline_asm_elementwise(
            F_FLOATS, "=r,=r,=r,=r,r", [bytes4], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            B_FLOATS, "=r,=r,=r,=r,r", [bytes4], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )


@triton.jit
def _spread_words(a, b, c, d, BH: tl.constexpr, WM: tl.constexpr):
    """Codebook (bh, warp, r, c) of jj = 0, 1, 2, 3 as one for each word of the lane."""
    t = tl.join(tl.join(a, b), tl.join(c, d))  # jj%2, jj/2
    t = tl.permute(tl.reshape(t, (BH, WM, 8, 4, 2, 2)), (0, 5, 1, 2, 3, 4))
    t = tl.reshape(t, (BH, 2, WM, 8, 4, 2, 1))
    return tl.reshape(tl.broadcast_to(t, (BH, 2, WM, 8, 4, 2, 2)), (BH * WM * 256,))


@triton.jit
def _number(word, scale, SIGN: tl.constexpr, REST: tl.constexpr, DT: tl.constexpr):
    """Sign at bit SIGN and three bits from REST on, times the scale."""
    m = word >> REST & 7
    e = m >> 1
    twice = tl.where(e == 0, m & 1, (2 + (m & 1)) << tl.maximum(e - 1, 0)).to(tl.float32)
    return (tl.where((word >> SIGN & 1) == 1, -twice, twice) * (0.5 * scale)).to(DT)


@triton.jit
def _interpreted(w, s, DT: tl.constexpr):
    """(h, r3, k0) of a word by shifts and masks; s: scales of (h, r3)."""
    a, b = _number(w, s[0], 15, 6, DT), _number(w, s[0], 31, 22, DT)
    c, d = _number(w, s[1], 12, 3, DT), _number(w, s[1], 28, 19, DT)
    e, f = _number(w, s[2], 14, 9, DT), _number(w, s[2], 30, 25, DT)
    return join8(a, b, c, d, e, f, _number(w, s[3], 13, 0, DT), _number(w, s[3], 29, 16, DT))


@triton.jit
def unpack_e2m1(
    words,
    exponents,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    BATCH: tl.constexpr = False,
):
    """`load_e2m1` to w as an operand [rows, 128 k], k ordered as packed_operands.unpack says."""
    h0, h1 = tl.split(tl.reshape(exponents, (BH * WM * 32, 2)))
    m0, m1 = _multipliers(h0, DT, INTERPRET), _multipliers(h1, DT, INTERPRET)
    s0, s1 = spread_parts(m0[0], m0[2], BH, WM), spread_parts(m0[1], m0[3], BH, WM)
    s2, s3 = spread_parts(m1[0], m1[2], BH, WM), spread_parts(m1[1], m1[3], BH, WM)
    return _times(words, s0, s1, s2, s3, DT, BH, WM, KWIDTH4, INTERPRET, BATCH)


@triton.jit
def unpack_nvfp4(
    words,
    scales,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    BATCH: tl.constexpr = False,
):
    """`load_nvfp4` to 1 / NVFP4_SHARE of w, without a row's factor: exact in 16 bits."""
    even, odd = tl.split(tl.reshape(scales, (BH * WM * 32, 2, 2)))
    j0, j2 = tl.split(even)
    j1, j3 = tl.split(odd)
    m0, m1 = _float_multipliers(j0, DT, INTERPRET), _float_multipliers(j1, DT, INTERPRET)
    m2, m3 = _float_multipliers(j2, DT, INTERPRET), _float_multipliers(j3, DT, INTERPRET)
    s0 = _spread_words(m0[0], m1[0], m2[0], m3[0], BH, WM)
    s1 = _spread_words(m0[1], m1[1], m2[1], m3[1], BH, WM)
    s2 = _spread_words(m0[2], m1[2], m2[2], m3[2], BH, WM)
    s3 = _spread_words(m0[3], m1[3], m2[3], m3[3], BH, WM)
    return _times(words, s0, s1, s2, s3, DT, BH, WM, KWIDTH4, INTERPRET, BATCH)


@triton.jit
def _times(
    words,
    s0,
    s1,
    s2,
    s3,
    DT: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
    BATCH: tl.constexpr = False,
):
    """Codes times multipliers of (h, r3), one for each word, as an operand [rows, 128 k]."""
    if INTERPRET:
        t = _interpreted(words, (s0, s1, s2, s3), DT)
    else:
        if DT == tl.float16:
            o = tl.inline_asm_elementwise(
                F_E2M1,
                O8I5,
                [words, s0, s1, s2, s3],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            o = tl.inline_asm_elementwise(
                B_E2M1,
                O8I5,
                [words, s0, s1, s2, s3],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        t = join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    return placed(t, 4, BH, WM, KWIDTH4, BATCH)


@triton.jit
def own_sum(t, INTERPRET: tl.constexpr):
    """Return t behind an instruction that compilers neither fuse nor reorder sums across."""
    if INTERPRET:
        return t
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
        )
