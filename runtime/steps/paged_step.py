"""One step of a stage on a GPU: what `RaggedStep` is to hosts, as tensors of the device.

Nothing of it depends on the rows but values on the device, so that a step is captured once and
replayed for any rows of as many places.

Legend: T places (tokens and padding), R rows, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.kv.paged.paged_rows import TokenPlaces
from llmpq.runtime.steps.step import Step


@dataclass(frozen=True, kw_only=True)
class PagedStep(Step):
    """The rows of one forward, packed as [1, T]; `q_len` counts all places."""

    rows_FR: Tensor
    """The rows as kernels read them (kernels/kv/paged/paged_rows.py)."""
    work_split: Tensor
    """What each program of attention takes of them, as far as the cache tells it."""
    where: TokenPlaces
    where_windowed: TokenPlaces | None = None
    """Places in the pool of the layers with a window, if they have one."""
    chunks: bool
    """Whether rows may have several tokens; else row r is place r."""
    noted_FR: Tensor | None = None
    """How rows go on from noted tokens (kernels/recurrent/notes.py), where states keep notes."""
    notes: bool = False
    """Whether tokens of rows may have to be taken back."""
    prompts: tuple[tuple[int, int], ...] = ()
    """Runs of rows (rows, tokens of each) where all are known to be prompts from their start."""

    @property
    def ends_by_place(self) -> bool:
        """As of `Step`."""
        return True

    @property
    def ends(self) -> Tensor:
        """Tokens of the request of every place, with this step [T]; padding's mean nothing."""
        starts_R, counts_R, firsts_R = self.rows_FR[1], self.rows_FR[2], self.rows_FR[3]
        places_T = torch.arange(self.q_len, dtype=firsts_R.dtype, device=firsts_R.device)
        row_T = torch.searchsorted(firsts_R.contiguous(), places_T, right=True) - 1
        return (starts_R + counts_R)[row_T]

    def last_valid(self, x_BQH: Tensor) -> Tensor:
        """Return [R, h]: each row at its last token."""
        return x_BQH[0, self.where.last_R] if self.chunks else x_BQH[0]

    def _positions(self) -> Tensor:
        return self.where.positions_T[None]
