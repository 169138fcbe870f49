"""Checkpoints quantised elsewhere to our packed weights, bit for bit.

Published forms (b bits, G groups of 128; int32 words hold a little-endian stream of b-bit codes:
code i fills bits b*i .. b*i+b-1, and may straddle two words when b = 3):

    GPTQ     qweight [K b/32, N], stream down K      qzeros [G, N b/32], stream along N
             scales [G, N]      g_idx [K]: the group of each k      w = scale (code - zero)
             "v1" files store zero - 1 (modulo 2^b), "v2" files the zero itself
    AWQ      qweight [K, N/8], qzeros [G, N/8], scales [G, N], 4 bits only; nibble i of a word
             is column 0 2 4 6 1 3 5 7 [i] of its eight
    compressed-tensors "pack-quantized"
             weight_packed [N, ceil(K b/32)], stream along K, codes offset by 2^(b-1)
             weight_scale [N, G]     weight_zero_point [ceil(N b/32), G], stream down N, same
             offset, absent when symmetric     weight_shape [2]

Sources: AutoGPTQ/GPTQModel `qlinear` pack(), AutoAWQ `WQLinear_GEMM.from_linear`,
compressed-tensors 0.20 `pack_quantized/helpers.py` (its own pack is an oracle in our tests).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.kernels.formats.weight_layout import GROUP, GROUPS, Layout
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from llmpq.precision import padded_k

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column of its eight each nibble of a word is."""


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [R, C] into int32 words [R, ceil(C bits / 32)], a bit stream along each row."""
    rows, columns = codes.shape
    padded = functional.pad(codes, (0, -columns % 32)).long().view(rows, -1, 32)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int64, device=codes.device)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        words[:, :, word] |= padded[:, :, i] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, :, word + 1] |= padded[:, :, i] >> (32 - shift)
    flat = words.view(rows, -1)[:, : -(-columns * bits // 32)]
    return torch.where(flat >= 1 << 31, flat - (1 << 32), flat).int()


def unpack_stream(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the uint8 codes [R, columns] of `pack_stream`."""
    rows = words.shape[0]
    padded = functional.pad(words, (0, -words.shape[1] % bits)).long() & 0xFFFFFFFF
    groups = padded.view(rows, -1, bits)
    codes = torch.empty(rows, groups.shape[1], 32, dtype=torch.uint8, device=words.device)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        value = groups[:, :, word] >> shift
        if shift + bits > 32:
            value = value | groups[:, :, word + 1] << (32 - shift)
        codes[:, :, i] = (value & (1 << bits) - 1).to(torch.uint8)
    return codes.view(rows, -1)[:, :columns]


def from_gptq(
    tensors: Mapping[str, Tensor], *, bits: int, v2: bool = False, layout: Layout | None = None
) -> QuantizedWeight:
    """Convert `qweight`, `qzeros`, `scales` and, if present, `g_idx` of one GPTQ layer."""
    n, k = tensors["qweight"].shape[1], tensors["qweight"].shape[0] * 32 // bits
    scale_NG = tensors["scales"].t()
    group_size = _group_size(k, scale_NG.shape[1])
    order = torch.arange(k) // (group_size or k)
    if "g_idx" in tensors and not torch.equal(tensors["g_idx"].cpu().long(), order):
        raise ValueError(
            "GPTQ layer with activation order (g_idx is not k // group size): our kernels need the "
            "k of a group side by side. Re-quantise with desc_act=False."
        )
    codes = unpack_stream(tensors["qweight"].t().contiguous(), bits, k)
    zero = unpack_stream(tensors["qzeros"], bits, n)
    if not v2:
        zero = (zero + 1) & (1 << bits) - 1
    return _build(codes, scale_NG, zero.t(), bits, group_size, layout)


def from_awq(tensors: Mapping[str, Tensor], *, layout: Layout | None = None) -> QuantizedWeight:
    """Convert `qweight`, `qzeros` and `scales` of one AWQ (GEMM version) layer."""
    scale_NG = tensors["scales"].t()
    k = tensors["qweight"].shape[0]
    codes = awq_unpack(tensors["qweight"]).t()
    zero_NG = awq_unpack(tensors["qzeros"]).t()
    return _build(codes, scale_NG, zero_NG, 4, _group_size(k, scale_NG.shape[1]), layout)


def from_compressed_tensors(
    tensors: Mapping[str, Tensor], *, bits: int, layout: Layout | None = None
) -> QuantizedWeight:
    """Convert `weight_packed`, `weight_scale`, `weight_shape` and, if any, `weight_zero_point`."""
    n, k = (int(size) for size in tensors["weight_shape"])
    scale_NG = tensors["weight_scale"]
    codes = unpack_stream(tensors["weight_packed"], bits, k)
    zero_NG = None
    if "weight_zero_point" in tensors:
        zero_NG = unpack_stream(tensors["weight_zero_point"].t().contiguous(), bits, n).t()
    return _build(codes, scale_NG, zero_NG, bits, _group_size(k, scale_NG.shape[1]), layout)


def pack_quantized(
    bits: int, codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None = None
) -> dict[str, Tensor]:
    """Return compressed-tensors "pack-quantized" tensors of codes, scales and zeros.

    `ValueError` for rows so short that their words are as many as those of codes of more bits.
    """
    k = codes_NK.shape[1]
    if -(-k * bits // 32) * 32 // k != bits:
        raise ValueError(
            f"rows of {k} channels are too short for codes of {bits} bits in compressed-tensors' "
            "form, expected at least 32; give the layer 4 or 8 bits"
        )
    packed = {
        "weight_packed": pack_stream(codes_NK, bits),
        "weight_scale": scale_NG.contiguous(),
        "weight_shape": torch.tensor(codes_NK.shape),
    }
    if zero_NG is not None:
        zero_GN = zero_NG.to(torch.uint8).t()
        packed["weight_zero_point"] = pack_stream(zero_GN, bits).t().contiguous()
    return packed


def _group_size(k: int, groups: int) -> int | None:
    if groups == 1 and k > GROUP:
        return None
    for size in reversed(GROUPS):
        if groups == -(-k // size):
            return size
    raise ValueError(
        f"group size: got {groups} groups of K = {k}, expected {-(-k // GROUP)} (groups of "
        f"{GROUP}), more (of 64 or 32) or 1 (per channel). Re-quantise with one of them."
    )


def _build(
    codes: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    bits: int,
    group_size: int | None,
    layout: Layout | None,
) -> QuantizedWeight:
    """Pad K with zero weights; zeros that are all 2^(b-1) make the weight symmetric."""
    n, k = codes.shape
    if zero_NG is not None and bool((zero_NG == 2 ** (bits - 1)).all()):
        zero_NG = None
    padding = padded_k(k) - k
    if padding:
        last = 2 ** (bits - 1) if zero_NG is None else zero_NG[:, -1:].expand(n, padding)
        filler = codes.new_empty(n, padding)
        filler[:] = last
        codes = torch.cat((codes, filler), dim=1)
        more = padded_k(k) // (group_size or padded_k(k)) - scale_NG.shape[1]
        scale_NG = functional.pad(scale_NG, (0, more))
        zero_NG = None if zero_NG is None else functional.pad(zero_NG, (0, more))
    return from_codes(
        codes.contiguous(),
        scale_NG.contiguous(),
        None if zero_NG is None else zero_NG.to(scale_NG.dtype).contiguous(),
        bits=bits,
        group_size=group_size,
        in_features=k,
        layout=layout,
    )


def awq_unpack(words: Tensor) -> Tensor:
    """Return the codes [R, N] of AWQ words [R, N / 8], columns in order."""
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for i, column in enumerate(AWQ_COLUMNS):
        codes[:, :, column] = (words >> (4 * i) & 15).to(torch.uint8)
    return codes.view(words.shape[0], -1)
