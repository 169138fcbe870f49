"""How the parts of a model go together: what its spec says, whatever family it is of.

    layer   x += attention(norm(x)); x += mlp(norm(x))   norms, biases, activation by the spec
            x += attention(norm(x)) + mlp(norm(x))       side by side
rotary, ALiBi or learned positions; norms of query and key heads; gated MLPs; experts; latents
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.kv.reference import ScoreRule
from llmpq.models.model_spec import SHARED, ModelSpec
from llmpq.models.tensor_parallel import Member
from llmpq.runtime.cache.attention import alibi_slopes
from llmpq.runtime.models.experts import LatentMixture, MixtureBeside, Routing, SparseMLP
from llmpq.runtime.models.latent_attention import Index, LatentAttention
from llmpq.runtime.models.layer_tensors import LayerTensors
from llmpq.runtime.models.layers import (
    Attention,
    DecoderLayer,
    Embedding,
    Head,
    LayerRunner,
    LayerTail,
    PerLayerInputs,
    PlainLayers,
    Sharing,
    SideBySide,
    StreamFactors,
)
from llmpq.runtime.models.linear import Linear, Reduce, RowParallelLinear
from llmpq.runtime.models.mlps import (
    MLP,
    XIELU,
    GatedMLP,
    GatedSharedMLP,
    GateFunction,
    Xielu,
)
from llmpq.runtime.models.norms import NoNorm, Norm
from llmpq.runtime.models.recurrent import RecurrentMixer, lightning_decays
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.models.streams import Mixing, StreamLayer, Streams


@dataclass(frozen=True)
class Split:
    """How a device shares layers with others of its stage."""

    member: Member
    reduce: Reduce


INDEX_NORM_EPS = 1e-6
"""What the norm of an indexer's keys adds, whatever the model's norms do."""


class Wiring:
    """Wiring of one model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        runner: LayerRunner | None = None,
        *,
        split: Split | None = None,
    ) -> None:
        """`runner`: who computes the layers; torch's operators by default.

        `split`: where several devices share the layers, of which `spec` is what this one has.
        """
        self._spec, self._runner, self.split = spec, runner or PlainLayers(), split
        self._rotary, self._window_rotary = _rotaries(spec, device)
        self._slopes_H = None
        if spec.positions == "alibi":
            whole = alibi_slopes(spec.heads if split is None else split.member.spec.heads)
            own = None if split is None else split.member.heads
            self._slopes_H = (whole if own is None else whole[own.start : own.stop]).to(device)

    def embedding(self, parts: LayerTensors) -> Embedding:
        """Wire the first stage's embedding."""
        learned = self._spec.positions == "learned"
        return Embedding(
            parts.tensor("tokens.weight"),
            parts.tensor("positions.weight") if learned else None,
            self._norm(parts, "norm") if self._spec.embedding_norm else None,
            factor=self._spec.embedding_factor,
            per_layer=self._per_layer_inputs(parts),
            streams=self._streams(parts, "stream_in"),
            offset=self._spec.position_offset,
        )

    def _streams(self, parts: LayerTensors, name: str) -> Streams | None:
        """Return the matrices of the further residual streams of AltUp (Gemma 3n)."""
        form = self._spec.altup
        if form is None:
            return None
        return Streams([parts.tensor(f"{name}.{i}.weight") for i in range(1, form.streams)])

    def _per_layer_inputs(self, parts: LayerTensors) -> PerLayerInputs | None:
        """Return what makes each layer's own input of a token (`LayerTail`)."""
        if not self._spec.per_layer_dim:
            return None
        table, weight = (parts.tensor(f"per_layer{part}.weight") for part in ("", "_in"))
        return PerLayerInputs(table, weight, parts.norm("per_layer_norm"))

    def layer(self, parts: LayerTensors, index: int) -> DecoderLayer:
        """Wire decoder layer `index`, counted over the whole model."""
        spec = self._spec.of_layer(index)
        norms = {name: self._norm(parts, name) for name in spec.layer_norms}
        kind = DecoderLayer if spec.altup is None else StreamLayer
        layer = kind(
            attn_norm=norms.get("attn_norm", NoNorm()),
            attention=self._mixer(spec, parts, index),
            mlp_norm=NoNorm() if spec.mixture_beside else norms.get("mlp_norm", NoNorm()),
            mlp=self._mlp(spec, parts) if spec.has_mlp else None,
            runner=self._runner,
            attn_out_norm=norms.get("attn_out_norm"),
            mlp_out_norm=norms.get("mlp_out_norm"),
            residual_factor=spec.residual_factor,
            mlp_factor=spec.mlp_factor,
            tail=self._tail(spec, parts, index),
            parallel_norms=spec.parallel_norms,
            stream=_stream_factors(spec),
        )
        if isinstance(layer, StreamLayer):
            assert spec.altup is not None
            names = ("router.weight", "predict.weight", "correct.weight", "scale")
            router, predict, correct, scale = (parts.tensor(f"altup.{name}") for name in names)
            left, right = (parts.tensor(f"laurel.{side}.weight") for side in ("left", "right"))
            mixing = Mixing(
                spec.altup, norms["altup_norm"], router, predict, correct, scale, (left, right)
            )
            return layer.with_mixing(mixing, norms["laurel_norm"])
        return layer

    @staticmethod
    def _tail(spec: ModelSpec, parts: LayerTensors, index: int) -> LayerTail | None:
        if not spec.per_layer_dim and not spec.layer_scalar:
            return None
        own = spec.per_layer_dim > 0
        return LayerTail(
            index,
            GateFunction(spec.activation),
            parts.linear("per_layer_gate") if own else None,
            parts.linear("per_layer_out") if own else None,
            parts.norm("per_layer_out_norm") if own else None,
            parts.tensor("scalar") if spec.layer_scalar else None,
        )

    def _summed(self, part: Linear, *, cut: bool) -> Linear:
        """Return the last linear of attention or an MLP; where that is cut, with an all-reduce."""
        if self.split is None or not cut:
            return part
        return RowParallelLinear(part.weight, part.bias, self.split.reduce)

    @property
    def _cuts_attention(self) -> bool:
        return self.split is not None and self.split.member.heads is not None

    @property
    def _cuts_mlps(self) -> bool:
        return self.split is not None and self.split.member.cuts_mlps

    def _norm(self, parts: LayerTensors, name: str) -> Norm:
        """Return a norm over the hidden size."""
        return parts.norm(name, centred=self._spec.norm == "layernorm")

    def _mixer(
        self, spec: ModelSpec, parts: LayerTensors, index: int
    ) -> Attention | LatentAttention | RecurrentMixer | SideBySide | None:
        """Wire what mixes a layer's tokens: attention, a recurrence, both or nothing."""
        if spec.mixer == "none":
            return None
        if spec.mixer == "recurrent":
            return self._recurrent(parts, index)
        if spec.mixer == "both":
            attention = self._attention(parts, index)
            return SideBySide(attention, self._recurrent(parts, index), spec.attention_factor)
        if spec.latent:
            return self._latent_attention(parts)
        return self._attention(parts, index)

    def _mlp(self, spec: ModelSpec, parts: LayerTensors) -> MLP | GatedMLP | SparseMLP:
        """Wire a layer's MLP or mixture of experts."""
        if not spec.experts:
            return self._alone(_dense_mlp(spec, parts, ""))
        rule = spec.router
        routing = Routing(
            parts.tensor("router.weight"),
            spec.experts_per_token,
            rule,
            bias_E=parts.tensor("router.bias") if rule.bias else None,
            correction_E=parts.float32("router.correction") if rule.correction else None,
            scale_h=parts.tensor("router.scale") if rule.normed else None,
            norm_eps=spec.norm_eps,
            expert_scale_E=parts.tensor("router.expert_scale") if rule.expert_scale else None,
        )
        owners = list(spec.mlps())
        experts = (_dense_mlp(spec, parts, owner) for owner in owners)
        shared = _dense_mlp(spec, parts, SHARED) if spec.shared_ffn else None
        if spec.mixture_beside:
            assert shared is not None
            names = ("mlp_norm", "shared_out_norm", "experts_norm", "experts_out_norm")
            before, behind, to_experts, of_experts = (parts.norm(name) for name in names)
            norms = (before, behind, to_experts, of_experts)
            mixture = self._mixture(routing, experts, len(owners), None)
            return MixtureBeside(mixture, self._alone(shared), norms)
        if spec.latent_experts:
            around = parts.linear("latent_in"), parts.linear("latent_out")
            mixture = self._mixture(routing, experts, len(owners), None)
            return LatentMixture(mixture, None if shared is None else self._alone(shared), *around)
        return self._mixture(routing, experts, len(owners), shared)

    def _alone(self, mlp: MLP | GatedMLP) -> MLP | GatedMLP:
        """Return an MLP whose own output is summed over devices, not together with experts'."""
        mlp.down = self._summed(mlp.down, cut=self._cuts_mlps)
        return mlp

    def _mixture(
        self,
        routing: Routing,
        experts: Iterable[MLP | GatedMLP],
        count: int,
        shared: MLP | GatedMLP | None,
    ) -> SparseMLP:
        """Return a mixture of experts; where they are cut, one all-reduce is behind all of them."""
        mixture = self._runner.sparse_mlp(routing, experts, count, shared)
        if self.split is not None and self._cuts_mlps:
            mixture.reduce = self.split.reduce
        return mixture

    def head(self, parts: LayerTensors) -> Head:
        """Wire the last stage's norm and output matrix."""
        suppressed = self._spec.suppressed
        return Head(
            self._norm(parts, "norm"),
            parts.linear("output"),
            self._runner,
            factor=self._spec.logit_factor,
            cap=self._spec.logit_cap,
            streams=self._streams(parts, "stream_out"),
            suppressed_N=torch.tensor(suppressed, device=parts.device) if suppressed else None,
        )

    def _attention(self, parts: LayerTensors, index: int) -> Attention:
        spec = self._spec.of_layer(index)
        window = spec.windows[index] if spec.windows else 0
        rule = None
        if window or spec.score_cap or spec.sinks:
            sinks_H = parts.tensor("sinks") if spec.sinks else None
            chunked = spec.chunked_windows and window > 0
            rule = ScoreRule(window, spec.score_cap, sinks_H, chunked)
        rotary = self._window_rotary if window else self._rotary
        return Attention(
            spec,
            parts.linear(spec.attention_input),
            self._summed(parts.linear("o"), cut=self._cuts_attention),
            rotary=None if index in spec.without_positions else rotary,
            alibi_slopes_H=self._slopes_H,
            q_norm=self._head_norm(spec, parts, "q_norm"),
            k_norm=None if spec.reads_kv else self._head_norm(spec, parts, "k_norm"),
            rule=rule,
            sharing=self._sharing(index),
            gate_Hh=parts.tensor("head_gate.weight") if spec.head_gate else None,
        )

    @staticmethod
    def _head_norm(spec: ModelSpec, parts: LayerTensors, name: str) -> Norm | None:
        if not spec.qk_norm:
            return None
        of_each = spec.head_dim if spec.qk_norm_apart else 0
        return parts.norm(name, centred=spec.qk_norm_centred, of_each=of_each)

    def _sharing(self, index: int) -> Sharing:
        """Return whose keys and values a layer reads, and whether others read its own."""
        sources = self._spec.kv_sources
        source = self._spec.kv_source(index)
        if source != index:
            return Sharing(own=index, source=source)
        if sources.count(index) > 1:
            return Sharing(own=index, read_by_others=True)
        return Sharing()

    def _recurrent(self, parts: LayerTensors, index: int) -> RecurrentMixer:
        form = self._spec.recurrent
        assert form is not None
        normed = "mixer_norm.weight" in parts.tensors
        fixed = None
        if form.kind == "lightning":
            fixed = lightning_decays(form.heads, index, self._spec.num_layers)
        return RecurrentMixer(
            form,
            parts.linear("mixer_in"),
            parts.linear("mixer_out"),
            _taps_apart(parts.tensor("conv.weight")) if form.taps > 1 else None,
            parts.optional("conv.bias"),
            decay_H=parts.optional("decay"),
            step_bias_H=parts.optional("step_bias"),
            step_weight=parts.optional("step.weight"),
            skip_H=parts.optional("skip"),
            norm=parts.norm("mixer_norm", eps=form.norm_eps) if normed else None,
            decay_weight=parts.optional("mixer_decay.weight"),
            gate_weight=parts.optional("mixer_gate.weight"),
            fixed_decay_H=None if fixed is None else torch.tensor(fixed, device=parts.device),
        )

    def _latent_attention(self, parts: LayerTensors) -> LatentAttention:
        spec = self._spec
        assert spec.latent is not None
        small = spec.latent.q_rank > 0
        return LatentAttention(
            spec,
            (parts.linear("q_a"), parts.norm("q_norm"), parts.linear("q_b"))
            if small
            else parts.linear("q"),
            parts.linear("kv_a"),
            parts.norm("kv_norm"),
            parts.tensor("kv_b.weight"),
            self._summed(parts.linear("o"), cut=self._cuts_attention),
            self._rotary,
            self._index(parts),
        )

    def _index(self, parts: LayerTensors) -> Index | None:
        """Wire the indexer, which chooses the keys that latent attention sees."""
        form = self._spec.indexer
        if form is None:
            return None
        weight, bias = (parts.tensor(f"index_norm.{kind}") for kind in ("weight", "bias"))
        norm = Norm(weight, bias, INDEX_NORM_EPS)
        key, weights = (parts.tensor(f"index_{name}.weight") for name in ("k", "weights"))
        return Index(form, parts.linear("index_q"), key, norm, weights)


def _stream_factors(spec: ModelSpec) -> StreamFactors | None:
    """Return how the residual stream of a layer goes on from its norms, where it does."""
    form = spec.normed_stream
    if form is None:
        return None
    return StreamFactors(form.recurrent if spec.mixer == "recurrent" else form.attention, form.mlp)


def _taps_apart(weight_C1K: Tensor) -> Tensor:
    """Return a convolution's weights as its device reads them best: on GPUs tap by tap."""
    if not weight_C1K.is_cuda:
        return weight_C1K
    return weight_C1K.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def _rotaries(spec: ModelSpec, device: torch.device) -> tuple[Rotary | None, Rotary | None]:
    """Return the rotary positions of layers that see all tokens, and of those with a window."""
    if spec.positions != "rotary":
        return None, None
    assert spec.rope_theta is not None
    rotary_dim = spec.head_dim if spec.latent is None else spec.latent.rope_dim
    rotary_dim = spec.rotary_dim or rotary_dim
    wide = spec.global_head_dim or rotary_dim
    rotary = Rotary(wide, spec.rope_theta, spec.rope_scaling, device)
    if spec.window_rope_theta is None:
        return rotary, rotary
    return rotary, Rotary(rotary_dim, spec.window_rope_theta, None, device, name=" of windows")


def _gate_function(spec: ModelSpec) -> GateFunction:
    return GateFunction(
        spec.activation,
        spec.activation_limit,
        spec.activation_slope,
        spec.gate_factor,
        spec.gate_sparsity,
    )


def _dense_mlp(spec: ModelSpec, parts: LayerTensors, owner: str) -> MLP | GatedMLP:
    down = parts.linear(f"{owner}down")
    if spec.gated:
        gate = _gate_function(spec)
        if owner == SHARED and spec.shared_gate:
            token_gate = parts.tensor("shared_gate.weight")
            return GatedSharedMLP(parts.linear(f"{owner}gate_up"), down, gate, token_gate)
        return GatedMLP(parts.linear(f"{owner}gate_up"), down, gate)
    xielu = None
    if spec.activation == XIELU:
        xielu = Xielu(parts.tensor("xielu.positive"), parts.tensor("xielu.negative"))
    return MLP(parts.linear(f"{owner}up"), down, spec.activation, xielu)
