"""Norms, gates and rotary positions on the CPU by our own code (kernels/native/row_wise.h).

A call each, where torch's operators take three to eight, each as long as its call for a user's one
row, and wake all threads for a batch. Roundings on the way are torch's.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from llmpq.kernels.native.library import DTYPE_CODES, address, call, library


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether our own code computes on these: of one type, on a CPU, without gradients."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPE_CODES
        and not x.requires_grad
        and all(other.dtype == x.dtype and other.is_contiguous() for other in others)
        and library() is not None
    )


def rms_norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """Return x [..., N] / sqrt(mean x^2 + eps) times the weight, rounded once."""
    n = weight_N.shape[0]
    x = x.contiguous()
    y = torch.empty_like(x)
    number = ctypes.c_float(eps)
    call(
        "llmpq_norm",
        address(x),
        address(weight_N),
        address(y),
        ctypes.addressof(number),
        x.numel() // n,
        n,
        DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return y


def silu_gate(both: Tensor) -> Tensor:
    """Return silu(gate) * up [..., N] of contiguous [..., 2 N], gate first."""
    n = both.shape[-1] // 2
    y = both.new_empty(*both.shape[:-1], n)
    call(
        "llmpq_gate",
        address(both),
        address(y),
        y.numel() // n,
        n,
        DTYPE_CODES[both.dtype],
        torch.get_num_threads(),
    )
    return y


def can_rotate(x_BQND: Tensor, cos: Tensor) -> bool:
    """Whether `rotate` takes these: whole heads side by side, tokens equally far apart."""
    batch, q_len, _, dim = x_BQND.shape
    token, head, channel = x_BQND.stride()[1:]
    together = batch == 1 or q_len == 1 or x_BQND.stride(0) == q_len * token
    return (
        takes(x_BQND, cos)
        and (head, channel) == (dim, 1)
        and together
        and 2 * cos.shape[-1] == dim
        and cos.shape[0] in (1, batch)
        and cos.shape[1:3] == (q_len, 1)
    )


def rotate(x_BQND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads rotated by each token's angles, [B or 1, Q, 1, D / 2] each."""
    batch, q_len, heads, dim = x_BQND.shape
    y = x_BQND.new_empty(x_BQND.shape)
    pitch = x_BQND.stride(0) if q_len == 1 else x_BQND.stride(1)
    call(
        "llmpq_rotate",
        address(x_BQND),
        address(cos),
        address(sin),
        address(y),
        batch * q_len,
        cos.shape[0] * q_len,
        heads,
        dim // 2,
        pitch,
        DTYPE_CODES[y.dtype],
        torch.get_num_threads(),
    )
    return y
