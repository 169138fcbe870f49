"""A GGUF matrix's own codes as a weight of ours, in groups of 32: nothing is rounded a second time.

    block, 32 weights                                            w
    Q8_0   d f16 | 32 int8                                       d q
    Q4_0   d f16 | 16 bytes, weights 0-15 | 16-31                d (q - 8)
    Q4_1   d, m f16 | 16 bytes                                   d q + m
    Q5_0   d f16 | their fifth bits, 4 bytes | 16 bytes          d (q - 16)
    Q5_1   d, m f16 | 4 bytes | 16 bytes                         d q + m
    block, 256 weights in eights of 32
    Q4_K   d, dmin f16 | 8 s, 8 m of 6 bits | 128 bytes          d s q - dmin m
    Q5_K   the same, 32 bytes of fifth bits before the last 128

Ours is (code - zero) scale. Scales of a float32 stage are float32 and exact; else they are float16:
exact for Q8_0, Q4_0 and Q5_0, off by 2^-11 of a step's place for the others. The blocks are as ggml
lays them (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.checkpoints.gguf_file import GgufTensor
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from llmpq.precision import WeightScheme, padded_k

GROUP = 32
"""Weights of a block, or of a part of one, that share a scale."""
SMALLEST, LARGEST_ZERO = 6.2e-5, 1024.0
"""The least scale of full precision in float16, and the largest zero kept within half a step."""


@dataclass(frozen=True, kw_only=True)
class BlockCodes:
    """Codes uint8 [N, K], scale float32 [N, K / 32]; w = code scale + low, low = -zero scale."""

    codes_NK: Tensor
    scale_NG: Tensor
    zero: int | None = None
    """Of all groups; None where `low_NG` says what is added to scale * code."""
    low_NG: Tensor | None = None

    def rows(self, order: Callable[[Tensor], Tensor]) -> BlockCodes:
        """Return the same weights with rows in another order."""
        low = None if self.low_NG is None else order(self.low_NG)
        codes, scale = order(self.codes_NK), order(self.scale_NG)
        return BlockCodes(codes_NK=codes, scale_NG=scale, zero=self.zero, low_NG=low)

    def columns(self, order: Callable[[Tensor], Tensor]) -> BlockCodes:
        """Return the same weights with columns in another order, that of whole groups."""
        return self._transposed().rows(order)._transposed()

    def _transposed(self) -> BlockCodes:
        low = None if self.low_NG is None else self.low_NG.T
        return BlockCodes(
            codes_NK=self.codes_NK.T, scale_NG=self.scale_NG.T, zero=self.zero, low_NG=low
        )


def codes_of(tensor: GgufTensor, expert: int | None) -> BlockCodes | None:
    """Return a matrix's codes, or one expert's; None for a type whose grid is not even."""
    if tensor.kind not in READERS:
        return None
    blocks, shape = torch.from_numpy(tensor.blocks()), tensor.shape
    if expert is not None:
        blocks, shape = blocks.view(shape[0], -1)[expert], shape[1:]
    size, read = READERS[tensor.kind]
    return read(blocks.view(shape[0], -1, size))


def kept_weight(
    pieces: Sequence[BlockCodes],
    kinds: Sequence[str],
    scheme: WeightScheme,
    dtype: torch.dtype,
    order: Callable[[Tensor], Tensor],
) -> QuantizedWeight | None:
    """Return pieces one below the other as a weight of `scheme`; None where it cannot hold them.

    `order` puts their rows in ours.
    """
    bits = scheme.bits
    if scheme.group_size != GROUP or bits not in (4, 8) or scheme.activation_bits < 16:
        return None
    if any(BITS[kind] > bits for kind in kinds):
        return None
    made = [_on_our_grid(piece, bits, symmetric=scheme.symmetric) for piece in pieces]
    whole = [part for part in made if part is not None]
    if len(whole) < len(made):
        return None
    codes, scale, zero = (order(torch.cat(parts)) for parts in zip(*whole, strict=True))
    if dtype != torch.float32:
        small = (scale != 0) & (scale.abs() < SMALLEST)
        if bool(small.any()) or bool((zero.abs() > LARGEST_ZERO).any()):
            return None
        dtype = torch.float16  # bfloat16 would round the scales a second time
    k = codes.shape[1]
    more = padded_k(k) - k
    scale, zero = (functional.pad(t, (0, more // GROUP)).to(dtype) for t in (scale, zero))
    return from_codes(
        functional.pad(codes, (0, more)),
        scale,
        None if scheme.symmetric else zero,
        bits=bits,
        group_size=GROUP,
        in_features=k,
    )


def _on_our_grid(
    piece: BlockCodes, bits: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return codes, scales and zeros; None for weights with a low end on a symmetric grid."""
    codes, scale = piece.codes_NK, piece.scale_NG
    middle = 1 << (bits - 1)
    if piece.low_NG is None:
        assert piece.zero is not None
        return codes + (middle - piece.zero), scale, torch.full_like(scale, middle)
    if symmetric:
        return None
    low, flat = piece.low_NG, scale == 0  # all weights of a flat group are `low`: (0 + 1) low
    zero = torch.where(flat, -1.0, -low / torch.where(flat, 1.0, scale))
    codes = torch.where(flat.repeat_interleave(GROUP, dim=1), 0, codes)
    return codes, torch.where(flat, low, scale), zero


def halves(blocks: Tensor, start: int) -> Tensor:
    """Return a number of float16 from each block, as float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def nibbles(packed: Tensor) -> Tensor:
    """Return 32 codes of every 16 bytes: low nibbles first."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return 32 bits of every 4 bytes, in place 16."""
    bits = packed[..., :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q8_0(blocks: Tensor) -> BlockCodes:
    codes = blocks[..., 2:] ^ 128  # int8 + 128
    return BlockCodes(codes_NK=codes.flatten(1), scale_NG=halves(blocks, 0), zero=128)


def _q4_0(blocks: Tensor) -> BlockCodes:
    codes = nibbles(blocks[..., 2:])
    return BlockCodes(codes_NK=codes.flatten(1), scale_NG=halves(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> BlockCodes:
    codes, low = nibbles(blocks[..., 4:]), halves(blocks, 2)
    return BlockCodes(codes_NK=codes.flatten(1), scale_NG=halves(blocks, 0), low_NG=low)


def _q5_0(blocks: Tensor) -> BlockCodes:
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return BlockCodes(codes_NK=codes.flatten(1), scale_NG=halves(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> BlockCodes:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    low = halves(blocks, 2)
    return BlockCodes(codes_NK=codes.flatten(1), scale_NG=halves(blocks, 0), low_NG=low)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and mins [..., 8] of every 12 bytes."""
    first, second, mixed = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, mixed & 15 | first >> 6 << 4), dim=-1)
    mins = torch.cat((second & 63, mixed >> 4 | second >> 6 << 4), dim=-1)
    return scales.float(), mins.float()


def _k_codes(blocks: Tensor, nibbles_at: int, fifth_at: int | None) -> BlockCodes:
    """Return the codes of Q4_K, or of Q5_K with fifth bits at a place."""
    scales, mins = _six_bits(blocks[..., 4:16])
    pairs = blocks[..., nibbles_at : nibbles_at + 128].unflatten(-1, (4, 32))
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)  # [N, blocks, 8, 32]
    if fifth_at is not None:
        packed = blocks[..., None, fifth_at : fifth_at + 32]
        codes = codes | (packed >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return BlockCodes(
        codes_NK=codes.flatten(1),
        scale_NG=(halves(blocks, 0)[..., None] * scales).flatten(1),
        low_NG=-(halves(blocks, 2)[..., None] * mins).flatten(1),
    )


READERS: dict[str, tuple[int, Callable[[Tensor], BlockCodes]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, lambda blocks: _k_codes(blocks, 16, None)),
    "Q5_K": (176, lambda blocks: _k_codes(blocks, 48, 16)),
}
"""Type -> bytes of a block, and what reads them."""
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q4_K": 4, "Q5_K": 5}
BITS |= {"IQ4_NL": 8, "IQ4_XS": 8}
