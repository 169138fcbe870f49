"""Launching the low-bit KV kernels: plan() decides, the custom ops launch.

    plan_attend   how many packed tiles a program takes, from shapes the host knows (no sync)
    kv_append     llmpq::kv_append, kv_append.py
    kv_attend     llmpq::kv_attend, kv_attend.py

Both ops read lengths from device tensors and launch grids that depend on the plan alone, so a CUDA
graph captured at one length is right for every shorter one.

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from llmpq.kernels.kv_append import append_step, pack_blocks, write_ring
from llmpq.kernels.kv_attend import attend_split, combine_parts
from llmpq.kernels.kv_formats import KVFormat
from llmpq.kernels.kv_storage import DeviceRows, KVLayer
from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS, packed_end

MAX_Q_LEN = HOLDBACK_TOKENS
"""New tokens of one step that the decode kernels take."""

WORD_K_WIDTH = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2
"""Consecutive columns of an operand a thread holds, as Triton picks them for unpacked words. The
other value is right but shuffles: 3.6 halves the source's width at each join, 3.9 does not."""

REGISTER_LIMIT = 12
"""One-warp programs an SM has registers for: 65536 / (156 * 32), rounded down to what fits."""

SHARED_PER_SM = 227 * 1024

EARLY = True

AHEAD = 4
"""Tiles a program asks the L2 for while the kernel in front ends, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is tuned of a launch."""

    chunk: int
    """Packed 64-token tiles a program takes."""
    ring_parts: int
    """Programs that share the 16-bit ring: 5 when programs are few, else 1."""
    tiles: int
    """Tiles of a step of the loop, 1 or 2 (then `chunk` is even)."""
    stages: int
    ahead: int = AHEAD
    """Tiles a program asks the L2 for before the kernel in front ends, at most 8."""
    programs: int = 0
    """Programs of a row that draw chunks of tiles until none is left; 0: one program a chunk."""


@dataclass(frozen=True, kw_only=True)
class AttendPlan:
    """The launch of one attention step; any shorter step of the same shapes may reuse it."""

    columns: int
    """Query heads x new tokens a program takes: 8 or 16."""
    splits: int
    pdl: bool
    """Launch both kernels while their predecessor ends (PDL, sm_90 and later)."""
    launch: Launch


@lru_cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
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
) -> AttendPlan:
    """Choose columns and splits for requests of at most `max_end` tokens."""
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"the decode kernel takes 1..{MAX_Q_LEN} new tokens, got {q_len}")
    wanted = heads // kv_heads * q_len
    columns = 8 if wanted <= 8 else 16
    on_gpu = device.type == "cuda"
    sms = _sm_count(device) if on_gpu else 2
    blocks = packed_end(max_end - 1) // BLOCK_TOKENS
    rows = batch * kv_heads * -(-wanted // columns)
    launch = tuned_launch(bits, columns, rows, blocks) if head_dim == 128 else None
    if launch is None:
        tiles, stages = LOOP_SHAPE[bits]
        resident = sms * programs_per_sm(bits, head_dim, columns, tiles, stages)
        ring_parts = 5 if rows * 5 < resident else 1
        chunk = choose_chunk(2 * blocks, rows, resident, ring_parts, tiles)
        launch = Launch(chunk=chunk, ring_parts=ring_parts, tiles=tiles, stages=stages)
    return AttendPlan(
        columns=columns,
        splits=num_programs(launch, blocks),
        pdl=on_gpu and _capability(device) >= (9, 0),
        launch=launch,
    )


def num_programs(launch: Launch, blocks: int) -> int:
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
    text = Path(__file__).with_name("kv_tuning.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


def tuned_launch(bits: int, columns: int, rows: int, blocks: int) -> Launch | None:
    """Return the measured launch of the nearest shape, None if none is near."""

    def distance(entry: dict[str, int]) -> float:
        return max(_ratio(entry["rows"], rows), _ratio(entry["blocks"], blocks))

    near = [e for e in tuning_table() if (e["bits"], e["columns"]) == (bits, columns)]
    entry = min(near, key=distance, default=None)
    if entry is None or distance(entry) > TUNED_RANGE:
        return None
    fields = ("chunk", "ring_parts", "tiles", "stages")
    return Launch(**{name: entry[name] for name in fields})


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else float(a != b) * 1e9 + 1.0


def programs_per_sm(bits: int, head_dim: int, columns: int, tiles: int, stages: int) -> int:
    """Return the one-warp programs that are resident on an SM."""
    buffer = tiles * (64 * head_dim * bits // 4 + 256) + 4 * head_dim
    by_shared = SHARED_PER_SM // (max(1, stages - 1) * buffer + 1024)
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


def _strides(x: Tensor) -> tuple[int, int, int]:
    if x.stride(-1) != 1:
        raise ValueError(
            f"channels of new keys and values must be contiguous, got strides {x.stride()}"
        )
    return x.stride(0), x.stride(1), x.stride(2)


@torch.library.custom_op(
    "llmpq::kv_append",
    mutates_args=("k_ring", "v_ring", "k_words", "k_params", "v_words", "v_params", "q_out"),
)
def kv_append(
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    k_words: Tensor,
    k_params: Tensor,
    v_words: Tensor,
    v_params: Tensor,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    inv_freq: Tensor | None,
    bits: int,
    key_group: int,
    paged: bool,
) -> None:
    """Append k, v [B, S, G, D] at `starts` and pack what they complete (key_group 0: KT).

    With `inv_freq` [D/2] steps of at most MAX_Q_LEN tokens rotate their keys first, and write the
    rotated queries of q [B, S, H, D] to q_out.
    """
    batch, length, kv_heads, dim = k.shape
    strides = _strides(k)
    if strides != _strides(v):
        k, v = k.contiguous(), v.contiguous()
        strides = _strides(k)
    where = (k_words, k_params, v_words, v_params, table, slots, starts, counts, table.shape[1])
    fmt = {"G": kv_heads, "D": dim}
    packing = {**fmt, "BITS": bits, "KEY_GROUP": key_group, "PAGED": paged}
    if length <= MAX_Q_LEN:
        heads = q.shape[2] if q is not None else 0
        if q is not None and (q.stride(-1) != 1 or q.stride(-2) != dim):
            q = q.contiguous()
        pdl = k.device.type == "cuda" and _capability(k.device) >= (9, 0)
        early = {"launch_pdl": True} if pdl else {}
        append_step[(kv_heads, batch)](
            q if q is not None else k, q_out if q_out is not None else k,
            inv_freq if inv_freq is not None else k, k, v, k_ring, v_ring, *where, *strides,
            *(q.stride()[:2] if q is not None else (0, 0)),
            S=length, H=heads, **packing, ROTARY=inv_freq is not None, PDL=pdl, num_warps=8,
            **early,
        )  # fmt: skip
        return
    if inv_freq is not None:
        raise ValueError(f"rotate steps of more than {MAX_Q_LEN} tokens first, got {length}")
    blocks = -(-length // BLOCK_TOKENS) + 1
    pack_blocks[(2 * blocks, kv_heads, batch)](
        k, v, k_ring, v_ring, *where, *strides, **packing, num_warps=4
    )
    write_ring[(RING_TOKENS // 32, kv_heads, batch)](
        k, v, k_ring, v_ring, slots, starts, counts, *strides, **fmt, TOKENS=32, num_warps=4
    )


@kv_append.register_fake
def _(*args: object) -> None:
    return None


@torch.library.custom_op("llmpq::kv_attend", mutates_args=("tickets",))
def kv_attend(
    q: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    k_words: Tensor,
    k_params: Tensor,
    v_words: Tensor,
    v_params: Tensor,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    slopes: Tensor | None,
    tickets: Tensor | None,
    scale: float,
    bits: int,
    key_group: int,
    paged: bool,
    columns: int,
    chunk: int,
    splits: int,
    ring_parts: int,
    tiles: int,
    stages: int,
    ahead: int,
    programs: int,
    pdl: bool,
) -> Tensor:
    """Attend q [B, Q, H, D] to the cache; the step's own tokens must be appended already."""
    batch, q_len, heads, dim = q.shape
    kv_heads = k_ring.shape[1]
    q = q.contiguous()
    out = torch.empty_like(q)
    wanted = heads // kv_heads * q_len
    head_chunks = kv_heads * -(-wanted // columns)
    parts = ring_parts + splits
    part_out = q.new_empty((batch, head_chunks, parts, columns, dim), dtype=torch.float32)
    part_lse = q.new_empty((batch, head_chunks, parts, columns), dtype=torch.float32)
    shape = dict(zip("HGQDR", (heads, kv_heads, q_len, dim, columns), strict=True))
    shape["RING_PARTS"] = ring_parts
    early = {"launch_pdl": True} if pdl else {}
    # Left alone, ptxas takes 184 registers and an SM then holds 11 programs; 168 spill nothing.
    cap = {"maxnreg": 168} if columns == 8 and dim <= 128 and q.device.type == "cuda" else {}
    attend_split[(head_chunks, batch, parts)](
        q, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts,
        slopes if slopes is not None else part_lse, tickets if tickets is not None else slots,
        part_out, part_lse,
        scale * 1.4426950408889634, chunk, table.shape[1], parts, ahead,
        **shape, BITS=bits, KEY_GROUP=key_group, PAGED=paged, ALIBI=slopes is not None,
        TILES=tiles, DYNAMIC=programs > 0, KW=WORD_K_WIDTH, KW0=2, STAGES=stages,
        PDL=pdl, EMULATE=q.device.type == "cpu",
        num_warps=1, **(early | cap),
    )  # fmt: skip
    _combine(part_out, part_lse, out, starts, counts, chunk, shape, early)
    return out


def _combine(
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    starts: Tensor,
    counts: Tensor,
    chunk: int,
    shape: dict[str, int],
    early: dict[str, bool],
) -> None:
    """Launch the kernel that merges the parts, of 64 or 128 bytes of outputs a program."""
    parts = part_out.shape[2]
    x_step = max(16, min(256, triton.next_power_of_2(parts)))
    d_step = 16 if x_step > 128 else 32
    combine_parts[(shape["H"] * shape["Q"], shape["D"] // d_step, out.shape[0])](
        part_out, part_lse, out, starts, counts, chunk, parts, **shape, D_STEP=d_step,
        X_STEP=x_step, PDL=bool(early), EARLY=EARLY, num_warps=4 if parts > 32 else 1, **early,
    )  # fmt: skip


@kv_attend.register_fake
def _(q: Tensor, *args: object) -> Tensor:
    return torch.empty_like(q)


def run_append(
    fmt: KVFormat,
    layer: KVLayer,
    table: Tensor,
    k: Tensor,
    v: Tensor,
    rows: DeviceRows,
    *,
    paged: bool,
    q: Tensor | None = None,
    inv_freq: Tensor | None = None,
) -> Tensor | None:
    """Launch `kv_append` on one layer; return the rotated queries, if there are any to rotate."""
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.llmpq.kv_append(
        k, v, layer.k_ring_SGRD, layer.v_ring_SGRD, layer.k_words_PGW, layer.k_params_PG,
        layer.v_words_PGW, layer.v_params_PG, table, rows.slots, rows.starts, rows.counts,
        q, q_out, inv_freq, fmt.bits, fmt.key_group or 0, paged,
    )  # fmt: skip
    return q_out


def num_tickets(q: Tensor, layer: KVLayer) -> int:
    """Return how many counters a step's programs draw from: one a request and column chunk."""
    batch, q_len, heads, _ = q.shape
    kv_heads = layer.k_ring_SGRD.shape[1]
    return batch * kv_heads * -(-heads // kv_heads * q_len // 8)


def run_attend(
    fmt: KVFormat,
    layer: KVLayer,
    table: Tensor,
    q: Tensor,
    rows: DeviceRows,
    plan: AttendPlan,
    *,
    scale: float,
    paged: bool,
    slopes: Tensor | None = None,
    tickets: Tensor | None = None,
) -> Tensor:
    """Launch `kv_attend` on one layer.

    `tickets`: int32 zeros, `num_tickets` of them, that no concurrent launch uses; left at zero.
    """
    needed = num_tickets(q, layer)
    if plan.launch.programs and (tickets is None or tickets.numel() < needed):
        tickets = torch.zeros(needed, dtype=torch.int32, device=q.device)
    result: Tensor = torch.ops.llmpq.kv_attend(
        q, layer.k_ring_SGRD, layer.v_ring_SGRD, layer.k_words_PGW, layer.k_params_PG,
        layer.v_words_PGW, layer.v_params_PG, table, rows.slots, rows.starts, rows.counts, slopes,
        tickets, scale, fmt.bits, fmt.key_group or 0, paged,
        plan.columns, plan.launch.chunk, plan.splits, plan.launch.ring_parts, plan.launch.tiles,
        plan.launch.stages, plan.launch.ahead, plan.launch.programs, plan.pdl,
    )  # fmt: skip
    return result
