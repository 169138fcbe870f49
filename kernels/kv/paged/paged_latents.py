"""Attention of a step's rows of any lengths over latents (MLA) in blocks of a pool.

    pool [blocks, 1, PAGE, D]    token p of a request: p % PAGE of block table[slot, p // PAGE];
                                 its first V channels are its values as well; a token's entry may
                                 go on behind them (an indexer's key)
    scores [R, N] = q [R, D] C^T [D, N]      D = MAIN + REST, a power of two and the rest
    out    [R, V] += p [R, N] C[:, :V]

    decode   rows of one token: program = HEADS query heads of a row, one of `splits` shares of its
             keys; `combine` merges a row's parts and gives padding zeros
    chunk    rows of several: program = TILE new tokens times HEADS query heads over all they see

Where an indexer chose keys (chosen_latents.py) the row of one token reads those that a list names.

Lengths and tables are read on the device (paged_rows.py), so a captured step serves any mix of as
many rows and places. Cost: D elements of the pool a token, once for HEADS heads; 4 D operations per
query head, new token and key.

H query heads, D channels, V of them values, T places, R rows.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.kernel_table import TENSOR_CORES
from llmpq.kernels.kv.launch_plan import shared_memory
from llmpq.kernels.kv.paged.paged_rows import Ints, Rows, summed_rows
from llmpq.kernels.kv.paged.tiles import choose_splits
from llmpq.kernels.multiprocessors import multiprocessors, older_than
from llmpq.sizes.kv_format import BLOCK_TOKENS

BESIDE = 8192
"""Bytes of shared memory that a program takes beside its tiles, at most."""
LEAST_TILE = (16, 1)
"""Keys and stages where no more fit."""
OLD_ROWS = 8
"""Query rows of a program where Triton drives no tensor cores (before Ampere): both factors of a
product lie in shared memory in float32, 64 KiB on Turing. 512 channels take 50 KiB with 8 rows and
16 keys, 68 with 16."""


@triton.jit
def _attended(
    q, q_rest, pool, own_table, choice, listed, position, first, end, scale,
    D: tl.constexpr, ENTRY: tl.constexpr, V: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The softmax of some query rows over keys first..end-1; first is a multiple of N.

    CHOSEN: those are places in `choice`, where the keys' positions are, if they are `listed` there.
    """
    d = tl.arange(0, MAIN)
    e = MAIN + tl.arange(0, REST if REST > 0 else 16)
    m_i = tl.full([R], -1.0e30, tl.float32)
    l_i = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, MAIN], tl.float32)
    acc_rest = tl.zeros([R, REST if REST > 0 else 16], tl.float32)
    for t0 in tl.range(first, end, N, num_stages=STAGES):
        t = t0 + tl.arange(0, N)
        live = t < end
        if CHOSEN:
            t = tl.where(listed, tl.load(choice + t, mask=live & listed, other=0).to(tl.int32), t)
            block = tl.load(own_table + t // PAGE, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(own_table + t0 // PAGE).to(tl.int64)
        at = (block * PAGE + t % PAGE) * ENTRY
        c = tl.load(
            pool + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        x = tl.dot(q, tl.trans(c), input_precision="ieee")
        if REST > 0:
            c_rest = tl.load(
                pool + at[:, None] + e[None, :], mask=live[:, None] & (e < D)[None, :], other=0.0
            )
            x = tl.dot(q_rest, tl.trans(c_rest), x, input_precision="ieee")
        seen = (t[None, :] <= position[:, None]) & live[None, :]
        x = tl.where(seen, x * (scale * 1.4426950408889634), -1.0e30)
        m_new = tl.maximum(m_i, tl.max(x, 1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.where(seen, tl.exp2(x - m_new[:, None]), 0.0)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee")
        if V > MAIN:
            acc_rest = tl.dot(
                p.to(c.dtype), c_rest, acc_rest * alpha[:, None], input_precision="ieee"
            )
    whole = tl.maximum(l_i, 1e-30)
    lse = tl.where(l_i > 0, m_i + tl.log2(whole), -1.0e30)
    return acc / whole[:, None], acc_rest / whole[:, None], lse


@triton.jit
def _queries(q_ptr, row, used, D: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Queries [R, MAIN] and what is left of them."""
    d = tl.arange(0, MAIN)
    e = MAIN + tl.arange(0, REST if REST > 0 else 16)
    q = tl.load(
        q_ptr + row[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0
    )
    q_rest = tl.load(
        q_ptr + row[:, None] * D + e[None, :], mask=used[:, None] & (e < D)[None, :], other=0.0
    )
    return q, q_rest


@triton.jit
def _store(
    to, stride: tl.constexpr, row, used, out, out_rest, V: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Write rows of `stride` channels."""
    d = tl.arange(0, MAIN)
    at = to + row[:, None] * stride
    kind = to.dtype.element_ty
    tl.store(at + d[None, :], out.to(kind), mask=used[:, None] & (d < V)[None, :])
    if V > MAIN:
        e = MAIN + tl.arange(0, REST)
        tl.store(at + e[None, :], out_rest.to(kind), mask=used[:, None] & (e < V)[None, :])


@triton.jit(do_not_specialize=["num_rows", "columns", "splits", "num_chosen"])
def decode_latents(
    q_ptr, pool, rows, table, choice, part_ptr, lse_ptr, scale, num_rows, columns, splits,
    num_chosen,
    H: tl.constexpr, D: tl.constexpr, ENTRY: tl.constexpr, V: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    CHOSEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One share of the keys of a row of one token, for HEADS query heads.

    CHOSEN: of the keys in the row's part of `choice` [R, num_chosen], all where it sees no more.
    """
    split = tl.program_id(0)
    row = tl.program_id(2)
    slot = tl.load(rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    if (slot >= 0) & (count == 1):
        start = tl.load(rows + num_rows + row)
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        r = tl.arange(0, R)
        head = tl.program_id(1) * HEADS + r
        used = (r < HEADS) & (head < H)
        q, q_rest = _queries(q_ptr, place * H + head, used, D, MAIN, REST)
        end = start + 1
        listed = end > num_chosen
        if CHOSEN:
            end = tl.minimum(end, num_chosen)
            choice += row.to(tl.int64) * num_chosen
        share = ((end + N - 1) // N + splits - 1) // splits * N
        first = split * share
        out, out_rest, lse = _attended(
            q, q_rest, pool, table + slot.to(tl.int64) * columns, choice, listed,
            tl.zeros([R], tl.int32) + start, first, tl.minimum(end, first + share), scale,
            D, ENTRY, V, MAIN, REST, R, N, PAGE, CHOSEN, STAGES,
        )  # fmt: skip
        part = (row.to(tl.int64) * H + head) * splits + split
        tl.store(lse_ptr + part, lse, mask=used)
        _store(part_ptr, V, part, used, out, out_rest, V, MAIN, REST)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def combine_latents(
    part_ptr, lse_ptr, rows, out_ptr, num_rows, splits,
    H: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head of a row of one token; padding gets zeros."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(rows + row)
    count = tl.load(rows + 2 * num_rows + row)
    place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
    v = tl.arange(0, PADDED)
    if slot < 0:
        nothing = tl.zeros([PADDED], out_ptr.dtype.element_ty)
        for i in range(count):
            tl.store(out_ptr + ((place + i) * H + head) * V + v, nothing, mask=v < V)
    elif count == 1:
        x = tl.arange(0, X)
        at = (row.to(tl.int64) * H + head) * splits + x
        lse = tl.load(lse_ptr + at, mask=x < splits, other=-1.0e30)
        weight = tl.where(lse > -1.0e29, tl.exp2(lse - tl.max(lse, 0)), 0.0)
        live = (x < splits)[:, None] & (v < V)[None, :]
        part = tl.load(part_ptr + at[:, None] * V + v[None, :], mask=live, other=0.0)
        out = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
        tl.store(out_ptr + (place * H + head) * V + v, out.to(out_ptr.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["num_rows", "columns"])
def chunk_latents(
    q_ptr, pool, rows, table, out_ptr, scale, num_rows, columns,
    H: tl.constexpr, D: tl.constexpr, ENTRY: tl.constexpr, V: tl.constexpr, MAIN: tl.constexpr,
    REST: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILE new tokens of a row of several, times HEADS query heads."""
    TILE: tl.constexpr = R // HEADS
    tile = tl.program_id(0)
    sums = rows + 4 * num_rows
    if tile < tl.load(sums + num_rows - 1):
        r = tl.arange(0, ROWS)
        ends = tl.load(sums + r, mask=r < num_rows, other=2147483647)
        row = tl.sum((ends <= tile).to(tl.int32), 0)
        slot = tl.load(rows + row).to(tl.int64)
        start = tl.load(rows + num_rows + row)
        count = tl.load(rows + 2 * num_rows + row)
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        begin = (tile - tl.load(sums + row - 1, mask=row > 0, other=0)) * TILE
        m = tl.arange(0, R)
        new = begin + m // HEADS
        head = tl.program_id(1) * HEADS + m % HEADS
        used = (m < TILE * HEADS) & (new < count) & (head < H)
        at = (place + new) * H + head
        q, q_rest = _queries(q_ptr, at, used, D, MAIN, REST)
        out, out_rest, _ = _attended(
            q, q_rest, pool, table + slot * columns, table, False,
            start + tl.minimum(new, count - 1), 0, start + tl.minimum(count, begin + TILE), scale,
            D, ENTRY, V, MAIN, REST, R, N, PAGE, False, STAGES,
        )  # fmt: skip
        _store(out_ptr, V, at, used, out, out_rest, V, MAIN, REST)


def halves(dim: int) -> tuple[int, int]:
    """Return the power of two and the rest, a power of two as well or 0, that cover `dim`."""
    main = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - main
    return main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


@dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """How steps over a pool of latents are launched, whatever their rows."""

    heads: int
    dim: int
    """Channels that queries meet."""
    entry_dim: int
    """Channels of a token in the pool."""
    value_dim: int
    rows: int
    """Query rows of a program: some heads, of a chunk's program times new tokens."""
    tile_keys: int
    stages: int
    warps: int
    sms: int

    @classmethod
    @functools.cache
    def of(
        cls,
        heads: int,
        dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        index_dim: int = 0,
    ) -> LatentPlan:
        """Choose tiles that fit a program's shared memory; `index_dim`: of an indexer's keys."""
        (main, rest), block = halves(dim), shared_memory(device)[0]
        width, rows = (main + rest) * dtype.itemsize, 16
        old = older_than(device, TENSOR_CORES)
        fits = (
            (keys, stages)
            for keys, stages in ((64, 3), (32, 3), (32, 2), (16, 2))
            if width * (rows + (stages - 1) * keys) + 4 * rows * keys + BESIDE <= block
        )
        keys, stages = LEAST_TILE if old else next(fits, LEAST_TILE)
        rows = OLD_ROWS if old else rows
        return cls(
            heads=heads,
            dim=dim,
            entry_dim=dim + index_dim,
            value_dim=value_dim,
            rows=rows,
            tile_keys=keys,
            stages=stages,
            warps=8 if main >= 256 else 4,
            sms=multiprocessors(device),
        )

    @property
    def program_heads(self) -> int:
        """Query heads of a program."""
        return min(self.rows, triton.next_power_of_2(self.heads))

    @property
    def tile_queries(self) -> int:
        """New tokens that a chunk's program takes."""
        return self.rows // self.program_heads

    def splits(self, rows: int, longest: int) -> int:
        """Return the shares of a decoding row's keys; the same for all steps of so many rows."""
        programs = rows * triton.cdiv(self.heads, self.program_heads)
        return choose_splits(programs, longest, self.tile_keys, self.sms)

    def options(self) -> dict[str, int]:
        """Return the constants of either kernel."""
        main, rest = halves(self.dim)
        return {
            "H": self.heads,
            "D": self.dim,
            "ENTRY": self.entry_dim,
            "V": self.value_dim,
            "MAIN": main,
            "REST": rest,
            "R": self.rows,
            "HEADS": self.program_heads,
            "N": self.tile_keys,
            "PAGE": BLOCK_TOKENS,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }

    def table(
        self,
        slots: Rows,
        starts: Rows,
        counts: Rows,
        *,
        num_rows: int,
        num_places: int,
    ) -> Ints:
        """Return a step's rows as the kernels read them."""
        return summed_rows(
            *(slots, starts, counts, lambda positions_R: (0 * positions_R, 0 * positions_R)),
            num_rows=num_rows,
            num_places=num_places,
            tile_queries=self.tile_queries,
        )

    num_work_split = 0
    """Values that `work_split` returns."""

    def work_split(self, table: Ints) -> list[int]:
        """Return what each program takes of a rows' table: nothing, programs have rows."""
        return []


def attend_latent_pages(
    q_THD: Tensor,
    pool: Tensor,
    rows_FR: Tensor,
    table_SM: Tensor,
    plan: LatentPlan,
    *,
    scale: float,
    chunks: bool,
) -> Tensor:
    """Return o [T, H, V]; the step's own latents are in the pool already, padding gets zeros."""
    q_THD = q_THD.contiguous()
    require_entries(pool, plan)
    num_rows, columns = rows_FR.shape[1], table_SM.shape[1]
    out = q_THD.new_empty(len(q_THD), plan.heads, plan.value_dim)
    parts = LatentParts.of(plan, num_rows, columns * BLOCK_TOKENS, q_THD.device)
    attend_rows(q_THD, pool, rows_FR, table_SM, out, parts, plan, scale=scale, num_rows=num_rows)
    if chunks:
        groups = triton.cdiv(plan.heads, plan.program_heads)
        chunk_latents[(len(q_THD) // plan.tile_queries + num_rows, groups)](
            *(q_THD, pool, rows_FR, table_SM, out, float(scale), num_rows, columns),
            **plan.options(),
            ROWS=triton.next_power_of_2(num_rows),
        )
    return out


def require_entries(pool: Tensor, plan: LatentPlan) -> None:
    """Refuse a pool of another form than the plan's."""
    if tuple(pool.shape[1:]) != (1, BLOCK_TOKENS, plan.entry_dim) or not pool.is_contiguous():
        raise ValueError(
            f"latents must be [blocks, 1, {BLOCK_TOKENS}, {plan.entry_dim}] without gaps, got "
            f"{list(pool.shape)} with strides {pool.stride()}"
        )


@dataclass(frozen=True, eq=False)
class LatentParts:
    """Where programs leave their shares of rows' sums, before they are merged."""

    splits: int
    sums: Tensor
    lse: Tensor

    @classmethod
    def of(cls, plan: LatentPlan, rows: int, longest: int, device: torch.device) -> LatentParts:
        """Return those of so many rows over `longest` keys at most."""
        splits = plan.splits(rows, longest)
        shape = (rows * plan.heads * splits, plan.value_dim)
        sums = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(splits, sums, sums.new_empty(len(sums)))


def attend_rows(
    q_THD: Tensor,
    pool: Tensor,
    rows_FR: Tensor,
    table_SM: Tensor,
    out_THV: Tensor,
    parts: LatentParts,
    plan: LatentPlan,
    *,
    scale: float,
    num_rows: int,
    choice_RK: Tensor | None = None,
) -> None:
    """Write the sums of the first `num_rows` rows, of those that have one token, and padding.

    `choice_RK`: positions of the keys that a row reads, in any order; one that sees no more than K
    reads all, as all do without it.
    """
    stride, columns = rows_FR.stride(0), table_SM.shape[1]
    decode_latents[(parts.splits, triton.cdiv(plan.heads, plan.program_heads), num_rows)](
        *(q_THD, pool, rows_FR, table_SM, table_SM if choice_RK is None else choice_RK),
        *(parts.sums, parts.lse, float(scale), stride, columns, parts.splits),
        0 if choice_RK is None else choice_RK.shape[1],
        **plan.options(),
        CHOSEN=choice_RK is not None,
    )
    combine_latents[(num_rows, plan.heads)](
        *(parts.sums, parts.lse, rows_FR, out_THV, stride, parts.splits),
        H=plan.heads,
        V=plan.value_dim,
        PADDED=triton.next_power_of_2(plan.value_dim),
        X=triton.next_power_of_2(parts.splits),
        num_warps=4,
    )
