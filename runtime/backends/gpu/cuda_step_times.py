"""What drafts, verifies and plain steps take on this very device: timed at the start, for `auto`.

A cost model knows kinds of devices and layers on their own; whether drafting pays is decided by
differences of a few percent. Steps are timed as the engine runs them (replayed graphs), at two
context lengths and some numbers of positions; between those, times are straight lines. Attention
over a packed cache takes longer the fuller the ring of newest tokens is: it is half full here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from llmpq.plans.speculation import MAX_GAMMA, Line, MeasuredTimes
from llmpq.runtime.requests.request import PagedRow, StepKind, StepMessage
from llmpq.runtime.steps.step import message_of_rows
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS

if TYPE_CHECKING:
    from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner

POSITIONS = (1, 2, 3, 4, 6, MAX_GAMMA + 1)
"""New tokens a row at which verifies are timed; drafts of one less are those `auto` chooses from,
so that few graphs are captured."""
REPEATS = 8


def measure(
    compute: CudaStageRunner, rows: Sequence[int], contexts: Sequence[int], *, num_blocks: int
) -> MeasuredTimes:
    """Time the steps of a whole model over its pool, no block of which is in use yet."""

    def line(run: Callable[[StepMessage], object], num_rows: int, q_len: int) -> Line:
        def at(context: int) -> float:
            message = step_message(num_rows, context, q_len, num_blocks=num_blocks)
            compute.kv.take_rows(message.rows_with_news, message.starts_with_news)
            return seconds_of(lambda: run(message))

        return tuple((float(length), at(length)) for length in contexts)

    drafts = compute.drafts
    return MeasuredTimes(
        draft={} if drafts is None else {r: line(drafts, r, 1) for r in rows},
        verify={(r, q): line(compute.verify, r, q) for q in POSITIONS for r in rows},
        plain={r: line(compute.plain, r, 1) for r in rows},
    )


def contexts_of(max_len: int) -> list[int]:
    """Return the context lengths to time of requests of `max_len` tokens, verifies included."""
    longest = max(0, max_len - MAX_GAMMA - 1)
    return sorted({typical_context(context) for context in (min(max_len // 8, longest), longest)})


def typical_context(context: int) -> int:
    """Return the longest context up to `context` that half fills the ring of a packed cache."""
    half = HOLDBACK_TOKENS + BLOCK_TOKENS // 2
    return max(0, (context - half) // BLOCK_TOKENS) * BLOCK_TOKENS + min(context, half)


@torch.inference_mode()
def seconds_of(step: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median device time of a step that has run before."""
    for _ in range(2):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    pairs = zip(events[:-1], events[1:], strict=True)
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def step_message(rows: int, context: int, q_len: int, *, num_blocks: int) -> StepMessage:
    """Return the message of a step of so many rows, whose blocks follow each other in the pool."""
    each = -(-(context + q_len) // BLOCK_TOKENS)
    return message_of_rows(
        StepKind.VERIFY,
        range(rows),
        [context] * rows,
        [q_len] * rows,
        tokens=[1] * (q_len * rows),
        rows=[
            PagedRow(
                slot=row,
                new_blocks=tuple((row * each + m) % num_blocks for m in range(each)),
            )
            for row in range(rows)
        ],
    )
