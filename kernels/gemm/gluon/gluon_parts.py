"""Weights in groups of 32 or 64, or of a codebook, as scaled tensor-core operands (Gluon).

What gluon_unpack.py does with one scale a k-group of 128, this does with several (PARTS of them),
half a k-group at a time: code_assembly.py makes values of the codes, which are multiplied by the
scale of their group. The product is rounded once; a codebook's value, or a code less a zero that is
no integer, was rounded once before. A codebook's scale is float16; for products in bfloat16 it is
split into two bfloat16 values, whose sum it is.

A warpgroup's operand is 64 rows of w. Words [128 threads, (jj/2, jj%2, k3)]; scales and zeros of
rows r and r + 8 of a part, as pairs [128] (jj, k0, k3, r3: formats/weight_layout.py).
SYMMETRIC: a codebook's name, or whether all zeros are 2^(bits-1).
"""

# mypy: ignore-errors
# (A Gluon body is not Python: values change type as it is traced; DT is no constant.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.gemm.gluon.gluon_e2m1 import _AXES, e2m1_operand
from llmpq.kernels.gemm.gluon.gluon_load import has_zeros
from llmpq.kernels.gemm.gluon.gluon_unpack import (
    _FOUR,
    LANES_SHAPE,
    operand,
    splat,
    zero_constants,
)
from llmpq.kernels.gemm.operands.code_assembly import SUMS, linear_assembly, lookup_assembly

# Assembly by what it is for, made at import: a Gluon body may only look it up.
_ASSEMBLY = {
    (bits, kind, half, symmetric): linear_assembly(bits, kind, half, symmetric)
    for bits in (4, 8)
    for kind in ("f16", "bf16")
    for half in (0, 1)
    for symmetric in (True, False)
}

_LOOKUPS = {
    (codebook.value, kind, half): lookup_assembly(codebook.values, kind, half)
    for codebook in (Codebook.NF4, Codebook.FP4, Codebook.IQ4)
    for kind in ("f16", "bf16")
    for half in (0, 1)
}
_SUMS = gl.constexpr(SUMS)


@gluon.constexpr_function
def _looks_up(symmetric):
    """Whether codes are places of a codebook."""
    return isinstance(symmetric, str)


@gluon.constexpr_function
def _assembly(bits, dtype, half, symmetric):
    """The text that makes scaled values of half a word (code_assembly.py)."""
    kind = "f16" if dtype == gl.float16 else "bf16"
    if isinstance(symmetric, str):
        return _LOOKUPS[(symmetric, kind, half)]
    return _ASSEMBLY[(bits, kind, half, symmetric)]


@gluon.constexpr_function
def _kinds(inputs):
    """The constraints of a text with four 16-bit outputs and so many 32-bit inputs."""
    return "=h,=h,=h,=h" + ",r" * inputs


@gluon.jit
def _halves(words):
    """Words [128, 8] by jj/2: those of 0 and those of 1, [128, 4] each."""
    return gl.split(gl.permute(gl.reshape(words, (128, 2, 4)), (0, 2, 1)))


@gluon.jit
def _part(
    words,
    pairs,
    zeros,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    DT: gl.constexpr,
    SYMMETRIC: gl.constexpr,
):
    """Words [128, 4] of one jj/2, which lies in one part, as scaled values [128, 4, k0, r3]."""
    ROW: gl.constexpr = gl.SliceLayout(1, words[0].type.layout)
    pairs = gl.convert_layout(pairs, ROW, assert_trivial=True)
    if _looks_up(SYMMETRIC) and gl.bfloat16 == DT:
        s = gl.inline_asm_elementwise(
            _SUMS, _FOUR, [pairs], dtype=(gl.int32,) * 4, is_pure=True, pack=1
        )
    else:
        s = splat(pairs)
    given = words
    if has_zeros(SYMMETRIC):
        z = splat(gl.convert_layout(zeros, ROW, assert_trivial=True))
        given = given + (z[0][:, None], z[1][:, None])
    for i in gl.static_range(len(s)):
        given = given + (s[i][:, None],)
    ASM: gl.constexpr = _assembly(BITS, DT, HALF, SYMMETRIC)
    KINDS: gl.constexpr = _kinds(len(given))
    o = gl.inline_asm_elementwise(ASM, KINDS, given, dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    return gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))


@gluon.jit
def parts_operand(
    words,
    scales,
    zeros,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    DT: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    PARTS: gl.constexpr,
):
    """w of half HALF of a k-group as [64 rows, 64 k]; `scales`, `zeros`: of all its PARTS."""
    first, second = (), ()
    for i in gl.static_range(len(words)):
        a, b = _halves(words[i])
        first, second = first + (a,), second + (b,)
    A: gl.constexpr = HALF * PARTS // 2
    B: gl.constexpr = (2 * HALF + 1) * PARTS // 4
    a = _part(first, scales[A], zeros[A], HALF, BITS, DT, SYMMETRIC)
    b = _part(second, scales[B], zeros[B], HALF, BITS, DT, SYMMETRIC)
    t = gl.join(a, b).to(DT, bitcast=True)
    return gl.reshape(gl.permute(gl.reshape(t, LANES_SHAPE.value), _AXES.value), (64, 64))


@gluon.jit
def operand_of(
    words,
    scale,
    zero,
    HALF: gl.constexpr,
    BITS: gl.constexpr,
    DT: gl.constexpr,
    SYMMETRIC: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """w of half HALF of a k-group as [64 rows, 64 k], for every form of words."""
    if SYMMETRIC == "e2m1":
        return e2m1_operand(words[0], scale, HALF, DT)
    elif GROUPED > 1:
        return parts_operand(words, scale, zero, HALF, BITS, DT, SYMMETRIC, GROUPED)
    else:
        zeros = zero_constants(zero, BITS, DT, SYMMETRIC)
        return operand(words, splat(scale), zeros, HALF, BITS, DT, SYMMETRIC)
