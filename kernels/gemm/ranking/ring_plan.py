"""How `ring_gemv` divides a product: warps, rings, shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.wgmma_plan import SHARED_BYTES

TILE = 8
"""Rows of x: the columns of one product of the tensor cores."""
FORMS = {4: (16, 8, 6, 1), 16: (8, 8, 4, 2)}
"""Bits -> warps, those that share K, k-groups of a ring, turns between meetings: of six each the
quickest in steps of Llama-3.1-8B of one request (H200)."""


@dataclass(frozen=True, kw_only=True)
class RingForm:
    """What a compiled kernel is for."""

    bits: int
    """4 or 8, or 16: as it is."""
    kind: str
    """"f16" or "bf16"."""
    zeros: bool
    grouped: bool = True
    """Whether a k-group has a scale of its own; else a row has one."""
    tiles: int = 1
    """Eights of rows of x."""
    warps: int = 16
    parts: int = 16
    """Warps that share out a block's K; the others take other blocks."""
    ring: int = 6
    """k-groups that a warp's ring holds."""
    phase: int = 2
    """Turns between two meetings of the warps."""

    def shared_bytes(self, groups: int, rows: int) -> int:
        """Return a program's shared memory for K of `groups` k-groups and so many rows of x."""
        words = {4: 1024, 8: 2048}.get(self.bits, 0)
        slot = words + 32 * self.grouped * (1 + self.zeros) if words else BLOCK_ROWS * 272
        sums = 2 * self.phase * self.tiles * 512
        kept = min(rows + 1, TILE * self.tiles)
        return 128 + self.warps * (self.ring * slot + sums) + kept * (groups * 2 * GROUP + 16)


def ring_config(bits: int, k: int, rows: int, *, zeros: bool) -> Config | None:
    """Return the form for so many rows of x, None where there is none or x has no room."""
    if bits not in FORMS or k % GROUP or rows > TILE:
        return None
    warps, parts, ring, phase = FORMS[bits]
    form = RingForm(
        bits=bits, kind="bf16", zeros=zeros, warps=warps, parts=parts, ring=ring, phase=phase
    )
    if form.shared_bytes(k // GROUP, rows) > SHARED_BYTES:
        return None
    return Config(kernel="ring_gemv", warps=warps, blocks=parts, stages=ring, x_depth=phase)
