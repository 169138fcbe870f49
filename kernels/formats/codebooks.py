"""Codes of 4 bits that stand for 16 values of a codebook: the values, and how FRAGMENT's words lie.

    codebook   values                                     group   scale            in checkpoints
    e2m1       0 .5 1 1.5 2 3 4 6 and their negatives     32      E8M0, a byte     MXFP4
                                                          16      E4M3 and factor  NVFP4
    nf4        quantiles of a normal distribution         64      float16, 32      bitsandbytes
    fp4        0 1/192 2/3 1 1/3 1/2 1/6 1/4, negatives   64      float16, 32      bitsandbytes
    iq4        -127 -104 -83 ... 89 113                   32      float16, 32      GGUF's IQ4

Words of FRAGMENT are weight_layout.py's, but for the order of bits in a word:
    E2M1      each half's four codes i = 0..3 (h0r0, h0r1, h1r0, h1r1) of a sign s and three bits m
              lie as [ s0 s2 s3 s1 | m2 | m0 | m1 | m3 ], so that few masks bring them to where a
              16-bit float has them; scales of MXFP4 [N/16, Kp/128, r (8), part (4), r3 (2)], of
              NVFP4 [N/16, Kp/128, r (8), jj (4), h (2), r3 (2)]: a lane's are 8 and 16 bytes
    others    float16 scales, groups of 32 and 64; scales as there. The lower three bits of codes
              (h, r3, k0), k0 fastest, in nibbles; their top bits fill the nibbles' so that those of
              a half are the top bits of bytes: h = 0 as they are, h = 1 once shifted by 4
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

E8M0, E4M3 = torch.uint8, torch.float8_e4m3fn
"""Scales of a byte: a power of two by its exponent, biased by 127, and a float."""


class Codebook(Enum):
    """What codes of 4 bits stand for."""

    E2M1 = "e2m1"
    NF4 = "nf4"
    FP4 = "fp4"
    IQ4 = "iq4"

    @property
    def values(self) -> tuple[float, ...]:
        """The 16 values, by code."""
        return _VALUES[self]


def _signed(magnitudes: Sequence[float]) -> tuple[float, ...]:
    return (*magnitudes, *(-value for value in magnitudes))


_VALUES = {
    Codebook.E2M1: _signed((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    Codebook.NF4: (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    Codebook.FP4: _signed(tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))),
    Codebook.IQ4: tuple(
        map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
    ),
}


def scale_values(scale: Tensor) -> Tensor:
    """Return what stored scales stand for, in float32."""
    if scale.dtype is not E8M0:
        return scale.float()
    bits = (scale.int() << 23).masked_fill(scale == 0, 1 << 22)  # 2^-127 is a subnormal
    return bits.view(torch.float32)


def folded(plane: Tensor) -> Tensor:
    """Return FRAGMENT's nibbles with their bits where the file's head draws them."""
    half = plane.view(torch.int16).int() & 0xFFFF
    sign = [half >> (4 * i + 3) & 1 for i in range(4)]
    rest = [half >> (4 * i) & 7 for i in range(4)]
    folded = sign[0] << 15 | sign[2] << 14 | sign[3] << 13 | sign[1] << 12
    folded |= rest[2] << 9 | rest[0] << 6 | rest[1] << 3 | rest[3]
    return _bytes(folded)


def unfolded(plane: Tensor) -> Tensor:
    """Undo `folded`."""
    half = plane.view(torch.int16).int() & 0xFFFF
    sign = [half >> place & 1 for place in (15, 12, 14, 13)]
    rest = [half >> place & 7 for place in (6, 3, 9, 0)]
    whole = torch.zeros_like(half)
    for i in range(4):
        whole |= (sign[i] << 3 | rest[i]) << 4 * i
    return _bytes(whole)


def _places() -> list[tuple[int, int, int]]:
    """Return of a word's codes j = (h, r3, k0), k0 fastest: where weight_layout.py has their bits,
    where their lower three go, and where their top one goes."""
    codes = ((h, r3, k0) for h in range(2) for r3 in range(2) for k0 in range(2))
    return [
        (16 * k0 + 8 * h + 4 * r3, 16 * h + 8 * r3 + 4 * k0, 16 * r3 + 8 * k0 + 7 - 4 * h)
        for h, r3, k0 in codes
    ]


def paired(plane: Tensor) -> Tensor:
    """Return words of codes whose bits lie where the file's head draws them for lookups."""
    given = plane.view(torch.int32)
    made = torch.zeros_like(given)
    for old, low, top in _places():
        made |= (given >> old & 7) << low | (given >> (old + 3) & 1) << top
    return made.view(torch.uint8)


def unpaired(plane: Tensor) -> Tensor:
    """Undo `paired`."""
    given = plane.view(torch.int32)
    made = torch.zeros_like(given)
    for old, low, top in _places():
        made |= (given >> low & 7 | (given >> top & 1) << 3) << old
    return made.view(torch.uint8)


def _bytes(half: Tensor) -> Tensor:
    """Return the bytes of 16 bits in each int32."""
    signed = torch.where(half >= 1 << 15, half - (1 << 16), half)
    return signed.to(torch.int16).view(torch.uint8)
