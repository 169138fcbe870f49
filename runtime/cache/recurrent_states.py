"""What recurrent layers keep of requests: a slot of fixed size for each running one, per layer.

A slot holds the convolution's last inputs, in the model's dtype, and one matrix per head in
float32. It belongs to the request that runs in that row: a request that starts at position 0 starts
from zeros, so nothing has to be cleared when a row is freed or a request is preempted.

Legend: L recurrent layers of a stage, S slots, K taps, C channels, H heads, N key_dim, P value_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from llmpq.families.common.spec_values import Recurrent
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import KVCache

Cache = TypeVar("Cache", bound=KVCache)


@dataclass(frozen=True)
class LayerState:
    """The slots of one layer."""

    tail_SKC: Tensor
    """[S, K - 1, C]: the last inputs of the convolution, oldest first."""
    matrix_SHNP: Tensor
    """[S, H, N, P] float32; no heads where the convolution is all there is."""


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
    ) -> None:
        self._tails = torch.zeros(
            (num_layers, slots, form.taps - 1, form.channels), dtype=dtype, device=device
        )
        self._matrices = torch.zeros(
            (num_layers, slots, form.heads, form.key_dim, form.value_dim),
            dtype=torch.float32,
            device=device,
        )

    @property
    def nbytes(self) -> int:
        """Bytes held; equal to what `llmpq.sizes.state_size` predicts."""
        return self._tails.nbytes + self._matrices.nbytes

    def layer(self, place: int) -> LayerState:
        """Return the slots of a recurrent layer."""
        return LayerState(self._tails[place], self._matrices[place])


def with_states(
    kv: Cache,
    spec: ModelSpec,
    *,
    num_layers: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Cache:
    """Return a stage's cache with slots for its recurrent layers, if it has any."""
    if spec.recurrent is not None:
        kv.states = RecurrentStates(
            spec.recurrent, num_layers=num_layers, slots=slots, dtype=dtype, device=device
        )
    return kv
