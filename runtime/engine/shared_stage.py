"""A stage that several devices share in tensor parallel: one leads, the others follow its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from llmpq.runtime.engine.stage_loop import Compute
from llmpq.runtime.links.member_links import Followers
from llmpq.runtime.links.transport import Transport
from llmpq.runtime.requests.request import StepKind, StepMessage
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.runtime.steps.trace import Recorder


class LeaderCompute(Compute, Protocol):
    """The arithmetic of a shared stage's first device."""

    def wants_every_place(self, message: StepMessage) -> bool:
        """Whether hidden states of all places of a step are wanted behind the last layer."""
        ...


class LeadingCompute:
    """The arithmetic of the first device, which gives each step to the others before it."""

    fused_rounds = False

    def __init__(self, compute: LeaderCompute, followers: Followers) -> None:
        self._compute, self._followers = compute, followers

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1: the first device gives the others its tokens."""
        return self._compute.runs_ahead

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | HostCopy:
        """Return what the first device's part returns: the sums are of all."""
        # What it decides by what it alone knows: all devices are to compute the same places.
        message = replace(message, every_place=self._compute.wants_every_place(message))
        self._followers.give(message, hidden_BQH)
        return self._compute.run(message, hidden_BQH)

    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Not here: the host knows the tokens of every step."""
        raise RuntimeError(f"a shared stage got tokens of slots {list(slots)}")

    def end_speculation(self) -> None:
        """Go on without drafts; what the others hold for them stays unused."""
        self._compute.end_speculation()


def run_follower(compute: Compute, transport: Transport, recorder: Recorder) -> None:
    """Compute a device's part of every step that the first one gives, until STOP."""
    while True:
        message, hidden_BQH = transport.receive_step()
        if message.kind is StepKind.STOP:
            break
        assert hidden_BQH is not None
        given = hidden_BQH if hidden_BQH.shape[-1] else None
        with recorder.step(message.kind, message.seq, message.num_rows, message.q_len):
            compute.run(message, given)
    transport.close()
