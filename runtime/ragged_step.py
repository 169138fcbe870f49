"""One step of a stage on a CPU: rows of unequal lengths, one behind the other.

What `Step` is to padded rows this is to packed ones: hidden states are [1, T, h], the T tokens of
all rows in turn, padding only behind the last. Norms, products and rotary positions see one long
row; only attention and the choice of tokens know where each row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.runtime.step import Step
from llmpq.runtime.upload import upload


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
        device: torch.device | str = "cpu",
    ) -> RaggedStep:
        """Build the step of rows at `starts` that bring `counts` tokens each.

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
        rows = upload([slots, starts, counts], torch.long, device)
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
