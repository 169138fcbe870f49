"""The quantised weights of one layer behind one another in large pages (native/huge_pages.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from llmpq.kernels.native import huge_pages

if TYPE_CHECKING:
    from llmpq.kernels.weights.weight import Weight

_LINE = 64


def pack_contiguous(weights: Sequence[Weight]) -> list[Weight]:
    """Return the same weights, on a CPU their tensors one behind the other in large pages."""
    if len(weights) == 1 and _first(weights[0]).data_ptr() % huge_pages.PAGE == 0:
        return list(weights)  # made there
    found = list(dict.fromkeys(t for weight in weights for t in weight.tensors.values()))
    total = sum(_lines(tensor.nbytes) for tensor in found)
    on_cpu = all(tensor.device.type == "cpu" for tensor in found)
    if not on_cpu or total < huge_pages.LEAST or not huge_pages.are_here():
        return list(weights)
    room, at = huge_pages.room(total), 0
    moved: dict[Tensor, Tensor] = {}
    for tensor in found:
        place = room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved[tensor] = place.copy_(tensor)
        at += _lines(tensor.nbytes)
    return [weight.map_tensors(moved.__getitem__) for weight in weights]


def _first(weight: Weight) -> Tensor:
    return next(iter(weight.tensors.values()))


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
