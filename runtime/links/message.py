"""How a micro-batch is described on its way between stages: the header beside its hidden states.

The header is one int64 tensor of fixed size, so that a receiver can post its receive before it
knows what comes:

    [kind, seq, rows, q_len, has_tokens, paging, every_place, 0, ...]
    [slot, start, num_new, step, temperature, top_k, top_p, min_p, seed, request]  a line per row
    (temperature, top_p and min_p are the bits of a float64; what else a request asks of its tokens
    the last stage knows by the request's number, which is -1 where it asks nothing)

`paging` counts the int64 behind the header that say which blocks the rows got:

    [slot, flags, drafts, first block, new blocks, admission, first window block, new window
     blocks, saves, loads, drafts wanted, loads state, saves state]
    + drafts, new blocks, new window blocks, saves, loads                             for each row
    (flags: 1, it samples; 2, it resumes; of lists the first line has the lengths; `PagedRow` says
    what each is)

Steps whose rows the model's own head (MTP) sees send their tokens along, one row's behind the
other's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from llmpq.runtime.request import PagedRow, StepKind
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.step import StepMessage
from llmpq.runtime.token_rules import NO_RULES
from llmpq.speculation import MAX_GAMMA

_WIDTH = 10
_PAGING_WIDTH = 13
_KEPT = 4096
"""Values of which it is remembered how they are written: those of as many rows, about."""


def header_size(max_rows: int) -> int:
    """Return the number of int64 of a header for at most `max_rows` rows."""
    return _WIDTH * (1 + max_rows)


def pack_header(message: StepMessage, max_rows: int) -> Tensor:
    """Return the header tensor of a message."""
    has_tokens = int(message.sends_tokens)
    paging = sum(_paging_sizes(message.paged))
    values = [message.kind, message.seq, message.num_rows, message.q_len, has_tokens, paging]
    values.append(int(message.every_place))
    values += [0] * (_WIDTH - len(values))
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
            _float_bits(sampling.min_p),
            sampling.seed,
            message.requests[row] if message.requests else NO_RULES,
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
        sampling=[_choice(*row[4:9]) for row in rows],
        requests=[row[9] for row in rows],
        every_place=bool(values[6]),
    )


def paging_size(header: Tensor) -> int:
    """Return how many int64 of paging follow a header."""
    return int(header[5])


def max_paging_size(max_rows: int, max_blocks: int) -> int:
    """Return the int64 of the longest paging: each row brings a whole table of `max_blocks`.

    Hosts may keep as many, and get as many back.
    """
    return max_rows * (_PAGING_WIDTH + MAX_GAMMA + 5 * max_blocks)


def _paging_sizes(rows: Sequence[PagedRow]) -> Iterator[int]:
    """Yield the int64 that `pack_paging` writes of each row."""
    for row in rows:
        more = len(row.drafts) + len(row.new_blocks) + len(row.new_window_blocks)
        yield _PAGING_WIDTH + more + 2 * (len(row.saves) + len(row.loads))


def pack_paging(rows: Sequence[PagedRow]) -> Tensor:
    """Return which blocks the rows of a step got; empty without rows."""
    values: list[int] = []
    for row in rows:
        flags = int(row.samples) + 2 * int(row.resumes)
        values += [row.slot, flags, len(row.drafts), row.first_block, len(row.new_blocks)]
        values += [row.admission, row.first_window_block, len(row.new_window_blocks)]
        values += [len(row.saves), len(row.loads), row.drafts_wanted]
        values += [row.loads_state, row.saves_state]
        values += [*row.drafts, *row.new_blocks, *row.new_window_blocks]
        values += [number for pair in (*row.saves, *row.loads) for number in pair]
    return torch.tensor(values, dtype=torch.long)


def unpack_paging(message: StepMessage, paging: Tensor) -> StepMessage:
    """Return a message with the rows that `pack_paging` wrote."""
    values, rows, at = paging.tolist(), [], 0
    for _ in range(message.num_rows if values else 0):
        slot, flags, num_drafts, first_block, num_new, admission, first_window, num_window = values[
            at : at + 8
        ]
        num_saves, num_loads, drafts_wanted, loads_state, saves_state = values[
            at + 8 : at + _PAGING_WIDTH
        ]
        drafts = at + _PAGING_WIDTH
        blocks = drafts + num_drafts
        windowed = blocks + num_new
        saved = windowed + num_window
        loaded = saved + 2 * num_saves
        at = loaded + 2 * num_loads
        rows.append(
            PagedRow(
                slot=slot,
                samples=bool(flags & 1),
                resumes=bool(flags & 2),
                drafts=tuple(values[drafts:blocks]),
                first_block=first_block,
                new_blocks=tuple(values[blocks:windowed]),
                first_window_block=first_window,
                new_window_blocks=tuple(values[windowed:saved]),
                saves=_pairs(values[saved:loaded]),
                loads=_pairs(values[loaded:at]),
                admission=admission,
                drafts_wanted=drafts_wanted,
                loads_state=loads_state,
                saves_state=saves_state,
            )
        )
    return replace(message, paged=tuple(rows))


def _pairs(values: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(values[::2], values[1::2], strict=True))


@lru_cache(maxsize=_KEPT)
def _choice(temperature: int, top_k: int, top_p: int, min_p: int, seed: int) -> SamplerConfig:
    """Return what a row's line of the header asks; rows ask the same every step."""
    return SamplerConfig(
        temperature=_bits_float(temperature),
        top_k=top_k or None,
        top_p=_bits_float(top_p),
        min_p=_bits_float(min_p),
        seed=seed,
    )


@lru_cache(maxsize=_KEPT)
def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _bits_float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
