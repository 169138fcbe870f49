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
from llmpq.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, RING_TOKENS, packed_end


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which slot each request has, and which positions its new tokens take."""

    slots_B: Tensor
    start_B: Tensor
    """Tokens already in the cache; those beyond are overwritten."""
    num_new_B: Tensor


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


def completed_blocks(start: int, end: int) -> range:
    """Return the blocks that the queries start..end-1 are the first to see packed."""
    first = -(-(start - HOLDBACK_TOKENS) // BLOCK_TOKENS)
    return range(max(1, first) - 1, packed_end(end - 1) // BLOCK_TOKENS)


def append(
    fmt: KVFormat, layer: KVLayer, table_SN: Tensor, k_BQGD: Tensor, v_BQGD: Tensor, rows: Rows
) -> None:
    """Write the new tokens; pack every block that thereby lies `HOLDBACK_TOKENS` back."""
    starts, counts = rows.start_B.tolist(), rows.num_new_B.tolist()
    todo = [
        (b, n)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True))
        for n in completed_blocks(start, start + count)
    ]
    if todo:
        b_X, n_X = torch.tensor(todo, device=k_BQGD.device).unbind(-1)
        pos_XT = n_X[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=k_BQGD.device)
        at = tuple(
            _recent(ring, new, rows, b_X, pos_XT) for ring, new in _sources(layer, k_BQGD, v_BQGD)
        )
        pages = table_SN[rows.slots_B[b_X], n_X].long()
        packed = pack_block(fmt, *at)
        pools = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
        for pool, block in zip(pools, packed, strict=True):
            pool[pages] = block
    _write_ring(layer, k_BQGD, v_BQGD, rows)


def _sources(layer: KVLayer, k_BQGD: Tensor, v_BQGD: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return (layer.k_ring_SGRD, k_BQGD), (layer.v_ring_SGRD, v_BQGD)


def _recent(ring_SGRD: Tensor, new_BQGD: Tensor, rows: Rows, b_X: Tensor, pos_XT: Tensor) -> Tensor:
    """Read positions [X, T] of requests b_X: new tokens from the step, older from the ring."""
    start_X = rows.start_B[b_X]
    index = (pos_XT - start_X[:, None]).clamp(0, new_BQGD.shape[1] - 1)
    new = new_BQGD[b_X[:, None], index]
    old = ring_SGRD[rows.slots_B[b_X][:, None], :, pos_XT % RING_TOKENS]
    is_new = (pos_XT >= start_X[:, None])[..., None, None]
    return torch.where(is_new, new, old).transpose(1, 2)


def _write_ring(layer: KVLayer, k_BQGD: Tensor, v_BQGD: Tensor, rows: Rows) -> None:
    """Store the last `RING_TOKENS` of each request's new tokens."""
    q_len = k_BQGD.shape[1]
    index_BQ = torch.arange(q_len, device=k_BQGD.device).expand(len(k_BQGD), q_len)
    num_B1 = rows.num_new_B[:, None]
    b, i = ((index_BQ < num_B1) & (index_BQ >= num_B1 - RING_TOKENS)).nonzero(as_tuple=True)
    slot, at = rows.slots_B[b], (rows.start_B[b] + i) % RING_TOKENS
    layer.k_ring_SGRD[slot, :, at] = k_BQGD[b, i]
    layer.v_ring_SGRD[slot, :, at] = v_BQGD[b, i]


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
    compute_dtype: torch.dtype | None = None,
    exact_prompt: bool = False,
) -> Tensor:
    """Append, then attend; a step may have any number of new tokens. Returns [B, Q, H, D].

    The 16-bit keys are read before the ring is overwritten, so that the first queries of a long
    step still see them. With `exact_prompt` requests that start at 0 see themselves in 16 bits.
    """
    dtype = compute_dtype or q_BQHD.dtype
    ends = (rows.start_B + rows.num_new_B).tolist()
    since = [packed_end(start) for start in rows.start_B.tolist()]
    recent = max([end - first for end, first in zip(ends, since, strict=True)], default=0)
    device = q_BQHD.device
    b_B = torch.arange(len(ends), device=device)
    pos_BT = torch.tensor(since, device=device)[:, None] + torch.arange(recent, device=device)
    k_new, v_new = (
        _recent(ring, new, rows, b_B, pos_BT).to(dtype)
        for ring, new in _sources(layer, k_BQGD, v_BQGD)
    )
    append(fmt, layer, table_SN, k_BQGD, v_BQGD, rows)

    blocks = max([packed_end(end - 1) for end in ends], default=0) // BLOCK_TOKENS
    k_old, v_old = unpack_block(fmt, layer, table_SN[rows.slots_B, :blocks].long(), dtype)
    k, v = (
        torch.cat([old.transpose(1, 2).flatten(2, 3), new], 2)
        for old, new in ((k_old, k_new), (v_old, v_new))
    )
    old_pos = torch.arange(blocks * BLOCK_TOKENS, device=device).expand(len(ends), -1)
    is_packed = torch.arange(k.shape[2], device=device) < blocks * BLOCK_TOKENS
    return _attention(
        q_BQHD.to(dtype),
        k,
        v,
        torch.cat([old_pos, pos_BT], 1),
        is_packed,
        rows,
        scale,
        alibi_slopes_H,
        exact_prompt,
    ).to(q_BQHD.dtype)


def _attention(
    q_BQHD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    pos_BT: Tensor,
    is_packed_T: Tensor,
    rows: Rows,
    scale: float,
    alibi_slopes_H: Tensor | None,
    exact_prompt: bool,
) -> Tensor:
    """Attend with the mask that positions alone decide; the heads of a group share one product."""
    batch, q_len, heads, dim = q_BQHD.shape
    kv_heads = k_BGTD.shape[1]
    q_pos = rows.start_B[:, None] + torch.arange(q_len, device=q_BQHD.device)
    q_pos = torch.minimum(q_pos, (rows.start_B + rows.num_new_B - 1)[:, None])[..., None]
    line = (q_pos - HOLDBACK_TOKENS).div(BLOCK_TOKENS, rounding_mode="floor").clamp(min=0)
    line = line * BLOCK_TOKENS
    if exact_prompt:
        line = line.masked_fill((rows.start_B == 0)[:, None, None], 0)
    pos = pos_BT[:, None, :]
    seen_BQT = torch.where(is_packed_T, pos < line, (pos >= line) & (pos <= q_pos))
    bias = torch.zeros(seen_BQT.shape, dtype=q_BQHD.dtype, device=q_BQHD.device)
    bias = bias.masked_fill(~seen_BQT, float("-inf"))[:, None, None]
    if alibi_slopes_H is not None:
        slopes = alibi_slopes_H.to(bias.dtype).reshape(kv_heads, -1, 1, 1)
        bias = bias + slopes * (pos - q_pos).to(bias.dtype)[:, None, None]
    bias = bias.expand(batch, kv_heads, heads // kv_heads, q_len, -1).flatten(2, 3)
    q = q_BQHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k_BGTD, v_BGTD, attn_mask=bias, scale=scale)
    out = out.masked_fill(~seen_BQT.any(-1).repeat(1, heads // kv_heads)[:, None, :, None], 0.0)
    return out.unflatten(2, (-1, q_len)).permute(0, 3, 1, 2, 4).reshape(batch, q_len, heads, dim)
