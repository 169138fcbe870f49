"""AtomWeight: a reordered weight of few bits with 8-bit outlier channels, as it lies in memory.

    x [M, K]   gathered by index_K: normal channels | outliers
    codes      [N, Kp/128, 64] uint8   4 bit: two's complement nibbles, byte j of a k-group of 128
                                       holds [ k = j+64 | k = j ] (high | low), as weight_layout.py
               [N, Kp] int8            3 and 8 bit, and e2m1 (twice the number)
    scale      [N, G]                  G = Kp / group, 1 without groups
    outliers   [N, O] int8             one scale a row in outlier_scale [N]
    index_K    [K] int32               which channel of x stands where; None: x comes reordered

Kp = K - O padded up to a multiple of 128. A high nibble read alone (byte & 0xF0) and a low one
shifted up (byte << 4) are signed bytes of 16 times the code: what an int8 tensor core takes.

Knows no matmul. N = out_features, K = in_features, O = outliers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.formats import weight_layout as formats
from llmpq.kernels.formats.atom_rounding import Codes, restore, round_weight
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.formats.weight_layout import GROUP, Layout


@dataclass(frozen=True, kw_only=True)
class AtomWeight:
    """A weight [N, K] in Atom's form, and how the activations that meet it are rounded."""

    scheme: AtomScheme
    out_features: int
    in_features: int
    codes: Tensor
    scale: Tensor
    outliers: Tensor
    outlier_scale: Tensor | None
    index_K: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.scale.device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, absent ones left out."""
        names = ("codes", "scale", "outliers", "outlier_scale", "index_K")
        return {name: t for name in names if (t := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; an empty outlier block counts nothing."""
        kept = dict(self.tensors)
        if not self.scheme.outliers:
            kept.pop("outlier_scale", None)
        return sum(t.nbytes for t in kept.values())

    def unpacked(self) -> Codes:
        """Return the int8 codes and scales, channels still in the reordered order."""
        return Codes(
            rotated=self.scheme.rotation,
            in_features=self.in_features,
            codes=unpack_nibbles(self.codes) if self.codes.ndim == 3 else self.codes,
            scale=self.scale,
            outliers=self.outliers,
            outlier_scale=self.outlier_scale,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K] with channels in the order of x before the gather."""
        w_NK = self.dequantize_reordered(dtype)
        if self.index_K is None:
            return w_NK
        original = torch.empty_like(w_NK)
        original[:, self.index_K.long()] = w_NK
        return original

    def dequantize_reordered(self, dtype: torch.dtype) -> Tensor:
        """Return w [N, K] with the outliers last, computed in float32."""
        return restore(self.unpacked()).to(dtype)

    def with_activations(self, bits: int) -> AtomWeight:
        """Return the same tensors met by activations of other bits (16: a weight-only product)."""
        return replace(self, scheme=replace(self.scheme, activation_bits=bits))

    def to(self, device: torch.device | str) -> AtomWeight:
        """Return the weight on `device`."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors.items()}
        return replace(self, **moved)


def atom_weight(codes: Codes, scheme: AtomScheme, index_K: Tensor | None = None) -> AtomWeight:
    """Pack rounded rows; `index_K` is the order their channels were put in."""
    packed = codes.codes
    if scheme.weight_bits == 4 and scheme.number == "int":
        packed = pack_nibbles(packed)
    return AtomWeight(
        scheme=scheme,
        out_features=packed.shape[0],
        in_features=codes.in_features,
        codes=packed,
        scale=codes.scale,
        outliers=codes.outliers,
        outlier_scale=codes.outlier_scale,
        index_K=None if index_K is None else index_K.to(torch.int32),
    )


def quantize_atom(
    w_NK: Tensor, scheme: AtomScheme, *, dtype: torch.dtype, index_K: Tensor | None = None
) -> AtomWeight:
    """Round a weight [N, K] to nearest after putting its channels in the order `index_K`."""
    reordered = w_NK if index_K is None else w_NK[:, index_K.long()]
    return atom_weight(round_weight(reordered, scheme, scale_dtype=dtype), scheme, index_K)


def pack_nibbles(codes_NK: Tensor) -> Tensor:
    """Pack int8 codes -8..7 [N, Kp] as uint8 [N, Kp/128, 64]."""
    low, high = int(codes_NK.min()), int(codes_NK.max())
    if low < -8 or high > 7:
        raise ValueError(f"4-bit codes: got {low}..{high}, expected -8..7")
    nibbles = (codes_NK & 15).view(torch.uint8)
    (plane,) = formats.pack(nibbles, 4, Layout.ROWS)
    return plane.view(codes_NK.shape[0], -1, GROUP // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the int8 codes [N, Kp] of `pack_nibbles`."""
    halves = torch.cat((packed << 4, packed & 0xF0), dim=2).view(torch.int8)
    return (halves >> 4).view(packed.shape[0], -1)
