"""Our packed weights as other tools store them: the way back of kernels/weights/interchange.py."""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.weights.interchange import AWQ_COLUMNS, pack_quantized, pack_stream
from llmpq.kernels.weights.quantized_weight import QuantizedWeight


def to_gptq(q: QuantizedWeight, *, v2: bool = False) -> dict[str, Tensor]:
    """Return one layer's GPTQ tensors; v1 files cannot tell zero 2^b from 0, and none is 2^b."""
    k = _whole_k(q, "GPTQ")
    zero = _own(q, q.zero_NG()).to(torch.uint8)
    if not v2:
        zero = (zero.int() - 1 & (1 << q.bits) - 1).to(torch.uint8)
    return {
        "qweight": pack_stream(q.codes()[:, :k], q.bits).t().contiguous(),
        "qzeros": pack_stream(zero.t(), q.bits),
        "scales": _own(q, q.scale_NG()).t().contiguous(),
        "g_idx": (torch.arange(k) // (q.group_size or k)).int(),
    }


def to_awq(q: QuantizedWeight) -> dict[str, Tensor]:
    """Return one 4-bit layer's AWQ (GEMM version) tensors."""
    if q.bits != 4 or q.out_features % 8:
        raise ValueError(
            f"AWQ: got {q.bits} bits, N = {q.out_features}, expected 4 bits, N a multiple of 8"
        )
    k = _whole_k(q, "AWQ")
    return {
        "qweight": awq_pack(q.codes()[:, :k].t()),
        "qzeros": awq_pack(_own(q, q.zero_NG()).to(torch.uint8).t()),
        "scales": _own(q, q.scale_NG()).t().contiguous(),
    }


def to_compressed_tensors(q: QuantizedWeight) -> dict[str, Tensor]:
    """Return one layer's compressed-tensors "pack-quantized" tensors."""
    zero_NG = None if q.zero is None else _own(q, q.zero_NG())
    codes_NK, scale_NG = q.codes()[:, : q.in_features], _own(q, q.scale_NG())
    return pack_quantized(q.bits, codes_NK, scale_NG, zero_NG)


def _own(q: QuantizedWeight, values_NG: Tensor) -> Tensor:
    """Return the scales or zeros of groups that have weights: K is padded to whole k-groups."""
    return values_NG[:, : -(-q.in_features // (q.group_size or q.in_features))]


def _whole_k(q: QuantizedWeight, name: str) -> int:
    if q.in_features % 32 or q.out_features % 32:
        raise ValueError(
            f"{name}: got N = {q.out_features}, K = {q.in_features}, expected multiples of 32: its "
            "words have no room for a remainder"
        )
    return q.in_features


def awq_pack(codes_RN: Tensor) -> Tensor:
    """Return the AWQ words [R, N / 8] of codes [R, N]."""
    columns = codes_RN.int().reshape(codes_RN.shape[0], -1, 8)
    words = torch.zeros(columns.shape[:2], dtype=torch.int32, device=codes_RN.device)
    for i, column in enumerate(AWQ_COLUMNS):
        words |= columns[:, :, column] << (4 * i)
    return words
