"""How the devices of a stage in tensor parallel work on one step: its message, and their sums.

The first device receives and sends as a stage of one does, and gives every message to the others,
with the hidden states that came or, on the first stage, tokens. Sums are all-reduces of a process
group of the stage's own: gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from llmpq.plan import Worker
from llmpq.runtime.links.transport import Transport
from llmpq.runtime.step import STOP, StepMessage

SUM_LIMIT = timedelta(hours=1)
"""How long a device may wait in a sum for the others, which began the same step: whether they live
is the driver's to watch."""


class AllReduce:
    """The sum over a stage's devices; until they are connected, each has its own part alone.

    So a stage can warm up while others of its devices still load.
    """

    def __init__(self) -> None:
        self._total: Callable[[Tensor], Tensor] | None = None

    def connect(self, total: Callable[[Tensor], Tensor]) -> None:
        """Sum by a function from now on."""
        self._total = total

    def join(self, workers: Sequence[Worker], index: int, *, on_gpu: bool) -> None:
        """Connect the devices of every stage; each process of the plan calls it, in one order."""
        for stage in sorted({worker.stage for worker in workers if worker.shares}):
            ranks = [rank for rank, worker in enumerate(workers) if worker.stage == stage]
            backend = "nccl" if on_gpu else "gloo"
            group = dist.new_group(ranks, backend=backend, timeout=SUM_LIMIT)
            if index in ranks:
                self._total = partial(_all_reduced, group)

    def __call__(self, part: Tensor) -> Tensor:
        """Return the sum of all devices' tensors, in place of this one's."""
        return part if self._total is None else self._total(part)


def _all_reduced(group: dist.ProcessGroup, part: Tensor) -> Tensor:
    dist.all_reduce(part, group=group)
    return part


class Followers:
    """The other devices of a stage, as its first one gives them what it computes."""

    def __init__(self, links: Sequence[Transport]) -> None:
        """`links`: one to each."""
        self._links = links

    def give(self, message: StepMessage, hidden_BQH: Tensor | None) -> None:
        """Send a step, before this device computes it."""
        if hidden_BQH is None:
            hidden_BQH = torch.empty(*message.shape, 0)
        for link in self._links:
            link.send_step(message, hidden_BQH)

    def close(self) -> None:
        """End their loops."""
        for link in self._links:
            link.send_step(STOP, None)
        for link in self._links:
            link.close()
