"""Weights stored as small floats, to numbers: FP8, MXFP4, NVFP4.

    FP8      E4M3 codes [N, K], scale for all, a row [N, 1], or a block [N / bn, K / bk]; w = code s
    MXFP4    two E2M1 codes a byte, the first low, [..., K / 2]; a scale 2^(e - 127) for 32 of them
    NVFP4    the same codes; an E4M3 scale for 16, all divided by one float32

Every product is exact in float32 (4 and 8 bits of mantissa), so numbers are the format's own.
Sources: OCP Microscaling Formats 1.0; compressed-tensors 0.20 and Transformers 5 in our tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a code stand for; the fourth is the sign."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
BIAS = 127
"""Of E8M0 exponents."""


def from_fp8(codes_NK: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Return float32 [N, K]; `block`: rows and columns that share a scale of a table of them."""
    n, k = codes_NK.shape
    scale = scale.float()
    if block is not None:
        rows, columns = (-(-size // step) for size, step in zip((n, k), block, strict=True))
        _require_shape("block scales", scale, (rows, columns))
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return codes_NK.float() * wide[:n, :k]
    if scale.numel() not in (1, n):
        raise ValueError(
            f"FP8 weight [{n}, {k}] with scales {list(scale.shape)}: expected one, {n} or blocks "
            "that config.json describes"
        )
    return codes_NK.float() * (scale.reshape(-1, 1) if scale.numel() == n else scale.reshape(1, 1))


def from_mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [..., K] of bytes [..., K / 2] and uint8 exponents [..., K / 32]."""
    _require_groups(packed, exponents, MXFP4_GROUP)
    scale = torch.exp2(exponents.float() - BIAS)
    return _grouped(packed, scale, MXFP4_GROUP)


def from_nvfp4(packed: Tensor, scale: Tensor, whole_scale: Tensor) -> Tensor:
    """Return float32 [N, K] of bytes [N, K / 2], scales [N, K / 16] over one for all."""
    _require_groups(packed, scale, NVFP4_GROUP)
    return _grouped(packed, scale.float() / whole_scale.float(), NVFP4_GROUP)


def _grouped(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return codes times their group's scale."""
    return (_numbers(packed).unflatten(-1, (-1, group)) * scale[..., None]).flatten(-2)


def _numbers(packed: Tensor) -> Tensor:
    """Return what E2M1 codes stand for, two for each byte."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.long()]


def _require_groups(packed: Tensor, scale: Tensor, group: int) -> None:
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // group)
    _require_shape(f"scales of groups of {group}", scale, expected)


def _require_shape(what: str, got: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(got.shape) != tuple(expected):
        raise ValueError(f"{what} have shape {list(got.shape)}, expected {list(expected)}")
