"""CPUs: decoder layers of few rows by one call of our own code, the others by torch's operators.

Where a step is a token a row and KV a pool of 16 bits, all layers of a stage are one call: Python
between two layers takes 50 to 100 us, in which memory rests.

The calls are kernels/cpu/native_layer.py's; here is which layers and steps they serve. Results are
those of `PlainLayers`, whose products, norms and rotations are the same functions one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmpq.kernels.cpu.native_layer import (
    LayerForm,
    NativeLayer,
    NativeStack,
    PoolPlace,
    native_layer,
)
from llmpq.kernels.kv.reference import ScoreRule
from llmpq.kernels.weights.weight import Weight
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.cpu_paged_kv import CpuPagedKV
from llmpq.runtime.cache.kv_cache import KVCache, PagedKV
from llmpq.runtime.models.layers import Attention, DecoderLayer, PlainLayers
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import GatedMLP
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.step import Step
from llmpq.sizes.pool_size import PoolSize


@dataclass(frozen=True, eq=False)
class _Stack:
    weights: list[tuple[Linear, Weight]]
    """As they were when it was made."""
    stack: NativeStack | None


class NativeLayers(PlainLayers):
    """A CPU's layers."""

    def __init__(self) -> None:
        # Weak: a layer holds its runner, and a circle would keep weights until Python looks for it.
        self._known: WeakKeyDictionary[
            DecoderLayer, tuple[tuple[Weight, ...], NativeLayer | None]
        ] = WeakKeyDictionary()
        self._stacks: WeakKeyDictionary[object, _Stack] = WeakKeyDictionary()

    def decoder_layer(
        self,
        layer: DecoderLayer,
        x_BQh: Tensor,
        index: int,
        step: Step,
        kv: KVCache,
        *,
        last_only: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return the new residual stream; all tokens go on, the input may be what it becomes."""
        native = self._native(layer)
        attention = layer.attention
        grows = isinstance(attention, Attention) and attention.grows(step)
        if native is None or grows or not native.takes(x_BQh):
            return super().decoder_layer(layer, x_BQh, index, step, kv)
        assert isinstance(attention, Attention)
        angles = None
        if attention.rotary is not None:
            angles = attention.rotary.angles(step, x_BQh)
        y = x_BQh if in_place else torch.empty_like(x_BQh)
        scoring = attention.scoring_of(step)
        place = _place(kv, index, step, scoring.rule)
        if place is not None:
            native.whole(x_BQh, y, angles, place)
            return y
        q, k, v = native.before(x_BQh, angles)
        native.behind(kv.attend(index, q, k, v, step, scoring), x_BQh, y)
        return y

    def all_layers(
        self, layers: Sequence[DecoderLayer], x_BQh: Tensor, step: Step, kv: KVCache
    ) -> Tensor | None:
        """Return what one call makes of a token a row; None where it cannot."""
        if not isinstance(kv, CpuPagedKV):
            return None
        stack = self._stack(layers)
        places = None if stack is None or not stack.takes(x_BQh) else kv.places_of_tokens(step)
        if stack is None or places is None:
            return None
        attention = layers[0].attention
        assert isinstance(attention, Attention)
        if attention.grows(step):
            return None
        rotary = attention.rotary
        angles = None if rotary is None else rotary.angles(step, x_BQh)
        y = torch.empty_like(x_BQh)
        stack.whole(x_BQh, y, angles, places)
        return y

    def _stack(self, layers: Sequence[DecoderLayer]) -> NativeStack | None:
        known = self._stacks.get(layers)
        if known is None or any(part.weight is not held for part, held in known.weights):
            known = self._stacks[layers] = self._make_stack(layers)
        return known.stack

    def _make_stack(self, layers: Sequence[DecoderLayer]) -> _Stack:
        natives = [self._native(layer) for layer in layers]
        weights = [(linear, linear.weight) for layer in layers for linear in _linears(layer)]
        first, whole = layers[0].attention, []
        for layer, native in zip(layers, natives, strict=True):
            attention = layer.attention
            if native is None or not isinstance(attention, Attention):
                continue
            explicit = attention.rule.needs_mask
            if isinstance(first, Attention) and attention.rotary is first.rotary and not explicit:
                whole.append(native)
        return _Stack(weights, NativeStack(whole) if len(whole) == len(layers) else None)

    def _native(self, layer: DecoderLayer) -> NativeLayer | None:
        weights, known = self._known.get(layer, ((), None))
        linears = _linears(layer)
        if len(weights) != len(linears) or any(
            linear.weight is not weight for linear, weight in zip(linears, weights, strict=True)
        ):
            form = _form(layer)
            known = None if form is None else native_layer(form)
            self._known[layer] = tuple(linear.weight for linear in linears), known
        return known


def _place(kv: KVCache, index: int, step: Step, rule: ScoreRule) -> PoolPlace | None:
    if not isinstance(kv, CpuPagedKV):
        return None
    return kv.place_of_tokens(index, step, rule)


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        return ()
    return attention.qkv, attention.o, mlp.gate_up, mlp.down


def _form(layer: DecoderLayer) -> LayerForm | None:
    """Return the library's description of a layer; None of one that it does not compute."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        return None
    norms = [layer.attn_norm, layer.mlp_norm]
    heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    rotary, rule = attention.rotary, attention.rule
    if (
        not all(type(norm) is Norm and not norm.centred for norm in norms + heads)
        or layer.parallel_norms > 0
        or attention.late_norms
        or attention.limit > 0
        or any(norm.shape[0] != attention.head_dim for norm in heads)
        or len({norm.eps for norm in heads}) > 1
        or any(norm.weight.ndim > 1 for norm in heads)
        or (heads and (rotary is None or len(heads) != 2))
        or (rotary is not None and rotary.dim != attention.head_dim)
        or attention.gated
        or not attention.is_plain
        or not layer.adds_plainly
        or mlp.activation != "silu"
    ):
        return None
    dtype, linears = layer.attn_norm.weight.dtype, _linears(layer)
    if any(type(linear) is not Linear for linear in linears):
        return None  # sums over devices lie between the products
    products = [linear.weight.native_matrix(dtype) for linear in linears]
    if any(matrix is None for matrix in products):
        return None
    qkv, o, gate_up, down = (matrix for matrix in products if matrix is not None)
    return LayerForm(
        dtype=dtype,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=rule.window,
        rotated=rotary is not None,
        attn_norm=layer.attn_norm.weight,
        attn_eps=layer.attn_norm.eps,
        mlp_norm=layer.mlp_norm.weight,
        mlp_eps=layer.mlp_norm.eps,
        head_norms=(heads[0].weight, heads[1].weight) if heads else None,
        head_eps=heads[0].eps if heads else 0.0,
        slopes_H=attention.alibi_slopes_H,
        products=(qkv, o, gate_up, down),
        biases=tuple(linear.bias for linear in linears),
    )


class CpuBackend:
    """A stage on its host's cores."""

    def layers(self) -> NativeLayers:
        """Return layers of one call for few rows, of torch's operators for many."""
        return NativeLayers()

    def stage_runner(
        self,
        model: StageModel,
        kv: PagedKV,
        device: torch.device,
        dtype: torch.dtype,
        *,
        size: PoolSize,
        step_tokens: int,
        graphs: bool,
    ) -> StageRunner:
        """Return the plain arithmetic; nothing is captured."""
        return StageRunner(model, kv, device, dtype)
