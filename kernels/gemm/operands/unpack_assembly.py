"""Assembly texts that turn packed words into pairs of values, generated once at import.

A word (weight_layout.py) holds eight 4-bit codes, or a third of thirty-two 3-bit ones, of two rows
(r3) and of neighbours along k (k0) in its halves. `(word & 0x000f000f) | 0x64006400` is two fp16
values 1024 + code; one instruction takes 1024 + zero off, exactly, and a code that sits 3, 4 or 6
bits higher is scaled back by the same instruction (fma). bfloat16 has 7 mantissa bits: its magic
number is 128 (0x4300) and more codes must be shifted down first.

    instructions per 8 codes      4 bit         3 bit          8 bit (two words)
    float16                       5 int + 4 fp  6 int + 4 fp   14 int + 4 fp
    bfloat16                      7 int + 4 fp  7 int + 4 fp   11 int + 12 fp

Asymmetric zeros cost nothing there: they only change the constants (`*_ZERO` make them).
Names: F, B (float16, bfloat16), bits, Z (zero constants are operands).
"""

from __future__ import annotations

import triton.language as tl


def assembly_text(body: str, pairs: int) -> str:
    """Wrap instructions that leave fp pairs in p0, p1, ... as 2 * pairs outputs of 16 bits."""
    registers = ", ".join(f"p{i}" for i in range(pairs))
    outputs = "".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(pairs))
    return f"{{.reg .b32 s, t, u, v, k, z0, z1, z2, y0, y1, y2, {registers};{body}{outputs}}}"


def _constants(names: str, first: int | None, values: list[int]) -> str:
    """Set constants from operands first, first + 1, ... or, symmetric, from immediate values."""
    return "".join(
        f"mov.b32 {name}, {value:#010x};" if first is None else f"mov.b32 {name}, ${first + i};"
        for i, (name, value) in enumerate(zip(names.split(), values, strict=True))
    )


def pick(target: str, source: str, mask: int, magic: str) -> str:
    """Return the instruction that takes a code of both halves and its magic number."""
    return f"lop3.b32 {target}, {source}, {mask * 0x10001:#010x}, {magic}, 0xea;"


_F16, _B16 = "0x64006400", "0x43004300"


def _float16_4(first: int | None) -> str:
    body = _constants("z0 y1", first, [0x64086408, 0xD480D480])  # 1024 + 8, -(64 + 8)
    body += "mov.b32 k, 0x2c002c00;shr.b32 t, $8, 8;"  # 1/16
    body += pick("p0", "$8", 0xF, _F16) + pick("p1", "$8", 0xF0, _F16)
    body += pick("p2", "t", 0xF, _F16) + pick("p3", "t", 0xF0, _F16)
    body += "sub.f16x2 p0, p0, z0;fma.rn.f16x2 p1, p1, k, y1;"
    body += "sub.f16x2 p2, p2, z0;fma.rn.f16x2 p3, p3, k, y1;"
    return assembly_text(body, 4)


def _bfloat16_4(first: int | None) -> str:
    body = _constants("z0 z1", first, [0xC308C308] * 2)  # -(128 + 8)
    body += "mov.b32 k, 0x3f803f80;shr.b32 t, $8, 4;shr.b32 u, $8, 8;shr.b32 v, $8, 12;"  # 1
    for i, source in enumerate(("$8", "t", "u", "v")):
        body += pick(f"p{i}", source, 0xF, _B16)
    return assembly_text(
        body + "".join(f"fma.rn.bf16x2 p{i}, p{i}, k, z{i % 2};" for i in range(4)), 4
    )


def last_pair(magic: str) -> str:
    """Pair 15 of a 3-bit triple: one bit from the top of each half of each word."""
    body = "shr.b32 s, $32, 15;shr.b32 t, $33, 14;shr.b32 u, $34, 13;"
    body += pick("p15", "s", 1, magic)
    return body + pick("p15", "t", 2, "p15") + pick("p15", "u", 4, "p15")


def _float16_3(first: int | None) -> str:
    symmetric = [0x64046404] * 2 + [0xD820D820] * 2 + [0xCD00CD00] * 2  # 1028, -(128+4), -(16+4)
    body = _constants("z0 z1 y0 y1 y2 z2", first, symmetric)
    body += "mov.b32 k, 0x30003000;mov.b32 v, 0x24002400;"  # 1/8, 1/64
    for word in range(3):
        body += f"shr.b32 t, ${32 + word}, 9;"
        for field in range(5):
            p, row = f"p{5 * word + field}", (5 * word + field) % 2
            source = f"${32 + word}" if field < 3 else "t"
            body += pick(p, source, 7 << 3 * (field % 3), _F16)
            body += (
                f"sub.f16x2 {p}, {p}, z{row};",
                f"fma.rn.f16x2 {p}, {p}, k, y{row};",
                f"fma.rn.f16x2 {p}, {p}, v, {('y2', 'z2')[row]};",
            )[field % 3]
    return assembly_text(body + last_pair(_F16) + "sub.f16x2 p15, p15, z1;", 16)


def _bfloat16_3(first: int | None) -> str:
    symmetric = [0xC304C304] * 2 + [0xC1A0C1A0] * 2  # -(128 + 4), -(16 + 4)
    body = _constants("z0 z1 y0 y1", first, symmetric)
    body += "mov.b32 k, 0x3f803f80;mov.b32 v, 0x3e003e00;"  # 1, 1/8
    for word in range(3):
        body += f"shr.b32 t, ${32 + word}, 6;shr.b32 u, ${32 + word}, 12;"
        for field in range(5):
            p, row = f"p{5 * word + field}", (5 * word + field) % 2
            body += pick(p, (f"${32 + word}", "t", "u")[field // 2], 7 << 3 * (field % 2), _B16)
            scale, zero = ("k", "z") if field % 2 == 0 else ("v", "y")
            body += f"fma.rn.bf16x2 {p}, {p}, {scale}, {zero}{row};"
    return assembly_text(body + last_pair(_B16) + "fma.rn.bf16x2 p15, p15, k, z1;", 16)


def _float16_8(first: int | None) -> str:
    body = _constants("z0 z1", first, [0x64806480] * 2)  # 1024 + 128
    for i, (high, low) in enumerate(
        (("shl {}, $8, 4", ""), ("", "4"), ("shr {}, $8, 4", "8"), ("shr {}, $8, 8", "12"))
    ):
        if high:
            body += high.replace("shl ", "shl.b32 ").replace("shr ", "shr.b32 ").format("t") + ";"
        if low:
            body += f"shr.b32 u, $9, {low};"
        body += pick(f"p{i}", "t" if high else "$8", 0xF0, _F16)
        body += pick(f"p{i}", "u" if low else "$9", 0xF, f"p{i}")
        body += f"sub.f16x2 p{i}, p{i}, z{i % 2};"
    return assembly_text(body, 4)


def _bfloat16_8(first: int | None) -> str:
    """16 (high - zero's high nibble) + (low - its low one): 128 + zero itself may need 9 bits."""
    body = _constants(
        "y0 y1 z0 z1", first, [0xC508C508] * 2 + [0xC300C300] * 2
    )  # -16 (128+8), -128
    body += "mov.b32 k, 0x3f803f80;mov.b32 v, 0x41804180;"  # 1, 16
    for i in range(4):
        body += f"shr.b32 t, $8, {4 * i};shr.b32 u, $9, {4 * i};"
        body += pick("t", "t", 0xF, _B16) + pick("u", "u", 0xF, _B16)
        body += f"fma.rn.bf16x2 t, t, v, y{i % 2};fma.rn.bf16x2 u, u, k, z{i % 2};"
        body += f"fma.rn.bf16x2 p{i}, t, k, u;"
    return assembly_text(body, 4)


def _outputs(count: int, inputs: int) -> str:
    return ",".join(["=h"] * count + ["r"] * inputs)


# (bits, dtype) -> assembly without and with zero constants as operands, and their number.
F4, F4Z = tl.constexpr(_float16_4(None)), tl.constexpr(_float16_4(9))
B4, B4Z = tl.constexpr(_bfloat16_4(None)), tl.constexpr(_bfloat16_4(9))
F3, F3Z = tl.constexpr(_float16_3(None)), tl.constexpr(_float16_3(35))
B3, B3Z = tl.constexpr(_bfloat16_3(None)), tl.constexpr(_bfloat16_3(35))
F8, F8Z = tl.constexpr(_float16_8(None)), tl.constexpr(_float16_8(10))
B8, B8Z = tl.constexpr(_bfloat16_8(None)), tl.constexpr(_bfloat16_8(10))
O8I1, O8I3 = tl.constexpr(_outputs(8, 1)), tl.constexpr(_outputs(8, 3))
O8I2, O8I4, O8I5, O8I6 = (tl.constexpr(_outputs(8, i)) for i in (2, 4, 5, 6))
O32I3, O32I9, O32I7 = (tl.constexpr(_outputs(32, i)) for i in (3, 9, 7))

# Zeros of two rows, as a pair, to the constants above: splat each, then c + s * zero.
_SPLAT = ".reg .b32 a, b, s, m;prmt.b32 a, {n}, {n}, 0x1010;prmt.b32 b, {n}, {n}, 0x3232;"


def _zero_assembly(kind: str, terms: list[tuple[int, int, str]]) -> str:
    body = _SPLAT.format(n=f"${len(terms)}")
    for i, (constant, sign, row) in enumerate(terms):
        body += f"mov.b32 s, {constant:#010x};mov.b32 m, {sign:#010x};"
        body += f"fma.rn.{kind} ${i}, {row}, m, s;"
    return "{" + body + "}"


_P, _N, _BP = 0x3C003C00, 0xBC00BC00, 0xBF80BF80  # fp16 1, -1; bf16 -1
FZ4 = tl.constexpr(_zero_assembly("f16x2", [(0x64006400, _P, "a"), (0xD400D400, _N, "b")]))
FZ8 = tl.constexpr(_zero_assembly("f16x2", [(0x64006400, _P, "a"), (0x64006400, _P, "b")]))
FZ3 = tl.constexpr(
    _zero_assembly(
        "f16x2",
        [(c, s, r) for c, s in ((0x64006400, _P), (0xD800D800, _N)) for r in "ab"]
        + [(0xCC00CC00, _N, "a"), (0xCC00CC00, _N, "b")],
    )
)
BZ4 = tl.constexpr(_zero_assembly("bf16x2", [(0xC300C300, _BP, "a"), (0xC300C300, _BP, "b")]))
BZ3 = tl.constexpr(
    _zero_assembly("bf16x2", [(c, _BP, r) for c in (0xC300C300, 0xC180C180) for r in "ab"])
)


def _zero_nibbles() -> str:
    """bfloat16 zeros to -16 (128 + high nibble) and -(128 + low nibble), built as integers."""
    body = ".reg .b32 f0, f1, h0, h1, l0, l1;shl.b32 f0, $4, 16;and.b32 f1, $4, 0xffff0000;"
    for r in range(2):
        body += f"cvt.rzi.u32.f32 l{r}, f{r};shr.b32 h{r}, l{r}, 4;and.b32 l{r}, l{r}, 0x0000000f;"
        body += f"or.b32 h{r}, h{r}, 0x0000c500;or.b32 l{r}, l{r}, 0x0000c300;"
        body += f"prmt.b32 ${r}, h{r}, h{r}, 0x1010;prmt.b32 ${2 + r}, l{r}, l{r}, 0x1010;"
    return "{" + body + "}"


BZ8 = tl.constexpr(_zero_nibbles())
