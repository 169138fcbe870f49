"""What a step of the plain-torch cache reads and writes, by positions alone; shared by all layers.

B: requests.  Q: new tokens, right padded.  X: gathered runs of positions.  T: keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS, packed_end


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which slot each request has, and which positions its new tokens take."""

    slots_B: Tensor
    start_B: Tensor
    """Tokens already in the cache; those beyond are overwritten."""
    num_new_B: Tensor


@dataclass(frozen=True)
class Recent:
    """16-bit tokens to gather: from the step where `is_new_XT`, from the ring elsewhere."""

    request_X1: Tensor
    slot_X1: Tensor
    new_XT: Tensor
    """Index among the step's tokens."""
    ring_XT: Tensor
    is_new_XT: Tensor

    def read(self, ring_SGRD: Tensor, new_BQGD: Tensor) -> Tensor:
        """Return [X, G, T, D]."""
        new = new_BQGD[self.request_X1, self.new_XT]
        old = ring_SGRD[self.slot_X1, :, self.ring_XT]
        return torch.where(self.is_new_XT[..., None, None], new, old).transpose(1, 2)


@dataclass(frozen=True)
class Completed:
    """Blocks that this step completes: their tokens, and slot and number of each."""

    tokens: Recent
    slot_X: Tensor
    block_X: Tensor


@dataclass(frozen=True)
class StepView:
    """One step as the plain-torch cache sees it."""

    slots_B: Tensor
    blocks: int
    """Packed blocks of the longest request."""
    recent: Recent
    completed: Completed | None
    write: tuple[Tensor, Tensor, Tensor, Tensor]
    """Request, new token, slot and ring place of every token the ring takes."""
    seen_BQT: Tensor
    """Which keys (packed, then recent) a query sees."""
    distance_BQT: Tensor
    """Key position - query position."""


def completed_blocks(start: int, end: int) -> range:
    """Return the blocks that the queries start..end-1 are the first to see packed."""
    first = -(-(start - HOLDBACK_TOKENS) // BLOCK_TOKENS)
    return range(max(1, first) - 1, packed_end(end - 1) // BLOCK_TOKENS)


def look(rows: Rows, q_len: int, *, exact_prompt: bool = False) -> StepView:
    """Derive a step; with `exact_prompt` requests that start at 0 see themselves in 16 bits."""
    device = rows.start_B.device
    starts = rows.start_B.tolist()
    ends = [start + count for start, count in zip(starts, rows.num_new_B.tolist(), strict=True)]
    since = [packed_end(start) for start in starts]
    width = max([end - first for end, first in zip(ends, since, strict=True)], default=0)
    blocks = max([packed_end(end - 1) for end in ends], default=0) // BLOCK_TOKENS
    request_B = torch.arange(len(ends), device=device)
    pos_BT = torch.tensor(since, device=device)[:, None] + torch.arange(width, device=device)
    old_T = torch.arange(blocks * BLOCK_TOKENS, device=device)
    key_B1T = torch.cat([old_T.expand(len(ends), -1), pos_BT], 1)[:, None]
    query_BQ1 = rows.start_B[:, None] + torch.arange(q_len, device=device)
    query_BQ1 = torch.minimum(query_BQ1, (rows.start_B + rows.num_new_B - 1)[:, None])[..., None]
    line = (query_BQ1 - HOLDBACK_TOKENS).div(BLOCK_TOKENS, rounding_mode="floor").clamp(min=0)
    line = line * BLOCK_TOKENS
    if exact_prompt:
        line = line.masked_fill((rows.start_B == 0)[:, None, None], 0)
    is_packed = torch.arange(key_B1T.shape[-1], device=device) < len(old_T)
    in_ring = (key_B1T >= line) & (key_B1T <= query_BQ1)
    return StepView(
        slots_B=rows.slots_B,
        blocks=blocks,
        recent=_recent(rows, request_B, pos_BT, q_len),
        completed=_completed(rows, starts, ends, q_len),
        write=_write(rows, q_len),
        seen_BQT=torch.where(is_packed, key_B1T < line, in_ring),
        distance_BQT=key_B1T - query_BQ1,
    )


def _recent(rows: Rows, request_X: Tensor, pos_XT: Tensor, q_len: int) -> Recent:
    start_X1 = rows.start_B[request_X][:, None]
    return Recent(
        request_X[:, None],
        rows.slots_B[request_X][:, None],
        (pos_XT - start_X1).clamp(0, q_len - 1),
        pos_XT % RING_TOKENS,
        pos_XT >= start_X1,
    )


def _completed(rows: Rows, starts: list[int], ends: list[int], q_len: int) -> Completed | None:
    spans = enumerate(zip(starts, ends, strict=True))
    todo = [(b, n) for b, (start, end) in spans for n in completed_blocks(start, end)]
    if not todo:
        return None
    device = rows.start_B.device
    request_X, block_X = torch.tensor(todo, device=device).unbind(-1)
    pos_XT = block_X[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
    tokens = _recent(rows, request_X, pos_XT, q_len)
    return Completed(tokens, rows.slots_B[request_X], block_X)


def _write(rows: Rows, q_len: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last `RING_TOKENS` of each request's new tokens."""
    index_BQ = torch.arange(q_len, device=rows.start_B.device).expand(len(rows.start_B), q_len)
    num_B1 = rows.num_new_B[:, None]
    kept = (index_BQ < num_B1) & (index_BQ >= num_B1 - RING_TOKENS)
    request, token = kept.nonzero(as_tuple=True)
    place = (rows.start_B[request] + token) % RING_TOKENS
    return request, token, rows.slots_B[request], place
