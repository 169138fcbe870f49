"""Counters of all requests of a scheduler, a row for each.

Many rows are looked at, and moved on, by a few operations on arrays.

Knows no request: what a row means, and when its counters change, `RunningRequest`
(block_tables.py) and the scheduler say.

Legend: N rows of the table, W stop tokens of the request that has most.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.runtime.request import Ints

NEVER = 1 << 62
"""A position that no request reaches."""
_FIRST_ROWS = 64
_COUNTERS = (
    "arrival", "number", "num_prompt", "max_new", "num_computed", "num_sampled", "in_flight",
    "newest", "last_step", "slot", "admission", "num_blocks", "needs_blocks_at", "fills_block_at",
)  # fmt: skip
_FLAGS = ("has_news", "ends_in_text", "publishes", "streams")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowConstants:
    """What of B rows of the table stays as it is from their requests' admission on."""

    slots_B: Ints
    arrivals_B: Ints
    admissions_B: Ints
    stop_ids_WB: Ints
    """Tokens that end each; -1 for none."""
    last_steps_B: Ints
    """Index of the last token that each may get."""
    ends_in_text_B: NDArray[np.bool_] | None
    """Whether a text may end it; None where that is true of no row."""
    published: Ints
    """Which rows' tokens are wanted as they come."""
    numbers: list[int]
    """Of these rows' requests."""
    streams: bool
    """Whether somebody waits for one of them."""

    def may_end(self, tokens_B: Ints, steps_B: Ints) -> NDArray[np.bool_]:
        """Whether tokens, each the `steps_B`-th of its request, may be their requests' last."""
        ends_B = steps_B == self.last_steps_B
        for stop_B in self.stop_ids_WB:
            ends_B |= tokens_B == stop_B
        return ends_B if self.ends_in_text_B is None else ends_B | self.ends_in_text_B


class RequestTable:
    """A row for each request from its submission to its end, then for another one."""

    arrival: Ints
    """How many requests were submitted before it; -1: the row is free."""
    number: Ints
    """`Request.id`."""
    num_prompt: Ints
    """Tokens of its prompt."""
    max_new: Ints
    num_computed: Ints
    """Tokens whose KV has been issued."""
    num_sampled: Ints
    """Tokens of the output that were asked for."""
    in_flight: Ints
    """Of these, how many are not known yet."""
    newest: Ints
    """The last token that is known of its output."""
    last_step: Ints
    """Number of the step it was in last."""
    slot: Ints
    """Its row of the stages' block tables; -1 while it waits."""
    admission: Ints
    """How often it was admitted."""
    num_blocks: Ints
    """Blocks that it holds."""
    needs_blocks_at: Ints
    """Position of the first token for which it lacks a block, or has one to give back."""
    fills_block_at: Ints
    """Tokens that fill the first of its blocks that others cannot find yet."""
    has_news: NDArray[np.bool_]
    """Whether stages lack something that its next row is to say: blocks, where it begins."""
    ends_in_text: NDArray[np.bool_]
    """Whether a text may end it, which any token may complete."""
    publishes: NDArray[np.bool_]
    """Whether its tokens are wanted as they come."""
    streams: NDArray[np.bool_]
    """Whether somebody waits for them."""
    stop_ids_NW: Ints
    """Tokens that end it; -1 for none."""

    def __init__(self) -> None:
        for name in _COUNTERS:
            setattr(self, name, np.zeros(0, dtype=np.int64))
        for name in _FLAGS:
            setattr(self, name, np.zeros(0, dtype=np.bool_))
        self.stop_ids_NW = np.zeros((0, 1), dtype=np.int64)
        self._free: list[int] = []
        self._resize(_FIRST_ROWS)

    def add(
        self,
        *,
        arrival: int,
        number: int,
        num_prompt: int,
        max_new: int,
        stop_ids: Collection[int],
    ) -> int:
        """Return the row of a request that has nothing yet."""
        if not self._free:
            self._resize(2 * len(self.arrival))
        row = self._free.pop()
        for name in (*_COUNTERS, *_FLAGS):
            getattr(self, name)[row] = 0
        self.arrival[row], self.number[row] = arrival, number
        self.num_prompt[row], self.max_new[row] = num_prompt, max_new
        self.slot[row] = self.newest[row] = -1
        width = self.stop_ids_NW.shape[1]
        if len(stop_ids) > width:
            more = ((0, 0), (0, len(stop_ids) - width))
            self.stop_ids_NW = np.pad(self.stop_ids_NW, more, constant_values=-1)
        self.stop_ids_NW[row] = -1
        self.stop_ids_NW[row, : len(stop_ids)] = sorted(stop_ids)
        return row

    def remove(self, row: int) -> None:
        """Free the row of a request that has ended."""
        self.arrival[row] = -1
        self._free.append(row)

    def num_tokens(self, rows: Ints, tokens_ahead: int) -> Ints:
        """Return the tokens of requests' prompts and outputs that their next steps may build on.

        Those under way count while fewer than `tokens_ahead` are, but not a request's last one.
        """
        sampled = self.num_sampled[rows]
        waits = (self.in_flight[rows] >= tokens_ahead) | (sampled >= self.max_new[rows])
        return self.num_prompt[rows] + sampled - waits

    def constants(self, rows: Ints) -> RowConstants:
        """Return what of some rows stays as it is while their requests run."""
        stop_ids_BW, publishes_B = self.stop_ids_NW[rows], self.publishes[rows]
        in_text_B = self.ends_in_text[rows]
        return RowConstants(
            slots_B=self.slot[rows],
            arrivals_B=self.arrival[rows],
            admissions_B=self.admission[rows],
            stop_ids_WB=stop_ids_BW[:, (stop_ids_BW >= 0).any(axis=0)].T.copy(),
            last_steps_B=self.max_new[rows] - 1,
            ends_in_text_B=in_text_B if in_text_B.any() else None,
            published=np.flatnonzero(publishes_B),
            numbers=self.number[rows[publishes_B]].tolist(),
            streams=bool(self.streams[rows].any()),
        )

    def _resize(self, count: int) -> None:
        """Have so many rows, the new ones free."""
        old = len(self.arrival)
        more = (0, count - old)
        for name in (*_COUNTERS, *_FLAGS):
            setattr(self, name, np.pad(getattr(self, name), more))
        self.arrival[old:] = -1
        self.stop_ids_NW = np.pad(self.stop_ids_NW, (more, (0, 0)), constant_values=-1)
        self._free += range(count - 1, old - 1, -1)
