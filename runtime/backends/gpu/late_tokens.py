"""Tokens of a step that are drawn later: when the host knows what guided answers may go on with.

    step N       forward (under way) | masks of its guided rows, found by other threads
    meanwhile    step N - 1 is completed, step N + 1 planned and sent to the device
    then         step N's tokens are drawn, step N + 1 is issued behind them

Else all of this would come after the masks, and the device wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmpq.runtime.steps.device_copies import HostCopy


class LateTokens:
    """A step's tokens [B, 1], drawn when the next step is issued or somebody waits for them."""

    def __init__(self, device: torch.device, num_rows: int, draw: Callable[[], Tensor]) -> None:
        """`draw` returns them, on the device."""
        self._on_gpu, self._draw = device.type == "cuda", draw
        self._copied: torch.cuda.Event | None = None
        self._drawn = False
        value = torch.empty((num_rows, 1), dtype=torch.long, pin_memory=self._on_gpu)
        self.result = HostCopy(value, self)

    @torch.inference_mode()
    def draw(self) -> None:
        """Have the device draw them, if it has not been asked before."""
        if self._drawn:
            return
        self._drawn = True
        self.result.value.copy_(self._draw(), non_blocking=True)
        if self._on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def synchronize(self) -> None:
        """Wait until they are in the host's memory."""
        self.draw()
        if self._copied is not None:
            self._copied.synchronize()
