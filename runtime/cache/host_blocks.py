"""Blocks of preempted requests in the host's memory, until those go on.

    kept [number] -> K and V [layers, G, 128, D], pinned on a GPU's host

Copies go in order with the steps of the device's stream: what a block held when the scheduler gave
it away is saved before a later step writes to it, and is there again before one reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.runtime.requests.request import PagedRow


class HostBlocks:
    """What a stage keeps of pools [layers, blocks, ...] under the scheduler's numbers."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        self._pools = pools
        self._kept: dict[int, list[Tensor]] = {}
        """Memory stays with its number: as many as were ever kept at once."""

    def take_rows(self, rows: Sequence[PagedRow]) -> None:
        """Save and load what a step's rows say, before the step runs."""
        for row in rows:
            for block, number in row.saves:
                for pool, kept in zip(self._pools, self._memory(number), strict=True):
                    kept.copy_(pool[:, block], non_blocking=True)
        for row in rows:
            for number, block in row.loads:
                for pool, kept in zip(self._pools, self._kept[number], strict=True):
                    pool[:, block].copy_(kept, non_blocking=True)

    def _memory(self, number: int) -> list[Tensor]:
        if number not in self._kept:
            self._kept[number] = [
                torch.empty(
                    (pool.shape[0], *pool.shape[2:]), dtype=pool.dtype, pin_memory=pool.is_cuda
                )
                for pool in self._pools
            ]
        return self._kept[number]
