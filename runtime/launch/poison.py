"""Which requests fresh stages get after a loss, so that one that ends every stage is found.

A request is suspected once two engines in a row were lost before they brought a token of it.
Stages then get half of the suspects, and the others when those have brought a token each: what ends
the next stages is in the half that they had. The last suspect runs alone, and once it has ended two
fresh engines so it is failed, and the rest go on; once is enough where the stages did not die but
raised an error, and had before. A stage that is lost for reasons of its own, at
whatever moment, hardly ever looks like that: its requests bring tokens when they are asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmpq.runtime.launch.request_record import RequestRecord

STRIKES = 2
"""Engines that a request is seen with when they are lost, before it is suspected; and alone, before
it is failed."""
MOST_POISON = 3
"""Requests failed one after the other, with no token of any between, that mean a broken engine."""


class PoisonHunt:
    """Notes losses and says who may run."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: requests that may run at once; those behind them wait and are innocent."""
        self._max_rows = max_rows
        self._trial: list[RequestRecord] = []
        """Suspects that the engine has; the other ones wait until these have brought a token."""
        self._alone: RequestRecord | None = None
        self._num_failed = 0
        self._raised = False
        """Whether the last loss was an error that a stage raised."""

    @property
    def holds_all(self) -> bool:
        """Whether the engine has one request and is to get no other."""
        return self._alone is not None

    def note_loss(
        self, records: Iterable[RequestRecord], *, raised: bool = False
    ) -> list[RequestRecord]:
        """Take in that the engine of these unfinished requests was lost; return who is to fail.

        `raised`: by an error of a step, which comes again, rather than by a death.
        """
        again, self._raised = raised and self._raised, raised
        ordered = sorted((r for r in records if r.begun), key=lambda record: record.order)
        for record in ordered[: self._max_rows]:
            if record.brought_nothing:
                record.strikes += 1
                record.strikes_alone += record is self._alone
        sure = again and len(ordered) == 1 and ordered[0].brought_nothing
        failed = [record for record in ordered if sure or record.strikes_alone >= STRIKES]
        self._num_failed += len(failed)
        return failed

    def broken(self) -> bool:
        """Whether so many have failed in a row that it is not they who end the stages."""
        return self._num_failed >= MOST_POISON

    def chosen(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Return which of the unfinished requests a fresh engine gets first."""
        suspects = sorted(
            (record for record in records if record.strikes >= STRIKES),
            key=lambda record: record.order,
        )
        # Those of the last trial have one strike more than those that were held back from it.
        most = max((record.strikes for record in suspects), default=0)
        worst = [record for record in suspects if record.strikes == most]
        if len(worst) == 1:
            (self._alone,) = self._trial = worst
            return worst
        self._alone, self._trial = None, worst[: len(worst) // 2]
        held = [record for record in suspects if record not in self._trial]
        return [record for record in records if record not in held]

    def released(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Return who may run now, too, after tokens have come; `records`: the unfinished."""
        if self._num_failed and any(not r.brought_nothing for r in records if r.begun):
            self._num_failed = 0
        if not self._trial or any(r in records and r.brought_nothing for r in self._trial):
            return []
        self._trial, self._alone = [], None
        return [record for record in records if not record.begun]
