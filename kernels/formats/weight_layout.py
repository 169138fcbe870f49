"""How quantised weights lie in memory: codes in, packed bytes out, and back.

Codes are uint8 [N, Kp], 0 .. 2^bits - 1, Kp = K padded up to a multiple of 128. A *k-group* is
128 consecutive k of one row, whatever the quantisation group is. This file knows no scales.

ROWS    [N, Kp/128, row bytes]; the row bytes of one row's k-group are

    4 bit   64 bytes   byte j:   [ k=j+64 | k=j ]                               high | low nibble
    3 bit   48 bytes   A[j], B[j], C[j], j = 0..15; A and B hold the codes' low two bits
                       A[j]: [ k=j+48 | k=j+32 | k=j+16 | k=j    ]              two bits each
                       B[j]: [ k=j+112| k=j+96 | k=j+80 | k=j+64 ]
                       C[j]: [ B3 A3 B2 A2 B1 A1 B0 A0 ]                        their third bits
    8 bit   two planes of the 4-bit form: the codes' high nibbles, then the low ones. The high
            plane alone is a 4-bit weight (code // 16)

FRAGMENT (GPU)   16 rows of a k-group at a time, in the order in which the 32 lanes of a warp hold
the left operand of the tensor cores (mma.m16n8k16; wgmma's register operand is four of these), so
that a lane's bytes are wide loads, a warp's are one run and nothing is shuffled:

    row = 8*r3 + r      k = 64*h + 16*jj + 8*k3 + 2*c + k0      lane = 4*r + c

    32-bit word of a lane, 4 bit       high half: k0 = 1        low half: k0 = 0
                                       [ h1r1 h1r0 h0r1 h0r0 |  h1r1 h1r0 h0r1 h0r0 ]   h, r3
    so `word & 0x000f000f` holds two neighbours along k: one fp16 pair, once 0x6400 is or-ed in.
    [N/16, Kp/128, 256 words]:         jj/2 (2) | lane (32) | jj%2 (2) k3 (2)

    3 words of a lane, 3 bit           16 pairs p = 4*jj + 2*k3 + r3 of one h; each half of word i
                                       [ bit i of p15 | p5i+4 | p5i+3 | p5i+2 | p5i+1 | p5i ]
    [N/16, Kp/128, 192 words]:         word i (3) | lane (32) | h (2)

    8 bit: two planes of the 4-bit form.

A 16-row block's k-groups follow each other. Rows past the last full 16 keep the ROWS form after
the blocks, so no byte is added. Scales and zeros of a block: [N/16, G, r (8), r3 (2)].
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from llmpq.precision import K_PADDING

GROUP = K_PADDING
GROUPS = (32, 64, GROUP)
"""Weights that may share a scale, beside a channel's; where those are fewer than a k-group,
float32 stages lie in ROWS on GPUs (kernels/gemm/scaled/small_groups.py)."""
SMALL = tuple(size for size in GROUPS if size < GROUP)
BLOCK_ROWS = 16


class Layout(Enum):
    """Where the packed bytes of a weight lie."""

    ROWS = "rows"
    FRAGMENT = "fragment"
    CPU = "cpu"
    """This and CPU_PANELS are drawn in cpu_layout.py, which packs them."""
    CPU_PANELS = "cpu_panels"


NATIVE = (Layout.CPU, Layout.CPU_PANELS)
"""Layouts that our own code for CPUs multiplies."""


def row_bytes(bits: int) -> tuple[int, ...]:
    """Return the bytes that each plane holds of one row's k-group."""
    try:
        return {3: (48,), 4: (64,), 8: (64, 64)}[bits]
    except KeyError:
        raise ValueError(f"weight bits: got {bits}, expected 3, 4 or 8") from None


def pack(codes_NK: Tensor, bits: int, layout: Layout) -> tuple[Tensor, ...]:
    """Pack uint8 codes [N, Kp] into flat uint8 planes of N * Kp * bits / 8 bytes in all."""
    if codes_NK.dtype != torch.uint8 or codes_NK.shape[1] % GROUP:
        raise ValueError(
            f"codes: got {codes_NK.dtype} with K = {codes_NK.shape[1]}, expected uint8 with K a "
            f"multiple of {GROUP}. Pad K with the zero point first."
        )
    row_bytes(bits)
    if bits == 8:
        return tuple(pack(nibbles, 4, layout)[0] for nibbles in (codes_NK >> 4, codes_NK & 15))
    full = codes_NK.shape[0] // BLOCK_ROWS * BLOCK_ROWS if layout is Layout.FRAGMENT else 0
    blocks = _pack_blocks4 if bits == 4 else _pack_blocks3
    rows = _pack_rows4 if bits == 4 else _pack_rows3
    return (torch.cat((blocks(codes_NK[:full]), rows(codes_NK[full:]))),)


def unpack(planes: tuple[Tensor, ...], bits: int, layout: Layout, out_features: int) -> Tensor:
    """Return the uint8 codes [N, Kp] of planes made by `pack`."""
    if bits == 8:
        high, low = (unpack((plane,), 4, layout, out_features) for plane in planes)
        return high << 4 | low
    groups = planes[0].numel() // (out_features * row_bytes(bits)[0])
    full = out_features // BLOCK_ROWS * BLOCK_ROWS if layout is Layout.FRAGMENT else 0
    split = full * groups * row_bytes(bits)[0]
    blocks = _unpack_blocks4 if bits == 4 else _unpack_blocks3
    rows = _unpack_rows4 if bits == 4 else _unpack_rows3
    return torch.cat((blocks(planes[0][:split], groups), rows(planes[0][split:], groups)))


def pack_scales(scale_NG: Tensor, layout: Layout) -> Tensor:
    """Flatten scales or zeros [N, G]; FRAGMENT and CPU_PANELS put a block's 16 rows together."""
    if layout in (Layout.ROWS, Layout.CPU):
        return scale_NG.reshape(-1)
    out_features, groups = scale_NG.shape
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    halves = (1, 16) if layout is Layout.CPU_PANELS else (2, 8)
    blocks = scale_NG[:full].reshape(-1, *halves, groups).permute(0, 3, 2, 1)
    return torch.cat((blocks.reshape(-1), scale_NG[full:].reshape(-1)))


def unpack_scales(flat: Tensor, layout: Layout, out_features: int) -> Tensor:
    """Return scales or zeros [N, G] of a tensor made by `pack_scales`."""
    groups = flat.numel() // out_features
    if layout in (Layout.ROWS, Layout.CPU):
        return flat.view(out_features, groups)
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    halves = (16, 1) if layout is Layout.CPU_PANELS else (8, 2)
    blocks = flat[: full * groups].view(-1, groups, *halves).permute(0, 3, 2, 1)
    tail = flat[full * groups :].view(-1, groups)
    return torch.cat((blocks.reshape(full, groups), tail))


def _pack_rows4(codes_NK: Tensor) -> Tensor:
    halves = codes_NK.reshape(-1, 2, 64)
    return (halves[:, 0] | halves[:, 1] << 4).view(-1)


def _unpack_rows4(flat: Tensor, groups: int) -> Tensor:
    packed = flat.view(-1, 64)
    return torch.cat((packed & 15, packed >> 4), dim=1).view(-1, groups * GROUP)


def _pack_rows3(codes_NK: Tensor) -> Tensor:
    slots = codes_NK.reshape(-1, 8, 16)  # k in group = 16 * slot + j
    packed = torch.zeros(slots.shape[0], 3, 16, dtype=torch.uint8, device=codes_NK.device)
    for slot in range(8):
        half, field = divmod(slot, 4)
        packed[:, half] |= (slots[:, slot] & 3) << (2 * field)
        packed[:, 2] |= (slots[:, slot] >> 2) << (2 * field + half)
    return packed.view(-1)


def _unpack_rows3(flat: Tensor, groups: int) -> Tensor:
    packed = flat.view(-1, 3, 16)
    codes = torch.empty(packed.shape[0], 8, 16, dtype=torch.uint8, device=flat.device)
    for slot in range(8):
        half, field = divmod(slot, 4)
        third = (packed[:, 2] >> (2 * field + half) & 1) << 2
        codes[:, slot] = packed[:, half] >> (2 * field) & 3 | third
    return codes.view(-1, groups * GROUP)


# Axes of the codes of 16 rows: 0 block, 1 r3, 2 r, 3 group, 4 h, 5 jj/2, 6 jj%2, 7 k3, 8 c, 9 k0.
_CODE_AXES = (2, 8, -1, 2, 2, 2, 2, 4, 2)
_AXES4 = (0, 3, 5, 2, 8, 6, 7, 9, 4, 1)  # group | jj/2 | r c | jj%2 k3 | k0 h r3 (a nibble)
_AXES3 = (0, 3, 2, 8, 4, 9, 5, 6, 7, 1)  # group | r c | h | k0 | jj/2 jj%2 k3 r3 (a pair)


def _permute(codes_NK: Tensor, axes: tuple[int, ...]) -> Tensor:
    n, k = codes_NK.shape
    shape = (n // BLOCK_ROWS, *(k // GROUP if size < 0 else size for size in _CODE_AXES))
    return codes_NK.reshape(shape).permute(axes)


def _permute_back(values: Tensor, axes: tuple[int, ...], groups: int) -> Tensor:
    """Undo `_permute` on values in memory order."""
    sizes = (-1, *(groups if size < 0 else size for size in _CODE_AXES))
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    codes = values.view([sizes[axis] for axis in axes]).permute(inverse)
    return codes.reshape(-1, groups * GROUP)


def _pack_blocks4(codes_NK: Tensor) -> Tensor:
    nibbles = _permute(codes_NK, _AXES4).reshape(-1, 2)
    return nibbles[:, 0] | nibbles[:, 1] << 4


def _unpack_blocks4(flat: Tensor, groups: int) -> Tensor:
    return _permute_back(torch.stack((flat & 15, flat >> 4), dim=1).view(-1), _AXES4, groups)


def _pack_blocks3(codes_NK: Tensor) -> Tensor:
    pairs = _permute(codes_NK, _AXES3).reshape(-1, 64, 2, 16).int()  # lane and h, k0, p
    words = torch.zeros(pairs.shape[0], 3, 64, dtype=torch.int32, device=codes_NK.device)
    for i, k0 in ((i, k0) for i in range(3) for k0 in range(2)):
        half = (pairs[:, :, k0, 15] >> i & 1) << 15
        for field in range(5):
            half |= pairs[:, :, k0, 5 * i + field] << (3 * field)
        words[:, i] |= half << (16 * k0)
    return words.view(-1).view(torch.uint8)


def _unpack_blocks3(flat: Tensor, groups: int) -> Tensor:
    words = flat.clone().view(torch.int32).view(-1, 3, 64)
    pairs = torch.zeros(words.shape[0], 64, 2, 16, dtype=torch.uint8, device=flat.device)
    for i, k0 in ((i, k0) for i in range(3) for k0 in range(2)):
        half = words[:, i] >> (16 * k0)
        for field in range(5):
            pairs[:, :, k0, 5 * i + field] = (half >> (3 * field) & 7).to(torch.uint8)
        pairs[:, :, k0, 15] |= (half >> 15 & 1).to(torch.uint8) << i
    return _permute_back(pairs.view(-1), _AXES3, groups)
