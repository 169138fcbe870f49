"""Coefficients of one micro-batch size, and of a pair of sizes, for every class of devices.

Two times of everything: a whole micro-batch's, for the sums over stages, and the mean over all of
them, of which the last may be smaller, for the slowest stage.

Micro-batch sizes worth trying: one for every number of micro-batches. Sizes with the same
ceil(B / size) have the same number of micro-batches; the smallest of them is never slower and never
takes more memory, so it stands for all (66 pairs at B = 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmpq.costs.cost_model import Phase
from llmpq.planner.costs.links import Floats, Hops
from llmpq.planner.problem.work_clock import spend
from llmpq.workload import CHUNK_TOKENS

if TYPE_CHECKING:
    from llmpq.planner.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class SizeNumbers:
    """Times in seconds of one phase at one micro-batch size, as in `PairNumbers`."""

    layer_s: Floats
    """[L, C, B]"""
    ends_s: Floats
    """[C, 2]"""
    held_layer_s: Floats
    """[L, C, B] mean over all micro-batches (the last is smaller): the bottleneck's time."""
    held_ends_s: Floats
    """[C, 2]"""
    hop: Hops
    """A stage's output, to the next stage."""
    back: Hops
    """Sampled tokens, from the last stage to the first."""


@dataclass(frozen=True, kw_only=True)
class PairNumbers:
    """Times in seconds and sizes in bytes for one pair of micro-batch sizes."""

    eta: int
    xi: int
    prefill_s: Floats
    """[L, C, B] one layer, one step of a prefill micro-batch, mean over its chunks."""
    decode_s: Floats
    """[L, C, B] one layer, one decode micro-batch, mean over t = 1..n-1."""
    ends_prefill_s: Floats
    """[C, 2] embedding (as first stage) and head (as last stage)."""
    ends_decode_s: Floats
    held_prefill_s: Floats
    """[L, C, B] mean over all micro-batches (the last is smaller): P is made of these."""
    held_decode_s: Floats
    """[L, C, B] the same for D."""
    held_ends_prefill_s: Floats
    held_ends_decode_s: Floats
    hop_prefill: Hops
    """From a stage of one class to the next stage of another."""
    hop_decode: Hops
    back_prefill: Hops
    """Sampled tokens from the last stage's class to the first stage's."""
    back_decode: Hops
    layer_bytes: NDArray[np.int64]
    """[L, B] weights and the whole batch's KV."""
    problem: Problem

    @property
    def capacity(self) -> NDArray[np.int64]:
        """[C, 2, 2, 3] bytes left for layers: first stage or not, last or not, sort of weights."""
        return self.problem.capacity(self.eta, self.xi)

    @cached_property
    def uniform(self) -> bool:
        """Whether all layers take equal time and memory, so that only omega tells them apart."""
        tables = (
            self.prefill_s,
            self.held_prefill_s,
            self.decode_s,
            self.held_decode_s,
            self.layer_bytes,
        )
        return all(bool(np.all(t == t[:1])) for t in tables)


def pair_numbers(p: Problem, eta: int, xi: int) -> PairNumbers:
    """Return the numbers of a pair of micro-batch sizes."""
    prefill, decode = p.size_numbers(Phase.PREFILL, eta), p.size_numbers(Phase.DECODE, xi)
    return PairNumbers(
        eta=eta,
        xi=xi,
        prefill_s=prefill.layer_s,
        decode_s=decode.layer_s,
        ends_prefill_s=prefill.ends_s,
        ends_decode_s=decode.ends_s,
        held_prefill_s=prefill.held_layer_s,
        held_decode_s=decode.held_layer_s,
        held_ends_prefill_s=prefill.held_ends_s,
        held_ends_decode_s=decode.held_ends_s,
        hop_prefill=prefill.hop,
        hop_decode=decode.hop,
        back_prefill=prefill.back,
        back_decode=decode.back,
        layer_bytes=p.all_layer_bytes,
        problem=p,
    )


def size_numbers(p: Problem, phase: Phase, size: int) -> SizeNumbers:
    """Return the times of one phase at one size."""
    work, prefill = p.workload, phase is Phase.PREFILL
    layer_s, ends_s = one_size(p, phase, size)
    held_layer_s, held_ends_s, share = layer_s, ends_s, 0.0
    rest = work.batch % size
    if rest and p.objective == "makespan":
        passes = p.chunks_of_prompt if prefill else work.gen_len - 1
        share = last_share(-(-work.batch // size), passes)
        last_layer_s, last_ends_s = one_size(p, phase, rest)
        held_layer_s = layer_s + share * (last_layer_s - layer_s)
        held_ends_s = ends_s + share * (last_ends_s - ends_s)
    if p.factors is not None:
        of_layers, of_ends = p.factors.layer[phase, size], p.factors.ends[phase, size]
        layer_s, held_layer_s = layer_s * of_layers, held_layer_s * of_layers
        ends_s, held_ends_s = ends_s * of_ends, held_ends_s * of_ends
    tokens = work.prompt_len / p.chunks_of_prompt if prefill else 1
    row = tokens * p.spec.hop_features * work.dtype_bytes
    return SizeNumbers(
        layer_s=layer_s,
        ends_s=ends_s,
        held_layer_s=held_layer_s,
        held_ends_s=held_ends_s,
        hop=p.class_links.hops(size * row, rest * row, share),
        back=p.class_links.hops(size * 8, rest * 8, share),
    )


def one_size(p: Problem, phase: Phase, size: int) -> tuple[Floats, Floats]:
    """[L, C, B] and [C, 2]: what layers and ends take of micro-batches of one size."""
    if (phase, size) not in p.size_costs:
        p.size_costs[phase, size] = _costs_of_size(p, phase, size)
    return p.size_costs[phase, size]


def _costs_of_size(p: Problem, phase: Phase, size: int) -> tuple[Floats, Floats]:
    work, costs, prefill = p.workload, p.costs, phase is Phase.PREFILL
    firsts = [c.first for c in p.classes]
    spend(4 * len(firsts) * (len(p.choices) + 1))
    layers = np.array([end - start for start, end in p.groups], dtype=np.int64)
    if prefill:
        once = [
            [costs.layer_prefill_s(d, b, work, size, p.chunk) for b in p.choices] for d in firsts
        ]
        ends = [costs.ends_prefill_s(d, work, size, p.chunk) for d in firsts]
    else:
        once = [[costs.layer_decode_s(d, b, work, size) for b in p.choices] for d in firsts]
        ends = [costs.ends_decode_s(d, work, size) for d in firsts]
    return layers[:, None, None] * np.array(once), np.array(ends)


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
