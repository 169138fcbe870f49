"""A function-preserving copy of a model with outlier channels, to test what handles them.

Small models lack the outlier channels of large ones. Scaling a channel by f where it is made and
the columns that read it by 1 / f leaves every output the same:

    norm weight (and bias)      -> columns of qkv, gate_up or up (of every expert and the router)

and, if asked for `everywhere`, which no cache of few bits survives (v has outliers, too):

    rows of v                   -> columns of o, of every query head that shares the head
    rows of up                  -> columns of down (gated and ReLU layers; GELU is left alone)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import WeightScheme
from llmpq.runtime.models.layer_tensors import TensorSource


@dataclass(frozen=True)
class InjectedSource:
    """A tensor source whose layers have `channels` outlier channels before every linear."""

    source: TensorSource
    spec: ModelSpec
    channels: int
    factor: float
    seed: int = 0
    everywhere: bool = False

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Do nothing: outliers are injected into values."""

    def embedding(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the embedding as it is."""
        return self.source.embedding(dtype)

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Tensor]:
        """Return the head as it is."""
        return self.source.head(dtype, with_output=with_output)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a layer with outliers injected."""
        parts = {name: tensor.clone() for name, tensor in self.source.layer(index, dtype).items()}
        places = random.Random(self.seed * 1009 + index)
        up = "gate_up" if self.spec.gated else "up"
        ups = [f"{mlp}{up}" for mlp in self.spec.mlps()]
        routers = ["router"] if self.spec.experts else []
        for norm, readers in (("attn_norm", ["qkv"]), ("mlp_norm", ups + routers)):
            chosen = places.sample(range(self.spec.hidden), self.channels)
            for kind in ("weight", "bias"):
                if f"{norm}.{kind}" in parts:
                    parts[f"{norm}.{kind}"][chosen] *= self.factor
            for reader in readers:
                parts[f"{reader}.weight"][:, chosen] /= self.factor
        if self.everywhere:
            self._through_values(parts, places)
        if self.everywhere and self.spec.activation in ("silu", "relu"):
            for mlp in self.spec.mlps():
                chosen = places.sample(range(self.spec.ffn), self.channels)
                rows = [row + (self.spec.ffn if self.spec.gated else 0) for row in chosen]
                self._scale_rows(parts, f"{mlp}{up}", rows)
                parts[f"{mlp}down.weight"][:, chosen] /= self.factor
        return parts

    def _through_values(self, parts: dict[str, Tensor], places: random.Random) -> None:
        """Scale rows of v; a key/value head's channel is read by all query heads that share it."""
        spec = self.spec
        shared = spec.heads // spec.kv_heads
        first_v = (spec.heads + spec.kv_heads) * spec.head_dim
        count = max(1, self.channels // shared)
        for channel in places.sample(range(spec.kv_heads * spec.head_dim), count):
            head, place = divmod(channel, spec.head_dim)
            self._scale_rows(parts, "qkv", [first_v + channel])
            readers = range(head * shared, (head + 1) * shared)
            columns = [reader * spec.head_dim + place for reader in readers]
            parts["o.weight"][:, columns] /= self.factor

    def _scale_rows(self, parts: dict[str, Tensor], name: str, rows: list[int]) -> None:
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in parts:
                parts[f"{name}.{kind}"][rows] *= self.factor
