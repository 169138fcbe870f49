"""Decoder layers on a GPU: the same parts and sums as layers.py, in fewer and fused launches.

    norm        one kernel a row                                   cuda_norms.py
    qkv         one product
    positions   rotation and the pool's append in one kernel       rope_append.py
    attention   the pool's own                                     gpu_paged_kv.py, gpu_packed_kv.py
    o, down     products that add the residual stream themselves
    gate        act(gate) * up in one kernel                       kernels/fused/gated_mlp.py
    rules       windows, soft caps, sinks, latents                 `rule_of`

    experts     all of a layer in two products                     cuda_experts.py
    recurrence  convolution, state and gate in a kernel each       cuda_recurrent.py

Nothing here asks the device for a value, so a step of one new token can be captured in a graph;
experts that run one after the other do (a mixture whose weights cannot be stacked).

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from llmpq.kernels.fused import gated_mlp
from llmpq.kernels.fused import layer_norm as fused_layer_norm
from llmpq.kernels.fused import rope_append as fused_rope
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule, Scoring
from llmpq.kernels.recurrent.gated_norm import gated_norm
from llmpq.runtime.backends.gpu import (
    cuda_atom_layers,
    cuda_experts,
    cuda_recurrent,
)
from llmpq.runtime.backends.gpu.cuda_norms import added_behind, is_rms, norm, norm_heads
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.latent_attention import LatentAttention
from llmpq.runtime.models.layers import (
    FOLLOWING,
    Attention,
    DecoderLayer,
    PlainLayers,
    SideBySide,
    go_on,
    unit_norm,
)
from llmpq.runtime.models.linear import Linear, RowParallelLinear
from llmpq.runtime.models.mlps import MLP, GatedMLP
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrent import RecurrentMixer
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.runtime.steps.step import Step

_NORMED = "normed"
"""In a step's memo: a layer's output, and that by the norm of the layer behind it."""


class CudaLayers(PlainLayers):
    """The functions below as a `LayerRunner`."""

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
        """Return the layer's new residual stream."""
        return decoder_layer(layer, x_BQh, index, step, kv, last_only=last_only, in_place=in_place)

    def attention(
        self, part: Attention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
    ) -> Tensor:
        """Return a layer's attention, the output product included."""
        return product(part.o, attention(part, x_BQh, index, step, kv))

    def norm(self, part: Norm, x: Tensor) -> Tensor:
        """Return x normalised."""
        return norm(part, x)

    def sparse_mlp(
        self,
        routing: Routing,
        experts: Iterable[MLP | GatedMLP],
        count: int,
        shared: MLP | GatedMLP | None,
    ) -> SparseMLP:
        """Return experts that are two products together."""
        return cuda_experts.sparse_mlp(routing, experts, count, shared)


def decoder_layer(
    layer: DecoderLayer,
    x_BQh: Tensor,
    index: int,
    step: Step,
    kv: KVCache,
    *,
    last_only: bool = False,
    in_place: bool = False,
) -> Tensor:
    """Return the layer's new residual stream; `layers.DecoderLayer.forward` is its twin.

    `last_only`: after attention go on with the last valid token of each row, [B, 1, h].
    `in_place`: it may take the input's place, which saves a dense o the copying.
    """
    narrows = last_only and step.q_len > 1
    last = partial(_last_tokens, step) if narrows else None
    y = _without_tail(layer, x_BQh, index, step, kv, last=last, in_place=in_place)
    return y if layer.tail is None else layer.tail(y, step, last_only=narrows)


def _without_tail(
    layer: DecoderLayer,
    x_BQh: Tensor,
    index: int,
    step: Step,
    kv: KVCache,
    *,
    last: Callable[[Tensor], Tensor] | None,
    in_place: bool,
) -> Tensor:
    """Return the residual stream behind attention and MLP; `last`: takes each row's last token."""
    part, mlp = _known_parts(layer)
    if cuda_atom_layers.rounds_inputs(layer):
        assert isinstance(part, Attention)
        inner = partial(attend, part, index=index, step=step, kv=kv)
        return cuda_atom_layers.decoder_layer(layer, x_BQh, inner, last=last)
    if part is None:
        return _with_mlp(layer, mlp, x_BQh if last is None else last(x_BQh), None)
    normed = _normed_before(layer, x_BQh, step)
    if layer.stream is not None:
        assert mlp is not None
        made = _mixer_output(part, normed, index, step, kv)
        if last is not None:
            made, normed = last(made), last(normed)
        wide = norm(layer.mlp_norm, go_on(normed, made, layer.stream.mixer))
        return go_on(wide, _mlp_output(mlp, wide), layer.stream.mlp)
    if isinstance(part, SideBySide) or mlp is None or layer.mlp_factor != 1.0 or _alone(part, step):
        made = _mixer_output(part, normed, index, step, kv)
        del normed
        if last is not None:
            made, x_BQh = last(made), last(x_BQh)
        following = None if mlp is None else layer.mlp_norm
        y, wide = added_behind(layer, made, x_BQh, layer.attn_out_norm, following)
        return y if mlp is None else _with_mlp(layer, mlp, y, wide)
    o, attended = _mixed(part, normed, index, step, kv)
    if layer.parallel_norms:
        wide = normed if layer.parallel_norms == 1 else norm(layer.mlp_norm, x_BQh)
        del normed
        if last is not None:
            attended, x_BQh, wide = last(attended), last(x_BQh), last(wide)
        y = product(o, attended, residual=x_BQh, into_residual=in_place)
        if isinstance(mlp, SparseMLP):
            return y.add_(_mlp_output(mlp, wide))
        return product(mlp.down, _hidden(mlp, wide), residual=y, into_residual=True)
    del normed
    if last is not None:
        attended, x_BQh = last(attended), last(x_BQh)
    if layer.adds_plainly:
        following = None if layer.tail is not None else step.memo.get(FOLLOWING)
        y, normed_next = _plainly_added(
            *(o, layer.mlp_norm, mlp, attended, x_BQh, following), in_place=in_place
        )
        if normed_next is not None:
            step.memo[_NORMED] = y, normed_next
        return y
    made = product(o, attended)
    y, wide = added_behind(layer, made, x_BQh, layer.attn_out_norm, layer.mlp_norm)
    return _with_mlp(layer, mlp, y, wide)


def _with_mlp(
    layer: DecoderLayer, mlp: MLP | GatedMLP | SparseMLP | None, y: Tensor, wide: Tensor | None
) -> Tensor:
    """Return y plus the MLP of it; `wide`: y by the norm between, if known."""
    assert mlp is not None
    made = _mlp_output(mlp, norm(layer.mlp_norm, y) if wide is None else wide)
    made = made if layer.mlp_factor == 1.0 else made.mul_(layer.mlp_factor)
    return added_behind(layer, made, y, layer.mlp_out_norm, None)[0]


def _mixed(
    part: Attention | LatentAttention | RecurrentMixer,
    normed: Tensor,
    index: int,
    step: Step,
    kv: KVCache,
) -> tuple[Linear, Tensor]:
    """Return the matrix behind what mixes a layer's tokens, and what it is to multiply."""
    if isinstance(part, LatentAttention):
        return part.o, attend_latents(part, normed, index, step, kv)
    if isinstance(part, RecurrentMixer):
        into = product(part.mixer_in, normed)
        return part.mixer_out, cuda_recurrent.mix(part, normed, into, step, kv)
    return part.o, attention(part, normed, index, step, kv)


def _alone(part: nn.Module, step: Step) -> bool:
    """Whether a part runs by itself, in torch's operators: a recurrence of a step of no pool."""
    return isinstance(part, RecurrentMixer) and not isinstance(step, PagedStep)


def _mixer_output(
    part: Attention | LatentAttention | RecurrentMixer | SideBySide,
    normed: Tensor,
    index: int,
    step: Step,
    kv: KVCache,
) -> Tensor:
    """Return all that mixes a layer's tokens gives; of two side by side the sum."""
    if isinstance(part, SideBySide):
        made = _mixer_output(part.recurrent, normed, index, step, kv)
        attended = _mixer_output(part.attention, normed, index, step, kv)
        return made.add_(attended, alpha=part.factor)
    if _alone(part, step):
        whole: Tensor = part(normed, index, step, kv)
        return whole
    made = product(*_mixed(part, normed, index, step, kv))
    factor = part.form.out_factor if isinstance(part, RecurrentMixer) else 1.0
    return made if factor == 1.0 else made.mul_(factor)


def _plainly_added(
    o: Linear,
    between: Norm,
    mlp: MLP | GatedMLP | SparseMLP,
    attended: Tensor,
    x_BQh: Tensor,
    following: Norm | None,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return x + o(attended), plus the MLP of that: products add to the stream themselves.

    And that by the norm of the following layer, where sums over devices made it on the way.
    """
    if isinstance(mlp, SparseMLP):
        y = product(o, attended, residual=x_BQh)
        if isinstance(mlp, cuda_experts.GroupedMLP):
            return mlp.added(y, between), None
        return y.add_(mlp(norm(between, y))), None
    early, late = (_bias_for(between, part) for part in (o, mlp.down))
    if _sums_rows(o, between):
        y, wide = o.normed(attended, x_BQh, between.weight, between.eps)
        wide = norm(between, y) if wide is None else wide
    else:
        y = product(o, attended, residual=x_BQh, into_residual=in_place, with_bias=early is None)
        wide = norm(between, y, before=early, after=late)
    hidden = _hidden(mlp, wide)
    del wide
    if following is not None and _sums_rows(mlp.down, following):
        return mlp.down.normed(hidden, y, following.weight, following.eps)
    down = partial(product, mlp.down, hidden, residual=y, into_residual=True)
    return down(with_bias=late is None), None


def _sums_rows(part: nn.Module, behind: Norm) -> TypeGuard[RowParallelLinear]:
    """Whether a product is summed over devices, which may norm the sum on the way."""
    return isinstance(part, RowParallelLinear) and not part._forward_pre_hooks and is_rms(behind)


def _normed_before(layer: DecoderLayer, x_BQh: Tensor, step: Step) -> Tensor:
    """Return what a layer's attention takes: the layer before may have made it."""
    y, normed = step.memo.pop(_NORMED, (None, None))
    if y is x_BQh and isinstance(normed, Tensor):
        return normed
    return norm(layer.attn_norm, x_BQh)


def _mlp_output(mlp: MLP | GatedMLP | SparseMLP, wide: Tensor) -> Tensor:
    """Return mlp(wide)."""
    if isinstance(mlp, SparseMLP):
        summed: Tensor = mlp(wide)
        return summed
    return product(mlp.down, _hidden(mlp, wide))


def _hidden(mlp: MLP | GatedMLP, wide: Tensor) -> Tensor:
    """Return what `down` takes."""
    if isinstance(mlp, MLP):
        return _activated(mlp, wide)
    gate, made = mlp.gate, product(mlp.wide, wide)
    if not gate.is_plain:
        return mlp.activated(made)
    return gated_mlp.gate_mul(made, gate.activation, limit=gate.limit, slope=gate.slope)


def _known_parts(
    layer: DecoderLayer,
) -> tuple[
    Attention | LatentAttention | RecurrentMixer | SideBySide | None,
    MLP | GatedMLP | SparseMLP | None,
]:
    """Return attention and MLP; refuse what the kernels do not know, as capabilities.py before.

    Whatever reaches a GPU unplanned stops here, in place of giving other text without a word.
    """
    part, mlp = layer.attention, layer.mlp
    attention = part.attention if isinstance(part, SideBySide) else part
    rotary = None if isinstance(attention, RecurrentMixer | None) else attention.rotary
    if rotary is not None and rotary.by_length and not rotary.is_dynamic:
        raise ValueError("a layer's rotary positions are of a kind that no GPU kernel computes yet")
    if layer.parallel_norms and not layer.adds_plainly:
        raise ValueError(
            "attention and MLP side by side have norms behind or factors, which no GPU runs"
        )
    return part, mlp


def _bias_for(between: Norm, part: Linear) -> Tensor | None:
    """Return the bias of a dense o or down that the norm between them adds, None without one."""
    fused = between.bias is not None and between.weight.numel() <= fused_layer_norm.MAX_COLUMNS
    return part.bias if fused and _dense(part) is not None else None


def _dense(part: nn.Module) -> Tensor | None:
    """Return the weight of a plain dense product, None of any other part.

    A watched linear (profiler/quantize/layer_walk.py) is called as a module.
    """
    if type(part) is not Linear or part._forward_pre_hooks:
        return None
    return part.weight.matrix


def _activated(mlp: MLP, wide: Tensor) -> Tensor:
    """Return the activation of up(x); cuBLAS adds a dense bias and applies ReLU as it stores."""
    weight, bias = _dense(mlp.up), mlp.up.bias
    if mlp.activation == "relu" and weight is not None and bias is not None:
        x_MK = wide.reshape(-1, wide.shape[-1])
        return torch._addmm_activation(bias, x_MK, weight.t()).view(*wide.shape[:-1], -1)
    return mlp.activated(product(mlp.up, wide))


def _last_tokens(step: Step, x_BQh: Tensor) -> Tensor:
    return step.last_valid(x_BQh)[:, None].contiguous()


def product(
    part: nn.Module,
    x: Tensor,
    *,
    residual: Tensor | None = None,
    into_residual: bool = False,
    with_bias: bool = True,
) -> Tensor:
    """Return part(x) + residual; where the product can add it, that costs no extra pass.

    `into_residual`: the sum may take the residual's place, which saves copying it. Without
    `with_bias` the bias of a dense part is left out.
    """
    if residual is not None and type(part) is Linear and not part._forward_pre_hooks:
        left_out = not with_bias and part.weight.matrix is not None
        bias = None if left_out else part.bias
        return part.weight.matmul(x, bias, residual, into_residual=into_residual)
    if residual is not None and isinstance(part, RowParallelLinear):
        summed: Tensor = part(x, residual)
        return summed
    y_plain: Tensor = part(x)
    return y_plain if residual is None else y_plain.add_(residual)


def attention(part: Attention, x_BQh: Tensor, index: int, step: Step, kv: KVCache) -> Tensor:
    """Return attention(q, k, v) [B, Q, H * D] of cache layer `index`, before the output product."""
    out_BQN = attend(part, product(part.qkv, x_BQh), index, step, kv)
    of_heads = part.gate_of_heads(x_BQh)
    if of_heads is not None:
        out_BQN.unflatten(-1, (part.heads, -1)).mul_(of_heads)
    return out_BQN


def attend(part: Attention, qkv_BQN: Tensor, index: int, step: Step, kv: KVCache) -> Tensor:
    """Return attention(q, k, v) of the product with qkv, times its gate."""
    batch, q_len, _ = qkv_BQN.shape
    qkv, gate = qkv_BQN.view(batch, q_len, -1, part.head_dim), None
    if part.gated:
        qkv, gate = qkv.split([part.heads + 2 * part.kv_heads, part.heads], dim=2)
    q, k, v, rotary = _made(part, qkv, step)
    if kv.pages is not None:
        out = _paged(part, rotary, (q, k, v), index, step, kv.pages)
    else:  # calibration
        if rotary is not None:
            q, k = fused_rope.rope(q, k, step.start_B, rotary.step_frequencies(step), rotary.factor)
        out = attend_fresh(kv, part, index, (q, k, v), step)
    out = out.reshape(batch, q_len, part.heads * part.head_dim)
    return out if gate is None else _gated(out, gate)


def _gated(out_BQN: Tensor, gate_BQHD: Tensor) -> Tensor:
    """Return attention times the sigmoid of its gate, in one launch."""
    out_TN, gate_TN = (x.flatten(0, 1).flatten(1) for x in (out_BQN, gate_BQHD))
    given: dict[str, Any] = {"groups": 1, "norm_first": False, "gate": "sigmoid"}
    return gated_norm(out_TN, gate_TN, None, 0.0, **given).view(out_BQN.shape)


def _made(part: Attention, qkv: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor, Rotary | None]:
    """Return q, k and v, and how q and k are still to be rotated; `Attention._made` is the twin.

    Norms of single heads without a weight leave it to the cache to rotate: rotation keeps lengths.
    """
    rotary = part.rotary
    if part.sharing.source is not None:
        q, k, v = part.with_shared(qkv, step)
        return part.grown(q, step), k, v, None
    if part.values_are_keys:
        qkv = part.with_values(qkv)
    q, k, v = qkv.split([part.heads, part.kv_heads, part.kv_heads], dim=2)
    if part.q_norm is not None and not part.late_norms:
        q, k = norm_heads(part, qkv)
    if part.limit:
        q, k, v = (x.clamp(-part.limit, part.limit) for x in (q, k, v))
    scaled = rotary is not None and part.unit_eps is not None and rotary.factor != 1.0
    if rotary is not None and (part.late_norms or part.sharing.read_by_others or scaled):
        q, k, rotary = rotary.rotate(q, step), rotary.rotate(k, step), None
    if part.late_norms:
        q, k = part.normed(q, k)
    if part.unit_eps is not None:
        q, k = unit_norm(q, part.unit_eps), unit_norm(k, part.unit_eps)
    if part.value_eps is not None:
        v = unit_norm(v, part.value_eps)
    if part.sharing.read_by_others:
        part.share(k, v, step)
    return part.grown(q, step), k, v, rotary


def _paged(
    part: Attention,
    rotary: Rotary | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    index: int,
    step: Step,
    kv: KVCache,
) -> Tensor:
    """Append to the pool of blocks, then attend to it; where keys are another layer's, attend."""
    if part.sharing.read_by_others:
        kv.keep_for_readers(index, step)
    attend_to = kv.attend if part.sharing.source is None else kv.attend_again
    rotation = None if rotary is None else rotary.rotation_of(step)
    return attend_to(index, AttentionInputs(*qkv, _scoring(part, step), rotation), step)


def _scoring(part: Attention, step: Step) -> Scoring:
    return Scoring(part.scale, part.alibi_slopes_H, rule_of(part.rule, step))


def rule_of(rule: ScoreRule, step: Step) -> ScoreRule:
    """Return what of a rule changes what a step computes: a window that no row fills does not."""
    if not (rule.is_explicit or 0 < rule.window < step.max_end):
        return EVERYTHING
    return rule


def attend_fresh(
    kv: KVCache, part: Attention, index: int, qkv: tuple[Tensor, Tensor, Tensor], step: Step
) -> Tensor:
    """Return attention [B, Q, H, D] of windows that no cache keeps."""
    return kv.attend(index, AttentionInputs(*qkv, _scoring(part, step)), step)


def attend_latents(
    part: LatentAttention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
) -> Tensor:
    """Append a step's latents, return attention [B, Q, H * V] before the output product."""
    if kv.pages is not None:
        return part.values(kv.attend(index, part.paged_inputs(x_BQh, step), step))
    out = kv.attend(index, part.inputs(x_BQh, step), step)  # calibration
    return part.values(out[..., : part.latent.kv_rank])
