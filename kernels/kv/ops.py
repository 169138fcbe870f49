"""Launching the low-bit KV kernels as custom ops; launch_plan.py decides how.

    kv_append     llmpq::kv_append, low_bit/append.py
    kv_attend     llmpq::kv_attend, low_bit/attend.py

Both ops read lengths from device tensors and launch grids that depend on the plan alone, so a CUDA
graph captured at one length is right for every shorter one.

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.launch_plan import MAX_Q_LEN, AttendPlan, capability, combine_steps
from llmpq.kernels.kv.low_bit.append import append_step, pack_blocks, write_ring
from llmpq.kernels.kv.low_bit.attend import attend_split
from llmpq.kernels.kv.low_bit.combine import combine_parts
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.kv.storage import DeviceRows, KVLayer
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS

WORD_K_WIDTH = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2
"""Consecutive columns of an operand a thread holds, as Triton picks them for unpacked words. The
other value is right but shuffles: 3.6 halves the source's width at each join, 3.9 does not."""


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
        pdl = k.device.type == "cuda" and capability(k.device) >= (9, 0)
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
    first: int,
    splits: int,
    ring_parts: int,
    tiles: int,
    stages: int,
    ahead: int,
    programs: int,
    early: bool,
    merge: int,
    pdl: bool,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend q [B, Q, H, D] to the cache; the step's own tokens must be appended already."""
    (batch, q_len, heads, dim), kv_heads, q = q.shape, k_ring.shape[1], q.contiguous()
    out = torch.empty_like(q)
    wanted = heads // kv_heads * q_len
    head_chunks = kv_heads * -(-wanted // columns)
    parts = ring_parts + splits
    part_out = q.new_empty((batch, head_chunks, parts, columns, dim), dtype=torch.float32)
    part_lse = q.new_empty((batch, head_chunks, parts, columns), dtype=torch.float32)
    names = ("H", "G", "Q", "D", "R", "RING_PARTS")
    shape = dict(zip(names, (heads, kv_heads, q_len, dim, columns, ring_parts), strict=True))
    options = {"launch_pdl": True} if pdl else {}
    # Left alone, ptxas takes 184 registers and an SM then holds 11 programs; 168 spill nothing.
    most = {"maxnreg": 168} if columns == 8 and dim <= 128 and q.device.type == "cuda" else {}
    attend_split[(head_chunks, batch, parts)](
        q, k_words, k_params, v_words, v_params, k_ring, v_ring, table, slots, starts, counts,
        slopes if slopes is not None else part_lse, tickets if tickets is not None else slots,
        part_out, part_lse, scale * 1.4426950408889634, chunk, first, table.shape[1], parts, ahead,
        cap or 1.0, window, **shape, CAPPED=cap > 0, WINDOWED=window > 0, ALIBI=slopes is not None,
        BITS=bits, KEY_GROUP=key_group, PAGED=paged, TILES=tiles,
        DYNAMIC=programs > 0, KW=WORD_K_WIDTH, KW0=2, STAGES=stages, PDL=pdl,
        EMULATE=q.device.type == "cpu", num_warps=1, **(options | most),
    )  # fmt: skip
    shape |= {"TILES": tiles, "EARLY": early}
    _combine(part_out, part_lse, out, (starts, counts), (window, sinks), shape, merge, options)
    return out


def _combine(
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    rows: tuple[Tensor, Tensor],
    rule: tuple[int, Tensor | None],
    shape: dict[str, int],
    merge: int,
    options: dict[str, bool],
) -> None:
    """Launch the kernel that merges the parts."""
    (window, sinks), parts, dim = rule, part_out.shape[2], shape["D"]
    outputs = out.numel() // dim
    steps = combine_steps(parts=parts, outputs=outputs, dim=dim, merge=merge)
    combine_parts[(outputs // steps["N_STEP"], dim // steps["D_STEP"])](
        part_out, part_lse, out, *rows, part_lse if sinks is None else sinks, parts, window,
        **shape, **steps, WINDOWED=window > 0, SINKS=sinks is not None, PDL=bool(options),
        num_warps=4, **options,
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
    rule: ScoreRule = EVERYTHING,
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
        plan.columns, plan.launch.chunk, plan.launch.first, plan.splits, plan.launch.ring_parts,
        plan.launch.tiles, plan.launch.stages, plan.launch.ahead, plan.launch.programs,
        bool(plan.launch.early), plan.launch.merge, plan.pdl, rule.cap, rule.window, rule.sinks_H,
    )  # fmt: skip
    return result
