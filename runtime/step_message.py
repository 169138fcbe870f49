"""One micro-batch as stages see it: made of the scheduler's, sent by links, run by backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmpq.runtime.request import MicroBatch, PagedRow, StepKind
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.token_rules import NO_RULES
from llmpq.runtime.upload import upload


@dataclass(frozen=True, kw_only=True)
class StepMessage:
    """One micro-batch as a stage sees it: numbers only, no request objects."""

    kind: StepKind
    seq: int = 0
    slots: Sequence[int] = ()
    starts: Sequence[int] = ()
    num_new: Sequence[int] = ()
    sample_steps: Sequence[int] = ()
    """Index of the token each row samples, which seeds its random draw."""
    sampling: Sequence[SamplerConfig] = ()
    requests: Sequence[int] = ()
    """Numbers of the rows' requests, by which the last stage knows their rules; -1 without any."""
    tokens: Sequence[Sequence[int]] = field(default=(), repr=False)
    """New tokens of each row: known to the first stage, and to others that ask for them."""
    paged: Sequence[PagedRow] = ()
    """What a stage's cache has to know of each row."""

    @property
    def sends_tokens(self) -> bool:
        """Whether the last stage needs the rows' tokens; `paged` has the drafts."""
        return any(row.drafts_wanted >= 0 for row in self.paged)

    @property
    def q_len(self) -> int:
        """New tokens of the longest row."""
        return max(self.num_new, default=0)

    @property
    def num_rows(self) -> int:
        """Requests in the micro-batch."""
        return len(self.slots)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its hidden states: the rows' tokens, one row behind the other."""
        return 1, sum(self.num_new)

    def tokens_1T(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the new tokens, one row's behind the other's."""
        return upload([[token for row in self.tokens for token in row]], torch.long, device)


STOP = StepMessage(kind=StepKind.STOP)


def describe(micro_batch: MicroBatch) -> StepMessage:
    """Return the message of a micro-batch the scheduler issued."""
    requests, rows = micro_batch.requests, micro_batch.rows
    return StepMessage(
        kind=micro_batch.kind,
        seq=micro_batch.seq,
        slots=[row.slot for row in rows],
        starts=micro_batch.starts,
        num_new=[len(tokens) for tokens in micro_batch.tokens],
        sample_steps=[row.sample_step for row in rows],
        sampling=[request.sampling for request in requests],
        requests=[NO_RULES if request.rules is None else request.id for request in requests],
        tokens=micro_batch.tokens,
        paged=rows,
    )


def result_width(rows: Sequence[PagedRow]) -> int:
    """Return the columns of a result: one token, or where drafts were verified a count and tokens.

    Where drafts are wanted of the last stage, their count and they follow.
    """
    longest = max(len(row.drafts) for row in rows)
    wanted = max(row.drafts_wanted for row in rows)
    return (2 + longest if longest else 1) + (1 + wanted if wanted > 0 else 0)


def result_drafts(result_BK: Tensor, rows: Sequence[PagedRow]) -> list[list[int]]:
    """Return the drafts that the last stage sent with a step's tokens; empty where it sent none."""
    wanted = max(row.drafts_wanted for row in rows)
    if wanted <= 0:
        return []
    table: list[list[int]] = result_BK[:, -1 - wanted :].tolist()
    return [row[1 : 1 + row[0]] for row in table]
