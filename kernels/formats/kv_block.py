"""The packed block of the low-bit KV cache: 128 tokens of one key-value head, drawn.

Knows nothing of devices or attention: torch in, torch out, plain and slow enough to be read.

A block is two tiles of 64 tokens. A tile of keys is a matrix [64 tokens, D channels], a tile of
values is transposed, [D channels, 64 tokens]; both are the left operand of a tensor-core product
(scores = K q, output = V p), and are stored in the order in which its registers want them, so that
a thread loads 16 contiguous bytes and needs no shuffle and no shared memory.

    octet   16 rows x 8 columns; thread 4g+t holds  rows g, g+8  x  columns 2t, 2t+1
    plane   bits i*b .. i*b+b-1 of each byte of a 32-bit word; 8/b planes, one octet each:

            bit 31 ........ 24 | 23 ........ 16 | 15 ......... 8 | 7 .......... 0
                row g+8,       | row g,         | row g+8,       | row g,
                column 2t+1    | column 2t+1    | column 2t      | column 2t
                4 bits:  plane1 plane0 | plane1 plane0 | plane1 plane0 | plane1 plane0

    word    W of thread 4g+t:  W = m * (columns * b / 64) + o   (m: 16 rows, o: 8/b octets)
            keys by octet:     W = o * 4 + m
    tile    word address = (W // 4) * 128 + (4g + t) * 4 + W % 4      (16 bytes a thread)

Keys of heads whose channels are no power of two stand by octet in a GPU's pool (`pool_format`):
registers there hold powers of two, and what fills them up is then behind the last word of a tile.

`word & 0x000f000f` is then two fp16 subnormals n * 2**-24 in one instruction, the other plane is
`word & 0x00f000f0`, n * 2**-20: no conversion and no offset to subtract, only powers of two that
fold into the scales. Which channel or token is which row or column is free to choose, and chosen so
that the scales of a thread's elements are contiguous too:

    keys    row m*16 + r*8 + g = token 16m + 2g + r      octet o, column 2t+h = channel t*D/4+2o+h
    values  row m*16 + r*8 + g = channel g*D/8 + 2m + r  octet 2m+r, column u = token 16m + 2u + r

Scales and zeros are fp16 planes, x = code * scale + zero, zero = the least value:

    keys      [2, D]      one pair per channel
    values    [2, 128]    one pair per token, token 16m + 2g + r of a tile at 8g + 2m + r

The scale that stands in memory is the scale times 2**(8 - b - i*b), i: the plane of its channel or
token: planes come out of the mask 2**(i*b) times too large, and all products shall be the same
2**(8 - b) times too large. A power of two costs no precision upwards.

Keys and values may have different bits: each is drawn with its own b. Keys of 16 bits are not
packed: they stand as they are, [128, D] one token behind the other, without scales.

b: bits (8, 4, 2).  D: head_dim, padded with zeros to a multiple of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, block_bytes, padded_head_dim

TILE_TOKENS = 64
"""Tokens of one tile, two to a block."""


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """How keys and values are quantised: a scale a channel of keys, a scale a token of values."""

    precision: KVPrecision
    head_dim: int
    keys_by_octet: bool = False

    def __post_init__(self) -> None:
        if self.precision is KVPrecision.KV16:
            raise ValueError("kv16 is not a packed format; use a plain 16-bit cache")

    @property
    def key_bits(self) -> int:
        """Bits of one code of a key."""
        return self.precision.key_bits

    @property
    def value_bits(self) -> int:
        """Bits of one code of a value."""
        return self.precision.value_bits

    @property
    def channels(self) -> int:
        """head_dim, padded."""
        return padded_head_dim(self.head_dim)

    @property
    def register_channels(self) -> int:
        """`channels`, padded to a power of two."""
        return 1 << (self.channels - 1).bit_length()

    @property
    def plain_keys(self) -> bool:
        """Whether keys stand in blocks as they are, in the model's own dtype."""
        return self.key_bits == 16

    @property
    def key_words(self) -> int:
        """32-bit words of a packed block of keys; of keys that stand as they are, elements."""
        elements = BLOCK_TOKENS * self.channels
        return elements if self.plain_keys else elements * self.key_bits // 32

    @property
    def value_words(self) -> int:
        """32-bit words of a packed block of values."""
        return BLOCK_TOKENS * self.channels * self.value_bits // 32

    @property
    def key_param_shape(self) -> tuple[int, ...]:
        """Shape of a block's key scales and zeros."""
        return (2, 0 if self.plain_keys else self.channels)

    def block_bytes(self, kv_heads: int, dtype_bytes: int) -> int:
        """Bytes of one block of `kv_heads` heads, keys and values."""
        return block_bytes(
            self.precision, kv_heads=kv_heads, head_dim=self.head_dim, dtype_bytes=dtype_bytes
        )


def pool_format(precision: KVPrecision, head_dim: int) -> KVFormat:
    """Return the format of blocks in a GPU's pool."""
    channels = padded_head_dim(head_dim)
    by_octet = channels & (channels - 1) != 0
    return KVFormat(precision=precision, head_dim=head_dim, keys_by_octet=by_octet)


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round `x` to `2**bits` levels between its least and greatest value along `dim`.

    Returns uint8 codes, fp16 scale and fp16 zero (`dim` kept, of size 1). Codes are rounded against
    the fp16 scale and zero that are stored, so that dequantising makes no second error.
    """
    x32 = x.float()
    low, high = x32.amin(dim, keepdim=True), x32.amax(dim, keepdim=True)
    levels = 2**bits - 1
    scale = ((high - low) * (1.0 / levels)).to(torch.float16)
    zero = low.to(torch.float16)
    step = scale.float()
    inverse = torch.where(step > 0, 1.0 / step.clamp(min=1e-30), 0.0)
    codes = ((x32 - zero.float()) * inverse + 0.5).floor().clamp(0, levels)
    return codes.to(torch.uint8), scale, zero


def pack_keys(codes: Tensor, bits: int, *, by_octet: bool = False) -> Tensor:
    """Pack key codes [..., 128 tokens, D] into int32 words [..., block_words]."""
    *lead, tokens, channels = codes.shape
    # token 16m + 2g + r of tile n; channel t*D/4 + 2*(o*I + i) + h
    x = codes.reshape(*lead, tokens // TILE_TOKENS, 4, 8, 2, 4, channels * bits // 64, 8 // bits, 2)
    return _to_words(x, _KEY_AXES, bits, by_octet).reshape(*lead, -1)


def unpack_keys(words: Tensor, bits: int, channels: int, *, by_octet: bool = False) -> Tensor:
    """Invert `pack_keys`: uint8 codes [..., 128 tokens, D]."""
    lead = words.shape[:-1]
    x = _from_words(words, 4, channels * bits // 64, _KEY_AXES, bits, by_octet)
    return x.reshape(*lead, BLOCK_TOKENS, channels)


def pack_values(codes: Tensor, bits: int) -> Tensor:
    """Pack value codes [..., 128 tokens, D] into int32 words [..., block_words]."""
    *lead, tokens, channels = codes.shape
    # token 16m + 4t + 2h + r of tile n, octet 2m + r; channel g*D/8 + 2*row + r
    x = codes.reshape(*lead, tokens // TILE_TOKENS, 4, 4, 2, 2, 8, channels // 16, 2)
    x = x.permute(_axes("n M t h R g m r", "n M R t h g m r", len(lead)))
    x = x.reshape(*lead, tokens // TILE_TOKENS, bits, 8 // bits, 4, 2, 8, channels // 16, 2)
    return _to_words(x, _VALUE_AXES, bits).reshape(*lead, -1)


def unpack_values(words: Tensor, bits: int, channels: int) -> Tensor:
    """Invert `pack_values`: uint8 codes [..., 128 tokens, D]."""
    lead = words.shape[:-1]
    x = _from_words(words, channels // 16, bits, _VALUE_AXES, bits)
    x = x.reshape(*lead, BLOCK_TOKENS // TILE_TOKENS, 4, 2, 4, 2, channels)
    x = x.permute(_axes("n M R t h c", "n M t h R c", len(lead)))
    return x.reshape(*lead, BLOCK_TOKENS, channels)


def to_thread_order(x: Tensor) -> Tensor:
    """Reorder per-token values [..., 128] as the kernels' threads read them (drawing)."""
    return x.unflatten(-1, (-1, 4, 8, 2)).transpose(-2, -3).flatten(-4)


def from_thread_order(x: Tensor) -> Tensor:
    """Invert `to_thread_order`."""
    return x.unflatten(-1, (-1, 8, 4, 2)).transpose(-2, -3).flatten(-4)


def channel_gain(fmt: KVFormat, device: torch.device | None = None) -> Tensor:
    """Return [D]: what each channel's stored key scale is multiplied by."""
    channel = torch.arange(fmt.channels, device=device)
    return _gain(channel % (fmt.channels // 4) // 2, fmt.key_bits)


def token_gain(fmt: KVFormat, device: torch.device | None = None) -> Tensor:
    """Return [128]: what each token's stored value scale is multiplied by."""
    token = torch.arange(BLOCK_TOKENS, device=device)
    return _gain(token % TILE_TOKENS // 16 * 2 + token % 2, fmt.value_bits)


def _gain(octet: Tensor, bits: int) -> Tensor:
    return 2.0 ** (8 - bits - octet % (8 // bits) * bits)


_KEY_AXES = "n m g r t o i h"
_VALUE_AXES = "n o i t h g m r"


def _axes(order: str, names: str, lead: int) -> list[int]:
    """Return the permutation that brings axes named `order` into the sequence `names`."""
    have = order.split()
    return list(range(lead)) + [lead + have.index(name) for name in names.split()]


_WORD_AXES = {False: "n m o g t h r i", True: "n o m g t h r i"}


def _to_words(x: Tensor, order: str, bits: int, by_octet: bool = False) -> Tensor:
    """Put axes (tile n, m, o, g, t, h, r, plane i) into words [tile, W // 4, thread, W % 4]."""
    lead = x.dim() - 8
    x = x.permute(_axes(order, _WORD_AXES[by_octet], lead))
    *head, m, o, g, t, _, _, planes = x.shape
    shift = torch.arange(planes, device=x.device, dtype=torch.uint8) * bits
    byte = (x << shift).sum(-1, dtype=torch.uint8).contiguous()
    words = byte.reshape(*head, m, o, g * t, 4).view(torch.int32)
    words = words.reshape(*head, m * o // 4, 4, g * t).transpose(-1, -2)
    return words.contiguous()


def _from_words(
    words: Tensor, m: int, o: int, order: str, bits: int, by_octet: bool = False
) -> Tensor:
    """Invert `_to_words`, returning the axes in `order`."""
    planes = 8 // bits
    tiles = (BLOCK_TOKENS // TILE_TOKENS, m * o // 4)
    byte = words.contiguous().view(torch.uint8).reshape(*words.shape[:-1], *tiles, 32, 4, 4)
    byte = byte.transpose(-2, -3).reshape(
        *words.shape[:-1], tiles[0], *((o, m) if by_octet else (m, o)), 8, 4, 2, 2
    )
    codes = torch.stack([(byte >> (bits * i)) & (2**bits - 1) for i in range(planes)], -1)
    lead = codes.dim() - 8
    return codes.permute(_axes(_WORD_AXES[by_octet], order, lead))
