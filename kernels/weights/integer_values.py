"""Integer codes of other tools to values, whatever their groups and the order of their channels.

    w[n, k] = scale[n, g(k)] (code[n, k] - zero[n, g(k)]),  g(k) = g_idx[k], or k // group size

interchange.py says how codes lie in each form, and keeps them as they are. Here they become
float32, for groups and orders of channels that no kernel of ours takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmpq.kernels.weights.interchange import awq_unpack, unpack_stream


def values_of_gptq(
    tensors: Mapping[str, Tensor], *, bits: int, v2: bool = False, group_size: int | None = None
) -> Tensor:
    """Return float32 [N, K] of `qweight`, `qzeros`, `scales` and, if any, `g_idx`."""
    n, k = tensors["qweight"].shape[1], tensors["qweight"].shape[0] * 32 // bits
    codes = unpack_stream(tensors["qweight"].t().contiguous(), bits, k)
    zero_GN = unpack_stream(tensors["qzeros"], bits, n)
    if not v2:
        zero_GN = (zero_GN + 1) & (1 << bits) - 1
    scale_NG, order = tensors["scales"].t(), tensors.get("g_idx")
    return _values(codes, scale_NG, zero_GN.t(), order, group_size)


def values_of_awq(tensors: Mapping[str, Tensor], *, group_size: int | None = None) -> Tensor:
    """Return float32 [N, K] of `qweight`, `qzeros` and `scales` (GEMM version)."""
    codes, zero_NG = awq_unpack(tensors["qweight"]).t(), awq_unpack(tensors["qzeros"]).t()
    return _values(codes, tensors["scales"].t(), zero_NG, None, group_size)


def values_of_packed(tensors: Mapping[str, Tensor], *, bits: int) -> Tensor:
    """Return float32 [N, K] of compressed-tensors' pack-quantized tensors."""
    n, k = (int(size) for size in tensors["weight_shape"])
    codes = unpack_stream(tensors["weight_packed"], bits, k)
    zero_NG = torch.tensor(2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zero_NG = unpack_stream(tensors["weight_zero_point"].t().contiguous(), bits, n).t()
    return _values(codes, tensors["weight_scale"], zero_NG, tensors.get("weight_g_idx"))


def _values(
    codes_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor,
    g_idx_K: Tensor | None,
    group_size: int | None = None,
) -> Tensor:
    """Return scale (code - zero), each channel by its group's; a zero for all has no dimension.

    `group_size`: as the checkpoint says; the last group may have fewer channels.
    """
    k, groups = codes_NK.shape[1], scale_NG.shape[1]
    if g_idx_K is None:
        size = group_size or k // groups
        if -(-k // size) != groups:
            raise ValueError(
                f"{k} channels have {groups} groups, expected {-(-k // size)} of {size} channels; "
                "correct group_size in the quantisation's configuration, or get the file anew"
            )
        g_idx_K = torch.arange(k) // size
    group_K = g_idx_K.long()
    if len(group_K) != k or int(group_K.min()) < 0 or int(group_K.max()) >= groups:
        raise ValueError(
            f"the order of channels (g_idx) has {len(group_K)} entries up to {int(group_K.max())}, "
            f"expected {k} below {groups}; get the file anew"
        )
    zero = zero_NG.float() if zero_NG.dim() == 0 else zero_NG.float()[:, group_K]
    return (codes_NK.float() - zero) * scale_NG.float()[:, group_K]
