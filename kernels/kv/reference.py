"""Plain-torch twins of the low-bit KV kernels: the oracle in tests and the CPU path in production.

Knows nothing of Triton. Lengths are read on the host, so on a GPU these functions synchronise.

    append   quantise the blocks that this step completes, then write the new tokens to the ring
    attend   softmax(q k * scale + alibi) v, each query seeing packed or 16-bit keys by position

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
T: keys.  N: blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmpq.kernels.formats.kv_block import (
    KVFormat,
    channel_gain,
    from_thread_order,
    pack_keys,
    pack_values,
    quantize,
    to_thread_order,
    token_gain,
    unpack_keys,
    unpack_values,
)
from llmpq.kernels.kv.step_view import Rows, StepView, look
from llmpq.kernels.kv.storage import KVLayer
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.sizes.workspace import CHOICE_ELEMENTS

PIECE_ELEMENTS = 1 << 19
"""Elements of keys, or of values, that are dequantised or packed at a time."""


def pack_block(fmt: KVFormat, k_TD: Tensor, v_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise and pack blocks [..., 128, D]: key words, key params, value words, value params."""
    pad = fmt.channels - fmt.head_dim
    k_TD, v_TD = k_TD if fmt.plain_keys else k_TD.float(), v_TD.float()
    v_codes, v_scale, v_zero = quantize(v_TD, fmt.value_bits, -1)
    k_words, k_params = _packed_keys(fmt, k_TD, pad)
    v_params = torch.stack([v_scale, v_zero], -3).squeeze(-1)
    v_params[..., 0, :] *= token_gain(fmt, v_TD.device)
    v_params = to_thread_order(v_params)
    v_words = pack_values(F.pad(v_codes, (0, pad)), fmt.value_bits)
    return k_words, k_params, v_words, v_params


def _packed_keys(fmt: KVFormat, k_TD: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Quantise and pack keys [..., 128, D] of float32, or leave them as they are: words, params."""
    if fmt.plain_keys:
        none = torch.zeros((*k_TD.shape[:-2], *fmt.key_param_shape), dtype=torch.float16)
        return F.pad(k_TD, (0, pad)).flatten(-2), none.to(k_TD.device)
    codes, scale, zero = quantize(k_TD, fmt.key_bits, -2)
    params = F.pad(torch.cat([scale, zero], -2), (0, pad))
    params[..., 0, :] *= channel_gain(fmt, k_TD.device)
    return pack_keys(F.pad(codes, (0, pad)), fmt.key_bits, by_octet=fmt.keys_by_octet), params


def unpack_key_block(
    fmt: KVFormat, layer: KVLayer, pages: Tensor, dtype: torch.dtype, heads: slice = slice(None)
) -> Tensor:
    """Dequantise the keys of pages [...] and some heads to [..., G, 128, D]."""
    words = layer.k_words_PGW[:, heads][pages]
    if fmt.plain_keys:
        return words.unflatten(-1, (BLOCK_TOKENS, fmt.channels))[..., : fmt.head_dim].to(dtype)
    k_params = layer.k_params_PG[:, heads][pages].to(dtype)
    k = unpack_keys(words, fmt.key_bits, fmt.channels, by_octet=fmt.keys_by_octet).to(dtype)
    k_params[..., 0, :] /= channel_gain(fmt, k_params.device)
    k = k.mul_(k_params[..., 0, None, :]).add_(k_params[..., 1, None, :])
    return k[..., : fmt.head_dim]


def unpack_value_block(
    fmt: KVFormat, layer: KVLayer, pages: Tensor, dtype: torch.dtype, heads: slice = slice(None)
) -> Tensor:
    """Dequantise the values of pages [...] and some heads to [..., G, 128, D]."""
    v_params = from_thread_order(layer.v_params_PG[:, heads][pages].to(dtype))
    v_params[..., 0, :] /= token_gain(fmt, v_params.device)
    words = layer.v_words_PGW[:, heads][pages]
    v = unpack_values(words, fmt.value_bits, fmt.channels).to(dtype)
    return v.mul_(v_params[..., 0, :, None]).add_(v_params[..., 1, :, None])[..., : fmt.head_dim]


def append(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    rows: Rows,
    view: StepView | None = None,
) -> None:
    """Write the new tokens; pack every block that thereby lies `HOLDBACK_TOKENS` back."""
    view = view or look(rows, k_BQGD.shape[1])
    _pack_completed(fmt, layer, table_SN, k_BQGD, v_BQGD, view)
    _write_ring(layer, k_BQGD, v_BQGD, view)


def _pack_completed(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    view: StepView,
) -> None:
    """Pack the blocks the step completes, some at a time."""
    done = view.completed
    if done is None:
        return
    count = max(1, PIECE_ELEMENTS // (k_BQGD.shape[2] * BLOCK_TOKENS * fmt.channels))
    pools = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    for first in range(0, len(done.slot_X), count):
        part = slice(first, first + count)
        tokens = done.tokens.rows(part)
        k, v = tokens.read(layer.k_ring_SGRD, k_BQGD), tokens.read(layer.v_ring_SGRD, v_BQGD)
        pages = table_SN[done.slot_X[part], done.block_X[part]].long()
        for pool, block in zip(pools, pack_block(fmt, k, v), strict=True):
            pool[pages] = block


def _write_ring(layer: KVLayer, k_BQGD: Tensor, v_BQGD: Tensor, view: StepView) -> None:
    request, token, slot, place = view.write
    layer.k_ring_SGRD[slot, :, place] = k_BQGD[request, token]
    layer.v_ring_SGRD[slot, :, place] = v_BQGD[request, token]


@dataclass(frozen=True)
class ChosenKeys:
    """The queries of an indexer, which come as further heads behind a layer's queries.

    Of each such head the last `width` channels are multiplied with the keys' last ones; its first
    channel is the head's weight. `topk`: keys that are chosen of a query.
    """

    heads: int
    topk: int
    width: int


@dataclass(frozen=True, eq=False)
class IndexQueries:
    """What an indexer asks of the keys that stand behind latents, by token; X heads, C channels."""

    q_TXC: Tensor
    weights_TX: Tensor
    """What the scores of each head are multiplied by."""
    topk: int


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """What a layer does to its scores beside scaling them; none of it with ALiBi."""

    window: int = 0
    """The query at p sees the keys above p - window; 0: all."""
    cap: float = 0.0
    """Scores s become cap * tanh(s / cap) (Gemma 2)."""
    sinks_H: Tensor | None = None
    """A score per head that takes part in the softmax and brings no value (gpt-oss)."""
    chunked: bool = False
    """Windows begin at multiples of their size: the query at p sees the keys from there (Llama 4).
    """
    chosen: ChosenKeys | None = None
    """Only the keys that an indexer chooses are attended to (DeepSeek-V3.2)."""

    @property
    def is_explicit(self) -> bool:
        """Whether scores are made as a matrix: torch's fused operator only adds a bias to them."""
        return self.cap > 0 or self.sinks_H is not None or self.chosen is not None

    @property
    def needs_mask(self) -> bool:
        """Whether scores need a mask of their own: the C++ attention knows sliding windows only."""
        return self.is_explicit or self.chunked

    def first_seen(self, position: int) -> int:
        """Return the first key that the query at a position sees."""
        if not self.window:
            return 0
        last = position // self.window * self.window if self.chunked else position - self.window + 1
        return max(0, last)

    def unseen_from(self, key: int) -> int:
        """Return the first position whose query no longer sees a key; windows only."""
        return (key // self.window + 1) * self.window if self.chunked else key + self.window

    def away(self, positions: Tensor) -> Tensor | int:
        """Return how many tokens before a query the nearest key is that its window leaves out."""
        return positions % self.window + 1 if self.chunked else self.window

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled."""
        return not self.window and not self.is_explicit

    def of(self, heads: slice) -> ScoreRule:
        """Return the rule of some of the query heads."""
        sinks = None if self.sinks_H is None else self.sinks_H[heads]
        return ScoreRule(self.window, self.cap, sinks, self.chunked, self.chosen)

    def heads_of(self, q_BQHD: Tensor) -> int:
        """Return how many heads of queries attend: all but an indexer's."""
        return q_BQHD.shape[-2] - (0 if self.chosen is None else self.chosen.heads)


EVERYTHING = ScoreRule()


@dataclass(frozen=True, eq=False)
class Scoring:
    """How a layer makes scores of queries and keys: scaled, with ALiBi's slopes, by a rule."""

    scale: float
    alibi_slopes_H: Tensor | None = None
    rule: ScoreRule = EVERYTHING

    def of(self, heads: slice) -> Scoring:
        """Return how scores of some of the query heads are made."""
        slopes = None if self.alibi_slopes_H is None else self.alibi_slopes_H[heads]
        return Scoring(self.scale, slopes, self.rule.of(heads))


def attend_chosen(
    q_QHD: Tensor, k_TD: Tensor, seen_QT: Tensor, chosen: ChosenKeys, *, scale: float
) -> Tensor:
    """Return [Q, H, D] of a row's queries over keys that are values, those of an indexer chosen.

    `q_QHD`: an indexer's heads are behind the others. `seen_QT`: the keys that may be chosen.
    """
    heads = q_QHD.shape[1] - chosen.heads
    out = torch.empty((len(q_QHD), heads, q_QHD.shape[2]), dtype=q_QHD.dtype, device=q_QHD.device)
    at_once = max(1, CHOICE_ELEMENTS // (len(k_TD) * max(heads, chosen.heads)))
    keys_TI = k_TD[:, -chosen.width :].float()
    for first in range(0, len(q_QHD), at_once):
        part = slice(first, first + at_once)
        own, index = q_QHD[part].split([heads, chosen.heads], dim=1)
        scores_QHT = torch.matmul(index[..., -chosen.width :].float(), keys_TI.t()).relu_()
        total_QT = torch.matmul(index[:, None, :, 0].float(), scores_QHT)[:, 0]
        total_QT.masked_fill_(~seen_QT[part], float("-inf"))
        best = total_QT.topk(min(chosen.topk, len(k_TD)), dim=-1).indices
        unseen_QT = torch.ones_like(total_QT, dtype=torch.bool).scatter_(1, best, False)
        unseen_QT |= ~seen_QT[part]
        s_QHT = torch.matmul(own, k_TD.t()).float().mul_(scale)
        s_QHT.masked_fill_(unseen_QT[:, None], float("-inf"))
        out[part] = torch.matmul(s_QHT.softmax(dim=-1).to(k_TD.dtype), k_TD)
    return out


def append_and_attend(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    rows: Rows,
    *,
    scoring: Scoring,
    view: StepView | None = None,
) -> Tensor:
    """Append, then attend; a step may have any number of new tokens. Returns [B, Q, H, D].

    The 16-bit keys are read before the ring is overwritten, so that the first queries of a long
    step still see them. `view` is the step's, if the caller has it from another layer. Keys and
    values are dequantised for some rows and heads at a time, `PIECE_ELEMENTS` where possible.
    """
    view = view or look(rows, q_BQHD.shape[1])
    _pack_completed(fmt, layer, table_SN, k_BQGD, v_BQGD, view)
    batch, kv_heads = k_BQGD.shape[0], k_BQGD.shape[2]
    rep = q_BQHD.shape[2] // kv_heads
    shape = (*q_BQHD.shape[:2], scoring.rule.heads_of(q_BQHD), q_BQHD.shape[3])
    out = torch.empty(shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
    seen_BQT = view.seen_BQT
    at_once = max(1, PIECE_ELEMENTS // (view.num_keys * fmt.channels))
    num_rows, num_heads = max(1, at_once // kv_heads), min(at_once, kv_heads)
    for row in range(0, batch, num_rows):
        for head in range(0, kv_heads, num_heads):
            r, g = slice(row, row + num_rows), slice(head, head + num_heads)
            h = slice(head * rep, (head + num_heads) * rep)
            k = _keys(fmt, layer, table_SN, k_BQGD, view, r, g)
            v = _values(fmt, layer, table_SN, v_BQGD, view, r, g)
            out[r, :, h] = _attention(q_BQHD[r, :, h], k, v, view, seen_BQT[r], r, scoring.of(h))
            del k, v  # before the next are dequantised
    _write_ring(layer, k_BQGD, v_BQGD, view)
    return out


def _keys(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    k_BQGD: Tensor,
    view: StepView,
    rows: slice,
    heads: slice,
) -> Tensor:
    """Return the keys in sight of some rows and heads, packed ones first: [B, G, T, D]."""
    recent = view.recent.rows(rows).read(layer.k_ring_SGRD[:, heads], k_BQGD[:, :, heads])
    if not view.blocks:
        return recent
    pages = table_SN[view.rows.slots_B[rows], : view.blocks].long()
    return _joined(unpack_key_block(fmt, layer, pages, k_BQGD.dtype, heads), recent)


def _values(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    v_BQGD: Tensor,
    view: StepView,
    rows: slice,
    heads: slice,
) -> Tensor:
    """Return the values in sight, as `_keys`."""
    recent = view.recent.rows(rows).read(layer.v_ring_SGRD[:, heads], v_BQGD[:, :, heads])
    if not view.blocks:
        return recent
    pages = table_SN[view.rows.slots_B[rows], : view.blocks].long()
    return _joined(unpack_value_block(fmt, layer, pages, v_BQGD.dtype, heads), recent)


def _joined(old_BNGTD: Tensor, recent_BGTD: Tensor) -> Tensor:
    """Return blocks and recent tokens in one tensor [B, G, T, D]."""
    batch, blocks, groups, tokens, dim = old_BNGTD.shape
    shape = (batch, groups, blocks * tokens + recent_BGTD.shape[2], dim)
    joined = torch.empty(shape, dtype=recent_BGTD.dtype, device=recent_BGTD.device)
    old = joined[:, :, : blocks * tokens].unflatten(2, (blocks, tokens))
    old.copy_(old_BNGTD.transpose(1, 2))
    joined[:, :, blocks * tokens :] = recent_BGTD
    return joined


def _attention(
    q_BQHD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    view: StepView,
    seen: Tensor,
    rows: slice,
    scoring: Scoring,
) -> Tensor:
    """Attend with the view's mask; the heads of a group share one product.

    Keys and values are this call's own: those that no query sees are overwritten.
    """
    scale, alibi_slopes_H, rule = scoring.scale, scoring.alibi_slopes_H, scoring.rule
    batch, q_len, heads, dim = q_BQHD.shape
    kv_heads = k_BGTD.shape[1]
    if rule.window:
        start_B11 = view.rows.start_B[rows, None, None]
        position_BQ1 = start_B11 + torch.arange(q_len, device=start_B11.device)[:, None]
        seen = seen & (view.distance_BQT[rows] > -rule.away(position_BQ1))
    if rule.chosen is not None:
        found = [
            attend_chosen(q, k[0], own, rule.chosen, scale=scale)
            for q, k, own in zip(q_BQHD, k_BGTD, seen, strict=True)
        ]
        return torch.stack(found)
    unseen_B1T1 = ~seen.any(1)[:, None, :, None]
    if bool(unseen_B1T1.any()):  # they may be another request's, and not finite
        k_BGTD.masked_fill_(unseen_B1T1, 0)
        v_BGTD.masked_fill_(unseen_B1T1, 0)
    mask = seen[:, None, None]
    if alibi_slopes_H is not None:
        slopes = alibi_slopes_H.to(q_BQHD.dtype).reshape(kv_heads, -1, 1, 1)
        bias = slopes * view.distance_BQT[rows].to(q_BQHD.dtype)[:, None, None]
        mask = bias.masked_fill_(~mask, float("-inf"))
    if q_len > 1 or alibi_slopes_H is not None:
        mask = mask.expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    else:
        mask = mask[:, :, 0]
    q = q_BQHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if rule.is_explicit:
        out = _explicit(q, k_BGTD, v_BGTD, mask, scale, rule)
    else:
        out = F.scaled_dot_product_attention(q, k_BGTD, v_BGTD, attn_mask=mask, scale=scale)
    empty = ~seen.any(-1).repeat(1, heads // kv_heads)[:, None, :, None]
    out = out.masked_fill_(empty, 0.0)
    return out.unflatten(2, (-1, q_len)).permute(0, 3, 1, 2, 4).reshape(batch, q_len, heads, dim)


def _explicit(
    q_BGMD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor, scale: float, rule: ScoreRule
) -> Tensor:
    """Return [B, G, M, D] of the M = R * Q query rows of every head, with caps and sinks."""
    groups, rows = q_BGMD.shape[1:3]
    s_BGMT = torch.matmul(q_BGMD, k_BGTD.transpose(-1, -2)).float().mul_(scale)
    if rule.cap:
        s_BGMT.div_(rule.cap).tanh_().mul_(rule.cap)
    s_BGMT.masked_fill_(~mask, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float().view(1, groups, -1, 1)
        sinks = sinks.repeat_interleave(rows // sinks.shape[2], dim=2)
        s_BGMT = torch.cat((s_BGMT, sinks.expand(len(s_BGMT), -1, -1, -1)), dim=-1)
    share = s_BGMT.softmax(dim=-1)[..., : k_BGTD.shape[2]].to(v_BGTD.dtype)
    return torch.matmul(share, v_BGTD)
