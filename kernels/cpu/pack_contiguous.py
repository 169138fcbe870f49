"""The quantised weights of one layer behind one another in large pages (native/huge_pages.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.native import huge_pages

_LINE = 64


def pack_contiguous(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the same weights, on a CPU their tensors one behind the other in large pages."""
    if len(weights) == 1 and weights[0].planes[0].data_ptr() % huge_pages.PAGE == 0:
        return list(weights)  # made there
    found = list(dict.fromkeys(tensor for weight in weights for tensor in _tensors(weight)))
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
    return [
        replace(
            weight,
            planes=tuple(moved[plane] for plane in weight.planes),
            scale=moved[weight.scale],
            zero=None if weight.zero is None else moved[weight.zero],
        )
        for weight in weights
    ]


def _tensors(weight: QuantizedWeight) -> list[Tensor]:
    return [*weight.planes, weight.scale, *([] if weight.zero is None else [weight.zero])]


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
