"""Hidden states and tokens between GPUs of one host: written straight into the next stage's memory.

Every stage opens its neighbours' inboxes once (CUDA IPC). A message is two copies by the copy
engines on a stream of its own, which takes no SM: the bytes, then a number that the receiver's
stream waits for.

    stage i                                       stage i + 1
    compute, then on the sending stream:
      wait until slot k - 2 is read    <--------  number of messages read
      bytes -> slot k mod 2            -------->  slots
      k                                -------->  `arrived`; waits for k, computes, says so

Sampled tokens go from the last stage into a ring of the first one likewise. The host only enqueues
and runs ahead of all this.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.out_of_memory import first_line
from llmpq.runtime.links.cuda_driver import SHARED_BYTES, CudaDriver
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.sizes.gpu_workspace import OUTPUTS_LEAVING

SLOTS = 2
"""Messages of hidden states that may lie in an inbox: one being read, one arriving."""
_ALIGNED = 256
_ARRIVED, _TOKENS, _READ, _OUT_ARRIVED, _OUT_TOKENS, _OUT_READ = (64 * i for i in range(6))
"""Places of the numbers in an inbox; the last three are what is copied to others."""
_CONTROL_BYTES = 1024
HOST_BYTES = 16
"""Of what says which host a process is on."""
_MAX_TIMED = 100_000
_LAST = 2**31 - 1
"""No wait is for a later message."""


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """The largest messages of a plan."""

    hidden_bytes: int
    """Hidden states of one micro-batch."""
    max_rows: int
    tickets: int
    """Micro-batches whose tokens may be under way at once."""

    @property
    def slot_bytes(self) -> int:
        """Place of one micro-batch's hidden states."""
        return -(-self.hidden_bytes // _ALIGNED) * _ALIGNED

    @property
    def token_bytes(self) -> int:
        """Place of one micro-batch's tokens."""
        return -(-self.max_rows * 8 // _ALIGNED) * _ALIGNED

    def inbox_bytes(self, rank: int) -> int:
        """Size of a stage's inbox: tokens come to the first, hidden states to the others."""
        slots = SLOTS * self.slot_bytes if rank else self.tickets * self.token_bytes
        return _CONTROL_BYTES + slots


class PeerLinks:
    """The links of one stage to stages of the same host; its GPU is current in the thread."""

    name = "peer"

    def __init__(self, device: torch.device, sizes: BufferSizes, *, limit_s: float) -> None:
        """Open the neighbours' inboxes; every stage calls this at the same time."""
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._sizes = sizes
        self._limit_s = limit_s
        self._problem: str | None = None
        self._sending, self._fetching = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MAX_TIMED)
        self._num_sent = self._num_received = self._num_read = 0
        self._num_tokens = 0
        self._peers: dict[int, int] = {}
        self._open_neighbours()

    def send(self, tensor: Tensor) -> None:
        """Send hidden states to the next stage once the current stream has made them."""
        self._num_sent += 1
        number, slot = self._num_sent, self._num_sent % SLOTS
        peer = self._peers[self._rank + 1]
        with self._on_sending_stream() as stream:
            if number > SLOTS:
                self._driver.wait(self._mine(_READ), number - SLOTS, stream)
            target = peer + _CONTROL_BYTES + slot * self._sizes.slot_bytes
            self._deliver(tensor, target, peer + _ARRIVED, _OUT_ARRIVED, number)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the previous stage's next message, ready when the current stream gets to it.

        It is overwritten after `release`.
        """
        self._num_received += 1
        self._driver.wait(self._mine(_ARRIVED), self._num_received, self._current())
        start = _CONTROL_BYTES + self._num_received % SLOTS * self._sizes.slot_bytes
        return self._view(start, shape, dtype)

    def release(self) -> None:
        """Say that the current stream is done with what was received so far."""
        if self._num_read == self._num_received:
            return
        self._num_read = self._num_received
        stream = self._current()
        self._driver.write(self._mine(_OUT_READ), self._num_read, stream)
        target = self._peers[self._rank - 1] + _READ
        self._driver.copy(target, self._mine(_OUT_READ), 4, stream)

    def send_tokens(self, tokens_B1: Tensor) -> None:
        """Send sampled tokens to the first stage."""
        self._num_tokens += 1
        peer = self._peers[0]
        place = self._num_tokens % self._sizes.tickets * self._sizes.token_bytes
        with self._on_sending_stream():
            self._deliver(
                tokens_B1,
                peer + _CONTROL_BYTES + place,
                peer + _TOKENS,
                _OUT_TOKENS,
                self._num_tokens,
            )

    def expect_tokens(self, rows: int) -> int:
        """Announce a micro-batch whose tokens will come; return its ticket (first stage)."""
        del rows
        self._num_tokens += 1
        return self._num_tokens

    def tokens(self, ticket: int, rows: int) -> Tensor:
        """Return a micro-batch's tokens [B, 1], ready when the current stream gets to them."""
        self._driver.wait(self._mine(_TOKENS), ticket, self._current())
        start = _CONTROL_BYTES + ticket % self._sizes.tickets * self._sizes.token_bytes
        return self._view(start, (rows, 1), torch.long)

    def fetch_tokens(self, ticket: int, rows: int) -> HostCopy:
        """Return a micro-batch's tokens on their way to the host."""
        value = torch.empty(rows, 1, dtype=torch.long, pin_memory=True)
        with torch.cuda.stream(self._fetching):
            value.copy_(self.tokens(ticket, rows), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return HostCopy(value, copied)

    def sending_s(self) -> float:
        """Return how long copies have taken since the last call."""
        total_ms = 0.0
        while self._timed and self._timed[0][1].query():
            start, end = self._timed.popleft()
            total_ms += start.elapsed_time(end)
        return total_ms / 1e3

    def close(self) -> None:
        """Wait until everything sent has left and everything enqueued is done."""
        torch.cuda.synchronize(self.device)
        self._leaving.clear()

    def break_off(self) -> None:
        """Let streams go on that wait for stages that are gone; what they compute is dropped."""
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            for place in (_ARRIVED, _TOKENS, _READ):
                self._view(place, (1,), torch.int32).fill_(_LAST)
            torch.cuda.current_stream(self.device).synchronize()

    def trial(self) -> str | None:
        """Send a number round the ring, within the deadline; return what went wrong."""
        if self._problem is not None:
            return self._problem
        end_s, last = time.monotonic() + self._limit_s, self._world - 1
        if self._rank == 0:
            self.expect_tokens(1)
        mark = torch.full((1, 1), 1000 + self._rank, dtype=torch.long, device=self.device)
        if self._rank < last:
            self.send(mark)
        for own, sender, get in (
            (_ARRIVED, self._rank - 1, lambda: self.receive((1, 1), torch.long)),
            (_TOKENS, last, lambda: self.tokens(1, 1)),
        ):
            if (own == _ARRIVED) == (self._rank == 0):
                continue
            if not self._reached(own, 1, end_s):
                return f"nothing came from stage {sender} within {self._limit_s:.0f} s"
            got = int(get())
            if got != 1000 + sender:
                return f"stage {sender} sent {1000 + sender}, got {got}"
            self.release()
            if self._rank == last:
                self.send_tokens(mark)
        if self._rank < last and not self._reached(_READ, 1, end_s):
            return f"stage {self._rank + 1} did not confirm within {self._limit_s:.0f} s"
        return None

    def _open_neighbours(self) -> None:
        """Exchange the inboxes' handles over gloo; a failure waits until the trial reports it."""
        mine = bytes(HOST_BYTES + SHARED_BYTES)
        try:
            self._driver = CudaDriver()
            # May be more than what is left of the GPU, which the others must know, too.
            size = self._sizes.inbox_bytes(self._rank)
            self._inbox = torch.zeros(size, dtype=torch.uint8, device=self.device)
            torch.cuda.synchronize(self.device)
            mine = host_mark() + self._driver.share(self._inbox)
        except RuntimeError as error:
            self._problem = first_line(error)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = [torch.empty_like(sent) for _ in range(self._world)]
        dist.all_gather(gathered, sent)
        texts = [bytes(part.tolist()) for part in gathered]
        if len({text[:HOST_BYTES] for text in texts}) > 1:
            self._problem = self._problem or "the stages are on several hosts"
            return
        last = self._world - 1
        wanted = {self._rank - 1, self._rank + 1} | ({0} if self._rank == last else set())
        try:
            for peer in wanted & set(range(self._world)):
                self._peers[peer] = self._driver.open(texts[peer][HOST_BYTES:])
        except (AttributeError, RuntimeError) as error:
            self._problem = self._problem or str(error)

    def _deliver(self, tensor: Tensor, target: int, flag: int, out: int, number: int) -> None:
        """Copy bytes, then their number, on the sending stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._sending.cuda_stream
        start.record(self._sending)
        self._driver.copy(target, tensor.data_ptr(), tensor.nbytes, stream)
        self._driver.write(self._mine(out), number, stream)
        self._driver.copy(flag, self._mine(out), 4, stream)
        end.record(self._sending)
        self._timed.append((start, end))
        self._leaving.append((end, tensor))
        most = OUTPUTS_LEAVING * self._sizes.hidden_bytes
        # A stage ahead of a slower one waits here: what leaves takes memory.
        while sum(held.nbytes for _, held in self._leaving) > most:
            self._leaving[0][0].synchronize()
            self._leaving.popleft()
        while len(self._leaving) > 1 and self._leaving[0][0].query():
            self._leaving.popleft()

    def _on_sending_stream(self) -> _Sending:
        return _Sending(self._sending, torch.cuda.current_stream(self.device))

    def _reached(self, place: int, number: int, end_s: float) -> bool:
        """Look at a number of the own inbox until it is there, or until the deadline."""
        word = self._view(place, (1,), torch.int32)
        while int(word) < number:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.001)
        return True

    def _view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._inbox[start : start + num_bytes].view(dtype).view(shape)

    def _mine(self, place: int) -> int:
        return self._inbox.data_ptr() + place

    def _current(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream


class _Sending:
    """The sending stream, behind what the computing stream has been given so far."""

    def __init__(self, sending: torch.cuda.Stream, computing: torch.cuda.Stream) -> None:
        self._sending, self._computing = sending, computing

    def __enter__(self) -> int:
        self._sending.wait_stream(self._computing)
        return self._sending.cuda_stream

    def __exit__(self, *_: object) -> None:
        return None


def host_mark() -> bytes:
    """Return 16 bytes that processes of one boot of one host share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return hashlib.sha256(text.encode()).digest()[:HOST_BYTES]
