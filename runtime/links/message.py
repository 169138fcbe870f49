"""How a micro-batch is described on its way between stages: the header beside its hidden states.

The header is one int64 tensor of fixed size, so that a receiver can post its receive before it
knows what comes:

    [kind, seq, rows, q_len, has_tokens, paging, every_place, 0, ...]
    [slot, start, num_new, step, temperature, top_k, top_p, min_p, seed, request]  a line per row
    (temperature, top_p and min_p are the bits of a float64; what else a request asks of its tokens
    the last stage knows by the request's number, which is -1 where it asks nothing)

`paging` counts the int64 behind the header that say what is new of rows, blocks they got above all:

    [row, slot, flags, drafts, first block, new blocks, first window block, new window blocks,
     saves, loads, drafts wanted, loads state, saves state]
    + drafts, new blocks, new window blocks, saves, loads              for each row that has news
    (flags: 1, it samples; 2, it resumes; of lists the first line has the lengths; `PagedRow` says
    what each is)

Steps whose rows the model's own head (MTP) sees send their tokens along, one row's behind the
other's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from llmpq.plans.speculation import MAX_GAMMA
from llmpq.runtime.requests.request import PagedRow, RowSampling, StepKind, StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.requests.token_rules import NO_RULES

_WIDTH = 10
_PAGING_WIDTH = 13
_KEPT = 4096
"""Values of which it is remembered how they are written: those of as many rows, about."""


def header_size(max_rows: int) -> int:
    """Return the number of int64 of a header for at most `max_rows` rows."""
    return _WIDTH * (1 + max_rows)


def pack_header(message: StepMessage, max_rows: int) -> Tensor:
    """Return the header tensor of a message."""
    header = np.zeros((1 + max_rows, _WIDTH), dtype=np.int64)
    paging = sum(_paging_sizes(message.news))
    first = (message.kind, message.seq, message.num_rows, message.q_len, message.sends_tokens)
    header[0, :7] = (*first, paging, message.every_place)
    rows = header[1 : 1 + message.num_rows]
    rows[:, 0], rows[:, 1] = message.slots_B, message.starts_B
    rows[:, 2], rows[:, 3] = message.num_new_B, message.sample_steps_B
    if message.num_rows:
        rows[:, 4:9] = [_numbers(config) for config in message.sampling]
        rows[:, 9] = message.rules_B if len(message.rules_B) else NO_RULES
    return torch.from_numpy(header.reshape(-1))


def unpack_header(header: Tensor) -> StepMessage:
    """Return the message of a header; `tokens_T` is left out."""
    # A copy: what it came in is used for the next one.
    values = header.numpy().reshape(-1, _WIDTH).copy()
    kind, seq, num_rows, *_ = values[0].tolist()
    rows = values[1 : 1 + num_rows]
    return StepMessage(
        kind=StepKind(kind),
        seq=seq,
        slots_B=rows[:, 0],
        starts_B=rows[:, 1],
        num_new_B=rows[:, 2],
        sample_steps_B=rows[:, 3],
        sampling=RowSampling([_choice(*config) for config in rows[:, 4:9].tolist()]),
        rules_B=rows[:, 9],
        every_place=bool(values[0, 6]),
    )


def paging_size(header: Tensor) -> int:
    """Return how many int64 of paging follow a header."""
    return int(header[5])


def max_paging_size(max_rows: int, max_blocks: int) -> int:
    """Return the int64 of the longest paging: each row brings a whole table of `max_blocks`.

    Hosts may keep as many, and get as many back.
    """
    return max_rows * (_PAGING_WIDTH + MAX_GAMMA + 5 * max_blocks)


def _paging_sizes(news: Mapping[int, PagedRow]) -> Iterator[int]:
    """Yield the int64 that `pack_paging` writes of each row."""
    for row in news.values():
        more = len(row.drafts) + len(row.new_blocks) + len(row.new_window_blocks)
        yield _PAGING_WIDTH + more + 2 * (len(row.saves) + len(row.loads))


def pack_paging(news: Mapping[int, PagedRow]) -> Tensor:
    """Return what there is to say of rows of a step; empty without news."""
    values: list[int] = []
    for number, row in news.items():
        flags = int(row.samples) + 2 * int(row.resumes)
        values += [number, row.slot, flags, len(row.drafts), row.first_block, len(row.new_blocks)]
        values += [row.first_window_block, len(row.new_window_blocks)]
        values += [len(row.saves), len(row.loads), row.drafts_wanted]
        values += [row.loads_state, row.saves_state]
        values += [*row.drafts, *row.new_blocks, *row.new_window_blocks]
        values += [number for pair in (*row.saves, *row.loads) for number in pair]
    return torch.tensor(values, dtype=torch.long)


def unpack_paging(message: StepMessage, paging: Tensor) -> StepMessage:
    """Return a message with the news that `pack_paging` wrote."""
    values, news, at = paging.tolist(), {}, 0
    while at < len(values):
        number, slot, flags, num_drafts, first_block, num_new, first_window, num_window = values[
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
        news[number] = PagedRow(
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
            drafts_wanted=drafts_wanted,
            loads_state=loads_state,
            saves_state=saves_state,
        )
    return replace(message, news=news)


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
def _numbers(config: SamplerConfig) -> tuple[int, int, int, int, int]:
    """Return what `_choice` takes."""
    return (
        _float_bits(config.temperature),
        config.top_k or 0,
        _float_bits(config.top_p),
        _float_bits(config.min_p),
        config.seed,
    )


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _bits_float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
