"""A tile of `wgmma_rows`: what a kernel is compiled for, and what of it fits shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.kernels.gemm.ranking.wgmma_plan import SHARED_BYTES

_ALIGNMENT, _BARRIERS = 1024, 512
_MOST_SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class RowsTile:
    """What a compiled kernel is for."""

    bits: int
    kind: str
    """"f16" or "bf16"."""
    zeros: bool
    grouped: bool
    """Whether a k-group has a scale of its own; else a row has one."""
    rows: int
    """Rows of x: any multiple of 8."""
    warpgroups: int
    split: int = 1
    """Programs that share a tile's K: each adds up its part of the rows of x."""

    @property
    def high(self) -> int:
        """16-row blocks of w."""
        return 4 * self.warpgroups

    @property
    def slot_bytes(self) -> int:
        """Words and scales of a k-group."""
        words = {3: 768, 4: 1024, 8: 2048}[self.bits]
        return self.high * (words + (32 * (1 + self.zeros) if self.grouped else 0))

    @property
    def sum_bytes(self) -> int:
        """What programs that share K send each other."""
        return (self.split - 1) * self.warpgroups * (self.rows // self.split) * 256

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of x, 64 k each, of words, 128 k each; raises `ValueError` for too many rows."""
        found = self._found_slots()
        if found is None:
            raise ValueError(f"a tile of {self.rows} rows of x: got no shared memory for it")
        return found

    def _found_slots(self) -> tuple[int, int] | None:
        """Three of words where four of x still fit beside them."""
        held = _ALIGNMENT + _BARRIERS + self.warpgroups * self.rows * 128 + self.sum_bytes
        for words in (3, 2):
            x = (SHARED_BYTES - held - words * self.slot_bytes) // (self.rows * 128)
            if x >= (4 if words > 2 else 3):
                return min(x, _MOST_SLOTS), words
        return None

    @property
    def fits(self) -> bool:
        """Whether a program has shared memory for it."""
        return self._found_slots() is not None

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        x, words = self.slots
        rows = (x + self.warpgroups) * self.rows * 128
        return _ALIGNMENT + rows + words * self.slot_bytes + self.sum_bytes + _BARRIERS
