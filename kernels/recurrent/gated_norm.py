"""What a recurrence gives, normalised by groups of channels beside its gate, as one launch.

    norm first   y = rmsnorm(x) * w * silu(gate)
    gate first   y = rmsnorm(x * silu(gate)) * w
    no norm      y = x * silu(gate)

or the gate's sigmoid in place of its silu.

Bytes: x and gate read once, y written once; float32 inside, one rounding. A program takes GROUPS
groups of one token.

T tokens, C channels.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmpq.kernels.overlap import overlaps

PROGRAM_CHANNELS = 1024
"""Channels that a program takes of groups that are smaller."""


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, gate_stride, groups, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    GROUPS: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr, SHARED: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of one token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    d = tl.arange(0, PADDED)[None, :]
    live = (group < groups) & (d < WIDTH)
    c = group * WIDTH + d
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(x + token * groups * WIDTH + c, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + c, mask=live, other=0.0).to(tl.float32)
    z = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    if not NORM_FIRST:
        y *= z
    if NORM:
        w = tl.load(weight + (d if SHARED else c), mask=live, other=0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 1) / WIDTH + eps)[:, None] * w
    if NORM_FIRST:
        y *= z
    tl.store(out + token * groups * WIDTH + c, y.to(out.dtype.element_ty), mask=live)


def gated_norm(
    x_TC: Tensor,
    gate_TC: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    groups: int,
    norm_first: bool,
    gate: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    """Return y [T, C]; `weight` [C], [C / groups] of every group, or None: nothing is normalised.

    The gate's rows may lie further apart.
    """
    tokens, channels = x_TC.shape
    width, pdl = channels // groups, overlaps(x_TC.device)
    if gate_TC.stride(1) != 1 or not x_TC.is_contiguous():
        raise ValueError(f"a token's channels must lie side by side, got {gate_TC.stride()}")
    padded = triton.next_power_of_2(width)
    several = max(1, min(triton.next_power_of_2(groups), PROGRAM_CHANNELS // padded))
    out = torch.empty_like(x_TC)
    gated_norm_kernel[(tokens, triton.cdiv(groups, several))](
        x_TC,
        gate_TC,
        x_TC if weight is None else weight,
        out,
        gate_TC.stride(0),
        groups,
        eps,
        WIDTH=width,
        PADDED=padded,
        GROUPS=several,
        NORM=weight is not None,
        NORM_FIRST=norm_first,
        SHARED=weight is not None and weight.numel() == width,
        SIGMOID=gate == "sigmoid",
        PDL=pdl,
        num_warps=max(1, min(8, several * padded // 256)),
        launch_pdl=pdl,
    )
    return out
