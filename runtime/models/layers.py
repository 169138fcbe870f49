"""The parts decoder layers are wired from: attention, the layer itself, embedding and head.

Parts hold tensors and know nothing of files, families or stages. Linears are in linear.py, norms in
norms.py, rotary positions in rotary.py, MLPs in mlps.py and experts.py.

Legend: B rows, Q new tokens, h hidden, H query heads, G key/value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.kv.reference import ScoreRule
from llmpq.model_spec import ModelSpec
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.latent_attention import LatentAttention
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP, GatedSharedMLP, Xielu
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.recurrent import RecurrentMixer
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.step import Step


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
    ) -> None:
        super().__init__()
        self.qkv, self.o, self.q_norm, self.k_norm = qkv, o, q_norm, k_norm
        self.rotary, self.alibi_slopes_H, self.rule = rotary, alibi_slopes_H, rule
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5 if spec.score_factor is None else spec.score_factor
        self.gated = spec.attention_gate
        """Whether qkv ends with a gate [H, D] of what attention gives."""
        self.late_norms = spec.qk_norm_late
        """Whether queries and keys are normalised behind their rotation."""
        self.limit = spec.qkv_limit

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return o(attention(q, k, v)) [B, Q, h] of cache layer `layer`."""
        batch, q_len, _ = x_BQh.shape
        qkv, gate = self.qkv(x_BQh).view(batch, q_len, -1, self.head_dim), None
        if self.gated:
            qkv, gate = qkv.split([self.heads + 2 * self.kv_heads, self.heads], dim=2)
        q, k, v = self._positioned(qkv, step)
        del qkv, x_BQh
        out_BQHD = attend_by_rule(
            kv, layer, q, k, v, step, self.scale, self.alibi_slopes_H, self.rule
        )
        del q, k, v
        if gate is not None:
            out_BQHD = out_BQHD * gate.sigmoid()
        return self.o(out_BQHD.reshape(batch, q_len, self.heads * self.head_dim))

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


def normed_heads(norm: Norm, x_BQND: Tensor) -> Tensor:
    """Return queries or keys normalised, each head or, with a norm as wide, all at once."""
    if norm.shape[-1] == x_BQND.shape[-1]:
        return norm(x_BQND)
    return norm(x_BQND.flatten(2)).view(x_BQND.shape)


def attend_by_rule(
    kv: KVCache,
    layer: int,
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    step: Step,
    scale: float,
    alibi_slopes_H: Tensor | None,
    rule: ScoreRule | None,
) -> Tensor:
    """Attend through a cache; only one that knows rules gets one (llmpq/capabilities.py)."""
    options: dict[str, Any] = {} if rule is None else {"rule": rule}
    return kv.attend(
        layer, q_BQHD, k_BQGD, v_BQGD, step, scale=scale, alibi_slopes_H=alibi_slopes_H, **options
    )


class SideBySide(nn.Module):
    """Attention and a recurrence on one input, added up, attention times a factor."""

    def __init__(self, attention: Attention, recurrent: RecurrentMixer, factor: float) -> None:
        super().__init__()
        self.attention, self.recurrent, self.factor = attention, recurrent, factor

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return [B, Q, h] of cache layer `layer`."""
        out: Tensor = self.recurrent(x_BQh, layer, step, kv)
        return out + self.attention(x_BQh, layer, step, kv) * self.factor


class DecoderLayer(nn.Module):
    """A decoder layer: x += attention(norm(x)); x += mlp(norm(x)), or one of the two.

    With norms behind attention and MLP, and a factor, x += factor * norm(attention(norm(x))), ...
    Side by side, x += attention(norm(x)) + mlp(norm(x)), of one norm or of two.
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
        parallel_norms: int = 0,
    ) -> None:
        """`parallel_norms`: norms of an attention and an MLP side by side, 1 or 2."""
        super().__init__()
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
        return not behind and self.residual_factor == self.mlp_factor == 1.0

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

        `last_only`: nobody reads but the last valid token of each row, [B, 1, h] will do.
        `in_place`: nobody reads the input again, it need not be left as it was.
        """
        return self.runner.decoder_layer(
            self, x_BQh, layer, step, kv, last_only=last_only, in_place=in_place
        )


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
        if layer.mlp is None:
            return y
        given = layer.mlp_norm(x_BQh if layer.parallel_norms else y) if shared is None else shared
        del shared
        out = layer.mlp(given)
        out = out if layer.mlp_factor == 1.0 else out.mul_(layer.mlp_factor)
        return y.add_(layer.added(out, layer.mlp_out_norm))

    def all_layers(
        self, layers: Sequence[DecoderLayer], x_BQh: Tensor, step: Step, kv: KVCache
    ) -> Tensor | None:
        """Return None: layers run one by one."""
        return None

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
        offset: int = 2,
    ) -> None:
        """`offset`: rows of learned positions in front of that of position 0."""
        super().__init__()
        self.tokens_Vh, self.positions_Ph, self.norm = tokens_Vh, positions_Ph, norm
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
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True)
class HeldBytes:
    """What a part holds in memory."""

    key: int
    """The same of parts that share it."""
    nbytes: int


def held_weights(part: nn.Module) -> list[HeldBytes]:
    """Return what a part itself holds, the parts inside it left out."""
    holders = (Norm, Linear, Embedding, Routing, GatedSharedMLP, Xielu, Attention, LatentAttention)
    if not isinstance(part, (*holders, RecurrentMixer)):
        return []
    if isinstance(part, Attention):
        sinks = None if part.rule is None else part.rule.sinks_H
        return [] if sinks is None else [HeldBytes(id(sinks), sinks.nbytes)]
    tensors = [held for held in vars(part).values() if isinstance(held, Tensor)]
    found = [HeldBytes(id(tensor), tensor.nbytes) for tensor in tensors]
    if isinstance(part, Linear):
        weight = part.weight
        found.append(HeldBytes(id(next(iter(weight.tensors.values()))), weight.nbytes))
    return found


class Head(nn.Module):
    """Final norm and output matrix; logits times a factor, or capped."""

    def __init__(
        self,
        norm: Norm,
        output: Linear,
        runner: LayerRunner,
        *,
        factor: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm, self.output, self.runner = norm, output, runner
        self.factor, self.cap = factor, cap

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [..., V]."""
        logits: Tensor = self.output(self.runner.norm(self.norm, x))
        if self.factor != 1.0:
            logits.mul_(self.factor)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits
