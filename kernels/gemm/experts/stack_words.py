"""The words of one linear of all experts: those of one expert after the other's, [E, ...]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.formats.packed_words import INTEGERS, PackedWords


@dataclass(frozen=True)
class StackWords:
    """One expert's weight, like which all lie, and the tensors of all by the name of a field."""

    like: PackedWords
    tensors: Mapping[str, Tensor]

    @property
    def words(self) -> list[Tensor]:
        """Planes (one twice), scales and zeros [E, ...] as int32; scales stand in for no zeros."""
        planes = [tensor for name, tensor in self.tensors.items() if name.startswith("plane")]
        scale = self.tensors["scale"]
        found = (planes[0], planes[-1], scale, self.tensors.get("zero", scale))
        return [t.view(t.shape[0], -1).view(torch.int32) for t in found]

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are floats of 4 bits (MXFP4)."""
        return self.like.form not in INTEGERS
