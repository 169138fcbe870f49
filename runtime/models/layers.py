"""The parts decoder layers are wired from: attention, the layer itself, embedding and head.

Parts hold tensors and know nothing of files, families or stages. Linears are in linear.py, norms in
norms.py, rotary positions in rotary.py, MLPs in mlps.py and experts.py.

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule, Scoring
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.cache.attention import query_factors
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.latent_attention import Index, LatentAttention
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP, GatedSharedMLP, GateFunction, Xielu
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrent import RecurrentMixer
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.steps.step import Step


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which layer's keys and values a layer attends to; layers by their index in the model."""

    own: int = -1
    """The layer's own number."""
    source: int | None = None
    """Another layer, which made them."""
    read_by_others: bool = False


class Attention(nn.Module):
    """Fused qkv, optional q/k norms and rotary positions, attention through the cache, output."""

    def __init__(
        self,
        spec: ModelSpec,
        qkv: Linear,
        o: Linear,
        *,
        rotary: Rotary | None = None,
        alibi_slopes_H: Tensor | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rule: ScoreRule | None = None,
        sharing: Sharing | None = None,
        gate_Hh: Tensor | None = None,
    ) -> None:
        """`sharing`: whose keys and values it attends to, where they are not its own alone.

        `gate_Hh`: what makes a gate for each head.
        """
        super().__init__()
        self.qkv, self.called = qkv, spec.attention_input
        """What makes queries, and what that is called: keys and values may be made, too."""
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotary = rotary
        self.alibi_slopes_H = alibi_slopes_H
        self.rule = rule or EVERYTHING
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5 if spec.score_factor is None else spec.score_factor
        self.gated = spec.attention_gate
        """Whether qkv ends with a gate [H, D] of what attention gives."""
        self.gate_Hh = gate_Hh
        self.late_norms = spec.qk_norm_late
        """Whether queries and keys are normalised behind their rotation."""
        self.limit = spec.qkv_limit
        self.sharing = sharing or Sharing()
        self.values_are_keys = spec.value_is_key
        self.value_eps = spec.norm_eps if spec.value_norm else None
        rotated = rotary is not None
        self.unit_eps = spec.norm_eps if spec.qk_unit_norm and rotated else None
        self.growth = spec.query_growth
        if self.growth is not None and self.growth.unturned_only and rotated:
            self.growth = None

    @property
    def is_plain(self) -> bool:
        """Whether it makes queries, keys and values, of which the values stay as they are."""
        own = self.sharing == Sharing() and not self.values_are_keys
        return own and self.value_eps is None and self.unit_eps is None

    def grows(self, step: Step) -> bool:
        """Whether queries of a step grow with their position."""
        return self.growth is not None and self.growth.applies_to(step.max_end)

    def grown(self, q_BQHD: Tensor, step: Step) -> Tensor:
        """Return queries as their positions make them, where they grow with those."""
        if self.growth is None or not self.grows(step):
            return q_BQHD
        return q_BQHD * query_factors(step, self.growth, q_BQHD.dtype)

    def rule_of(self, step: Step) -> ScoreRule:
        """Return the rule of a step's scores: chunks do not count up to the first one's end."""
        rule = self.rule
        if rule.chunked and step.max_end <= rule.window:
            return EVERYTHING if rule.is_plain else replace(rule, window=0, chunked=False)
        return rule

    def scoring_of(self, step: Step) -> Scoring:
        """Return how a step's scores are made."""
        return Scoring(self.scale, self.alibi_slopes_H, self.rule_of(step))

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return o(attention(q, k, v)) [B, Q, h] of cache layer `layer`."""
        return self.o(self.read(x_BQh, layer, step, kv))

    def read(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return attention(q, k, v) [B, Q, H D], which the output matrix is multiplied with."""
        batch, q_len, _ = x_BQh.shape
        qkv, gate = self.qkv(x_BQh).view(batch, q_len, -1, self.head_dim), None
        if self.gated:
            qkv, gate = qkv.split([self.heads + 2 * self.kv_heads, self.heads], dim=2)
        q, k, v = self._made(qkv, step)
        q = self.grown(q, step)
        of_heads = self.gate_of_heads(x_BQh)
        del qkv, x_BQh
        if self.sharing.read_by_others:
            kv.keep_for_readers(layer, step)
        attend = kv.attend if self.sharing.source is None else kv.attend_again
        out_BQHD = attend(layer, AttentionInputs(q, k, v, self.scoring_of(step)), step)
        del q, k, v
        if gate is not None:
            out_BQHD = out_BQHD * gate.sigmoid()
        if of_heads is not None:
            out_BQHD = out_BQHD.mul_(of_heads)
        return out_BQHD.reshape(batch, q_len, self.heads * self.head_dim)

    def gate_of_heads(self, x_BQh: Tensor) -> Tensor | None:
        """Return what each head's output is multiplied by, [B, Q, H, 1], where it is gated so."""
        if self.gate_Hh is None:
            return None
        return functional.linear(x_BQh, self.gate_Hh).sigmoid_()[..., None]

    def _made(self, qkv_BQND: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised q, k and v with positions; k and v may be another layer's."""
        if self.is_plain:
            return self._positioned(qkv_BQND, step)
        if self.sharing.source is not None:
            return self.with_shared(qkv_BQND, step)
        if self.values_are_keys:
            qkv_BQND = self.with_values(qkv_BQND)
        q, k, v = self._positioned(qkv_BQND, step)
        if self.unit_eps is not None:
            q, k = unit_norm(q, self.unit_eps), unit_norm(k, self.unit_eps)
        if self.value_eps is not None:
            v = unit_norm(v, self.value_eps)
        if self.sharing.read_by_others:
            self.share(k, v, step)
        return q, k, v

    def with_shared(self, q_BQHD: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries with norms and positions, and the keys and values of another layer."""
        assert self.rotary is not None
        q = q_BQHD if self.q_norm is None else normed_heads(self.q_norm, q_BQHD)
        return self.rotary.rotate(q, step), *step.memo[f"keys of {self.sharing.source}"]

    def share(self, k_BQGD: Tensor, v_BQGD: Tensor, step: Step) -> None:
        """Leave a step's keys and values, as they are attended with, to layers that share them."""
        step.memo[f"keys of {self.sharing.own}"] = k_BQGD, v_BQGD

    def with_values(self, qk_BQND: Tensor) -> Tensor:
        """Return queries, keys and values of keys that are values, before norms and positions."""
        return torch.cat((qk_BQND, qk_BQND[:, :, self.heads :]), dim=2)

    def _positioned(self, qkv_BQND: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k with their norms and positions applied, and v."""
        split = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv_BQND.split(split, dim=2)
        normed = self.q_norm is not None and self.k_norm is not None
        if normed and not self.late_norms:
            q, k = self.normed(q, k)
        if self.limit:
            q, k, v = (x.clamp(-self.limit, self.limit) for x in (q, k, v))
        if self.rotary is not None and (self.limit or (normed and not self.late_norms)):
            q, k = self.rotary.rotate(q, step), self.rotary.rotate(k, step)
        elif self.rotary is not None:
            qk = self.rotary.rotate(qkv_BQND[:, :, : self.heads + self.kv_heads], step)
            q, k = qk.split(split[:2], dim=2)
        return (*self.normed(q, k), v) if normed and self.late_norms else (q, k, v)

    def normed(self, q_BQHD: Tensor, k_BQGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys by their norms."""
        assert self.q_norm is not None and self.k_norm is not None
        return normed_heads(self.q_norm, q_BQHD), normed_heads(self.k_norm, k_BQGD)


def unit_norm(x_BQND: Tensor, eps: float) -> Tensor:
    """Return heads normalised without a weight."""
    return functional.rms_norm(x_BQND.float(), x_BQND.shape[-1:], None, eps).to(x_BQND.dtype)


def normed_heads(norm: Norm, x_BQND: Tensor) -> Tensor:
    """Return queries or keys normalised, each head or, with a norm as wide, all at once."""
    if norm.shape[-1] == x_BQND.shape[-1]:
        return norm(x_BQND)
    return norm(x_BQND.flatten(2)).view(x_BQND.shape)


class SideBySide(nn.Module):
    """Attention and a recurrence on one input, added up, attention times a factor."""

    def __init__(self, attention: Attention, recurrent: RecurrentMixer, factor: float) -> None:
        super().__init__()
        self.attention = attention
        self.recurrent = recurrent
        self.factor = factor

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return [B, Q, h] of cache layer `layer`."""
        out: Tensor = self.recurrent(x_BQh, layer, step, kv)
        return out + self.attention(x_BQh, layer, step, kv) * self.factor


PER_LAYER = "inputs of layers"
"""What `Step.memo` calls the layers' own inputs [B, Q, layers of the model * P]."""
FOLLOWING = "following norm"
"""What it calls the norm before the layer behind, where several devices share a stage."""


class LayerTail(nn.Module):
    """What closes a layer: x += norm(out(act(gate(x)) * own input)); x *= a number.

    The layer's own input [B, Q, P] is made by the first stage (`PerLayerInputs`).
    """

    def __init__(
        self,
        index: int,
        activation: GateFunction,
        gate: Linear | None,
        out: Linear | None,
        norm: Norm | None,
        scalar_1: Tensor | None,
    ) -> None:
        """`gate`, `out` and `norm` together, or none of them."""
        super().__init__()
        self.index, self.activation = index, activation
        self.per_layer_gate = gate
        self.per_layer_out = out
        self.norm = norm
        self.scalar_1 = scalar_1

    def forward(self, x_BQh: Tensor, step: Step, *, last_only: bool = False) -> Tensor:
        """Return [B, Q, h], maybe in place of x; `last_only`: x has each row's last token alone."""
        if self.per_layer_gate is not None:
            x_BQh.add_(self.own_part(x_BQh, step, last_only=last_only))
        return x_BQh if self.scalar_1 is None else x_BQh.mul_(self.scalar_1)

    def own_part(self, x_BQh: Tensor, step: Step, *, last_only: bool = False) -> Tensor:
        """Return what the layer's own input adds to the residual stream, [B, Q, h]."""
        assert self.per_layer_gate is not None
        assert self.per_layer_out is not None and self.norm is not None
        gate = self.per_layer_gate(x_BQh)
        width = gate.shape[-1]
        own = step.memo[PER_LAYER][..., self.index * width : (self.index + 1) * width]
        own = step.last_valid(own)[:, None] if last_only else own
        return self.norm(self.per_layer_out(self.activation(gate, own.clone())))


@dataclass(frozen=True)
class StreamFactors:
    """What a residual stream that goes on from norms is multiplied by, and what is added to it."""

    mixer: tuple[float, float]
    mlp: tuple[float, float]


class DecoderLayer(nn.Module):
    """A decoder layer: x += attention(norm(x)); x += mlp(norm(x)), or one of the two.

    With norms behind attention and MLP, and a factor, x += factor * norm(attention(norm(x))), ...
    Side by side, x += attention(norm(x)) + mlp(norm(x)), of one norm or of two. With `stream`,
    n = norm(x); x = a n + b attention(n), and likewise the MLP.
    """

    def __init__(
        self,
        attn_norm: Norm,
        attention: Attention | LatentAttention | RecurrentMixer | SideBySide | None,
        mlp_norm: Norm,
        mlp: MLP | GatedMLP | SparseMLP | None,
        runner: LayerRunner,
        *,
        attn_out_norm: Norm | None = None,
        mlp_out_norm: Norm | None = None,
        residual_factor: float = 1.0,
        mlp_factor: float = 1.0,
        tail: LayerTail | None = None,
        parallel_norms: int = 0,
        stream: StreamFactors | None = None,
    ) -> None:
        """`parallel_norms`: norms of an attention and an MLP side by side, 1 or 2."""
        super().__init__()
        self.tail, self.stream = tail, stream
        self.parallel_norms = parallel_norms
        self.attn_norm, self.attention = attn_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attn_out_norm, self.mlp_out_norm = attn_out_norm, mlp_out_norm
        self.residual_factor, self.runner = residual_factor, runner
        self.mlp_factor = mlp_factor

    @property
    def adds_plainly(self) -> bool:
        """Whether attention and MLP are added to the residual stream as they come."""
        behind = self.attn_out_norm is not None or self.mlp_out_norm is not None
        factors = self.residual_factor == self.mlp_factor == 1.0
        return not behind and factors and self.tail is None and self.stream is None

    def added(self, y: Tensor, norm: Norm | None) -> Tensor:
        """Return what attention or MLP adds to the residual stream, in place of what it gave."""
        y = y if norm is None else norm(y)
        return y if self.residual_factor == 1.0 else y.mul_(self.residual_factor)

    def forward(
        self,
        x_BQh: Tensor,
        layer: int,
        step: Step,
        kv: KVCache,
        *,
        last_only: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Return a new residual stream [B, Q, h].

        `last_only`: only the last valid token of each row is needed: [B, 1, h] may be returned.
        `in_place`: the input may be overwritten.
        """
        return self.runner.decoder_layer(
            self, x_BQh, layer, step, kv, last_only=last_only, in_place=in_place
        )


def go_on(normed: Tensor, made: Tensor, factors: tuple[float, float]) -> Tensor:
    """Return what a residual stream is behind attention or an MLP, in place of what it gave."""
    carried, added = factors
    return made.mul_(added).add_(normed, alpha=carried)


def recurrence_of(layer: DecoderLayer) -> RecurrentMixer | None:
    """Return the part of a layer that keeps a recurrent state, if it has one."""
    part = layer.attention
    part = part.recurrent if isinstance(part, SideBySide) else part
    return part if isinstance(part, RecurrentMixer) else None


class LayerRunner(Protocol):
    """Who computes layers: torch's operators here, fused kernels of a backend elsewhere."""

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
        """Return the new residual stream of a layer (see `DecoderLayer.forward`)."""
        ...

    def all_layers(
        self, layers: Sequence[DecoderLayer], x_BQh: Tensor, step: Step, kv: KVCache
    ) -> Tensor | None:
        """Return the residual stream behind a stage's layers; None: they run one by one."""
        ...

    def attention(
        self, part: Attention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
    ) -> Tensor:
        """Return a layer's attention [B, Q, h] to its normed input, the output product included."""
        ...

    def norm(self, part: Norm, x: Tensor) -> Tensor:
        """Return x normalised."""
        ...

    def sparse_mlp(
        self,
        routing: Routing,
        experts: Iterable[MLP | GatedMLP],
        count: int,
        shared: MLP | GatedMLP | None,
    ) -> SparseMLP:
        """Return the mixture of `count` experts, each taken as it is made."""
        ...


class PlainLayers:
    """Torch's operators, one after the other: the CPU's way, and the twin of every other."""

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
        """Return the new residual stream; all tokens go on, the input stays as it was."""
        if layer.stream is not None:
            assert layer.attention is not None and layer.mlp is not None
            normed = layer.attn_norm(x_BQh)
            made = layer.attention(normed, index, step, kv)
            y = go_on(normed, made, layer.stream.mixer)
            normed = layer.mlp_norm(y)
            return go_on(normed, layer.mlp(normed), layer.stream.mlp)
        shared = None
        if layer.attention is None:
            y = x_BQh.clone()
        else:
            normed = layer.attn_norm(x_BQh)
            shared = normed if layer.parallel_norms == 1 else None
            attended = layer.attention(normed, index, step, kv)
            del normed
            y = layer.added(attended, layer.attn_out_norm)
            del attended
            y.add_(x_BQh)
        if layer.mlp is not None:
            other = x_BQh if layer.parallel_norms else y
            out = layer.mlp(layer.mlp_norm(other) if shared is None else shared)
            del shared
            out = out if layer.mlp_factor == 1.0 else out.mul_(layer.mlp_factor)
            y.add_(layer.added(out, layer.mlp_out_norm))
        return y if layer.tail is None else layer.tail(y, step)

    def all_layers(
        self, layers: Sequence[DecoderLayer], x_BQh: Tensor, step: Step, kv: KVCache
    ) -> Tensor | None:
        """Return None: layers run one by one."""
        return None

    def attention(
        self, part: Attention, x_BQh: Tensor, index: int, step: Step, kv: KVCache
    ) -> Tensor:
        """Return a layer's attention, the output product included."""
        attended: Tensor = part(x_BQh, index, step, kv)
        return attended

    def norm(self, part: Norm, x: Tensor) -> Tensor:
        """Return x normalised."""
        normed: Tensor = part(x)
        return normed

    def sparse_mlp(
        self,
        routing: Routing,
        experts: Iterable[MLP | GatedMLP],
        count: int,
        shared: MLP | GatedMLP | None,
    ) -> SparseMLP:
        """Return experts that run one after the other."""
        return SparseMLP(routing, list(experts), shared)


class Embedding(nn.Module):
    """Token embedding times a factor, learned positions (OPT stores two rows more), norm.

    The factor is rounded to the weights' dtype, as Gemma's was in training.
    """

    def __init__(
        self,
        tokens_Vh: Tensor,
        positions_Ph: Tensor | None = None,
        norm: Norm | None = None,
        *,
        factor: float = 1.0,
        per_layer: PerLayerInputs | None = None,
        streams: TokenStreams | None = None,
        offset: int = 2,
    ) -> None:
        """`offset`: rows of learned positions in front of that of position 0."""
        super().__init__()
        self.per_layer, self.streams = per_layer, streams
        self.tokens_Vh = tokens_Vh
        self.positions_Ph = positions_Ph
        self.norm = norm
        self.offset = offset
        self.factor = float(torch.tensor(factor, dtype=tokens_Vh.dtype))

    def forward(self, tokens_BQ: Tensor, step: Step) -> Tensor:
        """Return the residual stream [B, Q, h]."""
        x = functional.embedding(tokens_BQ, self.tokens_Vh)
        if self.factor != 1.0:
            x *= self.factor
        if self.positions_Ph is not None:
            last = self.positions_Ph.shape[0] - 1
            # Clamped for the padding of rows that end at the last position.
            rows_BQ = (step.positions_BQ + self.offset).clamp_(max=last)
            x += functional.embedding(rows_BQ, self.positions_Ph)
        x = x if self.norm is None else self.norm(x)
        if self.per_layer is not None:
            step.memo[PER_LAYER] = self.per_layer(tokens_BQ, x)
        return x if self.streams is None else self.streams.apart(x)


class TokenStreams(Protocol):
    """What makes several streams of a token, or one of several (streams.py)."""

    def apart(self, x: Tensor) -> Tensor:
        """Return [..., A * h] of [..., h]."""
        ...

    def together(self, x: Tensor) -> Tensor:
        """Return [..., h] of [..., A * h]."""
        ...


class PerLayerInputs(nn.Module):
    """The layers' own inputs: (norm(W x / sqrt(h)) + sqrt(P) table[token]) / sqrt(2), P channels.

    Tokens beyond the table have its first row.
    """

    def __init__(self, table_VW: Tensor, weight_Wh: Tensor, norm: Norm) -> None:
        """W = layers of the model * P."""
        super().__init__()
        self.table_VW = table_VW
        self.weight_Wh = weight_Wh
        self.norm = norm

    def forward(self, tokens_BQ: Tensor, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, W] of tokens and their embeddings."""
        width = self.norm.shape[0]
        factor = float(torch.tensor(width**0.5, dtype=self.table_VW.dtype))
        known_BQ = tokens_BQ.masked_fill(tokens_BQ >= len(self.table_VW), 0)
        made = functional.linear(x_BQh, self.weight_Wh).mul_(x_BQh.shape[-1] ** -0.5)
        made = self.norm(made.unflatten(-1, (-1, width))).flatten(-2)
        own = functional.embedding(known_BQ, self.table_VW) * factor
        return made.add_(own).mul_(2.0**-0.5)


@dataclass(frozen=True)
class HeldBytes:
    """What a part holds in memory."""

    key: int
    """The same of parts that share it."""
    nbytes: int


def held_weights(part: nn.Module) -> list[HeldBytes]:
    """Return what a part itself holds, the parts inside it left out."""
    holders = (Norm, Linear, Embedding, Routing, GatedSharedMLP, Xielu, Attention, LatentAttention)
    known = isinstance(part, (*holders, RecurrentMixer, PerLayerInputs, LayerTail, Index))
    if not known and not hasattr(part, "holds_weights"):
        return []
    if isinstance(part, Attention):
        own = (part.rule.sinks_H, part.gate_Hh)
        return [HeldBytes(id(held), held.nbytes) for held in own if held is not None]
    # Constants that a layer's place makes, a few numbers, no plan counts: as rotary frequencies.
    read = [held for name, held in vars(part).items() if not name.startswith("fixed_")]
    read += vars(part).get("weights") or ()
    tensors = [held for held in read if isinstance(held, Tensor)]
    found = [HeldBytes(id(tensor), tensor.nbytes) for tensor in tensors]
    if isinstance(part, Linear):
        weight = part.weight
        found.append(HeldBytes(id(next(iter(weight.tensors.values()))), weight.nbytes))
    return found


def nbytes_of(module: nn.Module, *, but: nn.Module | None = None) -> int:
    """Return the bytes of what a module holds and `but` does not, a shared matrix counted once."""
    mine, theirs = (
        {held.key: held.nbytes for part in each.modules() for held in held_weights(part)}
        for each in (module, nn.Module() if but is None else but)
    )
    return sum(mine[key] for key in mine.keys() - theirs.keys())


class Head(nn.Module):
    """Final norm and output matrix; logits times a factor, or capped; some tokens suppressed."""

    def __init__(
        self,
        norm: Norm,
        output: Linear,
        runner: LayerRunner,
        *,
        factor: float = 1.0,
        cap: float = 0.0,
        streams: TokenStreams | None = None,
        suppressed_N: Tensor | None = None,
    ) -> None:
        """`suppressed_N`: tokens that are never chosen."""
        super().__init__()
        self.streams, self.suppressed_N = streams, suppressed_N
        self.norm = norm
        self.output = output
        self.runner = runner
        self.factor, self.cap = factor, cap

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [..., V]."""
        x = x if self.streams is None else self.streams.together(x)
        logits: Tensor = self.output(self.runner.norm(self.norm, x))
        if self.factor != 1.0:
            logits.mul_(self.factor)
        logits = logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits
        return without(logits, self.suppressed_N)


def without(logits: Tensor, tokens_N: Tensor | None) -> Tensor:
    """Return logits [..., V] with the least number of their type for tokens that are suppressed."""
    if tokens_N is None:
        return logits
    return logits.index_fill_(-1, tokens_N, torch.finfo(logits.dtype).min)
