"""CPUs: decoder layers of few rows by one call of our own code, the others by torch's operators.

Where a step is a token a row and KV a pool of 16 bits, all layers of a stage are one call: Python
between two layers takes 50 to 100 us, in which memory rests.

The calls are kernels/cpu/native_layer.py's; here is which layers and steps they serve. Results are
those of `PlainLayers`, whose products, norms and rotations are the same functions one by one. Where
the library does not compute a layer's mixer (KDA, attention with limits), it computes what comes
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmpq.kernels.cpu.native_layer import (
    AttentionForm,
    LayerForm,
    Matrix,
    MixerInput,
    NativeLayer,
    NativeStack,
    RecurrentForm,
    StatePlace,
    StatePlaces,
    native_layer,
)
from llmpq.kernels.native.freed_memory import give_back_freed_memory
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.weight import Weight
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache, PagedKV
from llmpq.runtime.cache.recurrent_states import RecurrentStates
from llmpq.runtime.models.layers import Attention, DecoderLayer, PlainLayers
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import GatedMLP
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrent import RecurrentMixer, runs_in
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.steps.step import RaggedStep, Step
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
        native, mixer = self._native(layer), _mixer(layer)
        if native is None or mixer is None or not native.takes(x_BQh):
            return super().decoder_layer(layer, x_BQh, index, step, kv)
        y = x_BQh if in_place else torch.empty_like(x_BQh)
        if isinstance(mixer, RecurrentMixer):
            slots = _state_place(mixer, step, kv, x_BQh)
            if slots is not None and native.form.before is not None:
                native.recur(x_BQh, y, slots)
                return y
        if not isinstance(mixer, Attention) or native.form.before is None or mixer.grows(step):
            native.behind(mixer.read(layer.attn_norm(x_BQh), index, step, kv), x_BQh, y)
            return y
        angles = None if mixer.rotary is None else mixer.rotary.angles(step, x_BQh)
        scoring = mixer.scoring_of(step)
        place = kv.place_of_tokens(index, step, scoring.rule)
        if place is not None:
            native.whole(x_BQh, y, angles, place)
            return y
        q, k, v, gate = native.before(x_BQh, angles)
        attended = kv.attend(index, AttentionInputs(q, k, v, scoring), step)
        native.behind(attended if gate is None else attended * gate.sigmoid(), x_BQh, y)
        return y

    def all_layers(
        self, layers: Sequence[DecoderLayer], x_BQh: Tensor, step: Step, kv: KVCache
    ) -> Tensor | None:
        """Return what one call makes of a token a row; None where it cannot."""
        attention = next((m for m in map(_mixer, layers) if isinstance(m, Attention)), None)
        pools = states = None
        if attention is None and (kv.states is None or not isinstance(step, RaggedStep)):
            return None  # windows of calibration, whose states no cache keeps; a GPU's step
        if attention is not None:
            pools = kv.places_of_tokens(step)
            if pools is None or attention.grows(step):
                return None
        stack = self._stack(layers)
        if stack is None or not stack.takes(x_BQh):
            return None
        if kv.states is not None:
            states = _state_places(kv.states, step, x_BQh)
            if states is None:
                return None
        rotary = None if attention is None else attention.rotary
        angles = None if rotary is None else rotary.angles(step, x_BQh)
        y = torch.empty_like(x_BQh)
        stack.whole(x_BQh, y, angles, pools, states)
        return y

    def _stack(self, layers: Sequence[DecoderLayer]) -> NativeStack | None:
        known = self._stacks.get(layers)
        if known is None or any(part.weight is not held for part, held in known.weights):
            known = self._stacks[layers] = self._make_stack(layers)
        return known.stack

    def _make_stack(self, layers: Sequence[DecoderLayer]) -> _Stack:
        weights = [(linear, linear.weight) for layer in layers for linear in _linears(layer)]
        whole: list[NativeLayer] = []
        attentions = [m for m in map(_mixer, layers) if isinstance(m, Attention)]
        alike = all(m.rotary is attentions[0].rotary for m in attentions)
        if alike and not any(m.rule.needs_mask for m in attentions):
            natives = map(self._native, layers)
            whole = [n for n in natives if n is not None and n.form.before is not None]
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


def _state_place(mixer: RecurrentMixer, step: Step, kv: KVCache, x: Tensor) -> StatePlace | None:
    """Return which slots of a layer rows of one token move on; None in any other step."""
    if kv.states is None:
        return None
    single = runs_in(step, kv.states, x.numel() // x.shape[-1]).single
    if single is None:
        return None
    state = kv.states.layer(mixer.place)
    return StatePlace(single, state.tail_SKC, state.matrix_SHNP)


def _state_places(states: RecurrentStates, step: Step, x: Tensor) -> StatePlaces | None:
    single = runs_in(step, states, x.numel() // x.shape[-1]).single
    return None if single is None else StatePlaces(single, *states.addresses)


def _mixer(layer: DecoderLayer) -> Attention | RecurrentMixer | None:
    """Return a layer's mixer if what it reads can be multiplied by others."""
    mixer = layer.attention
    if isinstance(mixer, RecurrentMixer):
        return mixer if mixer.form.out_factor == 1.0 else None
    return mixer if isinstance(mixer, Attention) else None


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    mixer, mlp = _mixer(layer), layer.mlp
    if mixer is None or not isinstance(mlp, GatedMLP):
        return ()
    behind = (mlp.gate_up, mlp.down)
    if isinstance(mixer, Attention):
        return mixer.o, *behind, mixer.qkv
    return mixer.mixer_out, *behind, mixer.mixer_in


def _form(layer: DecoderLayer) -> LayerForm | None:
    """Return the library's description of a layer; None of one that it computes nothing of."""
    mlp, norm, linears = layer.mlp, layer.mlp_norm, _linears(layer)
    if (
        not linears
        or not isinstance(mlp, GatedMLP)
        or not _is_rms(norm)
        or layer.parallel_norms > 0
        or not layer.adds_plainly
        or mlp.activation != "silu"
    ):
        return None
    if any(type(linear) is not Linear for linear in linears):
        return None  # sums over devices lie between the products
    dtype = norm.weight.dtype
    products = [linear.weight.native_matrix(dtype) for linear in linears]
    if any(matrix is None for matrix in products):
        return None
    o, gate_up, down, into = (matrix for matrix in products if matrix is not None)
    return LayerForm(
        dtype=dtype,
        mlp_norm=norm.weight,
        mlp_eps=norm.eps,
        products=(o, gate_up, down),
        biases=tuple(linear.bias for linear in linears[:3]),
        before=_before(layer, into),
    )


def _before(layer: DecoderLayer, into: Matrix) -> AttentionForm | RecurrentForm | None:
    """Return what the library computes before a layer's second half: its mixer, or nothing."""
    mixer, norm = layer.attention, layer.attn_norm
    if not _is_rms(norm):
        return None
    if isinstance(mixer, Attention) and _is_plain(mixer):
        given = MixerInput(norm=norm.weight, norm_eps=norm.eps, product=into, bias=mixer.qkv.bias)
        return _attention_form(mixer, given)
    if not isinstance(mixer, RecurrentMixer) or mixer.form.kind == "kda" or mixer.form.in_factors:
        return None
    step, weight = mixer.native_step(norm.weight.dtype), mixer.step_weight
    steps = None if weight is None else DenseWeight(weight).native_matrix(norm.weight.dtype)
    if step is None or (weight is not None and steps is None):
        return None
    given = MixerInput(norm=norm.weight, norm_eps=norm.eps, product=into, bias=mixer.mixer_in.bias)
    return RecurrentForm(into=given, steps=steps, step=step)


def _is_rms(norm: Norm) -> bool:
    return type(norm) is Norm and not norm.centred and norm.weight.ndim == 1


def _is_plain(attention: Attention) -> bool:
    """Whether the library computes it, but for scores that need a mask."""
    heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return not (
        not all(map(_is_rms, heads))
        or attention.late_norms
        or attention.gate_Hh is not None
        or attention.limit > 0
        or any(norm.shape[0] != attention.head_dim for norm in heads)
        or len({norm.eps for norm in heads}) > 1
        or (heads and (attention.rotary is None or len(heads) != 2))
        or not attention.is_plain
    )


def _attention_form(attention: Attention, into: MixerInput) -> AttentionForm:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return AttentionForm(
        into=into,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.rule.window,
        turned=0 if attention.rotary is None else attention.rotary.dim,
        gated=attention.gated,
        head_norms=(q_norm.weight, k_norm.weight) if q_norm and k_norm else None,
        head_eps=q_norm.eps if q_norm else 0.0,
        slopes_H=attention.alibi_slopes_H,
    )


class CpuBackend:
    """A stage on its host's cores."""

    def layers(self) -> NativeLayers:
        """Return layers of one call for few rows, of torch's operators for many."""
        give_back_freed_memory()
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
