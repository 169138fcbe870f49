"""Packed words to fp16 operands of a tensor-core product, inside a Triton kernel.

    `word & 0x000f000f` is a pair of fp16 subnormals n * 2**-24: integers without a conversion, at
    one instruction per pair (plus one shift per word). Plane i comes out as n * 2**(b*i - 24);
    callers divide the other operand by 2**(b*i) and the result by 2**-24, in exact powers of two.

Tried before (see README.md): the 0x6400 exponent (1024 + n) costs two instructions more per pair
to take 1024 away, or loses it in the fp32 accumulator at long contexts.

The interpreter has no inline assembly: EMULATE computes the same bits with plain shifts.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TWO_24 = tl.constexpr(16777216.0)


def _assembly(bits: int) -> tl.constexpr:
    """Return PTX that splits a word into 8/bits planes x 2 rows of fp16 pairs."""
    planes = 8 // bits
    source = f"${2 * planes}"
    lines = [".reg .b32 y;", f"shr.b32 y, {source}, 8;"]
    for plane in range(planes):
        mask = ((2**bits - 1) << (bits * plane)) * 0x00010001
        lines += [
            f"and.b32 ${2 * plane}, {source}, {mask:#010x};",
            f"and.b32 ${2 * plane + 1}, y, {mask:#010x};",
        ]
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


def _constraints(bits: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=&r"] * (16 // bits)) + ",r")


ASM_8 = _assembly(8)
ASM_4 = _assembly(4)
ASM_2 = _assembly(2)
REGS_8 = _constraints(8)
REGS_4 = _constraints(4)
REGS_2 = _constraints(2)


@triton.jit
def _plane(x, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Emulate one plane: [...] halves of words -> [..., r] fp16 subnormals."""
    MASK: tl.constexpr = (2**BITS - 1) << (BITS * PLANE)
    r0 = (x & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    r1 = ((x >> 8) & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(r0, r1)


@triton.jit
def _fields(x, BITS: tl.constexpr, EMULATE: tl.constexpr):
    """[...] int16 halves of words -> [..., r, 8/BITS planes] fp16 (8 bits: [..., r])."""
    if BITS == 8:
        if EMULATE:
            return _plane(x, 0, 8)
        a, b = tl.inline_asm_elementwise(
            ASM_8, REGS_8, [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return tl.join(a, b)
    elif BITS == 4:
        if EMULATE:
            return tl.join(_plane(x, 0, 4), _plane(x, 1, 4))
        a, b, c, d = tl.inline_asm_elementwise(
            ASM_4,
            REGS_4,
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return tl.join(tl.join(a, b), tl.join(c, d))
    else:
        if EMULATE:
            even = tl.join(_plane(x, 0, 2), _plane(x, 2, 2))
            return tl.join(even, tl.join(_plane(x, 1, 2), _plane(x, 3, 2)))
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM_2,
            REGS_2,
            [x],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
        even = tl.join(tl.join(a, b), tl.join(e, f))
        return tl.join(even, tl.join(tl.join(c, d), tl.join(g, h)))


@triton.jit
def order_columns(x, M: tl.constexpr, S: tl.constexpr, KW: tl.constexpr):
    """(m, r, g, s, half, t, h) -> [M*16, S*16], columns in the order the operand's registers have.

    KW: consecutive columns a thread holds (kWidth): 2 -> (s, half, t, h), 4 -> (s, t, half, h).
    """
    if KW == 4:
        x = tl.permute(x, (0, 1, 2, 3, 5, 4, 6))
    return tl.reshape(x, (M * 16, S * 16))


@triton.jit
def unpack(
    halves,
    M: tl.constexpr,
    S: tl.constexpr,
    BITS: tl.constexpr,
    KW: tl.constexpr,
    EMULATE: tl.constexpr,
    BY_OCTET: tl.constexpr = False,
):
    """Halves of words [V*32, 8] of a tile (kv_block.py) -> fp16 [M*16, S*16], planes unscaled.

    BY_OCTET: of four rows of octets, as keys by octet are.
    """
    PLANES: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = 2 * S // PLANES
    V: tl.constexpr = M * WIDTH // 4
    x = _fields(halves, BITS, EMULATE)
    x = tl.reshape(x, (V, 8, 4, 4, 2, 2, PLANES))  # v g t w h r i
    if BY_OCTET:
        x = tl.permute(x, (3, 5, 1, 0, 6, 2, 4))  # w = m, v = o: m r g o i t h
    else:
        x = tl.permute(x, (0, 3, 1, 2, 4, 5, 6))  # v w g t h r i
        x = tl.reshape(x, (M, WIDTH, 8, 4, 2, 2, PLANES))  # m o g t h r i
        x = tl.permute(x, (0, 5, 2, 1, 6, 3, 4))  # m r g o i t h
    x = tl.reshape(x, (M, 2, 8, S, 2, 4, 2))  # m r g s half t h
    return order_columns(x, M, S, KW)
