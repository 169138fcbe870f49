"""Weights stored in FP8, to values.

    FP8      E4M3 codes [N, K], scale for all, a row [N, 1], or a block [N / bn, K / bk]; w = code s

Every product is exact in float32 (4 and 24 bits of mantissa, rounded once), so values are the
format's own. 4 bits are codebook_weight.py's. Source: compressed-tensors 0.20 in our tests.
"""

from __future__ import annotations

from torch import Tensor


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


def _require_shape(what: str, got: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(got.shape) != tuple(expected):
        raise ValueError(f"{what} have shape {list(got.shape)}, expected {list(expected)}")
