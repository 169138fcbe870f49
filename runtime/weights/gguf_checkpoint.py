"""Weights of a GGUF file, mapped from it and read as the values they stand for.

The file's names become the Hugging Face ones that the families' tables know (the `gguf` package has
the list), and what llama.cpp's converter changed is changed back: rows of queries and keys of
Llama's kind lie in pairs of rotated channels, Gemma's norms are stored as 1 + w, all experts of a
layer are one tensor, Qwen3.5's heads of values lie by turns of their key heads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmpq.checkpoints.gguf_config import UNREAD, architecture_of
from llmpq.checkpoints.gguf_file import GgufTensor, open_gguf
from llmpq.families.common.record import AS_IT_IS
from llmpq.families.common.spec_values import Recurrent
from llmpq.kernels.weights.codebook_weight import CodebookWeight, ordered
from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import WeightScheme
from llmpq.runtime.models.part_shapes import layer_shapes
from llmpq.runtime.weights.codebook_forms import table_of
from llmpq.runtime.weights.cut_parts import cut_weights
from llmpq.runtime.weights.gguf_codebooks import codebook_of_blocks, keeps_kind, whole_numbers
from llmpq.runtime.weights.gguf_codes import GROUP, codes_of, kept_weight
from llmpq.runtime.weights.gguf_layout import ONE_BELOW, Stored, layout
from llmpq.runtime.weights.sources import ROW, CheckpointSource, stored_name

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose bytes are the values."""
IQ4 = ("IQ4_NL", "IQ4_XS")
"""Types whose values are integers times a scale."""
SAMPLED_ROWS = 64
"""Rows by which a second rounding is measured."""
_log = logging.getLogger("llmpq.weights")
BLOCK = re.compile(r"blk\.([0-9]+)\.")
DELTA = re.compile(r"\.linear_attn\.(in_proj_\w+|conv1d|A_log|dt_bias)")
"""Parts of the delta rule with rows of every head of values."""


class GgufCheckpoint(CheckpointSource):
    """A model's GGUF file, in parts or whole."""

    DESCRIBED_BY = "its metadata"
    may_keep_codes = True

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self._file = open_gguf(path)
        self._arch, self._means = architecture_of(self._file)
        self._stored: dict[str, Stored] = {}
        self._spec = spec
        self._schemes: Mapping[int, WeightScheme | None] = {}
        self._said: set[str] = set()
        super().__init__(self._file.path.parent, spec)

    @property
    def where(self) -> Path:
        """What errors call it."""
        return self._file.path

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Hand out linears as their own codes where a layer's scheme can hold them."""
        self._schemes = schemes

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Read one decoder layer's parts: values, and codes where they are kept."""
        spec, scheme = self.spec.of_layer(index), self._schemes.get(index)
        table = {p: self._rooted(n) for p, n in self.names.of_layer(self.spec, index).items()}
        shapes = layer_shapes(spec)
        kept: dict[str, Any] = {}
        for part in [f"{linear.name}.weight" for linear in spec.linears()] if scheme else ():
            if part in shapes:
                weight = self._kept(part, table[part], shapes[part], scheme, dtype)
                kept |= {} if weight is None else {part: weight}
        rest = {part: shape for part, shape in shapes.items() if part not in kept}
        if scheme is not None and scheme.activation_bits == 16:
            again = [f"{s.name}.weight" for s in spec.linears() if f"{s.name}.weight" in rest]
            self._say_rounded({name for part in again for name in table[part]}, scheme, dtype)
        cuts = self._cuts(index)
        return {**self._parts(rest, table, dtype, cuts), **cut_weights(kept, cuts)}

    def _kept(
        self,
        part: str,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        scheme: WeightScheme | None,
        dtype: torch.dtype,
    ) -> QuantizedWeight | CodebookWeight | None:
        """Return a linear's own codes; None where the scheme cannot hold them."""
        table = self._table(part, names, shape, scheme, dtype)
        if table is not None or scheme is None or scheme.group_size != GROUP:
            return table
        if self._cuts_groups(names[0]):
            return None
        pieces, kinds = [], []
        arranged = self.names.arranged(part)
        for name in names:
            stored, expert = self._in_rows(name)
            if stored is None:
                return None
            if stored.make is not None:
                arranged = AS_IT_IS
            for tensor in (self._file.tensors[own] for own in stored.names):
                eight = scheme.bits == 8 and tensor.kind in IQ4
                piece = (whole_numbers if eight else codes_of)(tensor, expert)
                if piece is None:
                    return None
                piece = piece.rows(partial(self._their_rows, name))
                if self._has_columns_by_turns(name):
                    piece = piece.columns(self._together)
                pieces.append(piece)
                kinds.append(tensor.kind)
        got = (sum(p.codes_NK.shape[0] for p in pieces), pieces[0].codes_NK.shape[1])
        if got != shape or len({p.codes_NK.shape[1] for p in pieces}) > 1:
            return None  # read as values, which says what is wrong
        order = partial(arranged.ours, spec=self.spec)
        return kept_weight(pieces, kinds, scheme, dtype, order)

    def _table(
        self,
        part: str,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        scheme: WeightScheme | None,
        dtype: torch.dtype,
    ) -> CodebookWeight | None:
        """Return a linear's own codes that stand for a table's values, if it has such."""
        pieces: list[CodebookWeight | None] = []
        arranged = self.names.arranged(part)
        for name in names:
            stored, expert = self._in_rows(name)
            if stored is None or self._cuts_groups(name):
                return None
            columns = self._together if self._has_columns_by_turns(name) else None
            tensors = [self._file.tensors[own] for own in stored.names]
            if not all(keeps_kind(tensor.kind, scheme) for tensor in tensors):
                return None
            found = [codebook_of_blocks(tensor, expert, dtype, columns) for tensor in tensors]
            if stored.make is not None:
                arranged = AS_IT_IS
            elif found[0] is not None:
                found = [ordered(found[0], partial(self._their_rows, name))]
            pieces += found
        whole = table_of(pieces, shape)
        if whole is None or arranged == AS_IT_IS:
            return whole
        return ordered(whole, partial(arranged.ours, spec=self.spec))

    def _in_rows(self, name: str) -> tuple[Stored | None, int | None]:
        """Return where the rows of a tensor, or of a row of it, lie, and which expert's they are.

        None where it is missing, which `_get` says, or made of others' values.
        """
        row = ROW.fullmatch(name)
        stored = self._stored.get(name if row is None else row["name"])
        if stored is None or (stored.make is not None and stored.make not in ONE_BELOW):
            return None, None
        return stored, stored.expert if row is None else int(row["index"])

    def _say_rounded(self, names: set[str], scheme: WeightScheme, dtype: torch.dtype) -> None:
        """Say once of each type of blocks that they are rounded again, and by how much."""
        for name in sorted(names):
            stored = self._stored.get(stored_name(name))
            tensor = None if stored is None else self._file.tensors[stored.names[0]]
            if tensor is None or tensor.kind in PLAIN or tensor.kind in self._said:
                continue
            self._said.add(tensor.kind)
            expert = 0 if len(tensor.shape) > 2 else None
            values = values_of(tensor, expert, rows=SAMPLED_ROWS)
            rounded = quantize_weight(values, scheme, dtype=dtype).dequantize(torch.float32)
            error = float((rounded - values).norm() / values.norm().clamp(min=1e-30))
            groups = "rows" if scheme.group_size is None else f"groups of {scheme.group_size}"
            _log.warning(
                "'%s': %s blocks are rounded a second time, to %d bits in %s: %.2g of their "
                "values' norm in '%s'; a plan with --bits 16 keeps them",
                self._file.path.name,
                tensor.kind,
                scheme.bits,
                groups,
                error,
                tensor.name,
            )

    def _their_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return a matrix's rows in the Hugging Face order, those of ours alone."""
        stored = self._stored.get(name)
        if stored is not None and stored.half is not None:
            rows = rows.chunk(2)[stored.half]
        delta = DELTA.search(name)
        if self._means.by_turns and delta is not None:
            form = self._delta()
            kept = 2 * form.key_heads * form.key_dim if delta[1] in ("in_proj_qkv", "conv1d") else 0
            return torch.cat((rows[:kept], self._together(rows[kept:])))
        kind = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
        if not self._means.pairs or kind is None:
            return rows
        return _halves(rows, self.spec.heads if kind[1] == "q" else self.spec.kv_heads)

    def _delta(self) -> Recurrent:
        form = self.spec.recurrent
        assert form is not None
        return form

    def _has_columns_by_turns(self, name: str) -> bool:
        form = self.spec.recurrent
        turned = self._means.by_turns and name.endswith("linear_attn.out_proj.weight")
        return turned and form is not None and form.heads > form.key_heads

    def _cuts_groups(self, name: str) -> bool:
        """Whether columns in our order are no whole groups in the file's."""
        return self._has_columns_by_turns(name) and bool(self._delta().value_dim % GROUP)

    def _together(self, rows: Tensor) -> Tensor:
        """Return heads of values, as many rows each, with those of one key head side by side."""
        form = self._delta()
        by_turns = rows.view(form.heads // form.key_heads, form.key_heads, -1, *rows.shape[1:])
        return by_turns.transpose(0, 1).reshape(rows.shape)

    def _index(self) -> dict[str, str]:
        """Return name -> file, by the families' names where a tensor has one."""
        import gguf

        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch)
        table = gguf.get_tensor_name_map(arch, self._spec.num_layers)
        tensors = self._file.tensors
        self._stored = layout(self._names(), table, tensors)
        read = {own for stored in self._stored.values() for own in stored.names}
        files = {name: tensors[stored.names[0]].path.name for name, stored in self._stored.items()}
        return files | {name: tensors[name].path.name for name in set(tensors) - UNREAD - read}

    def _names(self) -> set[str]:
        """Return every name that the family's tables may ask for."""
        self.root, self.file_of = self.names.roots[0], {}
        if self._means.experts_apart:
            self.names = self.names.with_experts_apart()
        layers = range(self.spec.num_layers)
        others = [name for names in self.names.otherwise.values() for name in names]
        also = {self.root + name.format(i=i, e=0) for name in others for i in layers}
        return self._expected() | also | {self.names.output}

    def _output_name(self) -> str:
        return self.names.output

    def _is_known(self, name: str, expected: Collection[str]) -> bool:
        """Whether a tensor is known: in a table, or of a layer that is not run (MTP)."""
        match = BLOCK.match(name)
        if match is not None and name not in self._stored:
            return 0 <= int(match[1]) - self.spec.num_layers < self.spec.further_layers
        return name in self._stored and super()._is_known(name, expected)

    def _require(self, name: str) -> None:
        if name in self._stored:
            return
        missing = (
            f"'{self._file.path}': tensor '{name}' is missing, by the name it has in safetensors"
        )
        if name.endswith(".bias"):
            raise ValueError(
                f"{missing}; some of the layers' matrices have biases and others none, in a way "
                f"that the architecture '{self._file.metadata['general.architecture']}' is not "
                "read with. Get the model as safetensors"
            )
        raise ValueError(
            f"{missing}; the file has {len(self._file.tensors)} tensors. Download it again"
        )

    def _get(
        self, name: str, dtypes: Collection[torch.dtype] | None, index: int | None = None
    ) -> Tensor:
        """Return a tensor's values in the Hugging Face order: as stored, or float32."""
        self._require(name)
        stored = self._stored[name]
        if stored.make is not None:  # an expert's row of each, where a row is asked for
            own = [values_of(self._file.tensors[part], index) for part in stored.names]
            return self._their_rows(name, stored.make(own))
        one = self._file.tensors[stored.names[0]]
        # A file drops a first dimension of one.
        whole = index is None or len(one.shape) == 1
        tensor = values_of(one, stored.expert if whole else index)
        of_mixer = name.endswith("linear_attn.norm.weight")
        if self._means.above_one and name.endswith("norm.weight") and not of_mixer:
            tensor = tensor - 1
        tensor = self._their_rows(name, tensor)
        if self._has_columns_by_turns(name):
            tensor = self._together(tensor.T).T
        return tensor

    def _handle(self, file: str) -> Any:
        raise AssertionError(f"{file} is no safetensors file")


def values_of(tensor: GgufTensor, expert: int | None = None, *, rows: int | None = None) -> Tensor:
    """Return a tensor's values, or one expert's of them: as they are stored, or float32.

    `rows`: only so many of the first.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks, shape = tensor.blocks(), tensor.shape
    if expert is not None:
        blocks, shape = blocks.reshape(shape[0], -1)[expert], shape[1:]
    if rows is not None:
        blocks, shape = blocks.reshape(shape[0], -1)[:rows], (min(rows, shape[0]), *shape[1:])
    if tensor.kind in PLAIN:
        return torch.from_numpy(blocks).view(PLAIN[tensor.kind]).view(shape)
    by_row = np.asarray(blocks).reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(by_row, GGMLQuantizationType[tensor.kind]))


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows [heads * head_dim, ...] whose rotated pairs lie side by side as two halves."""
    by_pair = rows.view(heads, -1, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)
