"""What a step of the plain-torch cache reads and writes, by positions alone; shared by all layers.

B: requests.  Q: new tokens, right padded.  X: gathered runs of positions.  T: keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS, packed_end


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

    def rows(self, part: slice) -> Recent:
        """Return some of the runs."""
        return Recent(
            self.request_X1[part],
            self.slot_X1[part],
            self.new_XT[part],
            self.ring_XT[part],
            self.is_new_XT[part],
        )

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
    """One step as the plain-torch cache sees it; what no layer asks for is never made.

    Tables of all keys are made anew for each layer: those of a chunk's pieces together would grow
    with chunk and context.
    """

    rows: Rows
    starts: list[int]
    ends: list[int]
    q_len: int

    @cached_property
    def blocks(self) -> int:
        """Packed blocks of the longest request."""
        return max([packed_end(end - 1) for end in self.ends], default=0) // BLOCK_TOKENS

    @cached_property
    def width(self) -> int:
        """16-bit keys of the request that has most."""
        since = [packed_end(start) for start in self.starts]
        return max([end - first for end, first in zip(self.ends, since, strict=True)], default=0)

    @property
    def num_keys(self) -> int:
        """Keys in sight, packed and recent."""
        return self.blocks * BLOCK_TOKENS + self.width

    @cached_property
    def recent(self) -> Recent:
        """The 16-bit keys and values of every request."""
        request_B = torch.arange(len(self.ends), device=self.rows.start_B.device)
        return _recent(self.rows, request_B, self._recent_BT, self.q_len)

    @cached_property
    def completed(self) -> Completed | None:
        """Blocks that no query before this step saw packed."""
        return _completed(self.rows, self.starts, self.ends, self.q_len)

    @cached_property
    def write(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Request, new token, slot and ring place of every token the ring takes."""
        return _write(self.rows, self.q_len)

    @property
    def seen_BQT(self) -> Tensor:
        """Which keys (packed, then recent) a query sees."""
        query_BQ1, key_B1T = self._query_BQ1, self._key_B1T
        line = (query_BQ1 - HOLDBACK_TOKENS).div(BLOCK_TOKENS, rounding_mode="floor").clamp(min=0)
        line = line * BLOCK_TOKENS
        packed = self.blocks * BLOCK_TOKENS
        is_packed = torch.arange(key_B1T.shape[-1], device=key_B1T.device) < packed
        below = key_B1T < line
        return torch.where(is_packed, below, ~below & (key_B1T <= query_BQ1))

    @property
    def distance_BQT(self) -> Tensor:
        """Key position - query position."""
        return self._key_B1T - self._query_BQ1

    @property
    def _recent_BT(self) -> Tensor:
        """Position of every 16-bit key."""
        since = torch.tensor([packed_end(start) for start in self.starts])
        return (since[:, None] + torch.arange(self.width)).to(self.rows.start_B.device)

    @property
    def _key_B1T(self) -> Tensor:
        """Position of every key."""
        recent_BT = self._recent_BT
        old_T = torch.arange(self.blocks * BLOCK_TOKENS, device=recent_BT.device)
        return torch.cat([old_T.expand(len(self.ends), -1), recent_BT], 1)[:, None]

    @property
    def _query_BQ1(self) -> Tensor:
        """Position of every query, padding at its row's last."""
        start_B, num_new_B = self.rows.start_B, self.rows.num_new_B
        query_BQ = start_B[:, None] + torch.arange(self.q_len, device=start_B.device)
        return torch.minimum(query_BQ, (start_B + num_new_B - 1)[:, None])[..., None]


def completed_blocks(start: int, end: int) -> range:
    """Return the blocks that the queries start..end-1 are the first to see packed."""
    first = -(-(start - HOLDBACK_TOKENS) // BLOCK_TOKENS)
    return range(max(1, first) - 1, packed_end(end - 1) // BLOCK_TOKENS)


def look(rows: Rows, q_len: int) -> StepView:
    """Derive a step."""
    starts = rows.start_B.tolist()
    ends = [start + count for start, count in zip(starts, rows.num_new_B.tolist(), strict=True)]
    return StepView(rows, starts, ends, q_len)


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
