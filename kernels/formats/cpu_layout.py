"""The two weight layouts of our own code for CPUs, there and back.

CPU (ours, kernels/native/weight.h)   [N, Kp/128, 16 bits bytes]; a row's k-group is
    4 bit   32 words of 16 bits   word i:  [ k=i+96 | k=i+64 | k=i+32 | k=i ]     four bits each
    3 bit   32 bytes              byte j:  [ p=j+96, low two bits | p=j+32 | p=j ]
            16 bytes              byte j:  [ third bits of p=j+112, j+96 | p=j+80 | p=j+64 ]
    8 bit   128 bytes             byte k
3 bits take k in the order p = 0 .. 127 in which the 4-bit words hold it (the low nibbles of bytes
0 .. 63, then the high ones): a shift and a mask give bytes in that order, most of them.
CPU_PANELS (where one instruction multiplies bytes, kernels/native/panel.h)   the rows above, 16
at a time, 32-bit word by word in turn: [N/16, Kp/128, 4 bits words, 16 rows]; scales and zeros
[N/16, G, 16 rows]. Rows past the last full 16 keep the form above. 3 bits have other words, so that
each code is a byte after a shift and a mask, k in the order p, too:
    8 words   byte j    [ p=j+96 | p=j+64 | p=j+32 | p=j ]          low two bits each
    4 words   byte j    third bits of those fields of byte j (bits 0, 2, 4, 6) and of byte j+16
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS


def pack_panels(codes_NK: Tensor, bits: int) -> Tensor:
    """Pack codes [N, Kp] into panels of 16 rows, flat uint8."""
    rows = _pack_thirds(codes_NK) if bits == 3 else pack_cpu(codes_NK, bits)
    return _interleave(rows, bits, codes_NK.shape[0], False)


def unpack_panels(flat: Tensor, bits: int, out_features: int) -> Tensor:
    """Return the codes [N, Kp] of `pack_panels`."""
    rows = _interleave(flat, bits, out_features, True)
    return _unpack_thirds(rows, out_features) if bits == 3 else unpack_cpu(rows, bits, out_features)


def _interleave(flat: Tensor, bits: int, out_features: int, back: bool) -> Tensor:
    """Put the words of 16 rows in turn, or each row's together again."""
    full = out_features // BLOCK_ROWS * BLOCK_ROWS
    split = flat.numel() // max(out_features, 1) * full
    groups = flat.numel() // (max(out_features, 1) * 16 * bits)
    words = (4 * bits, BLOCK_ROWS) if back else (BLOCK_ROWS, groups, 4 * bits)
    shape = (-1, groups, *words) if back else (-1, *words)
    order = (0, 3, 1, 2) if back else (0, 2, 3, 1)
    panels = flat[:split].clone().view(torch.int32).view(shape).permute(order)
    return torch.cat((panels.reshape(-1).view(torch.uint8), flat[split:]))


def _ordered(codes_NK: Tensor) -> Tensor:
    """Return k-groups [.., 4, 32] in the order p: k + 64 beside k."""
    return torch.stack(codes_NK.reshape(-1, 2, 2, 32).unbind(1), dim=3).reshape(-1, 4, 32)


def _in_rows(fields: Tensor, out_features: int) -> Tensor:
    """Return the codes [N, Kp] of `_ordered`."""
    halves = fields.reshape(-1, 2, 32, 2)  # of k, then k and k + 64
    return halves.permute(0, 3, 1, 2).reshape(out_features, -1)


def _pack_thirds(codes_NK: Tensor) -> Tensor:
    fields = _ordered(codes_NK)
    low, top = fields & 3, fields >> 2
    pairs = low[:, 0] | low[:, 1] << 2 | low[:, 2] << 4 | low[:, 3] << 6
    thirds = torch.zeros_like(pairs[:, :16])
    for field, second in itertools.product(range(4), range(2)):
        thirds |= top[:, field, 16 * second : 16 * second + 16] << 2 * field + second
    return torch.cat((pairs, thirds), dim=1).view(-1)


def _unpack_thirds(flat: Tensor, out_features: int) -> Tensor:
    pairs, thirds = flat.view(-1, 48).split((32, 16), dim=1)
    thirds = torch.cat((thirds, thirds >> 1), dim=1)
    fields = [pairs >> 2 * f & 3 | (thirds >> 2 * f & 1) << 2 for f in range(4)]
    return _in_rows(torch.stack(fields, dim=1), out_features)


def pack_cpu(codes_NK: Tensor, bits: int) -> Tensor:
    """Pack codes [N, Kp] into rows of our own, flat uint8."""
    if bits == 8:
        return codes_NK.reshape(-1)
    quarters = codes_NK.reshape(-1, 4, 32)
    if bits == 4:
        low = quarters[:, 0] | quarters[:, 1] << 4
        return torch.stack((low, quarters[:, 2] | quarters[:, 3] << 4), dim=2).view(-1)
    first, second, third, fourth = _ordered(codes_NK).unbind(1)
    low, top = fourth & 3, fourth >> 2
    pairs = first | second << 3 | low << 6
    rest = third[:, :16] | third[:, 16:] << 3 | top[:, :16] << 6 | top[:, 16:] << 7
    return torch.cat((pairs, rest), dim=1).view(-1)


def unpack_cpu(flat: Tensor, bits: int, out_features: int) -> Tensor:
    """Return the codes [N, Kp] of `pack_cpu`."""
    if bits == 8:
        return flat.view(out_features, -1).clone()
    if bits == 4:
        low, high = flat.view(-1, 32, 2).unbind(2)
        quarters = torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=1)
        return quarters.view(out_features, -1)
    pairs, rest = flat.view(-1, 48).split((32, 16), dim=1)
    third = torch.cat((rest & 7, rest >> 3 & 7), dim=1)
    top = torch.cat((rest >> 6 & 1, rest >> 7), dim=1)
    fields = (pairs & 7, pairs >> 3 & 7, third, pairs >> 6 | top << 2)
    return _in_rows(torch.stack(fields, dim=1), out_features)
