"""Triton pieces shared by the weight kernels: packed words to tensor-core operands, no shuffles.

A word (formats.py) holds eight 4-bit codes, or a third of thirty-two 3-bit ones, of two rows (r3)
and of neighbours along k (k0) in its halves. `(word & 0x000f000f) | 0x64006400` is two fp16
numbers 1024 + code; one instruction takes 1024 + zero off, exactly, and a code that sits 3, 4 or 6
bits higher is scaled back by the same instruction (fma). bfloat16 has 7 mantissa bits: its magic
number is 128 (0x4300) and more codes must be shifted down first.

    instructions per 8 codes      4 bit         3 bit          8 bit (two words)
    float16                       5 int + 4 fp  6 int + 4 fp   14 int + 4 fp
    bfloat16                      7 int + 4 fp  7 int + 4 fp   11 int + 12 fp

Asymmetric zeros cost nothing there: they only change the constants (`zero_constants`).
The interpreter has no inline assembly: shifts and masks do the same there (INTERPRET).

Legend: a tile is BN = 16 * BH * WM rows (rows split over WM warps) of one k-group, or, BATCH,
16 * BH rows of WM k-groups (k split over the warps). lane = 4 r + c. DT: float16 or bfloat16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


def _assembly(body: str, pairs: int) -> str:
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


def _pick(target: str, source: str, mask: int, magic: str) -> str:
    return f"lop3.b32 {target}, {source}, {mask * 0x10001:#010x}, {magic}, 0xea;"


_F16, _B16 = "0x64006400", "0x43004300"


def _float16_4(first: int | None) -> str:
    body = _constants("z0 y1", first, [0x64086408, 0xD480D480])  # 1024 + 8, -(64 + 8)
    body += "mov.b32 k, 0x2c002c00;shr.b32 t, $8, 8;"  # 1/16
    body += _pick("p0", "$8", 0xF, _F16) + _pick("p1", "$8", 0xF0, _F16)
    body += _pick("p2", "t", 0xF, _F16) + _pick("p3", "t", 0xF0, _F16)
    body += "sub.f16x2 p0, p0, z0;fma.rn.f16x2 p1, p1, k, y1;"
    body += "sub.f16x2 p2, p2, z0;fma.rn.f16x2 p3, p3, k, y1;"
    return _assembly(body, 4)


def _bfloat16_4(first: int | None) -> str:
    body = _constants("z0 z1", first, [0xC308C308] * 2)  # -(128 + 8)
    body += "mov.b32 k, 0x3f803f80;shr.b32 t, $8, 4;shr.b32 u, $8, 8;shr.b32 v, $8, 12;"  # 1
    for i, source in enumerate(("$8", "t", "u", "v")):
        body += _pick(f"p{i}", source, 0xF, _B16)
    return _assembly(body + "".join(f"fma.rn.bf16x2 p{i}, p{i}, k, z{i % 2};" for i in range(4)), 4)


def _last_pair(magic: str) -> str:
    """Pair 15 of a 3-bit triple: one bit from the top of each half of each word."""
    body = "shr.b32 s, $32, 15;shr.b32 t, $33, 14;shr.b32 u, $34, 13;"
    body += _pick("p15", "s", 1, magic)
    return body + _pick("p15", "t", 2, "p15") + _pick("p15", "u", 4, "p15")


def _float16_3(first: int | None) -> str:
    symmetric = [0x64046404] * 2 + [0xD820D820] * 2 + [0xCD00CD00] * 2  # 1028, -(128+4), -(16+4)
    body = _constants("z0 z1 y0 y1 y2 z2", first, symmetric)
    body += "mov.b32 k, 0x30003000;mov.b32 v, 0x24002400;"  # 1/8, 1/64
    for word in range(3):
        body += f"shr.b32 t, ${32 + word}, 9;"
        for field in range(5):
            p, row = f"p{5 * word + field}", (5 * word + field) % 2
            source = f"${32 + word}" if field < 3 else "t"
            body += _pick(p, source, 7 << 3 * (field % 3), _F16)
            body += (
                f"sub.f16x2 {p}, {p}, z{row};",
                f"fma.rn.f16x2 {p}, {p}, k, y{row};",
                f"fma.rn.f16x2 {p}, {p}, v, {('y2', 'z2')[row]};",
            )[field % 3]
    return _assembly(body + _last_pair(_F16) + "sub.f16x2 p15, p15, z1;", 16)


def _bfloat16_3(first: int | None) -> str:
    symmetric = [0xC304C304] * 2 + [0xC1A0C1A0] * 2  # -(128 + 4), -(16 + 4)
    body = _constants("z0 z1 y0 y1", first, symmetric)
    body += "mov.b32 k, 0x3f803f80;mov.b32 v, 0x3e003e00;"  # 1, 1/8
    for word in range(3):
        body += f"shr.b32 t, ${32 + word}, 6;shr.b32 u, ${32 + word}, 12;"
        for field in range(5):
            p, row = f"p{5 * word + field}", (5 * word + field) % 2
            body += _pick(p, (f"${32 + word}", "t", "u")[field // 2], 7 << 3 * (field % 2), _B16)
            scale, zero = ("k", "z") if field % 2 == 0 else ("v", "y")
            body += f"fma.rn.bf16x2 {p}, {p}, {scale}, {zero}{row};"
    return _assembly(body + _last_pair(_B16) + "fma.rn.bf16x2 p15, p15, k, z1;", 16)


def _float16_8(first: int | None) -> str:
    body = _constants("z0 z1", first, [0x64806480] * 2)  # 1024 + 128
    for i, (high, low) in enumerate(
        (("shl {}, $8, 4", ""), ("", "4"), ("shr {}, $8, 4", "8"), ("shr {}, $8, 8", "12"))
    ):
        if high:
            body += high.replace("shl ", "shl.b32 ").replace("shr ", "shr.b32 ").format("t") + ";"
        if low:
            body += f"shr.b32 u, $9, {low};"
        body += _pick(f"p{i}", "t" if high else "$8", 0xF0, _F16)
        body += _pick(f"p{i}", "u" if low else "$9", 0xF, f"p{i}")
        body += f"sub.f16x2 p{i}, p{i}, z{i % 2};"
    return _assembly(body, 4)


def _bfloat16_8(first: int | None) -> str:
    body = _constants("z0 z1", first, [0xC380C380] * 2)  # -(128 + 128)
    body += "mov.b32 k, 0x3f803f80;mov.b32 y0, 0x41804180;mov.b32 y1, 0xc500c500;"  # 1, 16, -2048
    for i in range(4):
        body += f"shr.b32 t, $8, {4 * i};shr.b32 u, $9, {4 * i};"
        body += _pick("t", "t", 0xF, _B16) + _pick("u", "u", 0xF, _B16)
        body += f"fma.rn.bf16x2 t, t, y0, y1;fma.rn.bf16x2 u, u, k, z{i % 2};"
        body += f"fma.rn.bf16x2 p{i}, t, k, u;"
    return _assembly(body, 4)


def _outputs(count: int, inputs: int) -> str:
    return ",".join(["=h"] * count + ["r"] * inputs)


# (bits, dtype) -> assembly without and with zero constants as operands, and their number.
_F4, _F4Z = tl.constexpr(_float16_4(None)), tl.constexpr(_float16_4(9))
_B4, _B4Z = tl.constexpr(_bfloat16_4(None)), tl.constexpr(_bfloat16_4(9))
_F3, _F3Z = tl.constexpr(_float16_3(None)), tl.constexpr(_float16_3(35))
_B3, _B3Z = tl.constexpr(_bfloat16_3(None)), tl.constexpr(_bfloat16_3(35))
_F8, _F8Z = tl.constexpr(_float16_8(None)), tl.constexpr(_float16_8(10))
_B8, _B8Z = tl.constexpr(_bfloat16_8(None)), tl.constexpr(_bfloat16_8(10))
_O8I1, _O8I3 = tl.constexpr(_outputs(8, 1)), tl.constexpr(_outputs(8, 3))
_O8I2, _O8I4 = tl.constexpr(_outputs(8, 2)), tl.constexpr(_outputs(8, 4))
_O32I3, _O32I9, _O32I7 = (tl.constexpr(_outputs(32, i)) for i in (3, 9, 7))

# Zeros of two rows, as a pair, to the constants above: splat each, then c + s * zero.
_SPLAT = ".reg .b32 a, b, s, m;prmt.b32 a, {n}, {n}, 0x1010;prmt.b32 b, {n}, {n}, 0x3232;"


def _zero_assembly(kind: str, terms: list[tuple[int, int, str]]) -> str:
    body = _SPLAT.format(n=f"${len(terms)}")
    for i, (constant, sign, row) in enumerate(terms):
        body += f"mov.b32 s, {constant:#010x};mov.b32 m, {sign:#010x};"
        body += f"fma.rn.{kind} ${i}, {row}, m, s;"
    return "{" + body + "}"


_P, _N, _BP = 0x3C003C00, 0xBC00BC00, 0xBF80BF80  # fp16 1, -1; bf16 -1
_FZ4 = tl.constexpr(_zero_assembly("f16x2", [(0x64006400, _P, "a"), (0xD400D400, _N, "b")]))
_FZ8 = tl.constexpr(_zero_assembly("f16x2", [(0x64006400, _P, "a"), (0x64006400, _P, "b")]))
_FZ3 = tl.constexpr(
    _zero_assembly(
        "f16x2",
        [(c, s, r) for c, s in ((0x64006400, _P), (0xD800D800, _N)) for r in "ab"]
        + [(0xCC00CC00, _N, "a"), (0xCC00CC00, _N, "b")],
    )
)
_BZ4 = tl.constexpr(_zero_assembly("bf16x2", [(0xC300C300, _BP, "a"), (0xC300C300, _BP, "b")]))
_BZ3 = tl.constexpr(
    _zero_assembly("bf16x2", [(c, _BP, r) for c in (0xC300C300, 0xC180C180) for r in "ab"])
)


@triton.jit
def load_words(
    base,
    blocks,
    groups,
    group,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Words of a tile, flat. 4 bit (WORDS 256): (bh, jj/2, warp, lane, 4). 3 bit (WORDS 192), word
    PART of each triple: (bh, warp, lane, h). `blocks` left from `base` on; later ones are clamped."""
    if WORDS == 256:
        f = tl.arange(0, BH * WM * 256)
        inner = f // (128 * WM) % 2 * 128 + f % 128
        warp, bh = f // 128 % WM, f // (256 * WM)
    else:
        f = tl.arange(0, BH * WM * 64)
        inner = PART * 64 + f % 64
        warp, bh = f // 64 % WM, f // (64 * WM)
    if BATCH:
        at = tl.minimum(bh, blocks - 1) * groups * WORDS + warp * WORDS + inner
    else:
        at = tl.minimum(bh * WM + warp, blocks - 1) * groups * WORDS + inner
    # The group stays out of `at`, so that all groups share one address a lane.
    return tl.load(base + group * WORDS + at, eviction_policy="evict_first")


@triton.jit
def load_pairs(
    base, blocks, groups, group, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr
):
    """Scales (or zeros) of rows r and r + 8 as one 32-bit pair a lane: (bh, warp, r, c)."""
    f = tl.arange(0, BH * WM * 32)
    warp, bh = f // 32 % WM, f // (32 * WM)
    if BATCH:
        at = tl.minimum(bh, blocks - 1) * groups * 8 + warp * 8 + f // 4 % 8
    else:
        at = tl.minimum(bh * WM + warp, blocks - 1) * groups * 8 + f // 4 % 8
    return tl.load(base + group * 8 + at)


@triton.jit
def pair_floats(pairs, DT: tl.constexpr):
    """The two numbers of 32-bit pairs, as float32."""
    if DT == tl.float16:
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = ((pairs >> 16) << 16).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def accumulator_scale(
    pairs, DT: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr, BATCH: tl.constexpr
):
    """Scale pairs as float32 [(warp,) rows, 1, 4, 1]: an accumulator's columns are (n/8, c, 2)."""
    low, high = pair_floats(pairs, DT)
    s = tl.reshape(tl.join(low, high), (BH, WM, 8, 4, 2))
    if BATCH:
        return tl.reshape(tl.permute(s, (1, 0, 4, 2, 3)), (WM, BH * 16, 1, 4, 1))
    else:
        return tl.reshape(tl.permute(s, (0, 1, 4, 2, 3)), (BH * WM * 16, 1, 4, 1))


@triton.jit
def _spread(t, BITS: tl.constexpr, BH: tl.constexpr, WM: tl.constexpr):
    """Per-lane values (bh, warp, r, c) repeated for each word of the lane."""
    if BITS == 3:
        t = tl.reshape(t, (BH, WM, 8, 4, 1))
        return tl.reshape(tl.broadcast_to(t, (BH, WM, 8, 4, 2)), (BH * WM * 64,))
    else:
        t = tl.reshape(t, (BH, 1, WM, 8, 4, 1))
        return tl.reshape(tl.broadcast_to(t, (BH, 2, WM, 8, 4, 4)), (BH * WM * 256,))


@triton.jit
def zero_constants(pairs, BITS: tl.constexpr, DT: tl.constexpr, INTERPRET: tl.constexpr):
    """What `unpack` needs of a tile's zero pairs, per lane: a tuple of tensors."""
    if INTERPRET:
        return pair_floats(pairs, DT)
    elif DT == tl.float16:
        if BITS == 4:
            return tl.inline_asm_elementwise(
                _FZ4, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
            )
        elif BITS == 8:
            return tl.inline_asm_elementwise(
                _FZ8, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                _FZ3, "=r,=r,=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 6, is_pure=True, pack=1
            )
    elif BITS == 3:
        return tl.inline_asm_elementwise(
            _BZ3, "=r,=r,=r,=r,r", [pairs], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _BZ4, "=r,=r,r", [pairs], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )


@triton.jit
def _join8(a, b, c, d, e, f, g, h):
    low = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(low, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _code(word, shift: tl.constexpr, mask: tl.constexpr, zero, DT: tl.constexpr):
    return (((word >> shift) & mask).to(tl.float32) - zero).to(DT)


@triton.jit
def _interpret4(w, z, DT: tl.constexpr):
    """(h, r3, k0) of a 4-bit word by shifts and masks."""
    a, b = _code(w, 0, 15, z[0], DT), _code(w, 16, 15, z[0], DT)
    c, d = _code(w, 4, 15, z[1], DT), _code(w, 20, 15, z[1], DT)
    e, f = _code(w, 8, 15, z[0], DT), _code(w, 24, 15, z[0], DT)
    return _join8(a, b, c, d, e, f, _code(w, 12, 15, z[1], DT), _code(w, 28, 15, z[1], DT))


@triton.jit
def _interpret8(high, low, z, DT: tl.constexpr):
    out = ()
    for i in tl.static_range(4):
        for k0 in tl.static_range(2):
            shift: tl.constexpr = 4 * i + 16 * k0
            code = ((high >> shift) & 15) * 16 + ((low >> shift) & 15)
            out = out + ((code.to(tl.float32) - z[i % 2]).to(DT),)
    return _join8(out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7])


@triton.jit
def _interpret3(words, z, DT: tl.constexpr):
    out = ()
    for p in tl.static_range(16):
        for k0 in tl.static_range(2):
            if p < 15:
                code = (words[p // 5] >> (16 * k0 + 3 * (p % 5))) & 7
            else:
                code = (words[0] >> (16 * k0 + 15)) & 1
                code += ((words[1] >> (16 * k0 + 15)) & 1) * 2
                code += ((words[2] >> (16 * k0 + 15)) & 1) * 4
            out = out + ((code.to(tl.float32) - z[p % 2]).to(DT),)
    return out


@triton.jit
def _join32(o):
    a = _join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    b = _join8(o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15])
    c = _join8(o[16], o[17], o[18], o[19], o[20], o[21], o[22], o[23])
    d = _join8(o[24], o[25], o[26], o[27], o[28], o[29], o[30], o[31])
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def unpack(
    words,
    zeros,
    BITS: tl.constexpr,
    DT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BH: tl.constexpr,
    WM: tl.constexpr,
    BATCH: tl.constexpr,
    KWIDTH4: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Words (a tuple) and `zero_constants` to code - zero as an operand [(warp,) rows, 128 k].

    KWIDTH4 orders k inside 16 as (c, k3, k0): mma.sync operands that come from a join hold four
    neighbours of that order a thread (Triton's kWidth); otherwise k lies as stored, (k3, c, k0).
    """
    if INTERPRET:
        if SYMMETRIC:
            half: tl.constexpr = 1 << (BITS - 1)
            z = (half, half)
        else:
            z = (_spread(zeros[0], BITS, BH, WM), _spread(zeros[1], BITS, BH, WM))
        if BITS == 4:
            t = _interpret4(words[0], z, DT)
        elif BITS == 8:
            t = _interpret8(words[0], words[1], z, DT)
        else:
            t = _join32(_interpret3(words, z, DT))
    elif BITS == 3:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    _F3,
                    _O32I3,
                    [words[0], words[1], words[2]],
                    dtype=(tl.float16,) * 32,
                    is_pure=True,
                    pack=1,
                )
            else:
                o = tl.inline_asm_elementwise(
                    _B3,
                    _O32I3,
                    [words[0], words[1], words[2]],
                    dtype=(tl.bfloat16,) * 32,
                    is_pure=True,
                    pack=1,
                )
        elif DT == tl.float16:
            z0, z1, y0 = (
                _spread(zeros[0], BITS, BH, WM),
                _spread(zeros[1], BITS, BH, WM),
                _spread(zeros[2], BITS, BH, WM),
            )
            y1, y2, z2 = (
                _spread(zeros[3], BITS, BH, WM),
                _spread(zeros[4], BITS, BH, WM),
                _spread(zeros[5], BITS, BH, WM),
            )
            o = tl.inline_asm_elementwise(
                _F3Z,
                _O32I9,
                [words[0], words[1], words[2], z0, z1, y0, y1, y2, z2],
                dtype=(tl.float16,) * 32,
                is_pure=True,
                pack=1,
            )
        else:
            z0, z1 = _spread(zeros[0], BITS, BH, WM), _spread(zeros[1], BITS, BH, WM)
            y0, y1 = _spread(zeros[2], BITS, BH, WM), _spread(zeros[3], BITS, BH, WM)
            o = tl.inline_asm_elementwise(
                _B3Z,
                _O32I7,
                [words[0], words[1], words[2], z0, z1, y0, y1],
                dtype=(tl.bfloat16,) * 32,
                is_pure=True,
                pack=1,
            )
        t = _join32(o)
    elif BITS == 4:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    _F4, _O8I1, [words[0]], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    _B4, _O8I1, [words[0]], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        else:
            z0, z1 = _spread(zeros[0], BITS, BH, WM), _spread(zeros[1], BITS, BH, WM)
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    _F4Z, _O8I3, [words[0], z0, z1], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    _B4Z, _O8I3, [words[0], z0, z1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        t = _join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    else:
        if SYMMETRIC:
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    _F8, _O8I2, [words[0], words[1]], dtype=(tl.float16,) * 8, is_pure=True, pack=1
                )
            else:
                o = tl.inline_asm_elementwise(
                    _B8, _O8I2, [words[0], words[1]], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
                )
        else:
            z0, z1 = _spread(zeros[0], BITS, BH, WM), _spread(zeros[1], BITS, BH, WM)
            if DT == tl.float16:
                o = tl.inline_asm_elementwise(
                    _F8Z,
                    _O8I4,
                    [words[0], words[1], z0, z1],
                    dtype=(tl.float16,) * 8,
                    is_pure=True,
                    pack=1,
                )
            else:
                o = tl.inline_asm_elementwise(
                    _B8Z,
                    _O8I4,
                    [words[0], words[1], z0, z1],
                    dtype=(tl.bfloat16,) * 8,
                    is_pure=True,
                    pack=1,
                )
        t = _join8(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7])
    # Axes to (warp, bh, r3, r | h, jj/2, jj%2, k3, c, k0), then the warp and k3 where they belong.
    if BITS == 3:  # bh, warp, r, c, h | k0, r3, k3, jj%2, jj/2
        t = tl.permute(
            tl.reshape(t, (BH, WM, 8, 4, 2, 2, 2, 2, 2, 2)), (1, 0, 6, 2, 4, 9, 8, 7, 3, 5)
        )
    else:  # bh, jj/2, warp, r, c, jj%2, k3 | k0, r3, h
        t = tl.permute(
            tl.reshape(t, (BH, 2, WM, 8, 4, 2, 2, 2, 2, 2)), (2, 0, 8, 3, 9, 1, 5, 6, 4, 7)
        )
    if KWIDTH4:
        t = tl.permute(t, (0, 1, 2, 3, 4, 5, 6, 8, 7, 9))
    if BATCH:
        return tl.reshape(t, (WM, BH * 16, 128))
    else:
        t = tl.permute(t, (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
        return tl.reshape(t, (BH * WM * 16, 128))
