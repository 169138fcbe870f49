"""PTX of `wgmma_rows.cu` that turns words into pairs of scaled left operands.

Codes of bfloat16 have no magic number: the bits of a code 0 .. 255 are the number code * 2^-133,
since subnormals and the first binade are one linear scale. So no shift and no exponent brings a
nibble into place, and 8 bits are taken at once, where a mantissa of 7 cannot hold them beside 1.

    bfloat16   (code - zero) * 2^-7 by one fma, exactly; times scale * 2^7, rounded once
    float16    1024 + code, less 1024 + zero, exactly; times scale, rounded once

    instructions for 8 codes    4 bits             8 bits
    float16                     5 int + 8 fp       8 int + 8 fp
    bfloat16                    5 int + 8 fp       8 int + 8 fp    (7 + 8 and 15 + 16 with 128)

These are the bits of gluon_unpack.py's operands. 3 bits take its text. Operands: $0 and $1 are
pairs of rows r and r + 8, neighbours along k; then words, two scales, two zero constants.
"""

from __future__ import annotations

from llmpq.kernels.gemm.operands.unpack_assembly import FZ4, FZ8

_MAGIC = "0x64006400"
_MINUS_ZERO = "0x80008000"
_SELECT = "0xe4"  # lop3: third operand chooses between the first two

JOIN = (
    "{.reg .b32 t;shl.b32 t, $2, 4;lop3.b32 $0, t, $3, 0xf0f0f0f0, "
    f"{_SELECT};shr.b32 t, $3, 4;lop3.b32 $1, $2, t, 0xf0f0f0f0, {_SELECT};}}"
)
"""High and low nibbles' words to bytes, those of rows r and of rows r + 8: byte h of two is half
h's."""


def is_subnormal(bits: int, kind: str) -> bool:
    """Whether operands are made of subnormal numbers, so that scales are times 2^7."""
    return kind == "bf16" and bits != 3


def pairs_text(bits: int, kind: str, half: int) -> str:
    """Return the assembly of half a k-group's pairs of a word (4 bits) or of `JOIN`'s two."""
    words = ("$2", "$2") if bits == 4 else ("$2", "$3")
    scale = 3 if bits == 4 else 4
    body = ""
    if bits == 4:
        body += f"shr.b32 t, $2, {8 * half};"
        words = ("t", "t")
    for r, word in enumerate(words):
        # 2^126, less where a nibble stands higher; of float16 1 and 1/16.
        back = {"bf16": ("0x7e807e80", "0x7c807c80"), "f16": ("", "0x2c002c00")}[kind]
        factor = back[r] if bits == 4 else back[0]
        mask = ("0x000f000f", "0x00f000f0")[r] if bits == 4 else "0x00ff00ff"
        zero = f"${scale + 2 + r}"
        if bits == 8 and half:
            body += f"mov.b32 u, {'0x64646464' if kind == 'f16' else '0x00000000'};"
            body += f"prmt.b32 t, {word}, u, 0x4341;"
            found = "t"
        elif kind == "f16":
            body += f"lop3.b32 p, {word}, {mask}, {_MAGIC}, 0xea;"
            found = "p"
        else:
            body += f"and.b32 p, {word}, {mask};"
            found = "p"
        if factor:
            body += f"mov.b32 k, {factor};fma.rn.{kind}x2 p, {found}, k, {zero};"
        else:
            body += f"sub.rn.{kind}x2 p, {found}, {zero};"
        if kind == "f16":
            body += f"mul.rn.f16x2 ${r}, p, ${scale + r};"
        else:
            body += f"mov.b32 k, {_MINUS_ZERO};fma.rn.bf16x2 ${r}, p, ${scale + r}, k;"
    return f"{{.reg .b32 t, u, k, p;{body}}}"


SCALE = (
    f"{{.reg .b32 k, m;mov.b32 k, 0x43004300;mov.b32 m, {_MINUS_ZERO};fma.rn.bf16x2 $0, $1, k, m;}}"
)
"""bfloat16's scales times 2^7."""

_BF16_ZERO = (
    f"{{.reg .b32 t, k, m;mov.b32 k, 0xbc00bc00;mov.b32 m, {_MINUS_ZERO};fma.rn.bf16x2 t, $2, k, m;"
    "prmt.b32 $0, t, t, 0x1010;prmt.b32 $1, t, t, 0x3232;}"
)


def zero_text(bits: int, kind: str) -> str:
    """Return the assembly from a pair of zeros to the two constants of 4 or 8 bits."""
    return _BF16_ZERO if kind == "bf16" else str({4: FZ4, 8: FZ8}[bits].value)


def symmetric_zeros(bits: int, kind: str) -> tuple[int, int]:
    """Return the two constants of weights without zeros."""
    if kind == "bf16":
        return {4: (0xBD80BD80,) * 2, 8: (0xBF80BF80,) * 2}[bits]  # -8 / 128, -128 / 128
    return {4: (0x64086408, 0xD480D480), 8: (0x64806480,) * 2}[bits]
