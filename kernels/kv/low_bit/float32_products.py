"""Products of float32 on tensor cores that multiply fp16, inside a Triton kernel.

    x = high + low / 2**11          high: x rounded to fp16, low: 2**11 times what that leaves

Both are fp16, and x is known to 22 bits. Codes are fp16 numbers as they are (unpack.py), so that
float32 beside them takes two products; float32 on both sides takes three, since the product of two
lows is below what float32 holds.
"""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOW_GAIN = tl.constexpr(2048.0)


@triton.jit
def high_and_low(x):
    """Return a float32 tensor's two halves in fp16, the lower one times LOW_GAIN."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * LOW_GAIN).to(tl.float16)


@triton.jit
def dot_float32(a, b):
    """Return a b of two float32 tensors."""
    a_high, a_low = high_and_low(a)
    b_high, b_low = high_and_low(b)
    low = tl.dot(a_high, b_low, tl.dot(a_low, b_high))
    return tl.dot(a_high, b_high, low * (1.0 / LOW_GAIN))
