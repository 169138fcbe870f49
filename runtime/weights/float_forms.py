"""Stored forms that become values when they are read, and are rounded as the plan says.

    NAME.weight float8           weight_scale (one, a row, a block), or weight_scale_inv (blocks);
                                 kept as codes (`fp8_codes`) where the plan has 8 bits
    NAME.qweight, weight_packed  4 and 8 bits whose groups our kernels do not take: 32 or 64
                                 weights, or channels ordered by activation (g_idx)

The values are the form's own, in float32. Scales of inputs are not used: inputs keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.quantization_config import layout_of, stated_group
from llmpq.kernels.formats.float_codes import from_fp8
from llmpq.kernels.weights.fp8_weight import Fp8Weight, fp8_weight
from llmpq.kernels.weights.integer_values import (
    values_of_awq,
    values_of_gptq,
    values_of_packed,
)

Read = Callable[[str], Tensor]
"""A tensor of the checkpoint by its own name."""


def fp8_values(stem: str, held: Mapping[str, str], read: Read, block: Any) -> Tensor:
    """Return float32 [N, K] of FP8 codes; `held`: names of the checkpoint's tensors."""
    return from_fp8(read(f"{stem}.weight"), *_fp8_scale(stem, held, read, block))


def fp8_codes(
    stems: Sequence[str],
    held: Mapping[str, str],
    read: Read,
    block: Any,
    *,
    order: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype,
) -> Fp8Weight:
    """Return a fused linear's codes as they are stored; `order` puts rows in our form."""
    pieces = []
    for stem in stems:
        scale, blocks = _fp8_scale(stem, held, read, block)
        pieces.append(fp8_weight(read(f"{stem}.weight"), scale, blocks, dtype))
    whole = Fp8Weight.stack(pieces)
    if order is None:
        return whole
    codes_NK, scale_NC = order(whole.codes_NK), order(whole.scale_NC())
    return replace(whole, codes_NK=codes_NK, scale=scale_NC.contiguous(), rows=1)


def _fp8_scale(
    stem: str, held: Mapping[str, str], read: Read, block: Any
) -> tuple[Tensor, tuple[int, int] | None]:
    """Return a linear's scales, and the rows and columns that share one of a table of them."""
    inverse = f"{stem}.weight_scale_inv"
    name = inverse if inverse in held else f"{stem}.weight_scale"
    if name not in held:
        raise ValueError(f"{stem}.weight is FP8 without weight_scale; download the model again")
    scale = read(name)
    if scale.dim() == 4:  # ModelOpt's blocks: [N/128, 1, K/128, 1]
        return scale[:, 0, :, 0], _block(block, stem)
    if scale.dim() == 2 and (scale.shape[1] > 1 or name == inverse):
        return scale, _block(block, stem)
    return scale, None


def _block(block: Any, stem: str) -> tuple[int, int]:
    good = isinstance(block, list) and len(block) == 2
    if not good or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(
            f"{stem}.weight has a table of scales, config.json's weight block size is {block!r}; "
            "expected two values, such as [128, 128]"
        )
    return block[0], block[1]


def integer_values(
    stem: str, held: Mapping[str, str], read: Read, described: Mapping[str, Any], bits: int
) -> Tensor:
    """Return float32 [N, K] of integer codes in groups of any size and order."""
    fields = (
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        if f"{stem}.weight_packed" in held
        else ("qweight", "scales", "qzeros", "g_idx")
    )
    tensors = {field: read(f"{stem}.{field}") for field in fields if f"{stem}.{field}" in held}
    if "weight_packed" in tensors:
        return values_of_packed(tensors, bits=bits)
    # One group of all channels has one scale, whatever the size that is said.
    one = tensors["scales"].shape[0] == 1
    group_size = None if one else stated_group(described)
    if described.get("quant_method") == "awq":
        return values_of_awq(tensors, group_size=group_size)
    v2 = layout_of(described) == "gptq_v2"
    return values_of_gptq(tensors, bits=bits, v2=v2, group_size=group_size)
