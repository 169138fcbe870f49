"""Asking the L2 for what a Triton kernel is about to read (sm_90 and newer)."""

# Triton functions are typed by tl.constexpr alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

PREFETCH = tl.constexpr(
    "{.reg .pred p; setp.ne.u32 p, $2, 0;"
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}"
)


@triton.jit
def prefetch(address, nbytes):
    """Ask the L2 for `nbytes` (of a multiple of 16, 0 for nothing) at each lane's address."""
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [address, nbytes], dtype=tl.int32, is_pure=False, pack=1
    )
