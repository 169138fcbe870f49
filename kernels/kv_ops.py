"""Launching the low-bit KV kernels: plan() decides, the custom ops launch.

    plan_attend     how many packed tiles a program takes, from shapes the host knows (no device sync)
    kv_append       llmpq::kv_append, kv_append.py
    kv_attend       llmpq::kv_attend, kv_attend.py

Both ops read lengths from device tensors and launch grids that depend on the plan alone, so a CUDA
graph captured at one length is right for every shorter one.

B: requests.  Q: new tokens of each, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from llmpq.kernels.kv_append import append_step, pack_blocks, write_ring
from llmpq.kernels.kv_attend import RING_PARTS, attend_split, combine_parts
from llmpq.kernels.kv_formats import KVFormat
from llmpq.kernels.kv_storage import DeviceRows, KVLayer
from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS, packed_end

MAX_Q_LEN = HOLDBACK_TOKENS
"""New tokens of one step that the decode kernels take."""

WORD_K_WIDTH = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2
"""Consecutive columns of an operand a thread holds, as Triton picks them for unpacked words. Another
value is right but shuffles: 3.6 halves the source's width at each join, 3.9 does not (compiled)."""

PROGRAMS_PER_SM = 12
"""One-warp programs resident on an SM: 65536 registers / (168 * 32)."""


@dataclass(frozen=True, kw_only=True)
class AttendPlan:
    """The launch of one attention step; any shorter step of the same shapes may reuse it."""

    columns: int
    """Query heads x new tokens a program takes: 8 or 16."""
    chunk_blocks: int
    splits: int
    stages: int
    pdl: bool
    """Start the combine while the last parts run (programmatic dependent launch, sm_90 and later)."""


@lru_cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def plan_attend(
    *, batch: int, q_len: int, heads: int, kv_heads: int, max_end: int, device: torch.device
) -> AttendPlan:
    """Choose columns and splits for requests of at most `max_end` tokens."""
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"the decode kernel takes 1..{MAX_Q_LEN} new tokens, got {q_len}")
    wanted = heads // kv_heads * q_len
    columns = 8 if wanted <= 8 else 16
    on_gpu = device.type == "cuda"
    resident = _sm_count(device) * PROGRAMS_PER_SM if on_gpu else 4
    blocks = packed_end(max_end - 1) // BLOCK_TOKENS
    rows = batch * kv_heads * -(-wanted // columns)
    chunk = choose_chunk(blocks, rows, resident)
    return AttendPlan(
        columns=columns,
        chunk_blocks=chunk,
        splits=-(-blocks // chunk),
        stages=1,
        pdl=on_gpu and _capability(device) >= (9, 0),
    )


def choose_chunk(blocks: int, rows: int, resident: int) -> int:
    """Return the blocks a program takes: the longest chunk that still fills `resident` programs.

    Chunks stay within 16 blocks (2048 tokens), so that one long request among short ones is spread.
    """
    if blocks == 0:
        return 1
    splits = max(1, min(blocks, resident // rows - RING_PARTS.value))
    return max(1, min(16, -(-blocks // splits)))


def _strides(x: Tensor) -> tuple[int, int, int]:
    if x.stride(-1) != 1:
        raise ValueError(f"channels of new keys and values must be contiguous, got strides {x.stride()}")
    return x.stride(0), x.stride(1), x.stride(2)


@torch.library.custom_op(
    "llmpq::kv_append",
    mutates_args=("k_ring", "v_ring", "k_words", "k_params", "v_words", "v_params"),
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
    bits: int,
    key_group: int,
    paged: bool,
) -> None:
    """Append k, v [B, S, G, D] at `starts` and pack what they complete (key_group 0: KT)."""
    batch, length, kv_heads, dim = k.shape
    strides = _strides(k)
    if strides != _strides(v):
        k, v = k.contiguous(), v.contiguous()
        strides = _strides(k)
    where = (k_words, k_params, v_words, v_params, table, slots, starts, counts, table.shape[1])
    fmt = {"G": kv_heads, "D": dim}
    packing = {**fmt, "BITS": bits, "KEY_GROUP": key_group, "PAGED": paged}
    if length <= MAX_Q_LEN:
        append_step[(kv_heads, batch)](
            k, v, k_ring, v_ring, *where, *strides, S=length, **packing, num_warps=4
        )
        return
    blocks = -(-length // BLOCK_TOKENS) + 1
    pack_blocks[(blocks, kv_heads, batch)](
        k, v, k_ring, v_ring, *where, *strides, **packing, num_warps=4
    )
    write_ring[(RING_TOKENS // 32, kv_heads, batch)](
        k, v, k_ring, v_ring, slots, starts, counts, *strides, **fmt, TOKENS=32, num_warps=4
    )


@kv_append.register_fake
def _(*args: object) -> None:
    return None


@torch.library.custom_op("llmpq::kv_attend", mutates_args=())
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
    scale: float,
    bits: int,
    key_group: int,
    paged: bool,
    columns: int,
    chunk: int,
    splits: int,
    stages: int,
    pdl: bool,
) -> Tensor:
    """Attend q [B, Q, H, D] to the cache; the step's own tokens must be appended already."""
    batch, q_len, heads, dim = q.shape
    kv_heads = k_ring.shape[1]
    q = q.contiguous()
    out = torch.empty_like(q)
    wanted = heads // kv_heads * q_len
    head_chunks = kv_heads * -(-wanted // columns)
    parts = RING_PARTS.value + splits
    part_out = q.new_empty((batch, head_chunks, parts, columns, dim), dtype=torch.float32)
    part_lse = q.new_empty((batch, head_chunks, parts, columns), dtype=torch.float32)
    shape = {"H": heads, "G": kv_heads, "Q": q_len, "D": dim, "R": columns}
    attend_split[(parts, head_chunks, batch)](
        q, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts,
        slopes if slopes is not None else part_lse, part_out, part_lse,
        scale * 1.4426950408889634, chunk, table.shape[1], parts,
        **shape, BITS=bits, KEY_GROUP=key_group, PAGED=paged, ALIBI=slopes is not None,
        KW=WORD_K_WIDTH, KW0=2, STAGES=stages, PDL=pdl, EMULATE=q.device.type == "cpu", num_warps=1,
    )  # fmt: skip
    d_step = min(dim, 64)
    combine_parts[(kv_heads * wanted, dim // d_step, batch)](
        part_out, part_lse, out, starts, counts, chunk, parts,
        **shape, D_STEP=d_step, X_STEP=min(64, triton.next_power_of_2(parts)), PDL=pdl,
        num_warps=4 if parts > 16 else 1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@kv_attend.register_fake
def _(q: Tensor, *args: object) -> Tensor:
    return torch.empty_like(q)


def run_append(
    fmt: KVFormat, layer: KVLayer, table: Tensor, k: Tensor, v: Tensor, rows: DeviceRows, *, paged: bool
) -> None:
    """Launch `kv_append` on one layer."""
    torch.ops.llmpq.kv_append(
        k, v, layer.k_ring_SGRD, layer.v_ring_SGRD, layer.k_words_PGW, layer.k_params_PG,
        layer.v_words_PGW, layer.v_params_PG, table, rows.slots, rows.starts, rows.counts,
        fmt.bits, fmt.key_group or 0, paged,
    )  # fmt: skip


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
) -> Tensor:
    """Launch `kv_attend` on one layer."""
    result: Tensor = torch.ops.llmpq.kv_attend(
        q, layer.k_ring_SGRD, layer.v_ring_SGRD, layer.k_words_PGW, layer.k_params_PG,
        layer.v_words_PGW, layer.v_params_PG, table, rows.slots, rows.starts, rows.counts, slopes,
        scale, fmt.bits, fmt.key_group or 0, paged,
        plan.columns, plan.chunk_blocks, plan.splits, plan.stages, plan.pdl,
    )  # fmt: skip
    return result
