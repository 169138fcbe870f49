"""What recurrent layers keep of requests: a slot of fixed size for each running one, per layer.

A slot holds the convolution's last inputs, in the model's dtype, and one matrix per head in
float32. It belongs to the request that runs in that row: a request that starts at position 0 starts
from zeros, so nothing has to be cleared when a row is freed or a request is preempted.

Drafts may be refused, and a state cannot be taken back. So it does not move on by them: what they
would have brought is noted, a few inputs a token instead of a state a token (Qwen3-Next: 16 KiB, a
state has 2 MiB), and the request's next step, whose start says how many were accepted, takes those
in front of its own tokens. Tokens of the draft model are noted likewise, and the verify that
follows starts before all of them.

Legend: L recurrent layers of a stage, S slots, K taps, C channels, E inputs of a token, H heads,
N key_dim, P value_dim, M noted tokens, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.cpu.recurrent_step import SingleRows
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import Span

Cache = TypeVar("Cache", bound=KVCache)


@dataclass(frozen=True)
class LayerState:
    """The slots of one layer."""

    tail_SKC: Tensor
    """[S, K - 1, C]: the last inputs of the convolution, oldest first."""
    matrix_SHNP: Tensor
    """[S, H, N, P] float32; no heads where the convolution is all there is."""
    noted_SME: Tensor | None = None
    """[S, M, E]: inputs of tokens by which the state has not moved on; None without drafts."""
    mixed_SME: Tensor | None = None
    """[S, M, E]: room for what is made of noted tokens on the way, the same for all layers."""


@dataclass(frozen=True)
class StateRun:
    """One row of a step as its state sees it: noted tokens of the request, then its own."""

    slot: int
    first: int
    """Where its tokens are among those of the step with the noted ones."""
    count: int
    settled: int
    """How many of them, from the first on, the state moves on by."""
    fresh: bool
    """It begins from zeros."""


@dataclass(frozen=True)
class StateRuns:
    """The rows of one step, and where their noted tokens come from and go to."""

    runs: tuple[StateRun, ...]
    order: list[int] | None = None
    """Of every token which of (the step's, the noted ones) it is; None where none was noted."""
    own: list[int] | None = None
    """Where the step's tokens are in that order."""
    taken: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Slots and places of the noted tokens."""
    notes: tuple[tuple[int, int, int, int], ...] = ()
    """(slot, place, first token of the step, count) of tokens to be noted."""

    @cached_property
    def single(self) -> SingleRows | None:
        """Rows of one token each by which their states move on; None of any other step."""
        if self.order is not None or self.notes:
            return None
        if not all(run.count == run.settled == 1 for run in self.runs):
            return None
        found = [(run.first, run.slot, int(run.fresh)) for run in self.runs]
        return SingleRows(*torch.tensor(found, dtype=torch.int64).view(-1, 3).t().contiguous())

    def with_noted(self, inputs_TE: Tensor, state: LayerState) -> Tensor:
        """Return a layer's inputs of noted and new tokens, and note what may be taken back."""
        whole = inputs_TE
        if self.order is not None:
            assert state.noted_SME is not None
            whole = torch.cat((inputs_TE, state.noted_SME[self.taken]))[self.order]
        for slot, place, first, count in self.notes:
            assert state.noted_SME is not None, "drafts need `RecurrentStates.keep_notes`"
            state.noted_SME[slot, place : place + count] = inputs_TE[first : first + count]
        return whole

    def of_own(self, out_TC: Tensor) -> Tensor:
        """Return what came of the step's own tokens."""
        return out_TC if self.own is None else out_TC[self.own]


@dataclass
class _Noted:
    """Tokens of a slot by which its state has not moved on."""

    start: int
    """Position of the first."""
    count: int
    drafting: bool
    """They are the draft model's: none of them ever counts."""


class RecurrentStates:
    """The slots of a stage's recurrent layers, which count from 0 among themselves."""

    def __init__(
        self,
        form: Recurrent,
        *,
        num_layers: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        snapshots: int = 0,
    ) -> None:
        """`snapshots`: states of prefixes that are kept beside those of requests."""
        whole = slots + snapshots
        self._tails = torch.zeros(
            (num_layers, whole, form.taps - 1, form.channels), dtype=dtype, device=device
        )
        self._matrices = torch.zeros(
            (num_layers, whole, form.heads, form.key_dim, form.value_dim),
            dtype=torch.float32,
            device=device,
        )
        self._form, self._slots = form, slots
        self.moves_1 = torch.ones(1, dtype=torch.int32, device=device)
        """Zero while steps on a GPU are to leave states as they are; kernels read it."""
        self._notes: Tensor | None = None
        self._noted: dict[int, _Noted] = {}

    def keep_notes(self, tokens: int) -> int:
        """Allocate notes of so many tokens a request, for drafts; return their bytes.

        Of each layer, and of one more as room for all: steps on a GPU convolve them anew.
        """
        layers = len(self._tails)
        shape = (layers + (layers > 0), self._slots, tokens, self._form.inputs)
        self._notes = self._tails.new_zeros(shape)
        return self._notes.nbytes

    @property
    def has_notes(self) -> bool:
        """Whether drafts are noted."""
        return self._notes is not None

    def drop_notes(self) -> None:
        """Free the notes; no draft may be under way."""
        self._notes, self._noted = None, {}

    def forget_notes(self) -> None:
        """Take all drafts as refused; of a step that is repeated."""
        self._noted = {}

    def load(self, rows: Sequence[PagedRow]) -> None:
        """Put the states of found prefixes into the slots of rows that begin from them."""
        for row in rows:
            if row.loads_state >= 0:
                self._copy(self._slots + row.loads_state, row.slot)
                self._noted.pop(row.slot, None)

    def save(self, rows: Sequence[PagedRow]) -> None:
        """Keep the states behind the tokens of rows that end a prefix."""
        for row in rows:
            if row.saves_state >= 0:
                self._copy(row.slot, self._slots + row.saves_state)

    def _copy(self, source: int, target: int) -> None:
        self._tails[:, target] = self._tails[:, source]
        self._matrices[:, target] = self._matrices[:, source]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have steps on a GPU within leave states as they are: of a graph that is captured."""
        self.moves_1.zero_()
        try:
            yield
        finally:
            self.moves_1.fill_(1)

    def begin(self, spans: Sequence[Span], *, width: int) -> StateRuns:
        """Return how the states of a step's rows move on; `width`: its tokens with padding."""
        if not self._noted and not any(span.revocable for span in spans):
            return StateRuns(
                tuple(StateRun(s.slot, s.first, s.count, s.count, s.start == 0) for s in spans)
            )
        runs, notes = [], []
        order: list[int] = []
        own: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        for span in spans:
            before, settled, certain, place = self.goes_on(span)
            first = len(order)
            order += range(width + len(slots), width + len(slots) + before)
            slots += [span.slot] * before
            places += range(before)
            own += range(len(order), len(order) + span.count)
            order += range(span.first, span.first + span.count)
            runs.append(StateRun(span.slot, first, before + span.count, settled, span.start == 0))
            if span.revocable:
                notes.append((span.slot, place, span.first + certain, span.revocable))
        rest = range(len(own), width)
        own += range(len(order), len(order) + len(rest))
        order += rest
        return StateRuns(tuple(runs), order, own, (slots, places), tuple(notes))

    def goes_on(self, span: Span) -> tuple[int, int, int, int]:
        """Return how a row's state moves on, and note which of its tokens may be taken back.

        How many noted tokens come in front of its own, how many of all of them settle, how many of
        its own are certain, and behind how many notes the others are noted.
        """
        assert not span.revocable or self.has_notes, "drafts need `RecurrentStates.keep_notes`"
        noted = self._of(span)
        before = 0 if noted is None else noted.count
        certain = span.count - span.revocable
        drafting = noted is not None and noted.drafting
        place = before if drafting else 0
        self._note(span, place)
        return before, certain if drafting else before + certain, certain, place

    def _of(self, span: Span) -> _Noted | None:
        """Return what is noted in front of a row; what stands behind its start was refused."""
        noted = self._noted.get(span.slot)
        if noted is None or span.start == 0:
            return None
        kept = min(noted.count, span.start - noted.start)
        assert kept >= 0 and noted.start + kept == span.start, "a row leaves out tokens"
        return _Noted(noted.start, kept, noted.drafting) if kept else None

    def _note(self, span: Span, place: int) -> None:
        """Note which tokens of a row may be taken back, behind `place` others."""
        if span.revocable:
            start = span.end - span.revocable - place
            drafting = span.revocable == span.count
            self._noted[span.slot] = _Noted(start, place + span.revocable, drafting)
        else:
            self._noted.pop(span.slot, None)

    @property
    def nbytes(self) -> int:
        """Bytes held; equal to what `llmpq.sizes.state_size` predicts."""
        return self._tails.nbytes + self._matrices.nbytes

    @cached_property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Where the tails and the matrices of every layer lie."""
        tails, matrices = ([layer.data_ptr() for layer in x] for x in (self._tails, self._matrices))
        return tails, matrices

    def layer(self, place: int) -> LayerState:
        """Return the slots of a recurrent layer."""
        state = LayerState(self._tails[place], self._matrices[place])
        if self._notes is None:
            return state
        return replace(state, noted_SME=self._notes[place], mixed_SME=self._notes[-1])


def with_states(
    kv: Cache,
    spec: ModelSpec,
    *,
    num_layers: int,
    slots: int,
    snapshots: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Cache:
    """Return a stage's cache with slots for its recurrent layers, if it has any."""
    if spec.recurrent is not None:
        kv.states = RecurrentStates(
            spec.recurrent,
            num_layers=num_layers,
            slots=slots,
            snapshots=snapshots,
            dtype=dtype,
            device=device,
        )
    return kv
