"""Parts of int8_kernel.py: words as operands of wgmma, barriers, TMA. Symbols as there."""

# mypy: ignore-errors
# (Gluon bodies are not Python.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton renamed these between 3.6 and 3.9.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
tma_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def halves(byte):
    """Bytes of 4 blocks [4, 8, 128] as k 0 .. 63 and 64 .. 127 of their k-group."""
    return gl.split(byte.reshape((4, 2, 4, 128)).permute((0, 2, 3, 1)))


@gluon.jit
def lane_operand(even, odd, operand: gl.constexpr):
    """Bytes of 4 blocks as lanes hold them, rows r and r + 8, as the left operand [64, 64].

    [block, rhi, rlo c jj k3 b] and r3 to rows (block r3 r) and columns (jj k3 c b).
    """
    both = gl.join(even, odd).reshape((4, 4, 2, 4, 2, 2, 4, 2))
    both = both.permute((0, 7, 1, 2, 4, 5, 3, 6)).reshape((64, 64))
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def outlier_bytes(high, low, operand: gl.constexpr):
    """16 * high + low - 128 of two nibble planes, as int8."""
    even = gl.inline_asm_elementwise(
        "{.reg .b32 t, u; shl.b32 t, $1, 4; and.b32 t, t, 0xf0f0f0f0; and.b32 u, $2, 0x0f0f0f0f;"
        "or.b32 t, t, u; xor.b32 $0, t, 0x80808080;}",
        "=r,r,r",
        [high, low],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    odd = gl.inline_asm_elementwise(
        "{.reg .b32 t, u; and.b32 t, $1, 0xf0f0f0f0; shr.b32 u, $2, 4; and.b32 u, u, 0x0f0f0f0f;"
        "or.b32 t, t, u; xor.b32 $0, t, 0x80808080;}",
        "=r,r,r",
        [high, low],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
    return lane_operand(even, odd, operand).to(gl.int8, bitcast=True)
