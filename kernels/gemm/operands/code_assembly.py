"""Assembly texts that turn words of codes in small groups or of a table into scaled values.

    linear     code - zero by the magic numbers of unpack_assembly.py; exact, rounded once where the
               zero is not an integer
    lookup     a number of 16 is found by bytes: two permutations pick from the lower and the upper
               eight entries, the code's top bit chooses (bits as in weights/codebook_weight.py)
    thirds     the same of 3 bits: three words, sixteen pairs of one half h
    scaled     times a scale of r3, rounded once; of a table in bfloat16 times a pair of values
               whose sum is the float16 scale

A text makes four codes of a half h of a word, (r3, k0); `word_assembly` both halves. Of 3 bits it
makes 32, (jj, k3, r3, k0).
"""

from __future__ import annotations

import functools
import re
import struct

from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.gemm.operands.unpack_assembly import last_pair, pick

_MAGIC = {"f16": "0x64006400", "bf16": "0x43004300"}


def lookup_assembly(table: tuple[float, ...], kind: str, half: int) -> str:
    """Return the text that makes four codes of a word's half h values: outputs (r3, k0).

    `kind`: "f16" or "bf16". Operands behind the word: scales of r3 = 0 and 1, and of bfloat16 what
    these lack of the float16 that they were.
    """
    if kind == "f16":
        words = [struct.unpack("<H", struct.pack("<e", value))[0] for value in table]
    else:
        words = [_bfloat16(value) for value in table]
    body = "and.b32 c, $4, 0x77777777;" + ("shr.b32 c, c, 16;shl.b32 m, $4, 4;" if half else "")
    body += f"prmt.b32 m, {'m' if half else '$4'}, 0, 0xba98;"  # bytes of top bits
    for name, shift in (("l", 0), ("h", 8)):
        four = [sum((words[4 * i + j] >> shift & 255) << 8 * j for j in range(4)) for i in range(4)]
        for i, target in enumerate(("a", "b")):
            body += f"mov.b32 t, {four[2 * i]:#010x};mov.b32 u, {four[2 * i + 1]:#010x};"
            body += f"prmt.b32 {target}, t, u, c;"
        body += f"lop3.b32 {name}, a, b, m, 0xd8;"
    body += "prmt.b32 a, l, h, 0x5140;prmt.b32 b, l, h, 0x7362;"
    for i, pair in enumerate("ab"):
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


@functools.cache
def linear_assembly(bits: int, kind: str, half: int, symmetric: bool) -> str:
    """Return the text that makes four codes of a half code - zero, times scale: outputs (r3, k0).

    Operands: words (8 bits: high and low plane), then, not symmetric, zeros of r3 = 0 and 1, then
    scales.
    Code and zero are exact, their difference is rounded where the zero is not an integer.
    """
    magic, z = _MAGIC[kind], 2 ** (bits - 1) if symmetric else 0
    body = "mov.b32 k, 0x3f803f80;mov.b32 o, 0xbf80bf80;"
    for r in range(2):
        p, i = f"p{r}", 2 * half + r
        if kind == "f16":
            if bits == 4:
                body += f"shr.b32 t, $4, {8 * half};" + pick(p, "t", 0xF << 4 * r, magic)
            else:
                body += "shl.b32 t, $4, 4;" if i == 0 else f"shr.b32 t, $4, {4 * i - 4};"
                body += f"shr.b32 u, $5, {4 * i};" + pick(p, "t", 0xF0, magic)
                body += pick(p, "u", 0xF, p)
            if bits == 4 and r == 1:  # (1024 + 16 code) / 16 - (64 + zero)
                body += f"mov.b32 v, {_float16(-64.0 - z):#010x};mov.b32 u, 0x2c002c00;"
                body += f"fma.rn.f16x2 {p}, {p}, u, v;"
            else:
                body += f"mov.b32 v, {_float16(1024.0 + z):#010x};sub.rn.f16x2 {p}, {p}, v;"
            if not symmetric:
                body += f"sub.rn.f16x2 {p}, {p}, ${4 + bits // 4 + r};"
        else:
            body += f"shr.b32 t, $4, {4 * i};" + pick(p, "t", 0xF, magic)
            if bits == 4:
                body += f"mov.b32 v, {_pair(-128.0 - z):#010x};fma.rn.bf16x2 {p}, {p}, k, v;"
            else:  # 16 (128 + high) - 16 (128 + zero / 16), and the low nibble
                body += f"mov.b32 v, {_pair(-2048.0 - z):#010x};mov.b32 u, 0x41804180;"
                body += f"fma.rn.bf16x2 {p}, {p}, u, v;"
                body += f"shr.b32 t, $5, {4 * i};" + pick("t", "t", 0xF, magic)
                body += f"mov.b32 v, {_pair(-128.0):#010x};fma.rn.bf16x2 t, t, k, v;"
                body += f"fma.rn.bf16x2 {p}, t, k, {p};"
            if not symmetric:
                body += f"fma.rn.bf16x2 {p}, ${4 + bits // 4 + r}, o, {p};"
        by = f"${4 + bits // 4 + (0 if symmetric else 2) + r}"
        body += (
            f"mul.rn.f16x2 {p}, {p}, {by};"
            if kind == "f16"
            else f"mov.b32 u, 0x80008000;fma.rn.bf16x2 {p}, {p}, {by}, u;"
        )
    body += "mov.b32 {$0, $1}, p0;mov.b32 {$2, $3}, p1;"
    return "{.reg .b32 t, u, k, v, o, p0, p1;" + body + "}"


@functools.cache
def thirds_assembly(kind: str, symmetric: bool, shares: int) -> str:
    """Return the text that makes the 32 codes of three words scaled values: (jj, k3, r3, k0).

    `shares`: groups of a half h (64 k). Operands: words, then, not symmetric, zeros by (share, r3),
    then scales.
    """
    z, float16 = 4 if symmetric else 0, kind == "f16"
    wide, fields, step = (1024, (1, 8, 64), 3) if float16 else (128, (1, 8), 2)
    number, magic = _float16 if float16 else _pair, _MAGIC[kind]
    body = f"mov.b32 n, 0x80008000;mov.b32 o, {number(-1.0):#010x};"
    for i, field in enumerate(fields):  # a code that sits higher counts so many times
        body += f"mov.b32 k{i}, {number(1 / field):#010x};"
        body += f"mov.b32 z{i}, {number(-wide / field - z):#010x};"
    for i in range(15):
        word, (shift, place) = f"${32 + i // 5}", divmod(i % 5, step)
        if place == 0:
            body += f"shr.b32 t, {word}, {3 * step * shift};"
        body += pick(f"p{i}", "t", 7 << 3 * place, magic)
        body += f"fma.rn.{kind}x2 p{i}, p{i}, k{place}, z{place};"
    body += last_pair(magic) + f"fma.rn.{kind}x2 p15, p15, k0, z0;"
    for i in range(16):
        at = 35 + 2 * (i // 8 if shares == 2 else 0) + i % 2
        if not symmetric:
            body += f"fma.rn.{kind}x2 p{i}, ${at}, o, p{i};"
        at += 0 if symmetric else 2 * shares
        body += f"fma.rn.{kind}x2 p{i}, p{i}, ${at}, n;"
    body += "".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(16))
    registers = ", ".join(f"p{i}" for i in range(16))
    return f"{{.reg .b32 s, t, u, n, o, k0, k1, k2, z0, z1, z2, {registers};{body}}}"


def _float16(value: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", value))[0]) * 0x10001


def _pair(value: float) -> int:
    return _bfloat16(value) * 0x10001


@functools.cache
def word_assembly(form: str, bits: int, kind: str, symmetric: bool, parts: int) -> str:
    """Return the text that makes eight codes of a lane's word scaled values: (h, r3, k0).

    Operands: words, then of each half h what `linear_assembly` and `lookup_assembly` take. 3 bits
    in `parts` of a k-group: `thirds_assembly`.
    """
    if bits == 3:
        return thirds_assembly(kind, symmetric, parts // 2)
    words, body = max(1, bits // 4), ""
    for half in range(2):
        if form == "parts":
            text = linear_assembly(bits, kind, half, symmetric)
            more = 2 if symmetric else 4
        else:
            text = lookup_assembly(Codebook(form).values, kind, half)
            more, words = 2 if kind == "f16" else 4, 1
        place = {i: 4 * half + i for i in range(4)}
        place |= {4 + i: 8 + i for i in range(words)}
        place |= {4 + words + i: 8 + words + half * more + i for i in range(more)}
        pieces = re.split(r"\$(\d+)", text)
        body += pieces[0]
        for number, rest in zip(pieces[1::2], pieces[2::2], strict=True):
            body += f"${place[int(number)]}{rest}"
    return "{" + body + "}"


SUMS = (
    "{.reg .b16 a, b; .reg .f32 f0, f1, g; .reg .b32 t; mov.b32 {a, b}, $4;"
    + "".join(
        f"cvt.f32.f16 f{i}, {half};cvt.rn.bf16x2.f32 ${i}, f{i}, f{i};and.b32 t, ${i}, 0xffff0000;"
        f"mov.b32 g, t;sub.f32 g, f{i}, g;cvt.rn.bf16x2.f32 ${2 + i}, g, g;"
        for i, half in enumerate("ab")
    )
    + "}"
)
"""Float16 pairs to bfloat16 values of r3 = 0 and 1, doubled, and what these lack."""
