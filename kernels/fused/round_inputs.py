"""Inputs rounded to few bits and restored, in one pass: what a W4A4 draft of 4-bit weights sees.

    x [M, K] -> clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) * s,    s = clip * max|x| / (2^(b-1) - 1)

of every 128 channels of a row; values half way go to the even code. A program takes one row's
BLOCK channels. Arithmetic in float32, one rounding at the end.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.overlap import overlaps

GROUP = 128
GROUPS = 8
"""Groups of a program."""


@triton.jit
def round_kernel(
    x, out, columns, factor, top, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """Some groups of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = column < columns
    values = tl.load(x + row * columns + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 1) * factor
    # A group of zeros gets the least scale that is none.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)[:, None]
    # Adding 1.5 * 2^23 leaves no bits behind the point: round half to even.
    code = (tl.div_rn(values, tl.broadcast_to(scale, values.shape)) + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -top - 1.0), top)
    tl.store(out + row * columns + column, (code * scale).to(out.dtype.element_ty), mask=live)


def round_restore(x: Tensor, scheme: AtomScheme) -> Tensor:
    """Return x [..., K] as a product with rounded inputs sees it."""
    if scheme.outliers or scheme.rotation or scheme.signed_scale or scheme.group_size != GROUP:
        raise ValueError(f"round_restore: got {scheme}, expected plain integer groups of {GROUP}")
    x = x.contiguous()
    out, columns = x.new_empty(x.shape), x.shape[-1]
    top = 2.0 ** (scheme.activation_bits - 1) - 1
    pdl = overlaps(x.device)
    round_kernel[(x.numel() // columns, triton.cdiv(columns, GROUP * GROUPS))](
        x,
        out,
        columns,
        scheme.activation_clip / top,
        top,
        GROUP=GROUP,
        GROUPS=GROUPS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
