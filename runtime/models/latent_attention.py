"""Multi-head latent attention (DeepSeek-V2): a token caches one small vector for all heads.

    c = norm(A x)[:L], r = rotate(A x)[L:]        cached, L + P values a token, one "head"
    q = B norm(C x) or B x, per head (n, p)     n: without positions, p: with rotary ones, if any
    score = n . (K c) + p . r = (K^T n) . c + p . r
    out   = V sum_t a_t c_t                     K, V [H, ., L]: the halves of kv_b

So queries go through K^T once and meet the cache as it is: attention of one key/value head of
L + P channels, whose values are its keys. kv_b is never quantised.

Legend: B rows, Q new tokens, h hidden, H query heads, L kv_rank, P rope_dim, N nope_dim, V v_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.families.common.spec_values import Indexer
from llmpq.kernels.kv.reference import (
    EVERYTHING,
    ChosenKeys,
    IndexQueries,
    ScoreRule,
    Scoring,
)
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.cache.attention import query_factors
from llmpq.runtime.cache.kv_cache import AttentionInputs, KVCache
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.models.rotary import Rotary
from llmpq.runtime.steps.step import Step


class Index(nn.Module):
    """Queries, keys and head weights by which the tokens are chosen (DeepSeek-V3.2)."""

    def __init__(
        self, form: Indexer, q: Linear, key_Ih: Tensor, norm: Norm, weights_Hh: Tensor
    ) -> None:
        """I channels of a key; `q` multiplies the queries' small vector."""
        super().__init__()
        self.form = form
        self.q = q
        self.key_Ih = key_Ih
        self.norm = norm
        self.weights_Hh = weights_Hh

    @property
    def is_watched(self) -> bool:
        """Whether calibration looks at what `q` is given, be there few tokens to choose from."""
        return bool(self.q._forward_pre_hooks)

    def queries(self, small_BQR: Tensor) -> Tensor:
        """Return [B, Q, heads, I], over the root of I, not yet rotated."""
        made = self.q(small_BQR).unflatten(-1, (self.form.heads, self.form.dim))
        return made * self.form.dim**-0.5

    def keys(self, x_BQh: Tensor) -> Tensor:
        """Return [B, Q, 1, I], not yet rotated."""
        normed: Tensor = self.norm(functional.linear(x_BQh, self.key_Ih))
        return normed[:, :, None]

    def weights(self, x_BQh: Tensor) -> Tensor:
        """Return the weights of heads [B, Q, heads]."""
        return functional.linear(x_BQh, self.weights_Hh) * self.form.heads**-0.5


class LatentAttention(nn.Module):
    """Queries against the latents of all tokens so far, then the output matrix."""

    def __init__(
        self,
        spec: ModelSpec,
        queries: tuple[Linear, Norm, Linear] | Linear,
        kv_a: Linear,
        kv_norm: Norm,
        kv_b: Tensor,
        o: Linear,
        rotary: Rotary | None,
        index: Index | None = None,
    ) -> None:
        """`queries`: one matrix, or the small vector's matrix, its norm and the second matrix.

        `rotary`: None where no channel has positions. `index`: what chooses the tokens that are
        attended to.
        """
        super().__init__()
        assert spec.latent is not None and spec.score_factor is not None
        self.growth = spec.query_growth
        self.latent = spec.latent
        self.heads = spec.heads
        self.scale = spec.score_factor
        self.q: Linear | None = None
        if isinstance(queries, Linear):
            self.q = queries
        else:
            self.q_a, self.q_norm, self.q_b = queries
        self.kv_a = kv_a
        self.kv_norm = kv_norm
        self.kv_b = kv_b
        self.o = o
        self.rotary, self.index = rotary, index

    def forward(self, x_BQh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return o(attention) [B, Q, h] of cache layer `layer`."""
        inputs = self.inputs(x_BQh, step)
        del x_BQh
        out = kv.attend(layer, inputs, step)
        del inputs
        return self.o(self.values(out[..., : self.latent.kv_rank]))

    def inputs(self, x_BQh: Tensor, step: Step) -> AttentionInputs:
        """Return what a cache attends with; an indexer's queries as further heads."""
        small = self._small(x_BQh)
        q, cached = self._queries(small, step), self.cached(x_BQh, step)
        index, rule = self.index, EVERYTHING
        if index is not None:
            q = functional.pad(q, (0, index.form.dim))
        if index is not None and (step.max_end > index.form.topk or index.is_watched):
            own = functional.pad(self._rotated(index.queries(small), step), (self.latent.dim, 0))
            own[..., 0] = index.weights(x_BQh)
            q = torch.cat((q, own), dim=2)
            rule = ScoreRule(chosen=ChosenKeys(index.form.heads, index.form.topk, index.form.dim))
        return AttentionInputs(q, cached, cached, Scoring(self.scale, rule=rule))

    def paged_inputs(self, x_BQh: Tensor, step: Step) -> AttentionInputs:
        """Return what a pool of a GPU attends with; it is asked to choose among more than topk."""
        small = self._small(x_BQh)
        q, cached = self._queries(small, step), self.cached(x_BQh, step)
        index, chooses = self.index, None
        if index is not None and step.max_end > index.form.topk:
            made, weights = self._rotated(index.queries(small), step), index.weights(x_BQh)
            chooses = IndexQueries(made[0], weights[0], index.form.topk)
        return AttentionInputs(q, cached, cached, Scoring(self.scale), index=chooses)

    def _small(self, x_BQh: Tensor) -> Tensor:
        """Return what queries are made of: their small vector, or what is given."""
        return x_BQh if self.q is not None else self.q_norm(self.q_a(x_BQh))

    def _queries(self, small: Tensor, step: Step) -> Tensor:
        """Return the queries that meet latents, [B, Q, H, L + P]."""
        batch, q_len, _ = small.shape
        made = (self.q_b if self.q is None else self.q)(small)
        q = made.view(batch, q_len, self.heads, self.latent.q_head_dim)
        plain, rope = q.split([self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        absorbed_BQHL = torch.einsum("bqhn,hnl->bqhl", plain, self._halves()[0])
        made = torch.cat((absorbed_BQHL, self._rotated(rope, step)), dim=-1)
        if self.growth is None or not self.growth.applies_to(step.max_end):
            return made
        return made.mul_(query_factors(step, self.growth, made.dtype))

    def _rotated(self, x_BQND: Tensor, step: Step) -> Tensor:
        return x_BQND if self.rotary is None else self.rotary.rotate(x_BQND, step)

    def values(self, summed_BQHL: Tensor) -> Tensor:
        """Return what the output matrix takes, [B, Q, H * V], of sums of latents."""
        made = torch.einsum("bqhl,hvl->bqhv", summed_BQHL, self._halves()[1])
        return made.flatten(2)

    def cached(self, x_BQh: Tensor, step: Step) -> Tensor:
        """Return what a token caches, [B, Q, 1, L + P], and the indexer's key behind it."""
        made = self.kv_a(x_BQh)
        latent, rope = made.split([self.latent.kv_rank, self.latent.rope_dim], dim=-1)
        parts = [self.kv_norm(latent)[:, :, None], self._rotated(rope[:, :, None], step)]
        if self.index is not None:
            parts.append(self._rotated(self.index.keys(x_BQh), step))
        return torch.cat(parts, dim=-1)

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Return the matrices of keys [H, N, L] and of values [H, V, L]."""
        by_head = self.kv_b.view(self.heads, -1, self.latent.kv_rank)
        keys, values = by_head.split([self.latent.nope_dim, self.latent.v_dim], dim=1)
        return keys, values
