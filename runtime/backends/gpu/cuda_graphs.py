"""Steps of one stage as CUDA graphs: one launch instead of ten a layer.

A graph is captured per size of a step, over the static KV pool and static buffers; sizes in between
are rounded up. What changes from step to step (rows, positions, tokens) is copied to the device
from pinned memory before the replay. What a step is, and what is sent of it, subclasses say
(paged_graphs.py, paged_rounds.py).

Legend: B rows, h hidden, V vocabulary, S slots.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase, Numbers
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import StepMessage

_log = logging.getLogger("llmpq.graphs")

RING = 8
"""Steps whose inputs may be on their way to the device at once."""

_CAPTURING = threading.Lock()
"""Stages that share a process and a GPU capture in turn: torch begins a capture by waiting for the
whole device, which the driver refuses, and ends another thread's capture for, while one goes on."""

KEPT_ROWS = 32
"""Rows up to which a graph keeps logits of its own: those of all graphs of 228 rows of
Llama-3.1-8B would keep 0.3 GB, which no plan counts."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step left on the device; overwritten by the next step of as many rows."""

    hidden_BQh: Tensor | None = None
    logits_BV: Tensor | None = None
    tokens_B: Tensor | None = None
    """The most likely tokens (last stage)."""
    table_BK: Tensor | None = None
    """What a round of drafts yields (paged_rounds.py)."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden_BQh: Tensor | None
    output: StepOutput


class StepGraphs(ABC):
    """Runs steps of a stage, captured when their size is first seen."""

    def __init__(
        self,
        model: StageModel,
        kv: GpuPagedKVBase,
        *,
        num_slots: int,
        max_len: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: bool = True,
        last_token_S: Tensor | None = None,
    ) -> None:
        """`num_slots`: requests at once; `last_token_S`: another's table of last tokens, to share.

        What is sent of a step is int32, as attention reads it: no kernel of a step may write it, it
        is read early.
        """
        self._model, self._kv, self._dtype, self._device = model, kv, dtype, device
        self._max_rows = rounded_rows(max_rows, max_rows)
        positions = model.spec.max_positions if model.spec.positions == "learned" else max_len
        self.max_end = min(max_len, positions)
        if last_token_S is None:
            last_token_S = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.last_token_S = last_token_S
        # Flat, so that the rows of any step are one piece: only such copies are asynchronous.
        self._rows = torch.zeros(self._most_values, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        shape = (RING, self._most_values)
        self._staging = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._staged: NDArray[np.int32] = self._staging.numpy()
        """The same memory."""
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0
        self._captured: dict[int, _Captured] = {}
        # One for all graphs: cuBLAS keeps 32 MiB for every stream it has worked on.
        self._capturing: torch.cuda.Stream | None = None
        self._logits_BV: Tensor | None = None
        # Experts that are not stacked ask the device how many tokens each gets (SparseMLP).
        self._capture_failed = not capture or model.asks_host or device.type != "cuda"
        self._pool = None if self._capture_failed else torch.cuda.graph_pool_handle()
        self._reduce = model.reduce

    def share(self, other: StepGraphs) -> None:
        """Capture on another's stream into its memory: their steps never run at once."""
        if not self._capture_failed and not other._capture_failed:
            other._capturing = other._capturing or _capturing_stream(self._device)
            self._pool, self._capturing = other._pool, other._capturing

    @property
    def captured_rows(self) -> list[int]:
        """Numbers of rows that have a graph."""
        return sorted(self._captured)

    def run(self, message: StepMessage, hidden_BQh: Tensor | None) -> StepOutput:
        """Run one step; only as many rows as the message has mean anything."""
        self.stage(message)
        return self.run_staged(message, hidden_BQh)

    def stage(self, message: StepMessage) -> None:
        """Send the device a step's rows, behind all it was sent so far."""
        self._stage(message, self._size(message))

    def run_staged(self, message: StepMessage, hidden_BQh: Tensor | None) -> StepOutput:
        """Run the step that was staged last."""
        num_rows = self._size(message)
        if hidden_BQh is not None:
            hidden_BQh = self._widened(hidden_BQh.to(self._device), num_rows)
        if not self._captures(num_rows):
            return self._forward(num_rows, hidden_BQh)
        if num_rows not in self._captured and not self._capture(num_rows, hidden_BQh):
            return self._forward(num_rows, hidden_BQh)
        captured = self._captured[num_rows]
        if captured.hidden_BQh is not None and hidden_BQh is not None:
            captured.hidden_BQh.copy_(hidden_BQh)
        captured.graph.replay()
        return captured.output

    def run_through(self, message: StepMessage, hidden_BQh: Tensor | None) -> None:
        """Run a step through a layer of each kind, for the kernels that it calls alone."""
        self.stage(message)
        size, states = self._size(message), self._kv.states
        if hidden_BQh is not None:
            hidden_BQh = self._widened(hidden_BQh.to(self._device), size)
        before = [state.clone() for state in self._state()]
        try:
            with self._apart(), nullcontext() if states is None else states.still():
                self._forward_abridged(size, hidden_BQh)
        finally:
            self._put_back(before)

    def remember(self, slots_B: Tensor, tokens_B: Tensor) -> None:
        """Keep tokens that were sampled elsewhere (after a prompt, or not greedily)."""
        self.last_token_S[slots_B] = tokens_B

    @property
    @abstractmethod
    def _most_values(self) -> int:
        """Values sent of the largest step."""

    def _size(self, message: StepMessage) -> int:
        """Return the size that a step is padded to, which is the key of its graph: of rows."""
        return rounded_rows(message.num_rows, self._max_rows)

    def _captures(self, num_rows: int) -> bool:
        """Whether steps of so many rows run from graphs."""
        return not self._capture_failed and (self._reduce is None or self._reduce.captures)

    def _apart(self) -> AbstractContextManager[None]:
        """Leave sums over a stage's devices out: of what is not a step of all of them.

        So each sums as often as the others, whichever of them captures.
        """
        return nullcontext() if self._reduce is None else self._reduce.apart()

    def _widened(self, hidden_BQh: Tensor, num_rows: int) -> Tensor:
        """Return hidden states of a step padded to its size; only whole models take none."""
        raise NotImplementedError(f"{type(self).__name__} embeds its tokens itself")

    def _state(self) -> list[Tensor]:
        """Return what a step changes beside the cache: put back after a capture."""
        return [self.last_token_S]

    def _stage(self, message: StepMessage, num_rows: int) -> None:
        """Copy a step's values to the device without waiting for it."""
        place, self._next = self._next, (self._next + 1) % RING
        copied = self._copied[place]
        if copied is not None:
            copied.synchronize()
        end = 0
        for values in self._values(message, num_rows):
            if len(values):
                self._staged[place, end : end + len(values)] = values
                end += len(values)
        self._rows[:end].copy_(self._staging[place, :end], non_blocking=True)
        if self._device.type == "cuda":
            event = copied or torch.cuda.Event()
            event.record()
            self._copied[place] = event

    @abstractmethod
    def _values(self, message: StepMessage, size: int) -> list[Numbers]:
        """Return the values sent of a step, which stand one behind the other."""

    @abstractmethod
    def _forward(self, size: int, hidden_BQh: Tensor | None) -> StepOutput:
        """Run the stage on the static buffers; what a graph records."""

    def _forward_abridged(self, size: int, hidden_BQh: Tensor | None) -> None:
        """Run `_forward` through a layer of each kind: all kernels, in a fraction of the time."""
        whole, self._model = self._model, self._model.abridged()
        try:
            self._forward(size, hidden_BQh)
        finally:
            self._model = whole

    def _shared(self, logits_BV: Tensor) -> Tensor:
        """Return the logits of many rows where every graph leaves them."""
        if logits_BV.shape[0] <= KEPT_ROWS:
            return logits_BV
        if self._logits_BV is None:
            self._logits_BV = logits_BV.new_empty(self._max_rows, logits_BV.shape[1])
        return self._logits_BV[: logits_BV.shape[0]].copy_(logits_BV)

    def _capture(self, num_rows: int, hidden_BQh: Tensor | None) -> bool:
        """Record a graph of this many rows; False, for good, if the driver or a kernel refuses.

        A step before the recording makes library handles, loads kernels and compiles what was not
        compiled ahead; only before the first one it takes all layers, which may have to make what
        they keep. What it changes beside the cache must be put back, and recurrent states must not
        move on.
        """
        states = self._kv.states
        with nullcontext() if states is None else states.still():
            return self._record(num_rows, hidden_BQh)

    def _record(self, num_rows: int, hidden_BQh: Tensor | None) -> bool:
        static = None if hidden_BQh is None else hidden_BQh.clone()
        before = [state.clone() for state in self._state()]
        stream = self._capturing = self._capturing or _capturing_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                with self._apart():
                    warm_up = self._forward_abridged if self._captured else self._forward
                    warm_up(num_rows, static)
                self._put_back(before)
                stream.synchronize()
                # Other threads (a communicator's watchdog) may go on asking the driver.
                with (
                    _CAPTURING,
                    torch.cuda.graph(
                        graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                    ),
                ):
                    output = self._forward(num_rows, static)
        except RuntimeError as error:
            _log.warning("steps run without CUDA graphs: %s", str(error).partition("\n")[0])
            self._capture_failed = True
            return False
        finally:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            self._put_back(before)
        self._captured[num_rows] = _Captured(graph, static, output)
        return True

    def _put_back(self, values: Sequence[Tensor]) -> None:
        for state, value in zip(self._state(), values, strict=True):
            state.copy_(value)


def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the thread's stream, or another where that is the default one, which cannot capture.

    Kernels of a graph run on the SMs of the stream they were captured on: see
    runtime/launch/stages/emulate.py.
    """
    current = torch.cuda.current_stream(device)
    default = current == torch.cuda.default_stream(device)
    return torch.cuda.Stream(device) if default else current


def rounded_rows(num_rows: int, max_rows: int) -> int:
    """Return the rows a step is padded to, the plan's own number at most.

    1, 2, 4, multiples of 8 up to 32, of 16 up to 64 and of 32 beyond: a graph takes a tenth of a
    second to capture, and rows of padding take next to nothing within a tile of products.
    """
    for size in (1, 2, 4):
        if num_rows <= size:
            return min(size, max(num_rows, max_rows))
    width = 8 if num_rows <= 32 else 16 if num_rows <= 64 else 32
    return min(-(-num_rows // width) * width, max(num_rows, max_rows))
