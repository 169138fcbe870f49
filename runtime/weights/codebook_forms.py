"""Stored forms of 4 bits whose codes stand for 16 values: kept as CodebookWeight, or as values.

    NAME.weight_packed uint8     MXFP4 (weight_scale uint8) or NVFP4 (and weight_global_scale)
    NAME.weight uint8 [N, K/2]   NVFP4 of ModelOpt: weight_scale, and weight_scale_2, the inverse
                                 of weight_global_scale
    NAME_blocks, NAME_scales     MXFP4 of gpt-oss's experts, [E, N, K / 32, 16] and [E, N, K / 32]
    NAME.weight uint8 [N K/2, 1] bitsandbytes, the first code in the upper half: absmax of 64
                                 weights each, quant_map, quant_state.bitsandbytes__nf4 or __fp4
                                 (JSON); of absmax that is quantised itself also nested_absmax
                                 and nested_quant_map, absmax = map[code] nested + offset

Layers of 4 bits, and of 8, which hold them as well, keep codes; others are made of the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.stored_forms import BITSANDBYTES, CodesForm, state_of
from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook, scale_values
from llmpq.kernels.weights.codebook_weight import CodebookWeight, of_pairs
from llmpq.kernels.weights.fp8_weight import in_range
from llmpq.runtime.weights.sources import ROW

Read = Callable[[str], Tensor]
"""A tensor of the checkpoint by its own name."""
CODEBOOKS = {CodesForm.NF4: Codebook.NF4, CodesForm.FP4: Codebook.FP4}
"""Of bitsandbytes' forms."""
BESIDE = (*BITSANDBYTES.values(), "absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""What may stand behind `NAME.weight.`"""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
WHOLE = 2.0**-11
"""Of a row's largest scale: what one that float16 rounds coarser may be off by."""


def is_bitsandbytes(name: str, expected: Collection[str]) -> bool:
    """Whether a tensor says how an expected one is quantised."""
    stem, _, last = name.rpartition(".weight.")
    return last in BESIDE and f"{stem}.weight" in expected


def stored_codebook(
    name: str,
    form: CodesForm | None,
    held: Mapping[str, str],
    readers: tuple[Read, Callable[[str, int], Tensor]],
    dtype: torch.dtype,
) -> CodebookWeight | None:
    """Return a tensor's codes where they stand for values of a table.

    `readers`: of tensors, and of rows of their first dimension.
    """
    if form is None or not form.is_table:
        return None
    read, read_row = readers
    row, stem = ROW.fullmatch(name), name.removesuffix(".weight")
    if row is not None:
        return bounded(expert_weight(row["name"], int(row["index"]), read_row), dtype)
    if form in CODEBOOKS:
        return bounded(bitsandbytes_weight(stem, held, read, dtype), dtype)
    return bounded(fp4_weight(stem, held, read), dtype)


def bounded(weight: CodebookWeight, dtype: torch.dtype) -> CodebookWeight:
    """Return a weight whose values the dtype of a stage can hold; `ValueError` else."""
    most = float(scale_values(weight.scale).abs().max()) * max(map(abs, weight.codebook.values))
    if weight.factor is not None:
        most *= float(weight.factor.abs().max())
    return in_range(weight, dtype, most)


def fp4_weight(stem: str, held: Mapping[str, str], read: Read) -> CodebookWeight:
    """Return a linear's E2M1 codes as compressed-tensors or ModelOpt stores them."""
    name = f"{stem}.weight_packed"
    packed, scale = read(name if name in held else f"{stem}.weight"), read(f"{stem}.weight_scale")
    inverse, whole = f"{stem}.weight_global_scale", f"{stem}.weight_scale_2"
    if inverse not in held and whole not in held:
        _require(scale, E8M0, f"{stem}.weight_scale")
        return of_pairs(packed, scale, codebook=Codebook.E2M1, group_size=MXFP4_GROUP)
    _require(scale, E4M3, f"{stem}.weight_scale")
    if inverse in held:
        factor = (1 / read(inverse).double()).float().reshape(-1)
    else:
        factor = read(whole).float().reshape(-1)
    if factor.numel() != 1:
        name = inverse if inverse in held else whole
        raise ValueError(f"{name} has shape {list(factor.shape)}, expected one number")
    rows = factor.repeat(packed.shape[0])
    return of_pairs(packed, scale, codebook=Codebook.E2M1, group_size=NVFP4_GROUP, factor=rows)


def expert_weight(name: str, index: int, read_row: Callable[[str, int], Tensor]) -> CodebookWeight:
    """Return one expert's MXFP4 blocks as they are."""
    blocks, exponents = (read_row(f"{name}_{kind}", index) for kind in ("blocks", "scales"))
    if blocks.dim() != 3 or blocks.shape[2] * 2 != MXFP4_GROUP:
        raise ValueError(
            f"{name}_blocks: an expert has shape {list(blocks.shape)}, expected [rows, blocks, 16]"
        )
    return of_pairs(blocks.flatten(1), exponents, codebook=Codebook.E2M1, group_size=MXFP4_GROUP)


def bitsandbytes_weight(
    stem: str, held: Mapping[str, str], read: Read, dtype: torch.dtype
) -> CodebookWeight:
    """Return a linear's NF4 or FP4 codes; scales are float16, or float32 of a float32 stage."""
    found = state_of(stem, held)
    assert found is not None
    form, name = found
    codebook = CODEBOOKS[form]
    state = _state(name, read(name))
    (n, k), group = state["shape"], state["blocksize"]
    # Stored as bytes, or as the same bytes in another type's name (bnb_4bit_quant_storage).
    packed = read(f"{stem}.weight").contiguous().flatten().view(torch.uint8)
    if packed.numel() * 2 != n * k or k % group:
        raise ValueError(
            f"{stem}.weight has {packed.numel()} bytes, its state says [{n}, {k}] in blocks of "
            f"{group}; expected {n * k // 2}, and rows of whole blocks"
        )
    table, stored = torch.tensor(codebook.values), read(f"{stem}.weight.quant_map").float()
    if stored.shape != table.shape or not torch.allclose(stored, table, rtol=0, atol=1e-6):
        raise ValueError(f"{stem}.weight.quant_map is not the codebook of {codebook.value}")
    scale = _absmax(f"{stem}.weight", state, held, read)
    if scale.numel() != n * k // group:
        raise ValueError(
            f"{stem}.weight.absmax has {scale.numel()} scales, expected {n * k // group}"
        )
    bytes_NJ = packed.view(n, k // 2)
    scale_NG = scale.view(n, -1)
    if dtype != torch.float32 and has_halves(scale_NG):
        scale_NG = scale_NG.half()
    pairs = bytes_NJ >> 4 | bytes_NJ << 4
    return of_pairs(pairs, scale_NG, codebook=codebook, group_size=group)


def table_of(
    pieces: Sequence[CodebookWeight | None], shape: tuple[int, ...]
) -> CodebookWeight | None:
    """Return pieces one below the other; None where they are not all of one form.

    `ValueError` for another shape than config.json's.
    """
    found = [piece for piece in pieces if piece is not None]
    forms = {(p.codebook, p.group_size, p.in_features, p.scale.dtype) for p in found}
    if len(found) < len(pieces) or len(forms) > 1:
        return None
    whole = CodebookWeight.stack(found)
    if (whole.out_features, whole.in_features) != tuple(shape):
        raise ValueError(
            f"shape [{whole.out_features}, {whole.in_features}], config.json says {list(shape)}"
        )
    return whole


def _absmax(name: str, state: Mapping[str, Any], held: Mapping[str, str], read: Read) -> Tensor:
    """Return a weight's float32 scales, made of their own codes where those are quantised."""
    absmax = read(f"{name}.absmax")
    if absmax.dtype != torch.uint8:
        return absmax.float().flatten()
    for last in ("nested_absmax", "nested_quant_map"):
        if f"{name}.{last}" not in held:
            raise ValueError(f"{name}.absmax is quantised itself, {last} is missing")
    nested, table = read(f"{name}.nested_absmax").float(), read(f"{name}.nested_quant_map").float()
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, float) or table.numel() != 256:
        raise ValueError(f"{name}: its state does not say how absmax is quantised")
    if nested.numel() != -(-absmax.numel() // size):
        raise ValueError(f"{name}.nested_absmax has {nested.numel()} scales of {size} absmax each")
    each = nested.flatten().repeat_interleave(size)[: absmax.numel()]
    return table[absmax.flatten().int()] * each + offset


def _state(name: str, stored: Tensor) -> dict[str, Any]:
    """Return what bitsandbytes says of a weight; `ValueError` where that cannot be."""
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
        shape, size = state["shape"], state["blocksize"]
        good = len(shape) == 2 and all(type(x) is int and x > 0 for x in (*shape, size))
    except (ValueError, KeyError, TypeError):
        good = False
    if not good or not name.endswith(f"__{state.get('quant_type')}"):
        raise ValueError(f"{name} does not say how the weight is quantised; download it again")
    return dict(state)


def has_halves(scale_NG: Tensor) -> bool:
    """Whether float16 holds scales within its rounding of them, or of their row's largest."""
    off = (scale_NG.half().float() - scale_NG).abs()
    return bool((off <= WHOLE * scale_NG.abs().amax(1, keepdim=True)).all())


def _require(scale: Tensor, dtype: torch.dtype, name: str) -> None:
    if scale.dtype != dtype:
        raise ValueError(f"{name} is {scale.dtype}, expected {dtype}; download it again")
