"""What layers need of a stage's KV cache, whatever it keeps keys and values as.

Legend: B rows, Q new tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from llmpq.kernels.kv.reference import IndexQueries, ScoreRule, Scoring
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import Step

if TYPE_CHECKING:
    from llmpq.kernels.cpu.native_layer import PoolPlace, PoolPlaces
    from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
    from llmpq.runtime.cache.recurrent_states import RecurrentStates
    from llmpq.runtime.models.rotary import StepRotation

StepT = TypeVar("StepT", bound=Step, contravariant=True)
"""The type of steps that a cache takes: `RaggedStep` on CPUs, `PagedStep` on GPUs."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionInputs:
    """A layer's queries of a step, the keys and values to append, and how scores are made."""

    q_BQHD: Tensor
    k_BQGD: Tensor
    v_BQGD: Tensor
    scoring: Scoring
    rotation: StepRotation | None = None
    """The positions that queries and keys have yet to get, from the cache; None: they have them.
    Pools of a GPU alone rotate."""
    index: IndexQueries | None = None
    """What chooses the keys that are attended to, of a pool of a GPU; elsewhere `Scoring` says."""


class KVCache(ABC, Generic[StepT]):
    """Keys and values of the layers of one stage that have any; those count from 0 within it."""

    states: RecurrentStates | None = None
    """The slots of its recurrent layers, where it has some."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held; equal to what `llmpq.sizes.kv_format` predicts, times layers."""

    @property
    def all_nbytes(self) -> int:
        """Bytes of keys, values and recurrent states."""
        return self.nbytes + (0 if self.states is None else self.states.nbytes)

    @abstractmethod
    def attend(self, layer: int, inputs: AttentionInputs, step: StepT) -> Tensor:
        """Append the step's keys and values, then return its causal attention [B, Q, H, D]."""

    def place_of_tokens(self, layer: int, step: StepT, rule: ScoreRule) -> PoolPlace | None:
        """Return where a step of one token a row goes, if our own CPU code may attend to it there.

        `rule`: how the layer's scores are made.
        """
        return None

    def places_of_tokens(self, step: StepT) -> PoolPlaces | None:
        """Return the same of all layers, whose scores are plain or windows'."""
        return None

    def keep_for_readers(self, layer: int, step: StepT) -> None:  # noqa: B027
        """Keep what a step of a layer overwrites and `attend_again` needs."""

    def attend_again(self, layer: int, inputs: AttentionInputs, step: StepT) -> Tensor:
        """Return the attention of other queries over a layer that has had the step already.

        Its keys and values are appended again, which leaves the cache as it is.
        """
        return self.attend(layer, inputs, step)

    @property
    def pages(self) -> GpuPagedKVBase | None:
        """The cache if it is a pool of blocks on a GPU, whose steps are ragged; else None."""
        return None


class PagedKV(KVCache[StepT]):
    """A stage's pool of blocks; rows have any lengths, packed as [1, T]."""

    @abstractmethod
    def take_rows(self, rows: Sequence[PagedRow], starts: Sequence[int]) -> None:
        """Take note of the blocks that a step's rows got, before the step runs."""

    def append(self, layer: int, k_BQGD: Tensor, v_BQGD: Tensor, step: StepT) -> None:
        """Append the step's keys and values; packed pools only, as copies for drafts."""
        raise NotImplementedError(f"{type(self).__name__} is no copy of another pool")

    def stored_tokens(self, layer: int, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, N, G, D] of a request's first tokens; 16-bit pools only."""
        raise NotImplementedError(f"{type(self).__name__} has no 16-bit tokens to copy")

    def take_tokens_of(self, other: PagedKV, slot: int, count: int) -> None:
        """Append a request's first tokens as another pool has them; packed pools only."""
        raise NotImplementedError(f"{type(self).__name__} is no copy of another pool")
