"""Alternating updates (AltUp): a token has several streams, of which a layer works on one.

    s = streams + streams C(x_a)                      what a layer would make of all of them
    y = the layer of s_a;  s_i += (1 + c_i(y)) (y - s_a)
    s_i += norm(out(act(gate(scale s_a)) * the layer's own input)) for i > 0
    C, c: small matrices of tanh(W norm(x) / h)

A layer adds LAuReL, norm(R L x) + x of its normed input, to what attention gives, over sqrt(2). The
embedding is the first stream; the others are matrices of it, as large as it is. In the end they are
brought back the same way, and their mean goes to the head.

Legend: B rows, Q new tokens, A streams, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.families.common.spec_values import AltUp
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.layers import Attention, DecoderLayer, LayerTail
from llmpq.runtime.models.norms import Norm
from llmpq.runtime.steps.step import Step

LEAST_SQUARE = 1e-5
"""Streams whose mean square is below this are not made larger for it."""


class Streams(nn.Module):
    """Matrices that make streams of one, or bring them back, as large as the first."""

    holds_weights = True

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights`: [h, h] of each stream but the first."""
        super().__init__()
        self.weights = tuple(weights)

    def apart(self, x: Tensor) -> Tensor:
        """Return [..., A * h] of [..., h]."""
        found = [x, *(self._as_large(functional.linear(x, w), x) for w in self.weights)]
        return torch.cat(found, dim=-1)

    def together(self, x: Tensor) -> Tensor:
        """Return [..., h] of [..., A * h]."""
        first, *others = x.chunk(1 + len(self.weights), dim=-1)
        found = [first]
        for stream, weight in zip(others, self.weights, strict=True):
            found.append(self._as_large(functional.linear(stream, weight), first))
        return torch.stack(found).mean(dim=0)

    @staticmethod
    def _as_large(x: Tensor, like: Tensor) -> Tensor:
        wanted = like.square().mean(dim=-1, keepdim=True) ** 0.5
        own = x.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
        return x * wanted / own


class Mixing(nn.Module):
    """The small matrices of a layer that mix its streams, and LAuReL's."""

    holds_weights = True

    def __init__(
        self,
        form: AltUp,
        norm: Norm,
        router_Ah: Tensor,
        predict_CA: Tensor,
        correct_AA: Tensor,
        scale_h: Tensor,
        laurel: tuple[Tensor, Tensor],
    ) -> None:
        """`predict_CA`: C = A * A; `laurel`: [r, h] and [h, r]."""
        super().__init__()
        self.form = form
        self.norm = norm
        self.router_Ah = router_Ah
        self.predict_CA = predict_CA
        self.correct_AA = correct_AA
        self.scale_h = scale_h
        self.left_rh, self.right_hr = laurel

    def predicted(self, streams_BQAh: Tensor) -> Tensor:
        """Return the streams as the layer begins with them."""
        routed = self._routed(streams_BQAh[:, :, self.form.active])
        coefs = functional.linear(routed, self.predict_CA)
        mixed_BQAA = coefs.unflatten(-1, (self.form.streams, self.form.streams))
        return torch.matmul(mixed_BQAA, streams_BQAh).add_(streams_BQAh)

    def corrected(self, predicted_BQAh: Tensor, made_BQh: Tensor) -> Tensor:
        """Return the streams behind a layer that made `made` of the one it works on."""
        new = made_BQh - predicted_BQAh[:, :, self.form.active]
        coefs = functional.linear(self._routed(made_BQh), self.correct_AA) + 1.0
        return predicted_BQAh + coefs[..., None] * new[:, :, None]

    def laurel(self, x_BQh: Tensor) -> Tensor:
        """Return LAuReL's product of a layer's normed input, before its norm."""
        return functional.linear(functional.linear(x_BQh, self.left_rh), self.right_hr)

    def _routed(self, x_BQh: Tensor) -> Tensor:
        given = self.norm(x_BQh) * x_BQh.shape[-1] ** -1.0
        return torch.tanh(functional.linear(given, self.router_Ah).float()).to(x_BQh.dtype)


class StreamLayer(DecoderLayer):
    """A decoder layer of several streams [B, Q, A * h]."""

    mixing: Mixing
    laurel_norm: Norm

    def with_mixing(self, mixing: Mixing, laurel_norm: Norm) -> StreamLayer:
        """Return itself with what mixes its streams."""
        self.mixing, self.laurel_norm = mixing, laurel_norm
        return self

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
        """Return new streams [B, Q, A * h]."""
        form = self.mixing.form
        streams = self.mixing.predicted(x_BQh.unflatten(-1, (form.streams, -1)))
        corrected = self.mixing.corrected(streams, self._made(streams, layer, step, kv))
        first = corrected[:, :, form.active]
        first = first * self.mixing.scale_h if form.scaled else first
        assert isinstance(self.tail, LayerTail)
        corrected[:, :, 1:] += self.tail.own_part(first, step)[:, :, None]
        return corrected.flatten(2)

    def _made(self, streams_BQAh: Tensor, layer: int, step: Step, kv: KVCache) -> Tensor:
        """Return what attention and MLP make of the stream that the layer works on."""
        assert isinstance(self.attention, Attention) and self.mlp is not None
        active = streams_BQAh[:, :, self.mixing.form.active]
        normed = self.attn_norm(active.contiguous())
        beside = normed + self.laurel_norm(self.mixing.laurel(normed))
        attended = self.runner.attention(self.attention, normed, layer, step, kv)
        attended = self.added(attended, self.attn_out_norm)
        y = (active + attended + beside) / 2**0.5
        return y + self.added(self.mlp(self.mlp_norm(y)), self.mlp_out_norm)
