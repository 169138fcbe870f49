"""One step as a stage computes it, made of the step's message (`StepMessage`, request.py).

`Step` itself has rows that are right padded: the windows of calibration. The engine's steps pack
their rows, one behind the other: `RaggedStep` on CPUs, `PagedStep` (paged_step.py) on GPUs. Norms,
products and rotary positions see one long row; only attention and the choice of tokens know where
each row is.

Everything a forward decides on is a host value, so no device is asked for anything while it runs.

Legend: B rows, Q new tokens per row, T new tokens of all rows, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from llmpq.runtime.requests.request import PagedRow, RowSampling, StepKind, StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.device_copies import upload

Derived = TypeVar("Derived")


def message_of_rows(
    kind: StepKind,
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    tokens: Sequence[int] | None = None,
    rows: Sequence[PagedRow] = (),
    sampling: SamplerConfig | None = None,
) -> StepMessage:
    """Return a step of rows that are no requests': to be timed, captured, or of the MTP head.

    `tokens`: one row's behind the other's, zeros by default. `rows`: what there is to say of each.
    """
    count = len(slots)
    num_new_B = np.array(counts, dtype=np.int64)
    return StepMessage(
        kind=kind,
        slots_B=np.array(slots, dtype=np.int64),
        starts_B=np.array(starts, dtype=np.int64),
        num_new_B=num_new_B,
        sample_steps_B=np.zeros(count, dtype=np.int64),
        sampling=RowSampling([sampling or SamplerConfig()] * count),
        tokens_T=np.array([0] * num_new_B.sum() if tokens is None else tokens, dtype=np.int64),
        news=dict(enumerate(rows)),
    )


def result_width(news: Mapping[int, PagedRow]) -> int:
    """Return the columns of a result: one token, or where drafts were verified a count and tokens.

    Where drafts are wanted of the last stage, their count and they follow.
    """
    longest = max((len(row.drafts) for row in news.values()), default=0)
    wanted = _most_wanted(news)
    return (2 + longest if longest else 1) + (1 + wanted if wanted > 0 else 0)


def result_drafts(result_BK: Tensor, news: Mapping[int, PagedRow]) -> list[list[int]]:
    """Return the drafts that the last stage sent with a step's tokens; empty where it sent none."""
    wanted = _most_wanted(news)
    if wanted <= 0:
        return []
    table: list[list[int]] = result_BK[:, -1 - wanted :].tolist()
    return [row[1 : 1 + row[0]] for row in table]


def speculates(news: Mapping[int, PagedRow]) -> bool:
    """Whether a step's rows have drafts, or hosts are to know them for drafts to come."""
    return any(row.drafts or row.drafts_wanted >= 0 for row in news.values())


def _most_wanted(news: Mapping[int, PagedRow]) -> int:
    return max((row.drafts_wanted for row in news.values()), default=-1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of one forward. Build it with `Step.of`, which derives the host flags."""

    slots_B: Tensor
    """Row of the block tables of each row."""
    start_B: Tensor
    """Tokens already in the cache."""
    num_new_B: Tensor
    """Valid new tokens of each row, 1..q_len; the rest of the row is padding on the right."""
    q_len: int
    max_end: int
    """The largest start + num_new: keys beyond it are not read."""
    fresh: bool
    """Every start is 0: attention needs the new tokens only."""
    uniform: bool = False
    """Every row has the same start and `q_len` valid tokens."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was derived from the step once, shared by all layers."""

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        num_new: Sequence[int],
        *,
        device: torch.device | str = "cpu",
    ) -> Step:
        """Build the step of rows at `starts` that bring `num_new` tokens each."""
        if not len(slots) == len(starts) == len(num_new) > 0:
            raise ValueError(
                f"a step needs equally many slots, starts and counts, got {len(slots)}, "
                f"{len(starts)}, {len(num_new)}"
            )
        if min(num_new) < 1 or min(starts) < 0:
            raise ValueError(f"a row needs a new token and a start >= 0, got {num_new}, {starts}")
        rows = upload([slots, starts, num_new], torch.long, device)
        return cls(
            slots_B=rows[0],
            start_B=rows[1],
            num_new_B=rows[2],
            q_len=max(num_new),
            max_end=max(s + n for s, n in zip(starts, num_new, strict=True)),
            fresh=max(starts) == 0,
            uniform=len(set(starts)) == 1 and len(set(num_new)) == 1,
        )

    @classmethod
    def of_prompts(cls, rows: int, length: int, *, device: torch.device | str = "cpu") -> Step:
        """Build the step of so many whole prompts, all of one length."""
        return cls.of(range(rows), [0] * rows, [length] * rows, device=device)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.slots_B.shape[0]

    @property
    def positions_BQ(self) -> Tensor:
        """Position of every new token, padding included; [1, Q] when all rows are alike."""
        return self.once("positions", self._positions)

    @property
    def lengths_BQ(self) -> Tensor:
        """Tokens of every row's request with this step, [B, 1]."""
        return (self.start_B + self.num_new_B)[:, None]

    @property
    def ends_by_place(self) -> bool:
        """Whether `ends` has every place's."""
        return False

    @property
    def ends(self) -> Tensor:
        """Tokens of every row's request with this step, [B]; of packed rows every place's, [T]."""
        return self.start_B + self.num_new_B

    def once(self, key: str, make: Callable[[], Derived]) -> Derived:
        """Return what was derived under `key`, making it at its first use."""
        if key not in self.memo:
            self.memo[key] = make()
        made: Derived = self.memo[key]
        return made

    def last_valid(self, x_BQH: Tensor) -> Tensor:
        """Return [B, H]: each row at its last valid token."""
        if self.q_len == 1 or self.uniform:
            return x_BQH[:, -1]
        rows = torch.arange(self.batch, device=x_BQH.device)
        return x_BQH[rows, self.num_new_B - 1]

    def _positions(self) -> Tensor:
        start = self.start_B[:1] if self.fresh or self.uniform else self.start_B
        return start[:, None] + torch.arange(self.q_len, device=start.device)


@dataclass(frozen=True)
class Span:
    """One row: `count` tokens from position `start` of its request, at `first` of the step."""

    slot: int
    start: int
    count: int
    first: int
    revocable: int = 0
    """How many of its last tokens are drafts, which the request's next step may leave out."""

    @property
    def end(self) -> int:
        """Tokens of its request after this step."""
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class RaggedStep(Step):
    """The rows of one forward; `q_len` counts all tokens, padding included."""

    spans: tuple[Span, ...]
    wanted: tuple[int, ...]
    """Places of the step whose hidden states the head is asked for."""

    @classmethod
    def of_rows(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        wanted: Sequence[int],
        revocable: Sequence[int] | None = None,
        width: int | None = None,
    ) -> RaggedStep:
        """Build the step of rows at `starts` that bring `counts` tokens each, on a CPU.

        `wanted`: of how many of each row's last tokens the hidden state is asked for. `revocable`:
        how many of each row's last tokens are drafts. `width`: places in all.
        """
        if not len(slots) == len(starts) == len(counts) > 0:
            raise ValueError(
                f"a step needs equally many slots, starts and counts, got {len(slots)}, "
                f"{len(starts)}, {len(counts)}"
            )
        if min(counts) < 1 or min(starts) < 0:
            raise ValueError(f"a row needs a new token and a start >= 0, got {counts}, {starts}")
        spans, first = [], 0
        drafts = revocable or [0] * len(slots)
        for slot, start, count, last in zip(slots, starts, counts, drafts, strict=True):
            spans.append(Span(slot, start, count, first, last))
            first += count
        rows = torch.tensor([slots, starts, counts])
        return cls(
            slots_B=rows[0],
            start_B=rows[1],
            num_new_B=rows[2],
            q_len=first if width is None else width,
            max_end=max(span.end for span in spans),
            fresh=False,
            spans=tuple(spans),
            wanted=tuple(
                place
                for span, last in zip(spans, wanted, strict=True)
                for place in range(span.first + span.count - last, span.first + span.count)
            ),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return self.spans[-1].first + self.spans[-1].count

    @property
    def lengths_BQ(self) -> Tensor:
        """Tokens of every token's request with this step, [1, T]; 0 for padding."""
        lengths = [span.end for span in self.spans for _ in range(span.count)]
        lengths += [0] * (self.q_len - len(lengths))
        return torch.tensor([lengths])

    def last_valid(self, x_BQH: Tensor) -> Tensor:
        """Return [wanted places, H]."""
        return x_BQH[0, list(self.wanted)]

    def _positions(self) -> Tensor:
        positions = [p for span in self.spans for p in range(span.start, span.end)]
        positions += [0] * (self.q_len - len(positions))
        return upload([positions], torch.long, self.start_B.device)
