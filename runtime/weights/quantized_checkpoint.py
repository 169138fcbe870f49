"""Checkpoints that come quantised: compressed-tensors, GPTQ, AWQ, and Atom's own form.

The names of a linear's tensors tell its form (llmpq/checkpoints/stored_forms.py), so that every
layer may have another one:

    INTEGERS                       kept in groups that the plan's grid has, else read as values
    INT8                           kept; inputs are rounded per token (w8a8)
    MXFP4, NVFP4, NF4, FP4         kept where a layer has 4 or 8 bits (codebook_forms.py)
    FP8                            kept at 8 bits or beside integers (float_forms.py)
    llmpq.layers.I.LINEAR.codes    Atom (atom_weight.py): scale, outliers, outlier_scale,
                                   index_K; schemes in the file's metadata; the layer's norms and
                                   biases are llmpq.layers.I.PART, its channels already reordered

What is read as values is rounded to the plan's precision as the original's would be.
Linears come as QuantizedWeight, AtomWeight, Fp8Weight or CodebookWeight, those of 16 bits beside
integers or FP8 codes that a layer keeps as DenseWeight, all else as tensors.
N = out, K = in_features.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.checkpoints.quantization_config import (
    LAYER,
    QUANTIZATION,
    SCHEMES,
    fp8_block,
    is_centred,
    is_kept_block,
    layout_of,
    quantization_of,
    require_read,
)
from llmpq.checkpoints.stored_forms import (
    CodesForm,
    IntegerCodes,
    integer_codes,
    integer_fields,
    quantised_linears,
    stored_form,
)
from llmpq.families.common.config_values import section
from llmpq.families.common.record import AS_IT_IS
from llmpq.kernels.formats.codebooks import Codebook
from llmpq.kernels.formats.weight_layout import GROUP, Layout
from llmpq.kernels.weights.atom_weight import AtomWeight
from llmpq.kernels.weights.codebook_weight import CodebookWeight, ordered, serves_codebooks
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.fp8_weight import Fp8Weight
from llmpq.kernels.weights.interchange import from_awq, from_compressed_tensors, from_gptq
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, WeightScheme
from llmpq.runtime.models.part_shapes import Shapes
from llmpq.runtime.weights.atom_form import atom_parts, channel_weight, is_field
from llmpq.runtime.weights.codebook_forms import is_bitsandbytes, stored_codebook, table_of
from llmpq.runtime.weights.cut_parts import NO_CUTS, Cuts, cut_parts, cut_weights
from llmpq.runtime.weights.float_forms import (
    fp8_codes,
    fp8_values,
    integer_values,
)
from llmpq.runtime.weights.gguf_checkpoint import GgufCheckpoint
from llmpq.runtime.weights.sources import (
    ATOM_ROOT,
    FLOATING,
    ROW,
    TRANSPOSED,
    CheckpointSource,
    stored_name,
)

TABLE_BITS = 4
"""Of codes that point into a table."""
DTYPES = {
    **dict.fromkeys(("weight_packed", "weight_zero_point", "qweight", "qzeros"), (torch.int32,)),
    **dict.fromkeys(("weight_shape", "weight_g_idx", "g_idx"), (torch.int32, torch.int64)),
    "codes": (torch.uint8, torch.int8),
    "outliers": (torch.int8,),
    "index_K": (torch.int32,),
}
"""Last part of a tensor's name -> what a checkpoint may store it as; FLOATING for the rest."""
FIELDS = frozenset(DTYPES) | {
    "weight_scale",
    "scales",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_scale_2",
    "input_scale",
    "input_global_scale",
    "activation_scale",
}
"""Last parts of the names of a quantised linear's tensors; those of its inputs are not used."""
OF_EXPERTS = ("_blocks", "_scales", "_scale_inv", "_activation_scale")
"""What such names end in where one tensor holds all experts of a layer."""
_log = logging.getLogger("llmpq.weights")


def open_checkpoint(directory: str | Path, spec: ModelSpec) -> CheckpointSource:
    """Return the source of a model directory, quantised or not, or of a GGUF file."""
    if is_gguf(directory):
        return GgufCheckpoint(directory, spec)
    described = quantization_of(directory)
    if described is None:
        return CheckpointSource(directory, spec)
    return QuantizedCheckpoint(directory, spec, described)


def open_dequantized(directory: str | Path, spec: ModelSpec) -> CheckpointSource:
    """Return the source of a model's values: of 16 or 32 bits, or dequantised codes.

    Codes of GGUF files, FP8, MXFP4, NVFP4 and bitsandbytes are dequantised; what is quantised of
    them is rounded a second time. `ValueError` for the integers of other quantised directories.
    """
    source = open_checkpoint(directory, spec)
    if not isinstance(source, QuantizedCheckpoint):
        return source
    if not source.has_values():
        raise ValueError(
            f"'{directory}' is quantised already ({source.method}), and its integers are not "
            "rounded again: start from the model in 16 bits; llmpq-dist runs this one as it is"
        )
    _log.warning(
        "'%s' is stored quantised (%s): its values are rounded a second time; a plan of the "
        "directory itself keeps its codes",
        directory,
        source.method,
    )
    return source


def stored_kv(directory: str | Path) -> KVPrecision:
    """Return the KV precision a directory was quantised for; kv16 where it names none of ours."""
    described = quantization_of(directory) or {}
    scheme = section(described, "kv_cache_scheme", where=QUANTIZATION) or {}
    bits = scheme.get("num_bits") if scheme.get("type", "int") == "int" else None
    return KVPrecision.parse(str(bits)) if bits in (2, 4, 8) else KVPrecision.KV16


class QuantizedCheckpoint(CheckpointSource):
    """A directory whose config.json has a `quantization_config`."""

    may_keep_codes = True

    def __init__(
        self, directory: str | Path, spec: ModelSpec, described: Mapping[str, Any]
    ) -> None:
        self._described = described
        self._schemes: Mapping[int, WeightScheme | None] = {}
        self._said: set[Codebook] = set()
        require_read(described, directory)
        super().__init__(directory, spec)

    @property
    def method(self) -> str | None:
        """What config.json calls the way it is quantised."""
        return self._described.get("quant_method")

    def _is_known(self, name: str, expected: Collection[str]) -> bool:
        """Whether a tensor belongs to a quantised form of an expected one, or may be there."""
        stem, _, last = name.rpartition(".")
        if name.startswith(ATOM_ROOT) or (last in FIELDS and f"{stem}.weight" in expected):
            return True
        if any(name.endswith(end) and name.removesuffix(end) in expected for end in OF_EXPERTS):
            return True
        if is_bitsandbytes(name, expected):
            return True
        return super()._is_known(name, expected)

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Hand out FP8 codes, and those in groups of 32 or 64, where a layer's scheme has such."""
        self._schemes = schemes

    def has_values(self) -> bool:
        """Whether all linears are read as values where no codes are to be kept."""
        if any(name.startswith(ATOM_ROOT) for name in self.file_of):
            return False
        names = filter(LAYER.search, self.file_of)
        stems = (stem for _, stem, _ in quantised_linears(names, self))
        return not any(map(self._is_packed, stems))

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Read one decoder layer's parts, its linears packed."""
        if f"{ATOM_ROOT}{index}.qkv.codes" in self.file_of:
            return cut_parts(self._atom_layer(index, dtype), self._cuts(index))
        return self._with_plain(index, super().layer(index, dtype))

    def _with_plain(self, index: int, parts: dict[str, Any]) -> dict[str, Any]:
        """Return a layer's parts, its linears of 16 bits beside codes that are kept as they are.

        Beside a table's codes they are rounded to the plan's bits, which are 4 or 8 as it chooses.
        """
        scheme = self._schemes.get(index)
        codes = [part for part in parts.values() if isinstance(part, Weight)]
        tables = any(code.keeps_codes and code.bits == TABLE_BITS for code in codes)
        if scheme is None or scheme.activation_bits < 16 or not codes or tables:
            return parts
        linears = {f"{linear.name}.weight" for linear in self.spec.of_layer(index).linears()}
        return {
            part: DenseWeight(tensor) if part in linears and isinstance(tensor, Tensor) else tensor
            for part, tensor in parts.items()
        }

    def _parts(
        self,
        shapes: Shapes,
        table: Mapping[str, tuple[str, ...]],
        dtype: torch.dtype,
        cuts: Cuts = NO_CUTS,
    ) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for part, shape in shapes.items():
            # Codes are [N, K], whatever order a family stores values in.
            stems = [name.removesuffix(TRANSPOSED).removesuffix(".weight") for name in table[part]]
            kept = self._tables(part, table[part], shape, dtype)
            if kept is not None:
                parts[part] = kept
            elif part not in self.spec.kept_whole and all(map(self._keeps_fp8, table[part])):
                parts[part] = self._fp8(part, stems, shape, dtype)
            elif part.endswith(".weight") and self._is_packed(stems[0]):
                parts[part] = self._weight(part, stems, shape, dtype)
            else:
                parts |= super()._parts({part: shape}, table, dtype, cuts)
        return cut_weights(parts, cuts)

    def _tables(
        self, part: str, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> CodebookWeight | None:
        """Read a fused linear's 4-bit codes as they are; None where values are to be read."""
        scheme = self._scheme_of(names[0])
        if scheme is None or not serves_codebooks(scheme) or part in self.spec.kept_whole:
            return None
        try:
            pieces = [self._table(name, dtype) for name in names]
            whole = table_of(pieces, shape)
        except ValueError as error:
            raise ValueError(f"'{self.directory}', {' + '.join(names)}: {error}") from None
        if whole is not None and whole.codebook not in self._said:
            self._said.add(whole.codebook)
            _log.info("'%s': 4-bit codes (%s) are kept", self.directory, whole.codebook.value)
        arranged = self.names.arranged(part)
        if whole is None or arranged == AS_IT_IS:
            return whole
        return ordered(whole, partial(arranged.ours, spec=self.spec))

    def _table(self, name: str, dtype: torch.dtype) -> CodebookWeight | None:
        """Return a tensor's codes where they stand for values of a table."""
        stem = name.removesuffix(".weight")
        form = stored_form(stem, self) if stem != name or ROW.fullmatch(name) else None
        return stored_codebook(name, form, self.file_of, (super().read, self._row), dtype)

    def _keeps_fp8(self, name: str) -> bool:
        """Whether a tensor's FP8 codes are kept: its layer has 8 bits or integers that are, kernels
        its blocks."""
        scheme = self._scheme_of(name)
        if scheme is None or scheme.activation_bits < 16:
            return False
        if name.endswith(f"]{TRANSPOSED}"):  # an expert's codes lie as [in, out]
            return False
        codes = name.removesuffix(TRANSPOSED)
        if not self._is_fp8(codes) or not is_kept_block(fp8_block(self._described)):
            return False
        return scheme.bits == 8 or self._keeps_integers(codes)

    def _keeps_integers(self, name: str) -> bool:
        """Whether integers of a tensor's layer are kept as they are."""
        number = LAYER.search(name)
        stem = None if number is None else self._integers.get(int(number[1]))
        return stem is not None and self._is_packed(stem)

    @cached_property
    def _integers(self) -> dict[int, str]:
        """Return one linear of integers of each layer that has such."""
        found: dict[int, str] = {}
        for name, stem, form in quantised_linears(self.file_of, self):
            number = LAYER.search(name)
            if number is not None and form is CodesForm.INTEGERS:
                found.setdefault(int(number[1]), stem)
        return found

    def _is_fp8(self, name: str) -> bool:
        """Whether a tensor, or the one that a row is of, is stored as FP8 codes."""
        stored = stored_name(name)
        found = self.header(stored)
        return found is not None and found[0] == "F8_E4M3"

    def _fp8(
        self, part: str, stems: list[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Fp8Weight:
        """Read a fused linear's codes as they are."""
        arranged = self.names.arranged(part)
        order = None if arranged == AS_IT_IS else partial(arranged.ours, spec=self.spec)
        options: dict[str, Any] = {
            "block": fp8_block(self._described),
            "order": order,
            "dtype": dtype,
        }
        try:
            made = fp8_codes(stems, self.file_of, super().read, **options)
        except ValueError as error:
            raise ValueError(f"'{self.directory}', {' + '.join(stems)}: {error}") from None
        self._require_shape(stems, tuple(made.codes_NK.shape), shape)
        return made

    def _is_packed(self, stem: str) -> bool:
        """Whether a linear's codes are kept as they are."""
        form = stored_form(stem, self)
        if form is CodesForm.INTEGERS:
            return self._keeps(stem)
        return form is CodesForm.INT8

    def read(self, name: str, dtypes: Collection[torch.dtype] | None = None) -> Tensor:
        """Return one tensor by its own name; values where it is stored as codes of those."""
        row = ROW.fullmatch(name)
        if row is not None and self._is_fp8(name):
            whole = self._fp8_values(name.removesuffix(TRANSPOSED))
            return whole.t() if row["transposed"] else whole
        stem, _, last = name.removesuffix(TRANSPOSED).rpartition(".")
        form = stored_form(stem, self) if last == "weight" else None
        if form is CodesForm.FP8:
            return self._fp8_values(stem)
        codes = form is not None and not self._is_packed(stem)
        name = name.removesuffix(TRANSPOSED) if codes else name  # are [N, K] anyway
        try:
            table = self._table(name, torch.float32)
            if table is not None:
                return table.dequantize(torch.float32)
            if codes:
                bits = self._integer_codes(stem).bits
                return integer_values(stem, self.file_of, self._read, self._described, bits)
        except ValueError as error:
            raise ValueError(f"'{self.directory}', {stem}: {error}") from None
        return super().read(name, dtypes)

    def _fp8_values(self, stem: str) -> Tensor:
        try:
            return fp8_values(stem, self.file_of, super().read, fp8_block(self._described))
        except ValueError as error:
            raise ValueError(f"'{self.directory}', {stem}: {error}") from None

    def _scheme_of(self, stem: str) -> WeightScheme | None:
        """Return what the plan stores a linear's layer as, where it is to keep codes."""
        number = LAYER.search(stem)
        return None if number is None else self._schemes.get(int(number[1]))

    def _integer_codes(self, stem: str) -> IntegerCodes:
        """Return what a linear of integers has; `ValueError` where a tensor of it is missing."""
        for last in integer_fields(stem, self.file_of).needed:
            self._require(f"{stem}.{last}")
        return integer_codes(stem, self, self._described)

    def _keeps(self, stem: str) -> bool:
        """Whether a linear's integers are kept: in groups of 128, or as the layer's scheme has."""
        codes, scheme = self._integer_codes(stem), self._scheme_of(stem)
        if codes.group_size in (0, GROUP):
            return True
        return (
            codes.group_size is not None
            and scheme is not None
            and (scheme.group_size, scheme.bits) == (codes.group_size, codes.bits)
            and scheme.activation_bits == 16
            and scheme.symmetric
            <= is_centred(self._described, f"{stem}.weight_zero_point" in self.file_of)
        )

    def _row(self, name: str, index: int) -> Tensor:
        return self._get(name, (torch.uint8,), index)

    def header(self, name: str) -> tuple[str, list[int]] | None:
        """Return a tensor's dtype, as safetensors calls it, and its shape; None without it."""
        if name not in self.file_of:
            return None
        stored = self._handle(self.file_of[name]).get_slice(name)
        return stored.get_dtype(), stored.get_shape()

    def whole_numbers(self, name: str) -> list[int]:
        """Return the values of a small tensor of integers."""
        return [int(value) for value in self._read(name)]

    def _weight(
        self, part: str, stems: list[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantizedWeight | AtomWeight:
        """Read a fused linear's pieces, stack them along N and pack them our way."""
        if f"{stems[0]}.weight" in self.file_of:
            codes = [self.read(f"{stem}.weight", (torch.int8,)) for stem in stems]
            for stem in stems:
                self._require_no_zeros(stem)
            codes_NK = self._stacked(part, codes)
            scale_N1 = self._stacked(part, [self._read(f"{stem}.weight_scale") for stem in stems])
            self._require_shape(stems, codes_NK.shape, shape)
            return channel_weight(codes_NK, scale_N1, dtype)
        alike = all(map(self._is_packed, stems))
        pieces = [self._piece(stem, dtype) for stem in stems] if alike else []
        if len({(piece.bits, piece.group_size) for piece in pieces}) != 1:
            raise ValueError(
                f"'{self.directory}': {', '.join(stems)} are quantised differently; llmpq runs "
                "them as one matrix and needs one scheme"
            )
        zero_NG, scheme = None, self._scheme_of(stems[0])
        kept = scheme is not None and scheme.group_size == pieces[0].group_size != GROUP
        # With zeros where the plan counts them: those of centred codes are all the same.
        with_zeros = kept and scheme is not None and not scheme.symmetric
        if kept and not with_zeros and not all(piece.symmetric for piece in pieces):
            raise ValueError(
                f"'{self.directory}': {' + '.join(stems)} have zero points, which config.json says "
                "there are none of (sym); correct it, or download the checkpoint again"
            )
        if with_zeros or not all(piece.symmetric for piece in pieces):
            zero_NG = self._stacked(part, [piece.zero_NG() for piece in pieces])
        codes_NK = self._stacked(part, [piece.codes() for piece in pieces])
        self._require_shape(stems, (codes_NK.shape[0], pieces[0].in_features), shape)
        return from_codes(
            codes_NK,
            self._stacked(part, [piece.scale_NG() for piece in pieces]),
            zero_NG,
            bits=pieces[0].bits,
            group_size=pieces[0].group_size,
            in_features=shape[1],
        )

    def _stacked(self, part: str, rows: list[Tensor]) -> Tensor:
        """Return pieces one below the other, in our order of rows."""
        whole: Tensor = self.names.arranged(part).ours(torch.cat(rows), self.spec)
        return whole

    def _piece(self, stem: str, dtype: torch.dtype) -> QuantizedWeight:
        """Read one checkpoint linear of a weight-only form."""
        fields = integer_fields(stem, self.file_of)
        tensors = {last: self._read(f"{stem}.{last}") for last in fields.of(stem, self.file_of)}
        tensors[fields.scales] = tensors[fields.scales].to(dtype)
        try:
            return self._convert(tensors, self._integer_codes(stem).bits)
        except ValueError as error:
            raise ValueError(f"'{self.directory}', {stem}: {error}") from None

    def _read(self, name: str) -> Tensor:
        """Return a tensor of a quantised form, stored as its field must be."""
        return self.read(name, DTYPES.get(name.rpartition(".")[2], FLOATING))

    def _convert(self, tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
        if "weight_g_idx" in tensors:
            raise ValueError(
                "its channels are ordered by activation (weight_g_idx), which llmpq does not run; "
                "quantise without actorder, or with llmpq-quantize"
            )
        if "weight_packed" in tensors:
            return from_compressed_tensors(tensors, bits=bits, layout=Layout.ROWS)
        if self._described["quant_method"] == "awq":
            return from_awq(tensors, layout=Layout.ROWS)
        v2 = layout_of(self._described) == "gptq_v2"
        return from_gptq(tensors, bits=bits, v2=v2, layout=Layout.ROWS)

    def _require_no_zeros(self, stem: str) -> None:
        """Refuse 8-bit codes around zero points: int8 products have none."""
        name = f"{stem}.weight_zero_point"
        if name in self.file_of and bool(self.read(name, (torch.int8, torch.int32)).any()):
            raise ValueError(
                f"'{self.directory}': {stem} has zero points, which llmpq does not run for 8-bit "
                "codes; quantise with symmetric weights, or with llmpq-quantize"
            )

    def _require_shape(
        self, stems: list[str], got: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        if tuple(got) != expected:
            raise ValueError(
                f"'{self.directory}': {' + '.join(stems)} have shape {list(got)} together, "
                f"config.json says {list(expected)}"
            )

    def _atom_layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        prefix = f"{ATOM_ROOT}{index}."
        mine = [name for name in self.file_of if name.startswith(prefix)]
        metadata = self._handle(self.file_of[mine[0]]).metadata() or {}
        if SCHEMES not in metadata:
            raise ValueError(
                f"'{self.directory / self.file_of[mine[0]]}' has no '{SCHEMES}' in its metadata, "
                "which says how its layer is quantised; run llmpq-quantize again"
            )
        schemes = json.loads(metadata[SCHEMES])
        stored = {}
        for name in mine:
            own = name.removeprefix(prefix)
            stored[own] = self._read(name) if is_field(own, schemes) else self.read(name, FLOATING)
        return atom_parts(stored, schemes, self.spec.of_layer(index), dtype)
