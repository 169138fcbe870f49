"""In which form a checkpoint stores a linear, by what its tensors are called; no weight is read.

    form       tensors of a linear NAME      beside them
    INTEGERS   weight_packed int32           weight_scale, weight_shape; weight_zero_point,
                                             weight_g_idx (compressed-tensors, pack-quantized)
               qweight int32                 scales, qzeros; g_idx (GPTQ, AWQ)
    INT8       weight int8                   weight_scale (compressed-tensors, int-quantized)
    FP8        weight float8                 weight_scale_inv, or weight_scale
               NAME float8, of all experts   NAME_scale_inv
    MXFP4      weight_packed uint8           weight_scale
               NAME_blocks, of all experts   NAME_scales
    NVFP4      weight_packed uint8           weight_scale, weight_global_scale
               weight uint8 (ModelOpt)       weight_scale, weight_scale_2
    NF4, FP4   weight uint8 (bitsandbytes)   weight.absmax, weight.quant_map, and what
                                             weight.quant_state.bitsandbytes__nf4 or __fp4 says

Every linear may have another form. The planner asks headers (stored_precisions.py and
checkpoint_codes.py), the runtime the files that it reads (quantized_checkpoint.py). N = out,
K = in_features; NAME[i] is row i of a tensor that holds all experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from llmpq.checkpoints.quantization_config import QUANTIZATION, stated_group
from llmpq.families.common.config_values import size

GROUPS = (128, 64, 32)
"""Weights that may share a scale of integers which layers keep, the usual number first."""


class CodesForm(StrEnum):
    """What a quantised linear is stored as."""

    INTEGERS = "integers"
    INT8 = "int8"
    FP8 = "fp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NF4 = "nf4"
    FP4 = "fp4"

    @property
    def is_table(self) -> bool:
        """Whether 4-bit codes stand for the values of a table."""
        return self in (CodesForm.MXFP4, CodesForm.NVFP4, CodesForm.NF4, CodesForm.FP4)


BITSANDBYTES = {
    CodesForm.NF4: "quant_state.bitsandbytes__nf4",
    CodesForm.FP4: "quant_state.bitsandbytes__fp4",
}
"""What follows `NAME.weight.` in the name of what says how bitsandbytes quantised a weight."""


@dataclass(frozen=True, kw_only=True)
class IntegerFields:
    """Last parts of the names of a linear's tensors, of a form of integers."""

    codes: str
    scales: str
    others: tuple[str, ...]
    optional: tuple[str, ...]

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that every such linear has."""
        return self.codes, self.scales, *self.others

    def of(self, stem: str, held: Collection[str]) -> tuple[str, ...]:
        """Return those of a linear: all that it needs, and what else it has."""
        return *self.needed, *(last for last in self.optional if f"{stem}.{last}" in held)


PACKED = IntegerFields(
    codes="weight_packed",
    scales="weight_scale",
    others=("weight_shape",),
    optional=("weight_zero_point", "weight_g_idx"),
)
"""compressed-tensors'."""
QWEIGHT = IntegerFields(codes="qweight", scales="scales", others=("qzeros",), optional=("g_idx",))
"""GPTQ's and AWQ's."""


class TensorHeaders(Protocol):
    """The tensors of a checkpoint by name, without their values."""

    def header(self, name: str) -> tuple[str, list[int]] | None:
        """Return a tensor's dtype, as safetensors calls it, and its shape; None without it."""
        ...

    def whole_numbers(self, name: str) -> list[int]:
        """Return the values of a small tensor of integers."""
        ...


def stored_form(stem: str, headers: TensorHeaders) -> CodesForm | None:
    """Return the form of a linear, by its name without `.weight`; None for floats, or nothing."""

    def dtype_of(last: str) -> str:
        found = headers.header(stem + last)
        return "" if found is None else found[0]

    weight, packed = dtype_of(".weight"), dtype_of(".weight_packed")
    for form, state in BITSANDBYTES.items():
        if dtype_of(f".weight.{state}"):
            return form
    if weight:
        if weight == "U8" and dtype_of(".weight_scale_2"):
            return CodesForm.NVFP4
        if weight.startswith("F8"):
            return CodesForm.FP8
        return CodesForm.INT8 if dtype_of(".weight_scale") else None
    if packed == "U8":
        return CodesForm.NVFP4 if dtype_of(".weight_global_scale") else CodesForm.MXFP4
    if packed or dtype_of(".qweight"):
        return CodesForm.INTEGERS
    experts = stem.partition("[")[0]
    if headers.header(f"{experts}_blocks") is not None:
        return CodesForm.MXFP4
    whole = headers.header(experts)
    return CodesForm.FP8 if whole is not None and whole[0].startswith("F8") else None


def quantised_linears(
    names: Iterable[str], headers: TensorHeaders
) -> Iterator[tuple[str, str, CodesForm]]:
    """Yield the name of each quantised linear's codes, its stem and its form."""
    for name in names:
        stem, _, last = name.rpartition(".")
        if last not in ("weight", PACKED.codes, QWEIGHT.codes):
            of_experts = headers.header(f"{name}_scale_inv") is not None
            if not of_experts and not name.endswith("_blocks"):
                continue
            stem = name.removesuffix("_blocks")
        form = stored_form(stem, headers)
        if form is not None:
            yield name, stem, form


def integer_fields(stem: str, held: Collection[str]) -> IntegerFields:
    """Return what the tensors of a linear of integers are called."""
    return PACKED if f"{stem}.{PACKED.codes}" in held else QWEIGHT


@dataclass(frozen=True, kw_only=True)
class IntegerCodes:
    """What headers and config.json say of a linear of integers."""

    bits: int
    """0 where no `weight_shape` tells."""
    in_features: int
    groups: int | None
    """Scales of a row; None where there are no scales to tell."""
    is_ordered: bool
    """Whether groups are of channels in another order (act-order, g_idx)."""
    said_group: int | None
    """Weights of a group as GPTQ's and AWQ's words say."""

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale, 0 for a whole row.

        None where groups have other sizes than kernels take, or another order, or nothing tells.
        """
        odd = self.groups != 1 and self.said_group not in (None, *GROUPS)
        if self.is_ordered or odd or not self.in_features:
            return None
        found = [each for each in GROUPS if self.groups == -(-self.in_features // each)]
        return found[0] if found else 0 if self.groups == 1 else None


def integer_codes(stem: str, headers: TensorHeaders, described: Mapping[str, Any]) -> IntegerCodes:
    """Return what a linear of integers has, by its name; `described`: `quantization_of` its model.

    `ValueError` where config.json does not say the bits of GPTQ's codes.
    """
    codes = headers.header(f"{stem}.{PACKED.codes}")
    ordered = bool(described.get("desc_act"))
    if codes is not None:
        shape = f"{stem}.weight_shape"
        k = 0 if headers.header(shape) is None else headers.whole_numbers(shape)[1]
        return IntegerCodes(
            bits=codes[1][1] * 32 // k if k else 0,
            in_features=k,
            groups=_groups(headers, f"{stem}.{PACKED.scales}", 1),
            is_ordered=ordered or headers.header(f"{stem}.weight_g_idx") is not None,
            said_group=None,
        )
    codes = headers.header(f"{stem}.{QWEIGHT.codes}")
    assert codes is not None
    is_awq = described["quant_method"] == "awq"
    bits = 4 if is_awq else size(described, "bits", where=QUANTIZATION)
    return IntegerCodes(
        bits=bits,
        in_features=codes[1][0] if is_awq else codes[1][0] * 32 // bits,
        groups=_groups(headers, f"{stem}.{QWEIGHT.scales}", 0),
        is_ordered=ordered,
        said_group=stated_group(described),
    )


def _groups(headers: TensorHeaders, scales: str, dimension: int) -> int | None:
    found = headers.header(scales)
    return None if found is None else int(found[1][dimension])


def state_of(stem: str, held: Collection[str]) -> tuple[CodesForm, str] | None:
    """Return bitsandbytes' form of a weight and what its state is called; None of other forms."""
    names = ((form, f"{stem}.weight.{last}") for form, last in BITSANDBYTES.items())
    return next((found for found in names if found[1] in held), None)
