"""Which shapes are timed: a grid of micro-batch sizes and lengths per target.

Knows no torch and no clock. The grid is geometric, since the fit minimises relative error; sizes in
between (3, 48, ...) keep it from resting on powers of two alone, where kernels are at their best.

On a GPU prompts are laid out by the tokens of a micro-batch, up to many more: its products see only
them, in tiles, so that one token more than a tile costs as much as the next tile. Both sides of
every edge are timed while a tile is a good part of the whole; some counts also with short and with
long prompts, which tells attention from the rest. Fewest tokens come first, and decode before
prompts: after heavy load a GPU's clocks stay low for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmpq.cost_model import Phase
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.timing.cases import Target, TimedCase
from llmpq.sizes.gpu_workspace import padded_prompt
from llmpq.workload import Dtype

CACHED = 16
"""Tokens a cache may hold, per new token a case may have: attention reads, a layer computes."""


@dataclass(frozen=True, kw_only=True)
class ShapeGrid:
    """Micro-batch sizes and lengths to time, and the most tokens of one case."""

    prefill_v: tuple[int, ...]
    prefill_length: tuple[int, ...]
    decode_v: tuple[int, ...]
    decode_length: tuple[int, ...]
    prefill_tokens: tuple[int, ...] = ()
    """New tokens of a prefill, in place of every micro-batch size with every length."""
    prefill_edges: tuple[int, ...] = ()
    """New tokens that fill tiles of a layer's products: timed, and the next larger prefill."""
    verify_q: tuple[int, ...] = ()
    launch: bool = False
    """Whether the host's time to enqueue a layer of a prompt is timed too."""
    max_tokens: int
    """Most new tokens of a prefill case; a cache may hold `CACHED` times as many."""


_QUICK = ShapeGrid(
    prefill_v=(1, 3, 8),
    prefill_length=(16, 64, 128),
    decode_v=(1, 2, 4, 8),
    decode_length=(24, 128),
    max_tokens=640,
)
_FULL = ShapeGrid(
    prefill_v=(1, 2, 3, 4, 8, 16),
    prefill_length=(32, 96, 128, 256, 512, 1024),
    decode_v=(1, 2, 3, 4, 8, 16, 32, 64),
    decode_length=(64, 192, 512, 1024, 2048),
    max_tokens=4096,
)
_GPU = ShapeGrid(
    prefill_v=(1, 2, 4, 8, 16, 32, 64),
    prefill_length=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    prefill_tokens=(
        *(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768),
    ),
    # Tiles have 16 to 256 rows; kernels of few rows change with powers of two.
    prefill_edges=(16, 32, 64, *range(128, 1024, 64), *range(1024, 4097, 256)),
    decode_v=(1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64),
    decode_length=(64, 512, 1024, 2048, 4096),
    launch=True,
    max_tokens=32768,
)


LEAST_PREFILLS = 3
"""Batches of one job's prompts that a fit of prefill times needs."""


def make_grid(
    spec: ModelSpec,
    *,
    quick: bool,
    on_gpu: bool = False,
    max_batch: int,
    max_len: int | None = None,
    max_tokens: int | None = None,
    verify_q: Sequence[int] = (),
    job: tuple[int, int] | None = None,
) -> ShapeGrid:
    """Return the grid up to `max_batch` requests of `max_len` tokens.

    By default the longest is what the model allows, at most 256 in a quick run and 2048 otherwise,
    4096 on a GPU. `job`: only these prompt tokens, and the caches while that many are generated.
    """
    longest = min(max_len or (256 if quick else 4096 if on_gpu else 2048), spec.max_positions)
    if longest < 16:
        raise ValueError(f"--max-len must be at least 16 tokens, got {longest}")
    shapes = _QUICK if quick else _GPU if on_gpu else _FULL
    most = max_tokens or shapes.max_tokens
    if job is not None:
        prompt, gen = job
        batches = _up_to(shapes.prefill_v, max_batch)
        if sum(v * prompt <= most for v in batches) < LEAST_PREFILLS:
            enough = prompt * max(4, *batches[:LEAST_PREFILLS])
            raise ValueError(
                f"--job: got prompts of {prompt} tokens, but a fit needs {LEAST_PREFILLS} batches "
                f"of them within --max-tokens {most} and --max-batch {max_batch}; try --max-tokens "
                f"{enough} --max-batch {max(4, max_batch)}"
            )
        return ShapeGrid(
            prefill_v=batches,
            prefill_length=(prompt,),
            decode_v=_up_to(shapes.decode_v, max_batch),
            decode_length=(prompt + 1, prompt + gen),
            verify_q=tuple(verify_q),
            launch=shapes.launch,
            max_tokens=most,
        )
    return ShapeGrid(
        prefill_v=_up_to(shapes.prefill_v, max_batch),
        prefill_length=_up_to(shapes.prefill_length, longest),
        decode_v=_up_to(shapes.decode_v, max_batch),
        decode_length=_up_to(shapes.decode_length, longest),
        prefill_tokens=tuple(n for n in shapes.prefill_tokens if n <= most),
        prefill_edges=tuple(n for n in shapes.prefill_edges if n <= most),
        verify_q=tuple(verify_q),
        launch=shapes.launch,
        max_tokens=most,
    )


def cases(
    grid: ShapeGrid,
    *,
    device_kind: str,
    dtype: Dtype,
    precisions: Sequence[Precision],
    kv: Sequence[KVPrecision],
) -> list[TimedCase]:
    """Return every case of one device kind, the cases of one target together."""
    found: list[TimedCase] = []
    phases = (Phase.DECODE, *((Phase.VERIFY,) if grid.verify_q else ()), Phase.PREFILL)
    for precision in precisions:
        for kv_bits in kv:
            for phase in phases:
                target = Target(
                    device_kind=device_kind,
                    part="layer",
                    phase=phase,
                    precision=precision,
                    kv=kv_bits,
                    dtype=dtype,
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
        shapes = [(v, s) for v in grid.prefill_v for s in grid.prefill_length]
        if grid.prefill_tokens:
            shapes = sorted(set(_by_tokens(grid, edges=target.part == "layer")), key=_tokens)
        if grid.launch and target.part == "layer":
            yield TimedCase(target=target, v=1, length=min(grid.prefill_length), launch=True)
        yield from (
            TimedCase(target=target, v=v, length=s) for v, s in shapes if v * s <= grid.max_tokens
        )
        return
    for q in grid.verify_q if target.phase is Phase.VERIFY else (1,):
        for v in grid.decode_v:
            for length in grid.decode_length:
                if v * length <= CACHED * grid.max_tokens:
                    yield TimedCase(target=target, v=v, length=max(length, q), q_len=q)


def _by_tokens(grid: ShapeGrid, *, edges: bool) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, length) of numbers of tokens: many short prompts, some, one long.

    As short and as long as micro-batch sizes and lengths of the grid allow. At `edges`, some: with
    just as many tokens, and with the fewest more that prompts can have.
    """
    for tokens in grid.prefill_tokens:
        shapes = _shapes(grid, tokens)
        if shapes:
            yield from dict.fromkeys((shapes[0], _middle(shapes), shapes[-1]))
    for edge in grid.prefill_edges if edges else ():
        if edge not in grid.prefill_tokens and (shapes := _shapes(grid, edge)):
            yield _middle(shapes)
        above = (_shapes(grid, tokens) for tokens in range(edge + 1, 2 * edge + 1))
        if shapes := next(filter(None, above), []):
            yield _middle(shapes)


def _shapes(grid: ShapeGrid, tokens: int) -> list[tuple[int, int]]:
    """Return every (micro-batch, length) of so many tokens, padding included, shortest first."""
    longest = max(grid.prefill_length)
    return [
        (v, tokens // v)
        for v in range(max(grid.prefill_v), 0, -1)
        if tokens % v == 0
        and min(16, longest) <= tokens // v <= longest
        and padded_prompt(tokens // v) == tokens // v
    ]


def _tokens(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _middle(shapes: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the shape nearest to the geometric mean of the lengths."""
    mean = math.sqrt(shapes[0][1] * shapes[-1][1])
    return min(shapes, key=lambda shape: abs(math.log(shape[1] / mean)))


def _end_cases(grid: ShapeGrid, target: Target) -> Iterator[TimedCase]:
    """Return the cases of embedding or head: the past plays no part, so its length is one value."""
    if target.phase is Phase.PREFILL:
        yield from _layer_cases(grid, target)
        return
    length = grid.decode_length[len(grid.decode_length) // 2]
    yield from (case for case in _layer_cases(grid, target) if case.length == length)


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Return the values below the limit, and the limit itself as the last."""
    return (*(v for v in values if v < limit), limit)
