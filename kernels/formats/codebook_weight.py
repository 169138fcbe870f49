"""CodebookWeight: a weight [N, K] of 4-bit codes that stand for 16 values of a table, kept so.

    w[n, k] = table[code[n, k]] scale[n, k // group] factor[n]

    values   table                                      group   scale            in checkpoints
    e2m1     0 .5 1 1.5 2 3 4 6 and their negatives     32      E8M0, a byte     MXFP4
                                                        16      E4M3 and factor  NVFP4
    nf4      quantiles of a normal distribution         64      float16, 32      bitsandbytes
    fp4      0 1/192 2/3 1 1/3 1/2 1/6 1/4, negatives   64      float16, 32      bitsandbytes
    iq4      -127 -104 -83 ... 89 113                   32      float16, 32      GGUF's IQ4

ROWS       bytes as weight_layout.py draws them; scales [N, G]
FRAGMENT   (GPU) words as weight_layout.py draws them, but for the order of bits in a word:
           E2M1      each half's four codes i = 0..3 (h0r0, h0r1, h1r0, h1r1) of a sign s and three
                     bits m lie as [ s0 s2 s3 s1 | m2 | m0 | m1 | m3 ], so that few masks bring
                     them to where a 16-bit float has them; scales of MXFP4 [N/16, Kp/128, r (8),
                     part (4), r3 (2)], of NVFP4 [N/16, Kp/128, r (8), jj (4), h (2), r3 (2)]: a
                     lane's are 8 and 16 bytes
           others    float16 scales, groups of 32 and 64; scales as there. The lower three bits
                     of codes (h, r3, k0), k0 fastest, in nibbles; their top bits fill the nibbles'
                     so that those of a half are the top bits of bytes: h = 0 as they are, h = 1
                     once the word is shifted by 4
Padding behind K has code 0 of E2M1 and FP4, and scale 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats import weight_layout
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP, Layout
from llmpq.kernels.multiprocessors import older_than
from llmpq.precision import padded_k

BITS = 4
GROUPS = (16, 32, 64, GROUP)
"""Weights that may share a scale."""
E8M0, E4M3 = torch.uint8, torch.float8_e4m3fn
"""Scales of a byte: a power of two by its exponent, biased by 127, and a float."""
PLAIN = (torch.float16, torch.float32)
LARGEST = 128
"""Exponent of the largest E8M0 scale in FRAGMENT: 2. What a kernel multiplies by is 2^126 of it."""
_PARTS = 4
"""Scales of a k-group of FRAGMENT."""


class Codebook(Enum):
    """What the codes of a table stand for."""

    E2M1 = "e2m1"
    NF4 = "nf4"
    FP4 = "fp4"
    IQ4 = "iq4"

    @property
    def values(self) -> tuple[float, ...]:
        """The 16 values, by code."""
        return _TABLES[self]


def _signed(magnitudes: Sequence[float]) -> tuple[float, ...]:
    return (*magnitudes, *(-value for value in magnitudes))


_TABLES = {
    Codebook.E2M1: _signed((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    Codebook.NF4: (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    Codebook.FP4: _signed(tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))),
    Codebook.IQ4: tuple(
        map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
    ),
}


@dataclass(frozen=True, kw_only=True)
class CodebookWeight:
    """Packed codes, scales and, where a scale is of two values, a factor of each row."""

    codebook: Codebook
    group_size: int
    out_features: int
    in_features: int
    plane: Tensor
    """Flat uint8."""
    scale: Tensor
    """Flat, in the layout's order: E8M0, E4M3, float16 or float32."""
    factor: Tensor | None = None
    """float32 [N]."""
    layout: Layout = Layout.ROWS

    @property
    def is_mxfp4(self) -> bool:
        """Whether it is E2M1 with a power of two for 32."""
        return self.codebook is Codebook.E2M1 and self.scale.dtype is E8M0

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return BITS

    @property
    def groups(self) -> int:
        """Groups of one row."""
        return padded_k(self.in_features) // self.group_size

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.plane.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.plane, self.scale, self.factor) if t is not None)

    def to(self, device: torch.device | str) -> CodebookWeight:
        """Return the weight on a device, in the layout that device computes with fastest."""
        moved = replace(
            self,
            plane=self.plane.to(device),
            scale=self.scale.to(device),
            factor=None if self.factor is None else self.factor.to(device),
        )
        quick = moved.plane.is_cuda and not older_than(moved.plane.device, (8, 0))
        return moved.in_fragments() if quick and moved.has_fragments() else moved

    def codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the uint8 codes [stop - start, Kp] of some rows; in FRAGMENT, of whole blocks."""
        stop = self.out_features if stop is None else stop
        row = self.plane.numel() // self.out_features
        flat = self.plane.view(-1)[start * row : stop * row]
        if self.layout is Layout.FRAGMENT:
            e2m1 = self.codebook is Codebook.E2M1
            flat = _unfolded(flat) if e2m1 else _unpaired(flat)
        return weight_layout.unpack((flat,), BITS, self.layout, stop - start)

    def scale_NG(self) -> Tensor:
        """Return the scales [N, G] as they are stored."""
        if self.layout is Layout.ROWS:
            return self.scale.view(self.out_features, -1)
        n, blocks = self.out_features, self.out_features // BLOCK_ROWS
        if self.is_mxfp4:
            by_lane = self.scale.view(blocks, -1, 8, _PARTS, 2)
            return by_lane.permute(0, 4, 2, 1, 3).reshape(n, -1)
        if self.codebook is Codebook.E2M1:
            by_lane = self.scale.view(blocks, -1, 8, 4, 2, 2)
            return by_lane.permute(0, 5, 2, 1, 4, 3).reshape(n, -1)
        return weight_layout.unpack_scales(self.scale, self.layout, n)

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of w in float32 (float64 if asked for), rounded once to `dtype`."""
        stop = self.out_features if stop is None else stop
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        table = torch.tensor(self.codebook.values, dtype=torch.float32, device=self.device).to(wide)
        w = table[self.codes(start, stop).int()].view(stop - start, self.groups, -1)
        w *= scale_values(self.scale_NG()[start:stop]).to(wide)[:, :, None]
        if self.factor is not None:
            w *= self.factor[start:stop].to(wide)[:, None, None]
        return w.view(stop - start, -1)[:, : self.in_features].to(dtype)

    def in_fragments(self) -> CodebookWeight:
        """Return the weight in FRAGMENT, where `has_fragments`."""
        if self.layout is Layout.FRAGMENT:
            return self
        assert self.has_fragments()
        (plane,) = weight_layout.pack(self.codes(), BITS, Layout.FRAGMENT)
        if self.is_mxfp4:
            rows = self.scale_NG().view(-1, 2, 8, self.groups // _PARTS, _PARTS)
            scale = rows.permute(0, 3, 2, 4, 1).reshape(-1)
        elif self.codebook is Codebook.E2M1:
            rows = self.scale_NG().view(-1, 2, 8, self.groups // 8, 2, 4)
            scale = rows.permute(0, 3, 2, 5, 4, 1).reshape(-1)
        else:
            scale = weight_layout.pack_scales(self.scale_NG(), Layout.FRAGMENT)
        e2m1 = self.codebook is Codebook.E2M1
        plane = _folded(plane) if e2m1 else _paired(plane)
        return replace(self, plane=plane, scale=scale, layout=Layout.FRAGMENT)

    def has_fragments(self) -> bool:
        """Whether kernels take its words: whole blocks of rows, no MXFP4 scale above 2.

        Asks the device for the largest one.
        """
        if self.layout is Layout.FRAGMENT:
            return True
        if self.out_features % BLOCK_ROWS:
            return False
        if self.is_mxfp4:
            return self.group_size * _PARTS == GROUP and int(self.scale.max()) <= LARGEST
        if self.codebook is Codebook.E2M1:
            nvfp4 = self.group_size == 16 and self.scale.dtype is E4M3
            return nvfp4 and self.factor is not None
        return self.group_size in (32, 64) and self.scale.dtype == torch.float16


def scale_values(scale: Tensor) -> Tensor:
    """Return what stored scales stand for, in float32."""
    if scale.dtype is not E8M0:
        return scale.float()
    bits = (scale.int() << 23).masked_fill(scale == 0, 1 << 22)  # 2^-127 is a subnormal
    return bits.view(torch.float32)


def codebook_weight(
    codes_NK: Tensor,
    scale_NG: Tensor,
    *,
    codebook: Codebook,
    group_size: int,
    factor: Tensor | None = None,
) -> CodebookWeight:
    """Pack uint8 codes [N, K], K even, as `of_pairs` does."""
    pairs = codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
    return of_pairs(pairs, scale_NG, codebook=codebook, group_size=group_size, factor=factor)


def of_pairs(
    pairs_NJ: Tensor,
    scale_NG: Tensor,
    *,
    codebook: Codebook,
    group_size: int,
    factor: Tensor | None = None,
) -> CodebookWeight:
    """Return a weight of bytes [N, K / 2], each a code and, in its upper half, the next one.

    Scales are [N, ceil(K / group)]; `ValueError` for what lies.
    """
    n, k = pairs_NJ.shape[0], 2 * pairs_NJ.shape[1]
    expected = (n, -(-k // group_size))
    if group_size not in GROUPS or tuple(scale_NG.shape) != expected:
        raise ValueError(
            f"scales of groups of {group_size} have shape {list(scale_NG.shape)}, expected "
            f"{list(expected)} for codes [{n}, {k}] in groups of {', '.join(map(str, GROUPS))}"
        )
    finite = scale_NG != 255 if scale_NG.dtype is E8M0 else scale_NG.float().isfinite()
    if not bool(finite.all()) or (factor is not None and not bool(factor.isfinite().all())):
        raise ValueError("scales that are NaN or infinite; download it again")
    zero = codebook.values.index(0.0) if 0.0 in codebook.values else 0
    pairs = functional.pad(pairs_NJ, (0, (padded_k(k) - k) // 2), value=zero * 17)
    gap = padded_k(k) // group_size - expected[1]
    if gap:
        scale_NG = torch.cat((scale_NG, torch.zeros(n, gap).to(scale_NG)), dim=1)
    low, high = pairs.view(n, -1, 2, GROUP // 4).unbind(2)  # codes 0 to 63 and 64 to 127
    plane = torch.stack((low & 15 | high << 4, low >> 4 | high & 240), dim=-1)
    return CodebookWeight(
        codebook=codebook,
        group_size=group_size,
        out_features=n,
        in_features=k,
        plane=plane.view(-1),
        scale=scale_NG.reshape(-1),
        factor=factor,
    )


def ordered(weight: CodebookWeight, order: Callable[[Tensor], Tensor]) -> CodebookWeight:
    """Return a ROWS weight with its rows in another order."""
    n = weight.out_features
    return replace(
        weight,
        plane=order(weight.plane.view(n, -1)).reshape(-1),
        scale=order(weight.scale.view(n, -1)).reshape(-1),
        factor=None if weight.factor is None else order(weight.factor[:, None]).reshape(-1),
    )


def stacked(pieces: Sequence[CodebookWeight]) -> CodebookWeight:
    """Return ROWS weights of one form, one below the other."""
    first = pieces[0]
    factors = [p.factor for p in pieces if p.factor is not None]
    return replace(
        first,
        out_features=sum(piece.out_features for piece in pieces),
        plane=torch.cat([piece.plane for piece in pieces]),
        scale=torch.cat([piece.scale for piece in pieces]),
        factor=torch.cat(factors) if factors else None,
    )


def _folded(plane: Tensor) -> Tensor:
    """Return FRAGMENT's nibbles with their bits where the file's head draws them."""
    half = plane.view(torch.int16).int() & 0xFFFF
    sign = [half >> (4 * i + 3) & 1 for i in range(4)]
    rest = [half >> (4 * i) & 7 for i in range(4)]
    folded = sign[0] << 15 | sign[2] << 14 | sign[3] << 13 | sign[1] << 12
    folded |= rest[2] << 9 | rest[0] << 6 | rest[1] << 3 | rest[3]
    return _bytes(folded)


def _unfolded(plane: Tensor) -> Tensor:
    """Undo `_folded`."""
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


def _paired(plane: Tensor) -> Tensor:
    """Return words of codes whose bits lie where the file's head draws them for lookups."""
    given = plane.view(torch.int32)
    made = torch.zeros_like(given)
    for old, low, top in _places():
        made |= (given >> old & 7) << low | (given >> (old + 3) & 1) << top
    return made.view(torch.uint8)


def _unpaired(plane: Tensor) -> Tensor:
    """Undo `_paired`."""
    given = plane.view(torch.int32)
    made = torch.zeros_like(given)
    for old, low, top in _places():
        made |= (given >> low & 7 | (given >> top & 1) << 3) << old
    return made.view(torch.uint8)


def _bytes(half: Tensor) -> Tensor:
    """Return the bytes of 16 bits in each int32."""
    signed = torch.where(half >= 1 << 15, half - (1 << 16), half)
    return signed.to(torch.int16).view(torch.uint8)
