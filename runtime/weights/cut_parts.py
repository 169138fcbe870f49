"""What a member of a stage in tensor parallel takes of a layer's parts, as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.weights.weight import Weight
from llmpq.models.tensor_parallel import PartSlice, Runs

Cuts = Mapping[str, PartSlice]
"""Part -> what is taken of it; of others all is."""
NO_CUTS: Cuts = MappingProxyType({})


def cut_pieces(pieces: Sequence[Tensor], cut: PartSlice) -> list[Tensor]:
    """Return what is taken of tensors that are stacked along the first dimension: views."""
    taken = list(pieces) if cut.rows is None else _rows(pieces, cut.rows)
    if cut.columns is not None:
        taken = [piece[:, slice(*cut.columns)] for piece in taken]
    return [torch.zeros_like(piece) for piece in taken] if cut.zeros else taken


def cut_tensor(whole: Tensor, cut: PartSlice) -> Tensor:
    """Return what is taken of a tensor, in memory of its own."""
    return torch.cat(cut_pieces([whole], cut))


def cut_part(part: Tensor | Weight, cut: PartSlice) -> Tensor | Weight:
    """Return what is taken of a part, codes as they are."""
    if isinstance(part, Tensor):
        return cut_tensor(part, cut)
    if cut.rows is not None:
        part = part.of_rows(cut.rows)
    return part if cut.columns is None else part.of_columns(*cut.columns)


def cut_weights(parts: Mapping[str, Any], cuts: Cuts) -> dict[str, Any]:
    """Return parts, those that are codes cut; the others were as they were read."""
    return {
        name: cut_part(part, cuts[name]) if name in cuts and isinstance(part, Weight) else part
        for name, part in parts.items()
    }


def cut_parts(parts: Mapping[str, Any], cuts: Cuts) -> dict[str, Any]:
    """Return parts that were read whole, each as far as it is taken."""
    return {
        name: cut_part(part, cuts[name]) if name in cuts else part for name, part in parts.items()
    }


def _rows(pieces: Sequence[Tensor], runs: Runs) -> list[Tensor]:
    """Return views of the rows of runs, piece by piece."""
    taken = []
    for start, stop in runs:
        first = 0
        for piece in pieces:
            end = first + piece.shape[0]
            if start < end and first < stop:
                taken.append(piece[max(start, first) - first : min(stop, end) - first])
            first = end
    return taken
