"""Plain-torch twins of the low-bit KV kernels: the oracle in tests and the CPU path in production.

Knows nothing of Triton. Lengths are read on the host, so on a GPU these functions synchronise.

    append   quantise the blocks that this step completes, then write the new tokens to the ring
    attend   softmax(q k * scale + alibi) v, each query seeing packed or 16-bit keys by position

B: requests.  Q: new tokens, right padded.  H: query heads.  G: key-value heads.  D: head_dim.
T: keys.  N: blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmpq.kernels.kv_formats import (
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
from llmpq.kernels.kv_storage import KVLayer
from llmpq.kernels.kv_view import Rows, StepView, look
from llmpq.kv_format import BLOCK_TOKENS


def pack_block(fmt: KVFormat, k_TD: Tensor, v_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise and pack blocks [..., 128, D]: key words, key params, value words, value params."""
    pad = fmt.channels - fmt.head_dim
    k_TD, v_TD = k_TD.float(), v_TD.float()
    v_codes, v_scale, v_zero = quantize(v_TD, fmt.bits, -1)
    if fmt.key_group is None:
        k_codes, k_scale, k_zero = quantize(k_TD, fmt.bits, -1)
        k_params = to_thread_order(torch.stack([k_scale, k_zero], -3).squeeze(-1))
    else:
        groups = k_TD.unflatten(-2, (BLOCK_TOKENS // fmt.key_group, fmt.key_group))
        codes, k_scale, k_zero = quantize(groups, fmt.bits, -2)
        k_codes = codes.flatten(-3, -2)
        k_params = F.pad(torch.cat([k_scale, k_zero], -2), (0, pad))
        k_params[..., 0, :] *= channel_gain(fmt, k_TD.device)
    v_params = torch.stack([v_scale, v_zero], -3).squeeze(-1)
    v_params[..., 0, :] *= token_gain(fmt, v_TD.device)
    v_params = to_thread_order(v_params)
    k_words = pack_keys(F.pad(k_codes, (0, pad)), fmt.bits)
    v_words = pack_values(F.pad(v_codes, (0, pad)), fmt.bits)
    return k_words, k_params, v_words, v_params


def unpack_block(
    fmt: KVFormat, layer: KVLayer, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Dequantise pages [...] to keys and values [..., G, 128, D]."""
    k_params = layer.k_params_PG[pages].to(dtype)
    v_params = from_thread_order(layer.v_params_PG[pages].to(dtype))
    v_params[..., 0, :] /= token_gain(fmt, v_params.device)
    k = unpack_keys(layer.k_words_PGW[pages], fmt.bits, fmt.channels).to(dtype)
    v = unpack_values(layer.v_words_PGW[pages], fmt.bits, fmt.channels).to(dtype)
    v = v.mul_(v_params[..., 0, :, None]).add_(v_params[..., 1, :, None])[..., : fmt.head_dim]
    if fmt.key_group is None:
        k_params = from_thread_order(k_params)
        k = k.mul_(k_params[..., 0, :, None]).add_(k_params[..., 1, :, None])
        return k[..., : fmt.head_dim], v
    k_params[..., 0, :] /= channel_gain(fmt, k_params.device)
    groups = k.unflatten(-2, (-1, fmt.key_group))  # a view: the next line fills k
    groups.mul_(k_params[..., 0, None, :]).add_(k_params[..., 1, None, :])
    return k[..., : fmt.head_dim], v


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
    done = view.completed
    if done is not None:
        k, v = (
            done.tokens.read(layer.k_ring_SGRD, k_BQGD),
            done.tokens.read(layer.v_ring_SGRD, v_BQGD),
        )
        pages = table_SN[done.slot_X, done.block_X].long()
        pools = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
        for pool, block in zip(pools, pack_block(fmt, k, v), strict=True):
            pool[pages] = block
    request, token, slot, place = view.write
    layer.k_ring_SGRD[slot, :, place] = k_BQGD[request, token]
    layer.v_ring_SGRD[slot, :, place] = v_BQGD[request, token]


def append_and_attend(
    fmt: KVFormat,
    layer: KVLayer,
    table_SN: Tensor,
    q_BQHD: Tensor,
    k_BQGD: Tensor,
    v_BQGD: Tensor,
    rows: Rows,
    *,
    scale: float,
    alibi_slopes_H: Tensor | None = None,
    view: StepView | None = None,
) -> Tensor:
    """Append, then attend; a step may have any number of new tokens. Returns [B, Q, H, D].

    The 16-bit keys are read before the ring is overwritten, so that the first queries of a long
    step still see them. `view` is the step's, if the caller has it from another layer.
    """
    view = view or look(rows, q_BQHD.shape[1])
    k = view.recent.read(layer.k_ring_SGRD, k_BQGD)
    v = view.recent.read(layer.v_ring_SGRD, v_BQGD)
    append(fmt, layer, table_SN, k_BQGD, v_BQGD, rows, view)
    if view.blocks:
        pages = table_SN[view.slots_B, : view.blocks].long()
        k_old, v_old = unpack_block(fmt, layer, pages, q_BQHD.dtype)
        k = torch.cat([k_old.transpose(1, 2).flatten(2, 3), k], 2)
        v = torch.cat([v_old.transpose(1, 2).flatten(2, 3), v], 2)
    return _attention(q_BQHD, k, v, view, scale, alibi_slopes_H)


def _attention(
    q_BQHD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    view: StepView,
    scale: float,
    alibi_slopes_H: Tensor | None,
) -> Tensor:
    """Attend with the view's mask; the heads of a group share one product."""
    batch, q_len, heads, dim = q_BQHD.shape
    kv_heads = k_BGTD.shape[1]
    seen = view.seen_BQT
    mask = seen[:, None, None]
    if alibi_slopes_H is not None:
        slopes = alibi_slopes_H.to(q_BQHD.dtype).reshape(kv_heads, -1, 1, 1)
        bias = slopes * view.distance_BQT.to(q_BQHD.dtype)[:, None, None]
        mask = bias.masked_fill(~mask, float("-inf"))
    if q_len > 1 or alibi_slopes_H is not None:
        mask = mask.expand(batch, kv_heads, heads // kv_heads, q_len, -1).flatten(2, 3)
    else:
        mask = mask[:, :, 0]
    q = q_BQHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k_BGTD, v_BGTD, attn_mask=mask, scale=scale)
    empty = ~seen.any(-1).repeat(1, heads // kv_heads)[:, None, :, None]
    out = out.masked_fill(empty, 0.0)
    return out.unflatten(2, (-1, q_len)).permute(0, 3, 1, 2, 4).reshape(batch, q_len, heads, dim)
