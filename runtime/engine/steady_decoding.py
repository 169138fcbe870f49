"""Steps of rows that decode, each like the last one and a token further.

While nothing happens to any row (none needs a block, fills one, or may end) and no request comes or
goes, a step follows from the last one by two additions. The table of counters (request_table.py)
stays as it was meanwhile; `settle` moves it on before anything else reads it.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmpq.runtime.engine.request_table import RequestTable, RowConstants
from llmpq.runtime.request import Ints, MicroBatch


class SteadyDecoding:
    """The steps that follow one whose tokens are known, one after the other."""

    def __init__(self, table: RequestTable, last: MicroBatch, constants: RowConstants) -> None:
        """`last`: a step of all admitted requests, all of which decode; complete."""
        self.constants, self._table, self._last = constants, table, last
        rows, computed_B = last.members_B, last.starts_B + 1
        ends_B = np.minimum(table.needs_blocks_at[rows], table.fills_block_at[rows] - 1)
        left_B = np.minimum(ends_B - computed_B, constants.last_steps_B - last.sample_steps_B - 1)
        self.num_left = 0 if constants.ends_in_text_B is not None else max(0, int(left_B.min()))
        """Steps to come in which nothing happens but by a stop token."""
        self._newest_B = table.newest[rows]
        self._stop_ids = frozenset(constants.stop_ids_WB.ravel().tolist())
        self._num_issued = 0
        self.under_way = False
        """Whether the last step's tokens are yet to come."""

    def issue(self, number: int) -> MicroBatch:
        """Return the next step."""
        last = self._last
        self._last = replace(
            last,
            seq=number,
            starts_B=last.starts_B + 1,
            tokens_T=self._newest_B,
            sample_steps_B=last.sample_steps_B + 1,
            news={},
        )
        self.num_left -= 1
        self._num_issued += 1
        self.under_way = True
        return self._last

    def take(self, micro_batch: MicroBatch, tokens: Ints | Sequence[Sequence[int]]) -> bool:
        """Take the new tokens of the last step, if it is that and no row may end with them."""
        if micro_batch is not self._last or not self.under_way:
            return False
        tokens_B = np.array(tokens, dtype=np.int64).reshape(-1)
        new = tokens_B.tolist()
        if not self._stop_ids.isdisjoint(new):
            return False
        self._newest_B, self.under_way = tokens_B, False
        return True

    @property
    def newest_B(self) -> Ints:
        """The last token that is known of each row."""
        return self._newest_B

    def settle(self) -> None:
        """Enter in the table what came of the steps; no more of them are issued then."""
        table, rows = self._table, self._last.members_B
        if self._num_issued:
            table.num_computed[rows] += self._num_issued
            table.num_sampled[rows] += self._num_issued
            table.in_flight[rows] += self.under_way
            table.last_step[rows] = self._last.seq
            table.newest[rows] = self._newest_B
