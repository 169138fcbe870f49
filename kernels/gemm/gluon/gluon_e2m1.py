"""MXFP4 words to scaled operands in Gluon registers, half a k-group at a time (e2m1_operand.py).

A warpgroup's operand is 64 rows of w. Words [128 threads, (jj/2, jj%2, k3)], exponents [128] of
one half h: four bytes (jj/2, r3) of a thread.
"""

# mypy: ignore-errors
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmpq.kernels.gemm.gluon.gluon_unpack import LANES_SHAPE
from llmpq.kernels.gemm.operands.e2m1_operand import B_SCALES, F_SCALES, pairs_of


def _half(kind: str, half: int) -> str:
    """Outputs 0-3 (r3, k0); operands: word, multipliers of r3 = 0 and 1."""
    body = pairs_of(kind, (2 * half, 2 * half + 1), "$4", ("$5", "$6"))
    outputs = "".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(2))
    return f"{{.reg .b32 t, u, k, p0, p1;{body}{outputs}}}"


_HALVES = {(kind, half): _half(kind, half) for kind in ("f16", "bf16") for half in (0, 1)}
_O4I3 = gl.constexpr("=h,=h,=h,=h,r,r,r")
_MULTIPLIERS = gl.constexpr("=r,=r,=r,=r,r")
# warp r c | jj%2 k3 k0 r3 jj/2, to rows (warp, r3, r) and k (jj/2, jj%2, k3, c, k0).
_AXES = gl.constexpr((0, 6, 1, 7, 3, 4, 2, 5))


@gluon.constexpr_function
def _assembly(dtype, half):
    return _HALVES[("f16" if dtype == gl.float16 else "bf16", half)]


@gluon.constexpr_function
def _scale_assembly(dtype):
    return (F_SCALES if dtype == gl.float16 else B_SCALES).value


@gluon.jit
def _part(words, low, high, HALF: gl.constexpr, DT: gl.constexpr):
    """Words [128, 4] of one jj/2 as [128, 4, k0, r3]; multipliers of its rows [128]."""
    ROW: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    low = gl.convert_layout(low, ROW, assert_trivial=True)[:, None]
    high = gl.convert_layout(high, ROW, assert_trivial=True)[:, None]
    ASM: gl.constexpr = _assembly(DT, HALF)
    o = gl.inline_asm_elementwise(
        ASM, _O4I3, [words, low, high], dtype=(gl.int16,) * 4, is_pure=True, pack=1
    )
    return gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))


@gluon.jit
def e2m1_operand(words, exponents, HALF: gl.constexpr, DT: gl.constexpr):
    """w of half HALF as [64 rows, 64 k]; exponents of both halves."""
    ASM: gl.constexpr = _scale_assembly(DT)
    m = gl.inline_asm_elementwise(
        ASM, _MULTIPLIERS, [exponents[HALF]], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    first, second = gl.split(gl.permute(gl.reshape(words, (128, 2, 4)), (0, 2, 1)))
    a, b = _part(first, m[0], m[1], HALF, DT), _part(second, m[2], m[3], HALF, DT)
    t = gl.join(a, b).to(DT, bitcast=True)
    return gl.reshape(gl.permute(gl.reshape(t, LANES_SHAPE.value), _AXES.value), (64, 64))
