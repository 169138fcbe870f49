"""Which shapes are timed: a grid of micro-batch sizes, chunks and cache lengths per target.

Knows no torch and no clock. The grid is geometric, since the fit minimises relative error; sizes in
between (3, 48, ...) keep it from resting on powers of two only, where kernels are at their best.

Prompts are laid out by the tokens of a step, which is all that products see: as many short prompts
and as few long ones as there may be, and on a GPU at every size that steps are padded to. Some are
chunks behind other tokens, which tells attention to blocks from attention within a prompt. Fewest
tokens come first, and decode before prompts: after heavy load a GPU's clocks stay low for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from llmpq.costs.cost_model import Phase, Shares
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing.cases import Target, TimedCase
from llmpq.workload import CHUNK_TOKENS, Dtype

TIMED_LAYERS = 4
"""Layers that are timed together, if the model has as many."""
CACHED = 16
"""Tokens a cache may hold, per new token a case may have: attention reads, a layer computes."""
LEAST_LEN = 16
"""Tokens of the shortest prompts that several are timed of together."""
LEAST_END_CASES = 5
"""Prompts of embedding and head; more are timed only where powers of two are too few."""
CHUNKS = (128, CHUNK_TOKENS, 4 * CHUNK_TOKENS)
"""Tokens of a prompt's chunks that are timed behind other tokens."""
CHUNK_ROWS = (1, 4)
"""Prompts whose chunks are timed together."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far the shapes to time go; what is not given is as far as the defaults."""

    max_batch: int | None = None
    """Requests of a micro-batch."""
    max_len: int | None = None
    """Tokens of the longest prompt or cache."""
    max_tokens: int | None = None
    """New tokens of a step."""
    job: tuple[int, int] | None = None
    """Only these prompt tokens, and the caches while that many are generated."""
    cached_tokens: int | None = None
    """Tokens that the caches of a case may hold, if the device has no room for more."""


@dataclass(frozen=True, kw_only=True)
class ShapeGrid:
    """The shapes to time."""

    prefill: tuple[tuple[int, int, int], ...]
    """(micro-batch size, tokens of each prompt's chunk, tokens before it)."""
    decode: tuple[tuple[int, int], ...]
    """(micro-batch size, tokens in the cache)."""
    verify_q: tuple[int, ...] = ()
    """New tokens of a request in a verify step."""

    @property
    def most_tokens(self) -> int:
        """New tokens of the largest step."""
        return max(v * length for v, length, _ in self.prefill)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Values to combine, and the defaults of `Reach`."""

    prefill_tokens: tuple[int, ...]
    """New tokens of a step."""
    splits: int
    """Ways to have as many tokens: short prompts, long ones, some in between."""
    decode_v: tuple[int, ...]
    decode_length: tuple[int, ...]
    max_batch: int
    max_len: int
    max_tokens: int


_QUICK = _Sizes(
    prefill_tokens=(16, 32, 64, 96, 128, 256, 512),
    splits=2,
    decode_v=(1, 2, 4, 8, 16, 32, 64, 128),
    decode_length=(24, 128, 1024),
    max_batch=16,
    max_len=256,
    max_tokens=640,
)
_FULL = _Sizes(
    prefill_tokens=(
        4,
        8,
        16,
        32,
        64,
        96,
        128,
        256,
        384,
        512,
        1024,
        2048,
        4096,
        8192,
    ),
    splits=3,
    decode_v=(1, 2, 3, 4, 8, 16, 32, 64, 128, 256),
    decode_length=(64, 192, 512, 1024, 2048, 8192, 32768),
    max_batch=32,
    max_len=2048,
    max_tokens=4096,
)
_GPU_QUICK = _Sizes(
    prefill_tokens=(
        16,
        32,
        64,
        128,
        192,
        256,
        320,
        384,
        448,
        512,
        768,
        1024,
        1280,
        2048,
        4096,
        8192,
        16384,
        32768,
    ),
    splits=2,
    decode_v=(1, 2, 4, 8, 9, 16, 17, 32, 64, 128, 256),
    decode_length=(64, 1024, 8192),
    max_batch=32,
    max_len=1024,
    max_tokens=8192,
)
_GPU = _Sizes(
    # Every padded size up to 4,096; kernels of few rows change with powers of two.
    prefill_tokens=(
        16,
        32,
        *range(64, 512, 64),
        *range(512, 4097, 256),
        5120,
        6144,
        8192,
        12288,
        16384,
        32768,
    ),
    splits=3,
    decode_v=(1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256),
    decode_length=(64, 512, 1024, 2048, 4096, 16384, 65536),
    max_batch=128,
    max_len=4096,
    max_tokens=32768,
)


def make_grid(
    spec: ModelSpec,
    reach: Reach,
    *,
    quick: bool,
    on_gpu: bool = False,
    verify_q: Sequence[int] = (),
) -> ShapeGrid:
    """Return the grid of a model as far as it is to reach."""
    sizes = (_GPU_QUICK if quick else _GPU) if on_gpu else (_QUICK if quick else _FULL)
    max_batch = reach.max_batch or sizes.max_batch
    most = reach.max_tokens or sizes.max_tokens
    cached = min(CACHED * most, reach.cached_tokens or CACHED * most)
    if reach.job is not None:
        prompt, gen = reach.job
        lengths: tuple[int, ...] = (prompt + 1, prompt + gen)
        prefill = _job_prompts(prompt, _up_to(sizes.decode_v, max_batch), most)
    else:
        longest = min(reach.max_len or sizes.max_len, spec.max_positions)
        if longest < LEAST_LEN:
            raise ValueError(f"--max-len must be at least {LEAST_LEN} tokens, got {longest}")
        lengths = _up_to(sizes.decode_length, longest)
        prefill = {
            (v, tokens // v, 0)
            for tokens in _up_to(sizes.prefill_tokens, min(most, max_batch * longest))
            for v in _splits(tokens, max_batch, longest, sizes.splits)
        }
        prefill |= _chunks(longest, max_batch, most, cached)
    return ShapeGrid(
        prefill=tuple(
            sorted(
                (shape for shape in prefill if shape[0] * (shape[1] + shape[2]) <= cached),
                key=lambda shape: (shape[0] * shape[1], shape),
            )
        ),
        decode=tuple(
            (v, length)
            for v in _up_to(sizes.decode_v, max_batch)
            for length in lengths
            if v * length <= cached
        ),
        verify_q=tuple(verify_q),
    )


def cases(
    grid: ShapeGrid,
    *,
    device_kind: str,
    dtype: Dtype,
    precisions: Sequence[Precision],
    kv: Sequence[KVPrecision],
    shares: Sequence[Shares] = (),
) -> list[TimedCase]:
    """Return every case of one device kind, the cases of one target together.

    `shares`: of layers that devices share, of which the first one's part is timed, too.
    """
    found: list[TimedCase] = []
    phases = (Phase.DECODE, *((Phase.VERIFY,) if grid.verify_q else ()), Phase.PREFILL)
    for own, precision, kv_bits, phase in product(((), *shares), precisions, kv, phases):
        target = Target(
            device_kind=device_kind,
            part="layer",
            phase=phase,
            precision=precision,
            kv=kv_bits,
            dtype=dtype,
            shares=own,
        )
        found += _layer_cases(grid, target)
    for part in ("embedding", "head"):
        for phase in phases:
            target = Target(device_kind=device_kind, part=part, phase=phase, dtype=dtype)
            found += _end_cases(grid, target)
            if part == "head" and Precision.W8A16 in precisions:
                found += _end_cases(grid, target.model_copy(update={"precision": Precision.W8A16}))
    return found


def fitted_terms(target: Target) -> tuple[str, ...] | None:
    """Return the shape terms a target can depend on; None is all of its phase.

    Embedding and head see the new tokens only, never the cache.
    """
    if target.part == "layer":
        return None
    return {
        Phase.PREFILL: ("1", "v", "v*s"),
        Phase.DECODE: ("1", "v"),
        Phase.VERIFY: ("1", "v", "v*q"),
    }[target.phase]


def _layer_cases(grid: ShapeGrid, target: Target) -> Iterator[TimedCase]:
    if target.phase is Phase.PREFILL:
        for v, length, start in grid.prefill:
            yield TimedCase(target=target, v=v, length=length, start=start)
        return
    for q in grid.verify_q if target.phase is Phase.VERIFY else (1,):
        for v, length in grid.decode:
            yield TimedCase(target=target, v=v, length=max(length, q), q_len=q)


def _end_cases(grid: ShapeGrid, target: Target) -> Iterator[TimedCase]:
    """Return the cases of embedding or head: the past plays no part, so its length is one value."""
    found = list(_layer_cases(grid, target))
    if target.phase is Phase.PREFILL:
        found = [case for case in found if case.start == 0]
        sparse = [case for case in found if case.new_tokens.bit_count() == 1]
        yield from sparse if len(sparse) >= LEAST_END_CASES else found
        return
    lengths = sorted({case.length for case in found if case.v == 1})
    yield from (case for case in found if case.length == lengths[len(lengths) // 2])


def _splits(tokens: int, max_batch: int, longest: int, count: int) -> list[int]:
    """Return micro-batch sizes that have so many tokens: short prompts, long ones, some between."""
    fits = [
        v
        for v in range(min(max_batch, tokens), 0, -1)
        if tokens % v == 0
        and (tokens // v >= min(LEAST_LEN, longest) or v == 1)
        and tokens // v <= longest
    ]
    if len(fits) < 3 or count < 3:
        return fits[:1] + fits[1:][-1:]
    mean = math.sqrt(fits[0] * fits[-1])
    return [fits[0], min(fits, key=lambda v: abs(math.log(v / mean))), fits[-1]]


def _chunks(longest: int, max_batch: int, most: int, cached: int) -> set[tuple[int, int, int]]:
    """Return chunks behind other tokens, the last ones of the longest prompt among them."""
    return {
        (v, length, start)
        for length in CHUNKS
        for start in (longest // 4, longest - length)
        for v in CHUNK_ROWS
        if 0 < start <= longest - length
        and v <= max_batch
        and v * length <= most
        and v * longest <= cached
    }


def _job_prompts(prompt: int, batches: Sequence[int], most: int) -> set[tuple[int, int, int]]:
    """Return a job's prompts, whole, shorter, and in chunks as they are planned."""
    sizes = [v for v in batches if v < 4 or v.bit_count() == 1 or v == batches[-1]]
    chunks = [length for length in (*CHUNKS, 4 * CHUNKS[-1]) if length < prompt]
    shapes = {
        (v, length, 0)
        for length in (prompt, *chunks, max(1, prompt // 2), max(1, prompt // 4))
        for v in sizes
    }
    shapes |= {
        (v, length, start)
        for length in chunks
        for start in (prompt // 2, prompt - length)
        for v in CHUNK_ROWS
        if 0 < start <= prompt - length and v <= batches[-1]
    }
    return {shape for shape in shapes if shape[0] * shape[1] <= most}


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return the values below the limit, and the limit itself as the last."""
    return (*(v for v in values if v < limit), limit)
