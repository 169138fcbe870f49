"""Counters of all requests of a scheduler, a row for each.

Many rows are looked at, and moved on, by a few operations on arrays.

Knows no request: what a row means, and when its counters change, `RunningRequest`
(block_tables.py) and the scheduler say.

Legend: N rows of the table, B of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmpq.runtime.requests.request import Ints

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
    stop_ids: frozenset[int]
    """Tokens that end one of them, or several."""
    last_steps_B: Ints
    """Index of the last token that each may get."""
    ends_in_text_B: NDArray[np.bool_] | None
    """Whether a text may end it; None where that is true of no row."""
    published: list[int]
    """Places of the rows whose tokens are wanted as they come."""
    numbers: list[int]
    """Of these rows' requests."""
    streams: bool
    """Whether somebody waits for one of them."""
    ones_B: Ints
    """One for each: a token, where all decode."""

    def may_end(self, tokens: list[int], steps_B: Ints) -> list[int]:
        """Return the places of tokens that may be their requests' last, in order.

        Each is the `steps_B`-th of its request.
        """
        ends_B = steps_B == self.last_steps_B
        if self.ends_in_text_B is not None:
            ends_B |= self.ends_in_text_B
        places: list[int] = ends_B.nonzero()[0].tolist()
        if not self.stop_ids.isdisjoint(tokens):
            stops = [place for place, token in enumerate(tokens) if token in self.stop_ids]
            places = sorted({*places, *stops})
        return places


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
    """Position of the token that fills the first of its blocks that others cannot find yet."""
    has_news: NDArray[np.bool_]
    """Whether stages lack something that its next row is to say: blocks, where it begins."""
    ends_in_text: NDArray[np.bool_]
    """Whether a text may end it, which any token may complete."""
    publishes: NDArray[np.bool_]
    """Whether its tokens are wanted as they come."""
    streams: NDArray[np.bool_]
    """Whether somebody waits for them."""

    def __init__(self) -> None:
        for name in _COUNTERS:
            setattr(self, name, np.zeros(0, dtype=np.int64))
        for name in _FLAGS:
            setattr(self, name, np.zeros(0, dtype=np.bool_))
        self._free: list[int] = []
        self._resize(_FIRST_ROWS)

    def add(self, *, arrival: int, number: int, num_prompt: int, max_new: int) -> int:
        """Return the row of a request that has nothing yet."""
        if not self._free:
            self._resize(2 * len(self.arrival))
        row = self._free.pop()
        for name in (*_COUNTERS, *_FLAGS):
            getattr(self, name)[row] = 0
        self.arrival[row], self.number[row] = arrival, number
        self.num_prompt[row], self.max_new[row] = num_prompt, max_new
        self.slot[row] = self.newest[row] = -1
        return row

    def remove(self, row: int) -> None:
        """Free the row of a request that has ended."""
        self.arrival[row] = -1
        self._free.append(row)

    def waits(self, rows: Ints, tokens_ahead: int) -> NDArray[np.bool_]:
        """Whether each request's next step has to wait for the tokens that are under way.

        That is where `tokens_ahead` of them are, or its last one.
        """
        last = self.num_sampled[rows] >= self.max_new[rows]
        return last | (self.in_flight[rows] >= tokens_ahead)

    def issue(
        self, rows: Ints, *, computed_B: Ints, sampled_B: Ints, step: int
    ) -> tuple[Ints, Ints]:
        """Note a step's tokens of some requests: those it computes, and those it samples.

        Return where the requests stood: how many were computed and sampled before.
        """
        starts_B, sample_steps_B = self.num_computed[rows], self.num_sampled[rows]
        self.num_computed[rows] = starts_B + computed_B
        self.num_sampled[rows] = sample_steps_B + sampled_B
        self.in_flight[rows] = self.in_flight[rows] + sampled_B
        self.last_step[rows] = step
        return starts_B, sample_steps_B

    def take(self, rows: Ints, tokens_B: Ints) -> None:
        """Note a token of each request that was under way."""
        self.newest[rows] = tokens_B
        self.in_flight[rows] = self.in_flight[rows] - 1

    def num_tokens(self, rows: Ints, tokens_ahead: int) -> Ints:
        """Return the tokens of requests' prompts and outputs that their next steps may build on.

        Those under way count, but the newest one where it has to be waited for (`waits`).
        """
        known = self.num_prompt[rows] + self.num_sampled[rows]
        return known - self.waits(rows, tokens_ahead)

    def constants(self, rows: Ints, stop_ids: frozenset[int]) -> RowConstants:
        """Return what of some rows stays as it is while their requests run."""
        publishes_B, in_text_B = self.publishes[rows], self.ends_in_text[rows]
        return RowConstants(
            slots_B=self.slot[rows],
            arrivals_B=self.arrival[rows],
            admissions_B=self.admission[rows],
            stop_ids=stop_ids,
            last_steps_B=self.max_new[rows] - 1,
            ends_in_text_B=in_text_B if in_text_B.any() else None,
            published=publishes_B.nonzero()[0].tolist(),
            numbers=self.number[rows[publishes_B]].tolist(),
            streams=bool(self.streams[rows].any()),
            ones_B=np.ones(len(rows), dtype=np.int64),
        )

    def _resize(self, count: int) -> None:
        """Have so many rows, the new ones free."""
        old = len(self.arrival)
        more = (0, count - old)
        for name in (*_COUNTERS, *_FLAGS):
            setattr(self, name, np.pad(getattr(self, name), more))
        self.arrival[old:] = -1
        self._free += range(count - 1, old - 1, -1)
