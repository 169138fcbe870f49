"""Packed words to scaled tensor-core operands in Gluon registers, half a k-group at a time.

The magic numbers of unpack_assembly.py, but one half h of a k-group (64 k, weight_layout.py)
a call, so that an operand is 16 registers a thread, and with the scale multiplied in: exact
code - zero, one rounding by the product.

A warpgroup's operand is 64 rows of w. Words [128 threads, words of a lane], scales and zeros of
rows r and r + 8 as 32-bit pairs [128, 1].
"""

# mypy: ignore-errors
# ruff: noqa: SIM300
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmpq.kernels.gemm.operands.unpack_assembly import (
    B3,
    B3Z,
    BZ3,
    BZ4,
    BZ8,
    F3,
    F3Z,
    FZ3,
    FZ4,
    FZ8,
    pick,
)

_MAGIC = {"f16": "0x64006400", "bf16": "0x43004300"}


def _scale(kind: str, pair: str, scale: str | None) -> str:
    if scale is None:
        return ""
    if kind == "f16":
        return f"mul.rn.f16x2 {pair}, {pair}, {scale};"
    return f"fma.rn.bf16x2 {pair}, {pair}, {scale}, m;"


def _wrap(body: str, pairs: int) -> str:
    registers = ", ".join(f"p{i}" for i in range(pairs))
    outputs = "".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(pairs))
    return f"{{.reg .b32 t, u, k, v, m, {registers};mov.b32 m, 0x80008000;{body}{outputs}}}"


def _four(kind: str, half: int, *, scaled: bool = True) -> str:
    """Outputs 0-3 (r3, k0); operands: word, scales of r3 = 0 and 1, zero constants of both."""
    magic = _MAGIC[kind]
    word, s = "$4", ("$5", "$6") if scaled else (None, None)
    z = ("$7", "$8") if scaled else ("$5", "$6")
    if kind == "f16":
        body = f"shr.b32 t, {word}, 8;" if half else f"mov.b32 t, {word};"
        body += pick("p0", "t", 0xF, magic) + pick("p1", "t", 0xF0, magic)
        body += f"mov.b32 k, 0x2c002c00;sub.rn.f16x2 p0, p0, {z[0]};"
        body += f"fma.rn.f16x2 p1, p1, k, {z[1]};"
    else:
        body = f"mov.b32 k, 0x3f803f80;shr.b32 t, {word}, {8 * half};"
        body += f"shr.b32 u, {word}, {8 * half + 4};"
        body += pick("p0", "t", 0xF, magic) + pick("p1", "u", 0xF, magic)
        body += "".join(f"fma.rn.bf16x2 p{i}, p{i}, k, {z[i]};" for i in range(2))
    return _wrap(body + _scale(kind, "p0", s[0]) + _scale(kind, "p1", s[1]), 2)


def _eight(kind: str, half: int, *, scaled: bool = True) -> str:
    """As `_four`; operands: high and low word, two scales, two (bf16: four) zero constants."""
    magic = _MAGIC[kind]
    high, low, s = "$4", "$5", ("$6", "$7") if scaled else (None, None)
    zeros = 8 if scaled else 6
    body = ""
    for r in range(2):
        i, p = 2 * half + r, f"p{r}"
        if kind == "f16":
            body += f"shl.b32 t, {high}, 4;" if i == 0 else f"shr.b32 t, {high}, {4 * i - 4};"
            body += f"shr.b32 u, {low}, {4 * i};" + pick(p, "t", 0xF0, magic)
            body += pick(p, "u", 0xF, p) + f"sub.rn.f16x2 {p}, {p}, ${zeros + r};"
        else:
            body += f"shr.b32 t, {high}, {4 * i};shr.b32 u, {low}, {4 * i};"
            body += pick("t", "t", 0xF, magic) + pick("u", "u", 0xF, magic)
            body += "mov.b32 k, 0x3f803f80;mov.b32 v, 0x41804180;"
            body += f"fma.rn.bf16x2 t, t, v, ${zeros + r};fma.rn.bf16x2 u, u, k, ${zeros + 2 + r};"
            body += f"fma.rn.bf16x2 {p}, t, k, u;"
        body += _scale(kind, p, s[r])
    return _wrap(body, 2)


def _three(kind: str, symmetric: bool) -> str:
    """The 32 outputs of three words (unpack_assembly.py), each pair scaled by the last operands."""
    plain = {("f16", True): F3, ("f16", False): F3Z, ("bf16", True): B3, ("bf16", False): B3Z}
    first = 35 if symmetric else 41 if kind == "f16" else 39
    scaled = "".join(_scale(kind, f"p{i}", f"${first + i % 2}") for i in range(16))
    unpack, store, rest = plain[(kind, symmetric)].value.partition("mov.b32 {$0,")
    minus_zero = "" if kind == "f16" else ".reg .b32 m;mov.b32 m, 0x80008000;"
    return unpack + minus_zero + scaled + store + rest


def _constraints(inputs: int, outputs: int = 4) -> str:
    return ",".join(["=h"] * outputs + ["r"] * inputs)


_ASSEMBLY = {
    (bits, kind, half): make(kind, half)
    for bits, make in ((4, _four), (8, _eight))
    for kind in ("f16", "bf16")
    for half in (0, 1)
}
_ASSEMBLY3 = {(kind, s): _three(kind, s) for kind in ("f16", "bf16") for s in (True, False)}
CONSTANTS = {
    (3, "f16"): (0x64046404, 0x64046404, 0xD820D820, 0xD820D820, 0xCD00CD00, 0xCD00CD00),
    (3, "bf16"): (0xC304C304, 0xC304C304, 0xC1A0C1A0, 0xC1A0C1A0),
    (4, "f16"): (0x64086408, 0xD480D480),
    (4, "bf16"): (0xC308C308, 0xC308C308),
    (8, "f16"): (0x64806480, 0x64806480),
    (8, "bf16"): (0xC508C508, 0xC508C508, 0xC300C300, 0xC300C300),
}
"""What a symmetric weight's unpacking takes off, as pairs: immediates of 3 bits' assembly."""


def plain_text(bits: int, kind: str, *, half: int) -> str:
    """Return the assembly of half a k-group's pairs of 4 or 8 bits, without operands of scales."""
    make = _four if bits == 4 else _eight
    return make(kind, half, scaled=False)


def scaled_text(bits: int, kind: str, *, half: int = 0, symmetric: bool = True) -> str:
    """Return the assembly of half a k-group's scaled pairs; 3 bits have one for both halves."""
    return _ASSEMBLY3[kind, symmetric] if bits == 3 else _ASSEMBLY[bits, kind, half]


def zero_text(bits: int, kind: str) -> str:
    """Return the assembly that makes zero constants of a pair of zeros."""
    texts = {(3, "f16"): FZ3, (4, "f16"): FZ4, (8, "f16"): FZ8}
    texts |= {(3, "bf16"): BZ3, (4, "bf16"): BZ4, (8, "bf16"): BZ8}
    return str(texts[bits, kind].value)


@gluon.constexpr_function
def _assembly(bits, dtype, half):
    return _ASSEMBLY[(bits, "f16" if dtype == gl.float16 else "bf16", half)]


@gluon.constexpr_function
def _zero_assembly(bits, dtype):
    names = {(4, True): FZ4, (8, True): FZ8, (4, False): BZ4, (8, False): BZ8}
    names |= {(3, True): FZ3, (3, False): BZ3}
    return names[(bits, dtype == gl.float16)].value


@gluon.constexpr_function
def _assembly3(dtype, symmetric):
    return _ASSEMBLY3[("f16" if dtype == gl.float16 else "bf16", symmetric)]


# A thread's values, thread = (warp, r, c), then five axes of two: k0 r3 k3 jj%2 jj/2 (3 bit) or
# jj/2 jj%2 k3 k0 r3. AXES puts (warp, r3, r | jj/2, jj%2, k3, c, k0) in order: rows and k.
LANES_SHAPE = gl.constexpr((4, 8, 4, 2, 2, 2, 2, 2))
AXES3 = gl.constexpr((0, 4, 1, 7, 6, 5, 2, 3))
AXES4 = gl.constexpr((0, 7, 1, 3, 4, 5, 2, 6))
_TWO = gl.constexpr("=r,=r,r")
_FOUR = gl.constexpr("=r,=r,=r,=r,r")
_SPLAT = gl.constexpr("prmt.b32 $0, $2, $2, 0x1010;prmt.b32 $1, $2, $2, 0x3232;")
_O4I5 = gl.constexpr(_constraints(5))
_O4I6 = gl.constexpr(_constraints(6))
_O4I8 = gl.constexpr(_constraints(8))
_SIX = gl.constexpr("=r,=r,=r,=r,=r,=r,r")
_O32I5 = gl.constexpr(_constraints(5, 32))
_O32I9 = gl.constexpr(_constraints(9, 32))
_O32I11 = gl.constexpr(_constraints(11, 32))


@gluon.jit
def splat(pairs):
    """The two values of 16-bit pairs, each doubled: for rows r and r + 8."""
    return gl.inline_asm_elementwise(
        _SPLAT, _TWO, [pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def zero_constants(pairs, BITS: gl.constexpr, DT: gl.constexpr, SYMMETRIC: gl.constexpr):
    """What `operand` takes off the magic numbers; symmetric zeros are 2^(bits-1)."""
    if SYMMETRIC:
        if BITS == 3:  # immediates of the assembly
            return ()
        elif BITS == 4:
            if DT == gl.float16:  # 1024 + 8, -(64 + 8)
                return (pairs * 0 + 0x64086408, pairs * 0 + (0xD480D480 - 0x100000000))
            else:  # -(128 + 8)
                c = pairs * 0 + (0xC308C308 - 0x100000000)
                return (c, c)
        elif DT == gl.float16:  # 1024 + 128
            c = pairs * 0 + 0x64806480
            return (c, c)
        else:  # -16 (128 + 8), -128
            high = pairs * 0 + (0xC508C508 - 0x100000000)
            low = pairs * 0 + (0xC300C300 - 0x100000000)
            return (high, high, low, low)
    else:
        ASM: gl.constexpr = _zero_assembly(BITS, DT)
        if BITS == 3 and DT == gl.float16:
            return gl.inline_asm_elementwise(
                ASM, _SIX, [pairs], dtype=(gl.int32,) * 6, is_pure=True, pack=1
            )
        elif BITS != 4 and DT == gl.bfloat16:
            return gl.inline_asm_elementwise(
                ASM, _FOUR, [pairs], dtype=(gl.int32,) * 4, is_pure=True, pack=1
            )
        else:
            return gl.inline_asm_elementwise(
                ASM, _TWO, [pairs], dtype=(gl.int32,) * 2, is_pure=True, pack=1
            )


@gluon.jit
def _join8(a, b, c, d, e, f, g, h):
    return gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))


@gluon.jit
def _operand3(w0, w1, w2, s, z, DT: gl.constexpr, SYMMETRIC: gl.constexpr):
    ASM: gl.constexpr = _assembly3(DT, SYMMETRIC)
    if SYMMETRIC:
        o = gl.inline_asm_elementwise(
            ASM, _O32I5, [w0, w1, w2, s[0], s[1]], dtype=(gl.int16,) * 32, is_pure=True, pack=1
        )
    elif DT == gl.float16:
        o = gl.inline_asm_elementwise(
            ASM,
            _O32I11,
            [w0, w1, w2, z[0], z[1], z[2], z[3], z[4], z[5], s[0], s[1]],
            dtype=(gl.int16,) * 32,
            is_pure=True,
            pack=1,
        )
    else:
        o = gl.inline_asm_elementwise(
            ASM,
            _O32I9,
            [w0, w1, w2, z[0], z[1], z[2], z[3], s[0], s[1]],
            dtype=(gl.int16,) * 32,
            is_pure=True,
            pack=1,
        )
    a = _join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    b = _join8(o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15])
    c = _join8(o[16], o[17], o[18], o[19], o[20], o[21], o[22], o[23])
    d = _join8(o[24], o[25], o[26], o[27], o[28], o[29], o[30], o[31])
    t = gl.join(gl.join(a, b), gl.join(c, d)).to(DT, bitcast=True)  # k0 r3 k3 jj%2 jj/2
    return gl.reshape(gl.permute(gl.reshape(t, LANES_SHAPE.value), AXES3.value), (64, 64))


@gluon.jit
def operand(
    words,
    scales,
    zeros,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    DT: gl.constexpr,
    SYMMETRIC: gl.constexpr,
):
    """(code - zero) * scale of half HALF as [64 rows, 64 k], in the words' registers' order."""
    if BITS == 3:
        w0, w1, w2 = gl.split(words[0]), gl.split(words[1]), gl.split(words[2])
        return _operand3(w0[HALF], w1[HALF], w2[HALF], scales, zeros, DT, SYMMETRIC)
    else:
        return _operand(words, scales, zeros, HALF, BITS, DT)


@gluon.jit
def _column(values):
    """Per-thread tensors [threads] as [threads, 1] beside the words."""
    out = ()
    for i in gl.static_range(len(values)):
        out = out + (values[i][:, None],)
    return out


@gluon.jit
def _operand(
    words,
    scales,
    zeros,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    DT: gl.constexpr,
):
    ASM: gl.constexpr = _assembly(BITS, DT, HALF)
    scales, zeros = _column(scales), _column(zeros)
    if BITS == 4:
        o = gl.inline_asm_elementwise(
            ASM,
            _O4I5,
            [words[0], scales[0], scales[1], zeros[0], zeros[1]],
            dtype=(gl.int16,) * 4,
            is_pure=True,
            pack=1,
        )
    elif DT == gl.float16:
        o = gl.inline_asm_elementwise(
            ASM,
            _O4I6,
            [words[0], words[1], scales[0], scales[1], zeros[0], zeros[1]],
            dtype=(gl.int16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        o = gl.inline_asm_elementwise(
            ASM,
            _O4I8,
            [words[0], words[1], scales[0], scales[1], zeros[0], zeros[1], zeros[2], zeros[3]],
            dtype=(gl.int16,) * 4,
            is_pure=True,
            pack=1,
        )
    t = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])).to(DT, bitcast=True)  # words k0 r3
    return gl.reshape(gl.permute(gl.reshape(t, LANES_SHAPE.value), AXES4.value), (64, 64))
