"""Which micro-batch sizes are worth trying: one for every number of micro-batches.

Sizes with the same ceil(B / size) have the same number of micro-batches; the smallest of them is
never slower and never takes more memory, so it stands for all (66 pairs at B = 32).
"""

from __future__ import annotations

from llmpq.workload import CHUNK_TOKENS


def distinct_sizes(batch: int) -> tuple[int, ...]:
    """Return the smallest micro-batch size for each possible number of micro-batches, ascending."""
    return tuple(sorted({-(-batch // -(-batch // size)) for size in range(1, batch + 1)}))


def microbatch_pairs(
    prefill: tuple[int, ...], decode: tuple[int, ...], *, ordered: bool = False
) -> tuple[tuple[int, int], ...]:
    """Return every (prefill, decode) size; `ordered` leaves out prefill > decode, as the paper."""
    pairs = [(eta, xi) for xi in decode for eta in prefill if eta <= xi or not ordered]
    return tuple(pairs) or tuple((eta, xi) for xi in decode for eta in prefill)


LARGEST_STEP = 8192
"""Prompt tokens of a step from which on more make no device quicker."""


def chunk_sizes(batch: int, prompt_len: int, *, window: int = 0) -> tuple[int, ...]:
    """Return the chunks worth trying: larger ones only where few prompts make no large step.

    A step of several prompts' chunks costs what one of as many tokens of one prompt does, but for
    attention. A layer with a window keeps a chunk's tokens beside it: no chunk is longer than that.
    """
    sizes = [CHUNK_TOKENS]
    while sizes[-1] < prompt_len and batch * sizes[-1] < LARGEST_STEP:
        sizes.append(4 * sizes[-1])
    return tuple(size for size in sizes if size == CHUNK_TOKENS or not window or size <= window)


def small_chunks(prompt_len: int) -> tuple[int, ...]:
    """Return smaller chunks, for jobs that fit with no other: their steps need less workspace.

    From 256 tokens down no step makes a dense copy of packed weights.
    """
    return tuple(size for size in (256, 128) if size < prompt_len)


def last_share(count: int, steps: int) -> float:
    """Return for how much the last of `count` micro-batches counts in the slowest stage's time.

    Of `steps` passes over all of them the slowest stage is held for

        steps ((count - 1) whole + last) - whole = (steps count - 1) (whole + share (last - whole))

    beside a whole micro-batch's way through all stages (evaluate/objective.py).
    """
    return 0.0 if count < 2 or steps < 1 else 1.0 / (count - 1.0 / steps)


def sizes_of(batch: int, microbatch: int) -> tuple[int, ...]:
    """Return the sizes the batch is cut into; the last one may be ragged."""
    full, rest = divmod(batch, microbatch)
    return (microbatch,) * full + ((rest,) if rest else ())
