"""What travels between stages: a header that describes one micro-batch, beside its hidden states.

The header is one int64 tensor of fixed size, so that a receiver can post its receive before it
knows what comes:

    [kind, seq, rows, q_len, has_tokens, 0, 0, 0]
    [slot, start, num_new, step, temperature, top_k, top_p, seed]    one line per row
    (temperature and top_p are the bits of a float64)

Verify steps send their tokens [B, Q] along, since the last stage must compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmpq.runtime.request import MicroBatch, StepKind
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step import Step
from llmpq.runtime.upload import upload

_WIDTH = 8


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
    sampling: Sequence[TokenChoice] = ()
    tokens: Sequence[Sequence[int]] = field(default=(), repr=False)
    """New tokens of each row: known to the first stage, and to all in a verify step."""

    @property
    def q_len(self) -> int:
        """Width of the padded tables."""
        return max(self.num_new, default=0)

    @property
    def num_rows(self) -> int:
        """Requests in the micro-batch."""
        return len(self.slots)

    def step(self, device: torch.device | str) -> Step:
        """Build the value the model's forward takes."""
        return Step.of(self.slots, self.starts, self.num_new, device=device)

    def tokens_BQ(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the new tokens, right padded with 0."""
        table = [[*row, *[0] * (self.q_len - len(row))] for row in self.tokens]
        return upload(table, torch.long, device)


STOP = StepMessage(kind=StepKind.STOP)


def describe(micro_batch: MicroBatch) -> StepMessage:
    """Return the message of a micro-batch the scheduler issued."""
    requests = micro_batch.requests
    # A draft step samples the token after the drafts it has; all others the one after the output.
    ahead = micro_batch.kind is StepKind.DRAFT
    return StepMessage(
        kind=micro_batch.kind,
        seq=micro_batch.seq,
        slots=[request.slot for request in requests],
        starts=micro_batch.starts,
        num_new=_counts(micro_batch),
        sample_steps=[len(r.output) + (len(r.drafts) if ahead else 0) for r in requests],
        sampling=[request.sampling for request in requests],
        tokens=micro_batch.tokens,
    )


def _counts(micro_batch: MicroBatch) -> list[int]:
    """Return how many positions each row's newest one gets behind it, itself included."""
    if micro_batch.kind is StepKind.ROUND and micro_batch.round is not None:
        return [micro_batch.round.gamma + 1] * len(micro_batch.requests)
    return [len(tokens) for tokens in micro_batch.tokens]


def result_width(kind: StepKind, q_len: int) -> int:
    """Return the columns of a result: one token, or for a verify a count and up to Q tokens."""
    return 1 + q_len if kind is StepKind.VERIFY else 1


def header_size(max_rows: int) -> int:
    """Return the number of int64 of a header for at most `max_rows` rows."""
    return _WIDTH * (1 + max_rows)


def pack_header(message: StepMessage, max_rows: int) -> Tensor:
    """Return the header tensor of a message."""
    has_tokens = int(message.kind is StepKind.VERIFY)
    values = [message.kind, message.seq, message.num_rows, message.q_len, has_tokens, 0, 0, 0]
    for row in range(message.num_rows):
        sampling = message.sampling[row]
        values += [
            message.slots[row],
            message.starts[row],
            message.num_new[row],
            message.sample_steps[row],
            _float_bits(sampling.temperature),
            sampling.top_k or 0,
            _float_bits(sampling.top_p),
            sampling.seed,
        ]
    header = torch.zeros(header_size(max_rows), dtype=torch.long)
    header[: len(values)] = torch.tensor(values, dtype=torch.long)
    return header


def unpack_header(header: Tensor) -> StepMessage:
    """Return the message of a header; `tokens` is left out."""
    values = header.tolist()
    kind, seq, num_rows = StepKind(values[0]), values[1], values[2]
    rows = [values[_WIDTH * (1 + row) : _WIDTH * (2 + row)] for row in range(num_rows)]
    return StepMessage(
        kind=kind,
        seq=seq,
        slots=[row[0] for row in rows],
        starts=[row[1] for row in rows],
        num_new=[row[2] for row in rows],
        sample_steps=[row[3] for row in rows],
        sampling=[
            TokenChoice(
                temperature=_bits_float(row[4]),
                top_k=row[5] or None,
                top_p=_bits_float(row[6]),
                seed=row[7],
            )
            for row in rows
        ],
    )


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _bits_float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
