"""Stored forms that become values when they are read, and are rounded as the plan says.

    NAME.weight float8           weight_scale (one, a row, a block), or weight_scale_inv (one, or
                                 blocks); kept as codes (`fp8_codes`) where the plan has 8 bits
    NAME float8 [E, N, K]        experts: NAME_scale_inv [E, 1, 1], or blocks; so, too
    NAME.qweight, weight_packed  4 and 8 bits whose groups our kernels do not take: 32 or 64
                                 weights, or channels ordered by activation (g_idx)

The values are the form's own, in float32: products of codes and scales are exact there (E4M3 has
4 bits of mantissa, scales have 24 at most). Scales of inputs are not used: inputs keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.quantization_config import layout_of, stated_group
from llmpq.checkpoints.stored_forms import PACKED, integer_fields
from llmpq.kernels.weights.fp8_weight import Fp8Weight, fp8_weight
from llmpq.kernels.weights.integer_values import (
    values_of_awq,
    values_of_gptq,
    values_of_packed,
)
from llmpq.runtime.weights.sources import ROW, stored_name

Read = Callable[[str], Tensor]
"""A tensor of the checkpoint by its own name."""


def fp8_name(stem: str) -> str:
    """Return what a linear's codes are called: a tensor, or an expert's row of one."""
    return stem if ROW.fullmatch(stem) else f"{stem}.weight"


def fp8_values(stem: str, held: Mapping[str, str], read: Read, block: Any) -> Tensor:
    """Return float32 [N, K] of FP8 codes; `held`: names of the checkpoint's tensors."""
    return from_fp8(read(fp8_name(stem)), *_fp8_scale(stem, held, read, block))


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
        pieces.append(fp8_weight(read(fp8_name(stem)), scale, blocks, dtype))
    whole = Fp8Weight.stack(pieces)
    if order is None:
        return whole
    codes_NK, scale_NC = order(whole.codes_NK), order(whole.scale_NC())
    return replace(whole, codes_NK=codes_NK, scale=scale_NC.contiguous(), rows=1)


def from_fp8(codes_NK: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Return float32 [N, K] of E4M3 codes.

    `scale`: one for all, one a row [N, 1], or a table [N / bn, K / bk] of blocks of `block` rows
    and columns.
    """
    n, k = codes_NK.shape
    scale = scale.float()
    if block is not None:
        rows, columns = (-(-size // step) for size, step in zip((n, k), block, strict=True))
        if tuple(scale.shape) != (rows, columns):
            raise ValueError(
                f"block scales have shape {list(scale.shape)}, expected {[rows, columns]}"
            )
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return codes_NK.float() * wide[:n, :k]
    if scale.numel() not in (1, n):
        raise ValueError(
            f"FP8 weight [{n}, {k}] with scales {list(scale.shape)}: expected one, {n} or blocks "
            "that config.json describes"
        )
    return codes_NK.float() * (scale.reshape(-1, 1) if scale.numel() == n else scale.reshape(1, 1))


def _fp8_scale(
    stem: str, held: Mapping[str, str], read: Read, block: Any
) -> tuple[Tensor, tuple[int, int] | None]:
    """Return a linear's scales, and the rows and columns that share one of a table of them."""
    name = next((n for n in _scale_names(stem) if stored_name(n) in held), None)
    if name is None:
        raise ValueError(f"{fp8_name(stem)} is FP8 without a scale; download the model again")
    scale, inverse = read(name), "_scale_inv" in name
    if block is None and scale.numel() == 1:
        return scale, None
    if scale.dim() == 4:  # ModelOpt's blocks: [N/128, 1, K/128, 1]
        return scale[:, 0, :, 0], _block(block, stem)
    if scale.dim() == 2 and (scale.shape[1] > 1 or inverse):
        return scale, _block(block, stem)
    return scale, None


def _scale_names(stem: str) -> tuple[str, str]:
    """Return what a linear's scales may be called: the newer of Transformers' names, the older."""
    row = ROW.fullmatch(stem)
    if row is None:
        return f"{stem}.weight_scale_inv", f"{stem}.weight_scale"
    name, index = row["name"], row["index"]
    return f"{name}_scale_inv[{index}]", f"{name}_scale[{index}]"


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
    fields = integer_fields(stem, held)
    tensors = {field: read(f"{stem}.{field}") for field in fields.of(stem, held)}
    if fields is PACKED:
        return values_of_packed(tensors, bits=bits)
    # One group of all channels has one scale, whatever the size that is said.
    one = tensors["scales"].shape[0] == 1
    group_size = None if one else stated_group(described)
    if described.get("quant_method") == "awq":
        return values_of_awq(tensors, group_size=group_size)
    v2 = layout_of(described) == "gptq_v2"
    return values_of_gptq(tensors, bits=bits, v2=v2, group_size=group_size)
