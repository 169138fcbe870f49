"""Cheap ways of running the very model that is served: views of a stage with other linears.

    qspec   4-bit weights meet activations rounded to 4 bits (the target: 16-bit activations)
    w4kv4   16- and 8-bit layers, and the output matrix, get a 4-bit copy; the KV cache is read at
            4 bits
    kv4     the same weights; the KV cache is read at 4 bits

A view shares norms, embedding and (of qspec and kv4) head with its stage; what it adds in bytes is
stated. It attends to the stage's own KV cache, or to a 4-bit copy of it (dual_kv.py); the verifier
overwrites the KV that a draft leaves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.atom.reference import rounded
from llmpq.kernels.cpu.dense import plain_dense
from llmpq.kernels.formats.atom_rounding import Grid
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.atom_weight import AtomWeight
from llmpq.kernels.formats.codebook_weight import CodebookWeight
from llmpq.kernels.formats.fp8_weight import Fp8Weight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight, from_codes
from llmpq.kernels.formats.weight_layout import GROUP
from llmpq.kernels.linear import linear
from llmpq.precision import padded_k
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.stage_model import StageModel

DraftMode = Literal["qspec", "w4kv4", "kv4"]
_CPU_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 25
"""Weights per step: the temporaries stay in a CPU core's cache, or fill a GPU."""
_ACTIVATIONS = AtomScheme(weight_bits=4, activation_bits=4)

_log = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class DraftModel:
    """The draft's way through a stage."""

    model: StageModel
    kv: KVCache
    extra_bytes: int
    """Weights the draft holds beyond its stage's."""


class RoundedLinear(nn.Module):
    """A linear whose input is rounded to 4 bits, dynamically, per token and group of 128."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., N] in x's dtype."""
        if x.is_cuda:
            # Triton is not imported where there is no GPU.
            from llmpq.kernels.fused.round_inputs import round_restore

            return linear(round_restore(x, _ACTIVATIONS), self.weight, self.bias)
        flat = rounded(x.reshape(-1, x.shape[-1]), _ACTIVATIONS)
        return linear(flat.view(x.shape), self.weight, self.bias)


def build_draft(mode: DraftMode, model: StageModel, kv: KVCache) -> DraftModel:
    """Return a stage's draft view over a cache; layers the mode cannot make cheaper stay."""
    held: list[QuantizedWeight] = []

    def keep(weight: QuantizedWeight) -> QuantizedWeight:
        held.append(weight)
        return weight

    swaps: dict[str, Callable[[Linear], nn.Module]] = {
        "qspec": round_input,
        "w4kv4": lambda part: to_four_bits(part, keep),
        "kv4": lambda part: part,
    }
    view = copy.copy(model)
    view._modules = dict(model._modules)
    view.layers = nn.ModuleList([_with_linears(layer, swaps[mode]) for layer in model.layers])
    _say_what_drafts_cost(mode, model)
    if mode == "w4kv4" and model.head is not None:
        view.head = _with_linears(model.head, lambda part: to_four_bits(part, keep))
    return DraftModel(view, kv, sum(weight.nbytes for weight in held))


def _say_what_drafts_cost(mode: DraftMode, model: StageModel) -> None:
    """Name the linears whose own codes a mode reads only at the target's cost."""
    if mode != "qspec":
        return
    linears = [part for part in model.layers.modules() if isinstance(part, Linear)]
    kept = sum(isinstance(part.weight, CodebookWeight) for part in linears)
    if kept:
        _log.warning(
            "drafts of %s: %d of %d linears keep the checkpoint's own 4-bit codes and are drafted "
            "at the target's cost; other drafts may gain more (--speculate auto with --costs)",
            mode,
            kept,
            len(linears),
        )


def round_input(part: Linear) -> nn.Module:
    """Return a 4-bit linear that rounds its input, too."""
    weight = part.weight
    if isinstance(weight, AtomWeight) and weight.scheme.activation_bits == 16:
        return Linear(replace(weight, scheme=replace(weight.scheme, activation_bits=4)), part.bias)
    if isinstance(weight, QuantizedWeight) and weight.bits == 4:
        return RoundedLinear(weight, part.bias)
    return part


def to_four_bits(part: Linear, keep: Callable[[QuantizedWeight], QuantizedWeight]) -> nn.Module:
    """Return a 4-bit copy of a 16- or 8-bit linear."""
    weight = part.weight
    if not isinstance(weight, Tensor) and (isinstance(weight, AtomWeight) or weight.bits < 8):
        return part
    dense = plain_dense(weight) if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    dtype = weight.dtype if isinstance(weight, Tensor | Fp8Weight) else weight.scale.dtype
    return Linear(keep(draft_weight(dense, dtype)), part.bias)


def draft_weight(w_NK: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Return w in 4 bits without zeros, which kernels read fastest.

    Scales have a sign, so that the largest weight of a group takes the code -8 that symmetric grids
    leave unused (held-out text, `demo-7m`: 0.939 of the drafts accepted against 0.924 with plain
    symmetric grids, 0.945 with zeros, whose products take 5-10 % longer).
    """
    n, k = w_NK.shape
    grid, groups = Grid(4, "int", -8.0), padded_k(k) // GROUP
    codes = torch.empty(n, groups * GROUP, dtype=torch.uint8, device=w_NK.device)
    scale = torch.empty(n, groups, dtype=dtype, device=w_NK.device)
    chunk = max(1, (_GPU_CHUNK if w_NK.is_cuda else _CPU_CHUNK) // codes.shape[1])
    for start in range(0, n, chunk):
        rows = slice(start, min(n, start + chunk))
        wide = functional.pad(w_NK[rows].float(), (0, codes.shape[1] - k)).view(-1, GROUP)
        found = grid.search(wide, dtype)
        codes[rows] = (grid.round(wide, found) + 8).to(torch.uint8).view(-1, codes.shape[1])
        scale[rows] = found.view(-1, groups).to(dtype)
    return from_codes(codes, scale, None, bits=4, group_size=GROUP, in_features=k)


def _with_linears(module: _Module, swap: Callable[[Linear], nn.Module]) -> _Module:
    """Return a copy of a module whose linears are swapped; everything else is shared."""
    view = copy.copy(module)
    view._modules = {
        name: swap(child)
        if isinstance(child, Linear)
        else (None if child is None else _with_linears(child, swap))
        for name, child in module._modules.items()
    }
    return view
