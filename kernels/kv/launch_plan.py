"""How a step of low-bit attention is launched: tiles, programs and stages, from shapes alone.

Knows nothing of Triton or of lengths on the device: `plan_attend` reads what the host knows, so a
plan (and a CUDA graph captured with it) serves every shorter step of the same shapes. Measured
launches (tuning.json, from `bench kv --tune`) go first, near their shape; else a model chooses.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch

from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, packed_end

MAX_Q_LEN = HOLDBACK_TOKENS
"""New tokens of one step that the decode kernels take."""

REGISTER_LIMIT = 12
"""One-warp programs an SM has registers for: 65536 / (156 * 32), rounded down to what fits."""

SHARED_PER_SM = 228 * 1024
"""Shared memory of a Hopper multiprocessor, of which every program takes 1 KiB more: for plans that
are made where there is no GPU to ask."""

LEAST_SHARED = 101_376
"""Of a program at most, on the smallest listed GPU: where the driver does not say."""

AHEAD = 2
"""Tiles a program asks the L2 for while the kernel in front ends, if all programs start at once:
those of a later wave would ask for what they load in the next instant (H200: 5 to 10 % slower)."""


MERGE, LONG_MERGE = 4096, 16384
"""Few programs of the combine hold no multiprocessor back when steps are long (H200, 8 x 32768:
77.7 us and 75.2 us of the two), many are faster when they are short (1 x 8192: 7.6 and 8.6)."""

LONG_TILES = 16
"""Tiles of a program from which a step is long."""


@dataclass(frozen=True, kw_only=True)
class KvLaunch:
    """What is tuned of a launch."""

    chunk: int
    """Packed 64-token tiles a program takes, or draws at a time."""
    ring_parts: int
    """Programs that share the 16-bit ring: 5 when programs are few, else 1."""
    tiles: int
    """Tiles of a step of the loop, 1 or 2 (then `chunk` is even)."""
    stages: int
    ahead: int = 0
    """Tiles a program asks the L2 for before the kernel in front ends, at most 8."""
    programs: int = 0
    """Programs of a row that draw chunks of tiles until none is left; 0: one program a chunk."""
    first: int = 0
    """Tiles a program is dealt before it draws; one step of the loop at least."""
    early: int = 1
    """1 if the combine lets the kernel behind it start before it may read itself."""
    merge: int = MERGE
    """Partial results that a program of the combine loads at once: parts x channels x heads."""


@dataclass(frozen=True, kw_only=True)
class AttendPlan:
    """The launch of one attention step; any shorter step of the same shapes may reuse it."""

    columns: int
    """Query heads x new tokens a program takes: 8 or 16."""
    splits: int
    pdl: bool
    """Launch both kernels while their predecessor ends (PDL, sm_90 and later)."""
    launch: KvLaunch


@lru_cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of shared memory of a program at most, and of a multiprocessor."""
    if device.type != "cuda":
        return SHARED_PER_SM - 1024, SHARED_PER_SM
    p = torch.cuda.get_device_properties(device)
    block = int(getattr(p, "shared_memory_per_block_optin", LEAST_SHARED))
    return block, int(getattr(p, "shared_memory_per_multiprocessor", block + 1024))


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=4096)
def plan_attend(
    *,
    batch: int,
    q_len: int,
    heads: int,
    kv_heads: int,
    max_end: int,
    device: torch.device,
    bits: int,
    head_dim: int = 128,
    key_group: int | None = BLOCK_TOKENS,
) -> AttendPlan:
    """Choose columns and splits for requests of at most `max_end` tokens."""
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"the decode kernel takes 1..{MAX_Q_LEN} new tokens, got {q_len}")
    wanted = heads // kv_heads * q_len
    columns = 8 if wanted <= 8 else 16
    on_gpu = device.type == "cuda"
    sms, shared = multiprocessors(device), shared_memory(device)[1]
    blocks = packed_end(max_end - 1) // BLOCK_TOKENS
    rows = batch * kv_heads * -(-wanted // columns)
    launch = tuned_launch(bits, columns, rows, blocks) if head_dim == 128 else None
    if launch is None:
        tiles, stages = LOOP_SHAPE[bits]
        resident = sms * programs_per_sm(bits, head_dim, columns, tiles, stages, shared=shared)
        ring_parts = 5 if rows * 5 < resident else 1
        chunk = choose_chunk(2 * blocks, rows, resident, ring_parts, tiles)
        launch = KvLaunch(chunk=chunk, ring_parts=ring_parts, tiles=tiles, stages=stages)
        if rows * (num_programs(launch, blocks) + ring_parts) <= resident:
            launch = replace(launch, ahead=AHEAD)
        if chunk >= LONG_TILES:
            launch = replace(launch, merge=LONG_MERGE)
    shape = (bits, head_dim, columns, launch.tiles, launch.stages)
    together = sms * programs_per_sm(*shape, key_group=key_group, shared=shared)
    if launch.programs and rows * (num_programs(launch, blocks) + launch.ring_parts) > together:
        # what starts late must find little left (32 tokens a key group: 94 us dealt, 81 drawn)
        launch = replace(launch, first=launch.chunk)
    return AttendPlan(
        columns=columns,
        splits=num_programs(launch, blocks),
        pdl=on_gpu and capability(device) >= (9, 0),
        launch=launch,
    )


def num_programs(launch: KvLaunch, blocks: int) -> int:
    """Return the programs a row of `blocks` packed blocks gets."""
    chunks = -(-2 * blocks // launch.chunk)
    return min(chunks, launch.programs) if launch.programs else chunks


LOOP_SHAPE = {8: (1, 3), 4: (1, 3), 2: (2, 3)}
"""Tiles a step and stages, by bits, where nothing was measured."""

TUNED_RANGE = 1.25
"""A measured launch serves shapes whose rows and blocks differ by no more than this factor."""


@lru_cache
def tuning_table() -> tuple[dict[str, int], ...]:
    """Return the launches measured on an H200 (`bench kv --tune`), one object per shape."""
    text = Path(__file__).with_name("tuning.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def tuned_launch(bits: int, columns: int, rows: int, blocks: int) -> KvLaunch | None:
    """Return the measured launch of the nearest shape, None if none is near."""

    def distance(entry: dict[str, int]) -> float:
        return max(_ratio(entry["rows"], rows), _ratio(entry["blocks"], blocks))

    near = [e for e in tuning_table() if (e["bits"], e["columns"]) == (bits, columns)]
    entry = min(near, key=distance, default=None)
    if entry is None or distance(entry) > TUNED_RANGE:
        return None
    return KvLaunch(**{f.name: entry[f.name] for f in fields(KvLaunch)})


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else float(a != b) * 1e9 + 1.0


def programs_per_sm(
    bits: int,
    head_dim: int,
    columns: int,
    tiles: int,
    stages: int,
    *,
    key_group: int | None = BLOCK_TOKENS,
    shared: int = SHARED_PER_SM,
) -> int:
    """Return the one-warp programs that are resident on an SM with `shared` bytes of memory."""
    keys = 4 * head_dim * max(1, 64 * tiles // key_group) if key_group else 256 * tiles
    buffer = tiles * (64 * head_dim * bits // 4 + 256) + keys
    by_shared = shared // (max(1, stages - 1) * buffer + 1024)
    return max(1, min(REGISTER_LIMIT if columns == 8 else 8, by_shared))


START_UP = 3
"""Tiles whose time a program spends before its first: fitted to sweeps at 4 bits (H200)."""

MAX_CHUNK = 32
"""Tiles of a program at most, so that one long request among short ones is spread."""


def choose_chunk(tiles: int, rows: int, resident: int, ring_parts: int, even: int) -> int:
    """Return the tiles a program takes: the least (waves of programs) * (chunk + START_UP)."""
    best, best_cost = even, float("inf")
    for chunk in range(even, max(even, min(tiles, MAX_CHUNK)) + 1, even):
        waves = -(-rows * (-(-tiles // chunk) + ring_parts) // resident)
        cost = waves * (chunk + START_UP)
        if cost < best_cost:
            best, best_cost = chunk, cost
    return best


def combine_steps(*, parts: int, outputs: int, dim: int, merge: int) -> dict[str, int]:
    """Return what a program of the combine takes: parts, channels, and heads x tokens."""
    x_step = min(256, max(4, 1 << (parts - 1).bit_length()))
    d_step = min(dim, max(16, merge // x_step))
    n_step = math.gcd(outputs, max(1, merge // (x_step * d_step)))
    return {"X_STEP": x_step, "D_STEP": d_step, "N_STEP": n_step}
