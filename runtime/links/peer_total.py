"""The sum over GPUs of one host in one launch, over memory that each opens of the others.

Every device has an inbox (kernels/peer_sum.py says what is in it) and opens the others' once (CUDA
IPC). A sum is a kernel and nothing else, so a graph can hold it. Few values go by a launch of small
programs, more by a launch of large ones, each with an inbox of its own; what is larger than that
goes piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.kernels.overlap import overlaps
from llmpq.kernels.peer_sum import (
    PIECE_WORDS,
    WORD_BYTES,
    fits,
    inbox_words,
    peer_sum,
    peer_sum_norm,
)
from llmpq.out_of_memory import first_line
from llmpq.runtime.links.cuda_driver import SHARED_BYTES, CudaDriver
from llmpq.runtime.links.peer_links import HOST_BYTES, host_mark


@dataclass(frozen=True)
class Channel:
    """A launch: its programs, and the most values that it takes, in words of 32 bits."""

    programs: int
    warps: int
    capacity: int


FEW, MANY = Channel(64, 1, 1 << 12), Channel(128, 8, 1 << 19)
"""A token's hidden states, and those of many or the logits of a few; the latter's capacity is of
all other devices together. Two H200, microseconds a sum in a graph, bfloat16, beside NCCL's:
4,096 values 2.2 (6.8), 32,768 2.8 (7.2), 262,144 5.9 (10.2), 1,048,576 18 (27)."""
NORMED_ROWS = 64
"""Rows that are summed and normed in one launch, a program each."""


class PeerSum:
    """The sum of one device and its peers; all of them make it at the same time."""

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        *,
        columns: int,
        member: int,
        members: int,
    ) -> None:
        """Open the others' inboxes; `group`: the devices', over gloo.

        `dtype`: of what is summed, beside integers of 64 bits; `columns`: of hidden states, whose
        rows have a channel of their own. `problem` says why there are none, of this device or
        another.
        """
        each = MANY.capacity // (members - 1) // FEW.capacity * FEW.capacity
        channels = FEW, replace(MANY, capacity=each)
        self._device, self._member, self._channels = device, member, channels
        self._dtypes = {dtype, torch.int64}
        self._overlaps = overlaps(device)
        self._columns, row_bytes = columns, columns * dtype.itemsize
        rows = Channel(
            NORMED_ROWS, 0, NORMED_ROWS * -(-row_bytes // (4 * PIECE_WORDS)) * PIECE_WORDS
        )
        words = [inbox_words(members, channel.capacity) for channel in (*channels, rows)]
        mine = bytes(HOST_BYTES + SHARED_BYTES)
        self.problem: str | None = None
        try:
            driver = CudaDriver()
            self._inbox = torch.zeros(sum(words), dtype=torch.long, device=device)
            torch.cuda.synchronize(device)  # before anybody writes
            mine = host_mark() + driver.share(self._inbox)
        except (AttributeError, RuntimeError) as error:
            self.problem = first_line(error)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = [torch.empty_like(sent) for _ in range(members)]
        dist.all_gather(gathered, sent, group=group)
        texts = [bytes(part.tolist()) for part in gathered]
        if len({text[:HOST_BYTES] for text in texts}) > 1:
            self.problem = self.problem or "the devices are on several hosts, or one has no memory"
        if self.problem is not None:
            return
        try:
            starts = [
                self._inbox.data_ptr() if peer == member else driver.open(text[HOST_BYTES:])
                for peer, text in enumerate(texts)
            ]
        except (AttributeError, RuntimeError) as error:
            self.problem = first_line(error)
            return
        self._inboxes, self._numbers, before = [], [], 0
        self._rows = rows
        for channel, count in zip((*channels, rows), words, strict=True):
            addresses = [start + before * WORD_BYTES for start in starts]
            self._inboxes.append(torch.tensor(addresses, dtype=torch.long, device=device))
            numbers = torch.zeros(channel.programs, dtype=torch.int32, device=device)
            self._numbers.append(numbers)
            before += count
        torch.cuda.synchronize(device)

    def takes(self, part: Tensor, residual: Tensor | None) -> bool:
        """Whether a tensor is summed in one launch."""
        alike = residual is None or (residual.is_contiguous() and residual.data_ptr() % 16 == 0)
        alike = alike and part.dtype in self._dtypes
        return alike and fits(part, self._channels[-1].capacity)

    def __call__(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of a tensor that this takes, plus the residual, in the part's place."""
        words = part.numel() * part.element_size() // 4
        place = next(i for i, channel in enumerate(self._channels) if words <= channel.capacity)
        channel = self._channels[place]
        return peer_sum(
            part,
            residual,
            self._inboxes[place],
            self._numbers[place],
            member=self._member,
            capacity=channel.capacity,
            warps=channel.warps,
            overlaps=self._overlaps,
        )

    def takes_rows(self, part: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """Whether rows of hidden states are summed and normed in one launch."""
        rows = part.numel() <= NORMED_ROWS * self._columns and part.shape[-1] == self._columns
        whole = self._columns * part.element_size() % (4 * PIECE_WORDS) == 0
        normed = weight.shape == part.shape[-1:] and weight.dtype == part.dtype
        aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
        return rows and whole and normed and aligned and self.takes(part, residual)

    def normed(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of rows that this takes plus the residual, and that by an RMSNorm."""
        return peer_sum_norm(
            *(part, residual, weight, eps, self._inboxes[-1], self._numbers[-1]),
            member=self._member,
            capacity=self._rows.capacity,
            overlaps=self._overlaps,
        )

    def in_pieces(self, part: Tensor) -> Tensor:
        """Return the sum of a tensor of any size, in its place."""
        values = part.view(-1)
        most = self._channels[-1].capacity * 4 // part.element_size()
        for piece in values.split(most):
            if self.takes(piece, None):
                self(piece)
                continue
            step = 4 * PIECE_WORDS // part.element_size()
            whole = piece.new_zeros(-(-piece.numel() // step) * step)
            whole[: piece.numel()] = piece
            piece.copy_(self(whole)[: piece.numel()])
        return part

    def trial(self) -> str | None:
        """Sum numbers over each channel, of every type, with and without a residual.

        Loads the kernels, too, which a capture could not; returns what went wrong.
        """
        members, wrong = self._inboxes[0].numel(), []
        for dtype in sorted(self._dtypes, key=str):
            adds = dtype.is_floating_point  # of integers one device has all
            own = self._member + 1 if adds else 7 * (self._member == 0)
            total = members * (members + 1) // 2 if adds else 7
            for channel in self._channels:
                for extra in (0, 1) if adds else (0,):
                    count = channel.capacity * 4 // dtype.itemsize
                    part = torch.full((count,), own, dtype=dtype, device=self._device)
                    residual = torch.ones_like(part) if extra else None
                    wrong.append((self(part, residual) != total + extra).any())
        dtype = next(dtype for dtype in self._dtypes if dtype.is_floating_point)
        row = torch.ones(1, self._columns, dtype=dtype, device=self._device)
        if self.takes_rows(row, row, row[0]):
            summed, normed = self.normed(row.clone(), row, row[0], 0.0)
            wrong.append(((summed != members + 1) | ((normed - 1).abs() > 0.01)).any())
        found = sum(map(int, wrong))
        return f"{found} of {len(wrong)} sums were wrong" if found else None
