"""Cheap ways of running the very model that is served: views of a stage with other linears.

    qspec   4-bit weights meet activations rounded to 4 bits (the target: 16-bit activations)
    w4kv4   16- and 8-bit layers, and the output matrix, get a 4-bit copy; the KV cache is read at
            4 bits
    kv4     the same weights; the KV cache is read at 4 bits

A view shares norms, embedding and (of qspec and kv4) head with its stage; what it adds in bytes is
stated. It attends to the stage's own KV cache, or to a 4-bit copy of it (forwarding_kv.py); the
verifier
overwrites the KV that a draft leaves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from llmpq.kernels.weights.weight import DraftMode, Weight
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.stage_model import StageModel

__all__ = ["DraftMode", "DraftModel", "build_draft"]

_log = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class DraftModel:
    """The draft's way through a stage."""

    model: StageModel
    kv: KVCache
    extra_bytes: int
    """Weights the draft holds beyond its stage's."""


def build_draft(mode: DraftMode, model: StageModel, kv: KVCache) -> DraftModel:
    """Return a stage's draft view over a cache; layers the mode cannot make cheaper stay."""
    held: list[Weight] = []

    def drafted(part: Linear) -> Linear:
        weight = part.weight.as_draft(mode)
        if weight is part.weight:
            return part
        if mode == "w4kv4":  # a copy; the others read the same codes
            held.append(weight)
        return part.with_weight(weight)

    view = copy.copy(model)
    view._modules = dict(model._modules)
    view.layers = nn.ModuleList([_with_linears(layer, drafted) for layer in model.layers])
    _say_what_drafts_cost(mode, model)
    if mode == "w4kv4":
        view.cut_head = None
        if model.head is not None:
            view.head = _with_linears(model.head, drafted)
    return DraftModel(view, kv, sum(weight.nbytes for weight in held))


def _say_what_drafts_cost(mode: DraftMode, model: StageModel) -> None:
    """Name the linears whose own codes a mode reads only at the target's cost."""
    if mode != "qspec":
        return
    linears = [part for part in model.layers.modules() if isinstance(part, Linear)]
    kept = sum(part.weight.keeps_codes and part.weight.bits == 4 for part in linears)
    if kept:
        _log.warning(
            "drafts of %s: %d of %d linears keep the checkpoint's own 4-bit codes and are drafted "
            "at the target's cost; other drafts may gain more (--speculate auto with --costs)",
            mode,
            kept,
            len(linears),
        )


def _with_linears(module: _Module, swap: Callable[[Linear], Linear]) -> _Module:
    """Return a copy of a module whose linears are swapped; everything else is shared."""
    view = copy.copy(module)
    view._modules = {
        name: swap(child)
        if isinstance(child, Linear)
        else (None if child is None else _with_linears(child, swap))
        for name, child in module._modules.items()
    }
    return view
