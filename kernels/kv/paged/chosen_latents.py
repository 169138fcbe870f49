"""Attention of a step's tokens over the latents that an indexer chooses (DeepSeek-V3.2), by pages.

    pool [blocks, 1, PAGE, ENTRY]    a token's latent, D channels; behind it the indexer's key, C
    score_keys    scores [T, W] = sum over heads of w relu(q k): program = a token's heads, N keys;
                  keys that a token does not see, and padding, get -inf
    torch.topk    the positions of each token's best K, where it sees more, in any order
    attend_rows   every token is a row of its own, which reads those (paged_latents.py)

Lengths, tables and the choice stay on the device: a captured step serves any mix. Tokens go in
pieces, so that scores and sums take bounded memory (`chosen_at_once`). Cost of a token: C elements
of the pool for each key it sees, then D of each chosen one; 4 bytes a key of the longest request
for scores, written once and read by topk.

T places of a step, X heads of the indexer, C channels of its keys, W keys of the longest request.
"""

# Triton kernels take no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmpq.kernels.kv.paged.paged_latents import (
    LatentParts,
    LatentPlan,
    attend_rows,
    require_entries,
)
from llmpq.kernels.kv.paged.paged_rows import TokenPlaces
from llmpq.kernels.kv.reference import IndexQueries
from llmpq.sizes.gpu_workspace import chosen_at_once
from llmpq.sizes.kv_format import BLOCK_TOKENS


@triton.jit(do_not_specialize=["num_rows", "columns", "width"])
def score_keys(
    q_ptr, weight_ptr, pool, rows, table, score_ptr, num_rows, columns, width,
    X: tl.constexpr, C: tl.constexpr, D: tl.constexpr, ENTRY: tl.constexpr, HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """N keys of a row's request: what the indexer gives them."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(rows + row)
    position = tl.load(rows + num_rows + row)
    t = tile * N + tl.arange(0, N)
    total = tl.full([N], float("-inf"), tl.float32)
    if (slot >= 0) & (tile * N <= position):
        place = tl.load(rows + 3 * num_rows + row).to(tl.int64)
        head = tl.arange(0, HEADS)
        c = tl.arange(0, CHANNELS)
        at = place * X + head
        q = tl.load(
            q_ptr + at[:, None] * C + c[None, :], mask=(head < X)[:, None] & (c < C)[None, :],
            other=0.0,
        )  # fmt: skip
        weight = tl.load(weight_ptr + at, mask=head < X, other=0.0).to(tl.float32)
        block = tl.load(table + slot.to(tl.int64) * columns + tile * N // PAGE).to(tl.int64)
        seen = t <= position
        k = tl.load(
            pool + (block * PAGE + t % PAGE)[:, None] * ENTRY + D + c[None, :],
            mask=seen[:, None] & (c < C)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        total = tl.where(seen, tl.sum(x * weight[:, None], 0), float("-inf"))
    tl.store(score_ptr + row.to(tl.int64) * width + t, total)


def token_rows(where: TokenPlaces) -> Tensor:
    """Return every place of a step as a row of one token, [4, T] int32 (paged_rows.py)."""
    slots_T = where.slots_T.masked_fill(where.places_T < 0, -1)
    places_T = torch.arange(len(slots_T), device=slots_T.device)
    return torch.stack((slots_T, where.positions_T, torch.ones_like(slots_T), places_T)).int()


def attend_chosen_latents(
    q_THD: Tensor,
    index: IndexQueries,
    pool: Tensor,
    rows_4T: Tensor,
    table_SM: Tensor,
    plan: LatentPlan,
    *,
    scale: float,
    longest: int,
) -> Tensor:
    """Return o [T, H, V]; the step's own entries are in the pool already, padding gets zeros.

    `rows_4T`: `token_rows` of the step. `longest`: tokens of a request at most.
    """
    require_entries(pool, plan)
    q_THD, places = q_THD.contiguous(), len(q_THD)
    width = triton.cdiv(longest, BLOCK_TOKENS) * BLOCK_TOKENS
    num_chosen = min(index.topk, width)
    at_once = min(places, chosen_at_once(width, plan.heads * plan.value_dim))
    out = q_THD.new_empty(places, plan.heads, plan.value_dim)
    scores_RW = q_THD.new_empty(at_once, width, dtype=torch.float32)
    parts = LatentParts.of(plan, at_once, num_chosen, q_THD.device)
    heads, channels = index.q_TXC.shape[1:]
    given = (index.q_TXC.contiguous(), index.weights_TX.contiguous(), pool)
    for first in range(0, places, at_once):
        rows, own_4T = min(at_once, places - first), rows_4T[:, first:]
        score_keys[(width // plan.tile_keys, rows)](
            *(*given, own_4T, table_SM, scores_RW, places, table_SM.shape[1], width),
            X=heads,
            C=channels,
            D=plan.dim,
            ENTRY=plan.entry_dim,
            HEADS=max(16, triton.next_power_of_2(heads)),
            CHANNELS=max(16, triton.next_power_of_2(channels)),
            N=plan.tile_keys,
            PAGE=BLOCK_TOKENS,
            num_warps=4,
        )
        choice_RK = scores_RW[:rows].topk(num_chosen, dim=-1, sorted=False).indices
        step = (q_THD, pool, own_4T, table_SM, out, parts, plan)
        attend_rows(*step, scale=scale, num_rows=rows, choice_RK=choice_RK)
    return out
