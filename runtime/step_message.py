"""One micro-batch as stages see it: made of the scheduler's, sent by links, run by backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmpq.runtime.request import MicroBatch, PagedRow, StepKind
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.step import Step
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
    """New tokens of each row: known to the first stage, and to all in a verify step."""
    paged: Sequence[PagedRow] = ()
    """Of the paged engine, what its cache has to know of each row; empty elsewhere."""

    @property
    def sends_tokens(self) -> bool:
        """Whether the last stage needs the rows' tokens; over a pool `paged` has the drafts."""
        if self.paged:
            return any(row.drafts_wanted >= 0 for row in self.paged)
        return self.kind is StepKind.VERIFY

    @property
    def q_len(self) -> int:
        """Width of the padded tables."""
        return max(self.num_new, default=0)

    @property
    def num_rows(self) -> int:
        """Requests in the micro-batch."""
        return len(self.slots)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its hidden states: padded, or all rows behind each other in one."""
        return (1, sum(self.num_new)) if self.paged else (self.num_rows, self.q_len)

    def step(self, device: torch.device | str) -> Step:
        """Build the value the model's forward takes."""
        return Step.of(self.slots, self.starts, self.num_new, device=device)

    def tokens_BQ(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the new tokens, right padded with 0; of a pool's rows one behind the other."""
        if self.paged:
            return upload([[token for row in self.tokens for token in row]], torch.long, device)
        table = [[*row, *[0] * (self.q_len - len(row))] for row in self.tokens]
        return upload(table, torch.long, device)


STOP = StepMessage(kind=StepKind.STOP)


def describe(micro_batch: MicroBatch) -> StepMessage:
    """Return the message of a micro-batch the scheduler issued."""
    requests, rows = micro_batch.requests, micro_batch.rows
    # A draft step samples the token after the drafts it has; all others the one after the output.
    ahead = micro_batch.kind is StepKind.DRAFT
    return StepMessage(
        kind=micro_batch.kind,
        seq=micro_batch.seq,
        slots=[row.slot for row in rows] or [request.slot for request in requests],
        starts=micro_batch.starts,
        num_new=_counts(micro_batch),
        sample_steps=[row.sample_step for row in rows]
        or [len(r.output) + (len(r.drafts) if ahead else 0) for r in requests],
        sampling=[request.sampling for request in requests],
        requests=[NO_RULES if request.rules is None else request.id for request in requests],
        tokens=micro_batch.tokens,
        paged=rows,
    )


def _counts(micro_batch: MicroBatch) -> list[int]:
    """Return how many positions each row's newest one gets behind it, itself included."""
    if micro_batch.kind is StepKind.ROUND and micro_batch.round is not None:
        return [micro_batch.round.gamma + 1] * len(micro_batch.requests)
    return [len(tokens) for tokens in micro_batch.tokens]


def result_width(kind: StepKind, q_len: int, rows: Sequence[PagedRow] = ()) -> int:
    """Return the columns of a result: one token, or where drafts were verified a count and tokens.

    `rows`: of a paged step. Where drafts are wanted of the last stage, their count and they follow.
    """
    if rows:
        longest = max(len(row.drafts) for row in rows)
        wanted = max(row.drafts_wanted for row in rows)
        return (2 + longest if longest else 1) + (1 + wanted if wanted > 0 else 0)
    return 1 + q_len if kind is StepKind.VERIFY else 1


def result_drafts(result_BK: Tensor, rows: Sequence[PagedRow]) -> list[list[int]]:
    """Return the drafts that the last stage sent with a step's tokens; empty where it sent none."""
    wanted = max(row.drafts_wanted for row in rows) if rows else 0
    if wanted <= 0:
        return []
    table: list[list[int]] = result_BK[:, -1 - wanted :].tolist()
    return [row[1 : 1 + row[0]] for row in table]
