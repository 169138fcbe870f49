"""Model families the runtime can run: one wiring file each, listed here."""

from __future__ import annotations

from typing import Protocol

import torch

from llmpq.model_spec import Family, ModelSpec
from llmpq.runtime.models.bloom import Bloom
from llmpq.runtime.models.layer_tensors import Parts
from llmpq.runtime.models.layers import DecoderLayer, Embedding, Head
from llmpq.runtime.models.llama import Llama
from llmpq.runtime.models.mixtral import Mixtral
from llmpq.runtime.models.opt import OPT
from llmpq.runtime.models.qwen3 import Qwen3
from llmpq.runtime.models.tensor_names import NameTable


class Wiring(Protocol):
    """What a family file offers."""

    names: NameTable

    def embedding(self, parts: Parts) -> Embedding:
        """Wire the first stage's embedding."""

    def layer(self, parts: Parts) -> DecoderLayer:
        """Wire one decoder layer."""

    def head(self, parts: Parts) -> Head:
        """Wire the last stage's norm and output matrix."""


FAMILIES: dict[Family, type[OPT] | type[Bloom] | type[Llama]] = {
    "opt": OPT,
    "bloom": Bloom,
    "llama": Llama,
    "qwen3": Qwen3,
    "mixtral": Mixtral,
}


def wiring(spec: ModelSpec, device: torch.device) -> Wiring:
    """Return the wiring of a model."""
    return FAMILIES[spec.family](spec, device)
