"""Attention of decoding rows over a pool of KV blocks on the CPU, without gathering them.

llmpq's C++ (kernels/native/attend.h) where it was compiled; `attend_gathered` is its twin in torch,
and runs where it was not.

Legend: B rows, M blocks of the longest table, N tokens: places of the pool, or of the longest row,
H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.native.library import DTYPE_CODES, address, call, library
from llmpq.sizes.kv_format import BLOCK_TOKENS

NEG_INF = float("-inf")


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Where the tokens of each row are, and how many it has with its query."""

    tables_BM: Tensor
    """int64 [B, M]: a row's blocks in the order of its tokens; behind its last one any number."""
    ends_B: Tensor
    """int64 [B], at least 1."""

    def seen(self, window: int = 0) -> Tensor:
        """Return which positions each query sees, bool [B, longest]."""
        ends_B1 = self.ends_B[:, None]
        keys_N = torch.arange(int(self.ends_B.max()))
        seen_BN = keys_N < ends_B1
        return seen_BN & (keys_N >= ends_B1 - window) if window else seen_BN

    def gathered(self, pool_NGD: Tensor) -> Tensor:
        """Return the rows' tokens [B, G, longest, D], zeros behind a row's end.

        Places behind a row's end may hold another request's values, NaN too, which a probability
        of 0 would not cancel.
        """
        blocks = pool_NGD.view(-1, BLOCK_TOKENS, *pool_NGD.shape[1:])
        whole = blocks.index_select(0, self.tables_BM.flatten())
        by_row = whole.view(len(self.ends_B), -1, *pool_NGD.shape[1:])
        seen_BN = self.seen()
        by_row = by_row[:, : seen_BN.shape[1]].masked_fill_(~seen_BN[:, :, None, None], 0)
        return by_row.transpose(1, 2)


def attend_blocks(
    q_BHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    rows: BlockRows,
    *,
    scale: float,
    window: int = 0,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """Return [B, H, D] of each row's query over its blocks of the pool [N, G, D].

    The query sees its row's last `window` tokens, all for 0. Slopes: as in
    runtime/cache/attention.py.
    """
    if not native_takes(q_BHD, k_NGD):
        return attend_gathered(
            q_BHD, k_NGD, v_NGD, rows, scale=scale, window=window, alibi_slopes_H=alibi_slopes_H
        )
    (batch, heads, dim), q_BHD = q_BHD.shape, q_BHD.contiguous()
    out_BHD = torch.empty_like(q_BHD)
    slopes = None if alibi_slopes_H is None else alibi_slopes_H.float().contiguous()
    factor = ctypes.c_float(scale)
    call(
        "llmpq_attend_blocks",
        address(q_BHD),
        address(k_NGD),
        address(v_NGD),
        address(out_BHD),
        address(rows.tables_BM),
        address(rows.ends_B),
        ctypes.addressof(factor),
        address(slopes),
        batch,
        heads,
        k_NGD.shape[1],
        dim,
        rows.tables_BM.shape[1],
        window,
        DTYPE_CODES[q_BHD.dtype],
        torch.get_num_threads(),
    )
    return out_BHD


def native_takes(q_BHD: Tensor, k_NGD: Tensor) -> bool:
    """Whether the C++ computes this."""
    return (
        k_NGD.device.type == "cpu"
        and q_BHD.dtype == k_NGD.dtype
        and k_NGD.dtype in DTYPE_CODES
        and k_NGD.is_contiguous()
        and library() is not None
    )


def attend_gathered(
    q_BHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    rows: BlockRows,
    *,
    scale: float,
    window: int = 0,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """Return what `attend_blocks` does, over copies of the blocks, by torch's operator."""
    (batch, heads, dim), groups = q_BHD.shape, k_NGD.shape[1]
    seen_BN = rows.seen(window)
    bias = torch.zeros(seen_BN.shape).masked_fill_(~seen_BN, NEG_INF)[:, None, None]
    if alibi_slopes_H is not None:
        away_BN = torch.arange(seen_BN.shape[1]) - (rows.ends_B[:, None] - 1)
        slopes = alibi_slopes_H.cpu().view(1, groups, -1, 1)
        bias = bias + slopes * away_BN[:, None, None]
    out = functional.scaled_dot_product_attention(
        q_BHD.view(batch, groups, heads // groups, dim),
        rows.gathered(k_NGD),
        rows.gathered(v_NGD),
        attn_mask=bias.to(q_BHD.dtype),
        scale=scale,
    )
    return out.reshape(batch, heads, dim)
