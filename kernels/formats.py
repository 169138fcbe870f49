"""How quantised weights lie in memory: codes in, packed bytes out, and back.

Codes are uint8 [N, Kp], 0 .. 2^bits - 1, Kp = K padded up to a multiple of 128. A *k-group* is
128 consecutive k of one row, whatever the quantisation group is. This file knows no scales.

Bytes of one row's k-group ("row bytes"), b = bits:

    4 bit   64 bytes        byte j:   [ k = j+64 | k = j ]                 high | low nibble
    8 bit   64 + 64 bytes   two planes of the 4-bit form: the codes' high nibbles, then the low
                            ones; the high plane alone is a 4-bit weight (scale x 16)
    3 bit   32 + 16 bytes   plane 2: bytes A[j], B[j], j = 0..15, hold the codes' low two bits
                            A[j]: [ k=j+48 | k=j+32 | k=j+16 | k=j    ]    two bits each
                            B[j]: [ k=j+112| k=j+96 | k=j+80 | k=j+64 ]
                            plane 1: byte C[j] holds the codes' third bits, interleaved:
                            [ B3 A3 B2 A2 B1 A1 B0 A0 ]                    A0 belongs to k=j

So one AND yields values that are neighbours along k in neighbouring bytes, which is what a
tensor-core operand wants; nothing is shuffled between threads.

Layout ROWS keeps [N, Kp/128, row bytes]. Layout FRAGMENT (GPU) reorders the bytes of 16 rows of
one k-group into the order in which the 32 lanes of a warp hold the A operand of mma.m16n8k16
(wgmma's register operand is four of these side by side). Row = 8*r3 + r; byte j = 16*jj + 8*k3 +
2*c + k0; lane = 4*r + c:

    4 bit  [N/16, Kp/128, 1024]:   jj/2 (2) | lane (32) | jj%2 (2) k3 (2) r3 (2) k0 (2)
    3 bit  [N/16, Kp/128,  512]:   lane (32) | A,B (2) k3 (2) r3 (2) k0 (2)   then plane 1
           [N/16, Kp/128,  256]:   lane (32) | k3 (2) r3 (2) k0 (2)

so a lane's bytes are one 16-byte (8-byte) load and a warp's are one run of 512 (256) bytes, and a
16-row block's k-groups follow each other. Rows past the last full 16 keep the ROWS form after it,
so no byte is added.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from llmpq.precision import K_PADDING

GROUP = K_PADDING
BLOCK_ROWS = 16


class Layout(Enum):
    """Where the packed bytes of a weight lie."""

    ROWS = "rows"
    FRAGMENT = "fragment"
    CPU_INT4 = "cpu_int4"
    CPU_INT8 = "cpu_int8"


def plane_bytes(bits: int) -> tuple[int, ...]:
    """Return the bytes that each plane holds of one row's k-group."""
    try:
        return {3: (32, 16), 4: (64,), 8: (64, 64)}[bits]
    except KeyError:
        raise ValueError(f"weight bits: got {bits}, expected 3, 4 or 8") from None


def pack(codes_NK: Tensor, bits: int, layout: Layout) -> tuple[Tensor, ...]:
    """Pack uint8 codes [N, Kp] into flat uint8 planes of N * Kp * bits / 8 bytes in all."""
    rows = _pack_rows(codes_NK, bits)
    if layout is Layout.ROWS:
        return tuple(plane.reshape(-1) for plane in rows)
    return tuple(_to_fragments(plane, bits) for plane in rows)


def unpack(planes: tuple[Tensor, ...], bits: int, layout: Layout, out_features: int) -> Tensor:
    """Return the uint8 codes [N, Kp] of planes made by `pack`."""
    rows = []
    for plane, row_bytes in zip(planes, plane_bytes(bits), strict=True):
        if layout is Layout.FRAGMENT:
            rows.append(_from_fragments(plane, bits, row_bytes, out_features))
        else:
            rows.append(plane.view(out_features, -1, row_bytes))
    return _unpack_rows(tuple(rows), bits)


def pack_scales(scale_NG: Tensor, layout: Layout) -> Tensor:
    """Flatten scales or zeros [N, G]; FRAGMENT puts the 16 rows of a block side by side."""
    if layout is Layout.ROWS:
        return scale_NG.reshape(-1)
    out_features, groups = scale_NG.shape
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    blocks = scale_NG[:full].view(-1, BLOCK_ROWS, groups).transpose(1, 2)
    return torch.cat((blocks.reshape(-1), scale_NG[full:].reshape(-1)))


def unpack_scales(flat: Tensor, layout: Layout, out_features: int) -> Tensor:
    """Return scales or zeros [N, G] of a tensor made by `pack_scales`."""
    groups = flat.numel() // out_features
    if layout is Layout.ROWS:
        return flat.view(out_features, groups)
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    blocks = flat[: full * groups].view(-1, groups, BLOCK_ROWS).transpose(1, 2)
    tail = flat[full * groups :].view(-1, groups)
    return torch.cat((blocks.reshape(full, groups), tail))


def _pack_rows(codes_NK: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Codes [N, Kp] to planes [N, Kp/128, row bytes]."""
    n, k = codes_NK.shape
    if codes_NK.dtype != torch.uint8 or k % GROUP:
        raise ValueError(
            f"codes: got {codes_NK.dtype} with K = {k}, expected uint8 with K a multiple of "
            f"{GROUP}. Pad K with the zero point first."
        )
    if bits == 4:
        return (_nibble_halves(codes_NK),)
    if bits == 8:
        return _nibble_halves(codes_NK >> 4), _nibble_halves(codes_NK & 15)
    plane_bytes(bits)
    slots = codes_NK.view(n, k // GROUP, 8, 16)  # k in group = 16 * slot + j
    two = torch.zeros(n, k // GROUP, 2, 16, dtype=torch.uint8, device=codes_NK.device)
    one = torch.zeros(n, k // GROUP, 16, dtype=torch.uint8, device=codes_NK.device)
    for slot in range(8):
        half, field = divmod(slot, 4)
        two[:, :, half] |= (slots[:, :, slot] & 3) << (2 * field)
        one |= (slots[:, :, slot] >> 2) << (2 * field + half)
    return two.view(n, k // GROUP, 32), one


def _unpack_rows(planes: tuple[Tensor, ...], bits: int) -> Tensor:
    """Planes [N, Kp/128, row bytes] to codes [N, Kp]."""
    n, groups, _ = planes[0].shape
    if bits == 4:
        return _join_halves(planes[0])
    if bits == 8:
        return _join_halves(planes[0]) << 4 | _join_halves(planes[1])
    two, one = planes[0].view(n, groups, 2, 16), planes[1]
    codes = torch.empty(n, groups, 8, 16, dtype=torch.uint8, device=one.device)
    for slot in range(8):
        half, field = divmod(slot, 4)
        low = two[:, :, half] >> (2 * field) & 3
        codes[:, :, slot] = low | (one >> (2 * field + half) & 1) << 2
    return codes.view(n, groups * GROUP)


def _nibble_halves(nibbles_NK: Tensor) -> Tensor:
    n, k = nibbles_NK.shape
    halves = nibbles_NK.view(n, k // GROUP, 2, 64)
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _join_halves(packed: Tensor) -> Tensor:
    n, groups, _ = packed.shape
    return torch.cat((packed & 15, packed >> 4), dim=2).view(n, groups * GROUP)


# Axes of 16 rows of one k-group, as a view of the row bytes, and their order in memory.
# 4 bit view: r3 r | jj/2 jj%2 k3 c k0        3 bit, plane 2: r3 r | ab k3 c k0    plane 1: no ab
_VIEWS = {
    (64, 4): ((2, 8, 2, 2, 2, 4, 2), (2, 1, 5, 3, 4, 0, 6)),
    (32, 3): ((2, 8, 2, 2, 4, 2), (1, 4, 2, 3, 0, 5)),
    (16, 3): ((2, 8, 2, 4, 2), (1, 3, 2, 0, 4)),
}


def _to_fragments(plane: Tensor, bits: int) -> Tensor:
    n, groups, row_bytes = plane.shape
    shape, order = _VIEWS[row_bytes, 3 if bits == 3 else 4]
    full = n // BLOCK_ROWS * BLOCK_ROWS
    # [block, 16, G, bytes] -> [block, G, 16, bytes] -> split the last two -> memory order
    blocks = plane[:full].view(-1, BLOCK_ROWS, groups, row_bytes).transpose(1, 2)
    blocks = blocks.reshape(-1, groups, *shape).permute(0, 1, *(axis + 2 for axis in order))
    return torch.cat((blocks.reshape(-1), plane[full:].reshape(-1)))


def _from_fragments(plane: Tensor, bits: int, row_bytes: int, out_features: int) -> Tensor:
    shape, order = _VIEWS[row_bytes, 3 if bits == 3 else 4]
    groups = plane.numel() // (out_features * row_bytes)
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    blocks = plane[: full * groups * row_bytes].view(-1, groups, *(shape[axis] for axis in order))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    blocks = blocks.permute(0, 1, *(axis + 2 for axis in inverse))
    blocks = blocks.reshape(-1, groups, BLOCK_ROWS, row_bytes).transpose(1, 2)
    tail = plane[full * groups * row_bytes :].view(-1, groups, row_bytes)
    return torch.cat((blocks.reshape(full, groups, row_bytes), tail))
