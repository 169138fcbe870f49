"""Where a stage's weights come from: a safetensors checkpoint, or seeded random values.

A source hands out one layer (or embedding, or head) at a time as host tensors by part name, so a
stage reads its own slice only and never holds more than a few layers unquantised. A part that a
file stores as it is used (an embedding in the stage's dtype) is that file's pages, mapped, not a
copy of them: rewriting a checkpoint in place changes the weights that are served. Files are closed
after each part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmpq.checkpoints.model_config import other_form
from llmpq.checkpoints.tensor_names import INDEX, SINGLE, index_of
from llmpq.families import FAMILIES
from llmpq.families.common.record import AS_IT_IS
from llmpq.file_form import broken_link, lfs_pointer
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import Member, PartSlice
from llmpq.precision import WeightScheme
from llmpq.runtime.models.part_shapes import (
    Shapes,
    embedding_shapes,
    head_shapes,
    layer_shapes,
    mtp_shapes,
)
from llmpq.runtime.weights.cut_parts import NO_CUTS, Cuts, cut_parts, cut_pieces, cut_tensor
from llmpq.runtime.weights.weight_map import read_weight_map

ATOM_ROOT = "llmpq.layers."
"""What Atom's layers are called up to the layer's number."""
FLOAT32_PARTS = ("router.correction",)
"""Parts read in float32 whatever the dtype: what they tell apart, 16 bits would make equal."""
ROW = re.compile(r"(?P<name>.+)\[(?P<index>[0-9]+)\](?P<transposed>\^T)?")
TRANSPOSED = "^T"
UNREAD = re.compile(
    r"rotary_emb\.|\.(masked_bias|position_ids|[kvq]_scale|output_scale)$|^lm_head\."
    r"|\.(slope_rate|(query|key|diagonal)_decay)$"
)
"""Buffers that old checkpoints carry, scales of a KV cache in 8 bits, and tied heads; constants of
lightning attention."""
LEFT_OUT = re.compile(
    r"(^|\.)(vision(_tower|_model|_encoder|_embedder|_projection|_projector)?|visual|audio_tower"
    r"|multi_modal_projector|mm_projector|embed_vision|embed_audio|connector|merger|mtp(_layers)?"
    r"|visual_embeddings_table|aligner|mlp1|sound_encoder|sound_projection)\."
    r"|(^|\.)image_newline$"
)
"""Parts of a checkpoint beside the language model."""
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that hold the weights themselves; 8-bit floats and integers are codes."""

_PAGE_BYTES = 4096
_MAPPED_BYTES = 1 << 20
"""Smaller parts are copied: a norm would keep all of its layer's pages mapped."""


class CheckpointSource:
    """Weights of a Hugging Face directory with `model.safetensors`, sharded or not."""

    DESCRIBED_BY = "config.json"
    """What says the model's shapes, in errors."""
    may_keep_codes = False
    """Whether `keep_codes` changes what is read: plain values are stored as no codes."""

    def __init__(self, directory: str | Path, spec: ModelSpec) -> None:
        self.directory, self.spec = Path(directory), spec
        self.names = FAMILIES[spec.family].names
        self._open: dict[str, Any] = {}
        self._member: Member | None = None
        self.file_of = self._index()
        self.names = self.names.used_in(self.file_of)
        (token_name,) = self.names.embedding["tokens.weight"]
        found = [root for root in self.names.roots if root + token_name in self.file_of]
        if not found:
            raise ValueError(
                f"'{self.where}': tensor '{self.names.roots[0]}{token_name}' is missing; "
                f"is this a {spec.family} checkpoint? It has "
                f"{', '.join([*sorted(self.file_of)[:4], '...']) if self.file_of else 'no tensors'}"
            )
        self.root = found[0]
        self._require_no_more_layers()
        self._require_known_tensors()

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Do nothing: every linear is stored as values."""

    def take_member(self, member: Member) -> None:
        """Read of decoder layers what one device of a stage in tensor parallel holds.

        Parts whose rows a family stores in another order are read whole first, one by one.
        """
        self._member = member

    def _cuts(self, index: int) -> Cuts:
        """Return what is read of the parts of a layer."""
        return NO_CUTS if self._member is None else self._member.cuts(index)

    @property
    def where(self) -> Path:
        """Where it is, in errors."""
        return self.directory

    def embedding(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Read the embedding's parts."""
        table = {part: self._rooted(names) for part, names in self.names.embedding.items()}
        return self._let_go_after(embedding_shapes(self.spec), table, dtype)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Read one decoder layer's parts."""
        table = {
            part: self._rooted(names)
            for part, names in self.names.of_layer(self.spec, index).items()
        }
        shapes = layer_shapes(self.spec.of_layer(index))
        return self._let_go_after(shapes, table, dtype, self._cuts(index))

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Tensor]:
        """Read the head's parts; without the output matrix where the embedding is at hand."""
        table = {part: self._rooted(names) for part, names in self.names.head.items()}
        tied = self._rooted(self.names.embedding["tokens.weight"])
        table["output.weight"] = tied if self.spec.tied_embeddings else (self._output_name(),)
        table["output.bias"] = (self._output_bias(),)
        shapes = head_shapes(self.spec)
        if self.spec.tied_embeddings:
            self._require_tied(self._output_name(), *tied)
        if not with_output:
            del shapes["output.weight"]
        return self._let_go_after(shapes, table, dtype)

    def mtp(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Read the parts of the head that predicts a further token; `ValueError` without one."""
        names = self.names.mtp
        if names is None:
            raise ValueError(f"a {self.spec.family} model has no head that predicts tokens (MTP)")
        root = self.root if names.rooted else ""
        table = {
            part: tuple(root + name for name in stored)
            for part, stored in self.names.of_mtp(self.spec).items()
        }
        return self._let_go_after(mtp_shapes(self.spec), table, dtype)

    def _require_tied(self, output: str, embedding: str) -> None:
        """Refuse an output matrix of its own where config.json says there is none."""
        if output in self.file_of and not torch.equal(self.read(output), self.read(embedding)):
            raise ValueError(
                f"'{self.directory}': config.json ties the output matrix to the embedding "
                f"(tie_word_embeddings), but '{output}' is another one than '{embedding}'. Set "
                "tie_word_embeddings to false in config.json, or download the model again"
            )

    def _output_name(self) -> str:
        """Return what the untied output matrix is called: beside the root, or beside its owner."""
        owner = self.root.split(".")[0]
        inside = f"{owner}.{self.names.output}"
        return inside if inside in self.file_of else self.names.output

    def _output_bias(self) -> str:
        """Return what the output matrix's bias is called, where the model has one."""
        return f"{self._output_name().removesuffix('weight')}bias"

    def _rooted(self, names: Any) -> tuple[str, ...]:
        return tuple(self.root + name for name in names)

    def _let_go_after(
        self,
        shapes: Shapes,
        table: Mapping[str, tuple[str, ...]],
        dtype: torch.dtype,
        cuts: Cuts = NO_CUTS,
    ) -> dict[str, Tensor]:
        """Read parts and close the files: only pages of what is kept of them stay mapped."""
        try:
            return self._parts(shapes, table, dtype, cuts)
        finally:
            self._open.clear()

    def _parts(
        self,
        shapes: Shapes,
        table: Mapping[str, tuple[str, ...]],
        dtype: torch.dtype,
        cuts: Cuts = NO_CUTS,
    ) -> dict[str, Tensor]:
        """Read the parts of `shapes`, stacking and rearranging as the family's table says."""
        parts = {}
        for part, shape in shapes.items():
            stored = torch.float32 if part in FLOAT32_PARTS else dtype
            arranged, cut = self.names.arranged(part), cuts.get(part)
            if arranged == AS_IT_IS:
                parts[part] = self._stack(table[part], shape, stored, cut)
                continue
            ours = arranged.ours(self._stack(table[part], shape, stored), self.spec)
            parts[part] = ours if cut is None else cut_tensor(ours, cut)
        return parts

    def _stack(
        self,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        cut: PartSlice | None = None,
    ) -> Tensor:
        """Return tensors stacked along the first dimension; one alone as it is mapped.

        `cut`: what of them is read.
        """
        pieces = [_without_ones(self.read(name, FLOATING), len(shape)) for name in names]
        if names[0].endswith(TRANSPOSED) and pieces[0].shape == shape[::-1] != shape:
            pieces = [
                pieces[0].t()
            ]  # newer Transformers save as they multiply (Qwen3-VL's experts)
        rows = sum(piece.shape[0] for piece in pieces)
        for name, piece in zip(names, pieces, strict=True):
            if rows != shape[0] or piece.shape[1:] != shape[1:]:
                raise ValueError(
                    f"'{self.file_of[stored_name(name)]}': tensor '{name}' has shape "
                    f"{list(piece.shape)}; "
                    f"{' + '.join(names)} must have shape {list(shape)} together, as "
                    f"{self.DESCRIBED_BY} says: the two do not belong together"
                )
        if cut is not None:
            pieces = cut_pieces(pieces, cut)
            shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        if len(pieces) == 1 and _serves_mapped(pieces[0], dtype):
            return _read_in(pieces[0])
        stacked = torch.empty(shape, dtype=dtype)
        start = 0
        for piece in pieces:
            stacked[start : start + piece.shape[0]].copy_(piece)
            start += piece.shape[0]
        return stacked

    def read(self, name: str, dtypes: Collection[torch.dtype] | None = None) -> Tensor:
        """Return one tensor of the checkpoint by its own name; `ValueError` for another dtype.

        `NAME[3]` is row 3 of its first dimension; `^T` behind either is that transposed.
        """
        row = ROW.fullmatch(name)
        if row is not None:
            whole = self._get(row["name"], dtypes, int(row["index"]))
            return whole.t() if row["transposed"] else whole
        whole = self._get(name.removesuffix(TRANSPOSED), dtypes)
        return whole.t() if name.endswith(TRANSPOSED) else whole

    def _get(
        self, name: str, dtypes: Collection[torch.dtype] | None, index: int | None = None
    ) -> Tensor:
        """Return a tensor, or one row of it."""
        self._require(name)
        path = self.directory / self.file_of[name]
        try:
            handle = self._handle(self.file_of[name])
            tensor: Tensor = (
                handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
            )
        except SafetensorError as error:
            raise ValueError(
                f"'{path}' does not give tensor '{name}', which {INDEX} says it holds ({error}). "
                "Download it again"
            ) from None
        if dtypes is not None and tensor.dtype not in dtypes:
            raise ValueError(
                f"'{path}': tensor '{name}' is {_dtype_name(tensor.dtype)}, expected "
                f"{' or '.join(map(_dtype_name, dtypes))}; llmpq reads quantised weights where "
                "quantization_config in config.json says how. Download it again, or start from "
                "the unquantised model"
            )
        return tensor

    def _require(self, name: str) -> None:
        """Raise `ValueError` for a tensor that no file holds."""
        if name not in self.file_of:
            raise ValueError(
                f"'{self.directory}': tensor '{name}' is missing; the checkpoint has "
                f"{len(self.file_of)} tensors. Download it again, or check config.json"
            )

    def _require_no_more_layers(self) -> None:
        """Raise `ValueError` for layers that would never run: the model would be cut short."""
        prefixes = map(re.escape, (self.root + self.names.layer_prefix, ATOM_ROOT))
        pattern = re.compile(f"(?:{'|'.join(prefixes)})([0-9]+)\\.")
        found = {int(match[1]): name for name in self.file_of if (match := pattern.match(name))}
        last = max(found, default=0)
        beyond = last - self.spec.num_layers + 1
        if beyond > self.spec.further_layers:
            raise ValueError(
                f"'{self.where}' has layers up to {last} (tensor '{found[last]}'), "
                f"{self.DESCRIBED_BY} says {self.spec.num_layers} layers: expected none from "
                f"{self.spec.num_layers} on. Correct {self.DESCRIBED_BY} or download it again"
            )

    def _require_known_tensors(self) -> None:
        """Refuse tensors that no layer reads: what they do would be missing from every layer."""
        expected = self._expected()
        others = [name for name in self.file_of if name not in expected]
        unknown = sorted(name for name in others if not self._is_known(name, expected))
        for weight in sorted({name.removesuffix("_scale") for name in unknown} & expected):
            self.read(weight, FLOATING)  # a scale is unknown where its weight's codes are, too
        if unknown:
            raise ValueError(
                f"'{self.where}': tensor '{unknown[0]}' is not part of a {self.spec.family} "
                f"model as {self.DESCRIBED_BY} describes it{_and_more(len(unknown))}; llmpq would "
                f"run the model without it. Correct {self.DESCRIBED_BY}, or download the "
                "checkpoint again"
            )

    def _expected(self) -> set[str]:
        """Return the names of all tensors that the spec's parts are read from."""
        spec, names = self.spec, self.names
        tables = [(embedding_shapes(spec), names.embedding), (head_shapes(spec), names.head)]
        for index in range(spec.num_layers):
            tables.append((layer_shapes(spec.of_layer(index)), names.of_layer(spec, index)))
        found = {self._output_name()}
        if spec.head_bias:
            found.add(self._output_bias())
        for shapes, table in tables:
            for part in shapes:
                found.update(self.root + stored_name(name) for name in table.get(part, ()))
        for index in range(spec.num_layers):
            if spec.kv_source(index) != index:  # files may have what would make its own cache
                table = names.of_layer(spec, index)
                unused = (*table["qkv.weight"], *table["qkv.bias"], *table["k_norm.weight"])
                found.update(self.root + name for name in unused)
        return found

    def _is_known(self, name: str, expected: Collection[str]) -> bool:
        """Whether a tensor that no part is read from may be there."""
        if UNREAD.search(name) or LEFT_OUT.search(name) or self._is_further(name):
            return True
        if name.rpartition(".")[2] in self.names.buffers:
            return self._is_constant(name)
        # Old tools write the biases that a family does not have: zeros change nothing.
        is_bias = name.endswith(".bias") and name.removesuffix("bias") + "weight" in expected
        return is_bias and not bool(self.read(name).any())

    def _is_constant(self, name: str) -> bool:
        """Whether a buffer, maybe rounded to 16 bits, has the value that its family runs with."""
        got, expected = self.read(name).float(), self.names.buffers[name.rpartition(".")[2]]
        return bool(torch.isclose(got, torch.tensor(expected), rtol=1e-2).all())

    def _is_further(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last one, which is not run."""
        prefix = self.root + self.names.layer_prefix
        number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        return number.isdigit() and int(number) >= self.spec.num_layers

    def _handle(self, file: str) -> Any:
        """Open a shard; the operating system maps it, tensors are read when touched."""
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                missing = f"'{path}' is missing; {INDEX} names it as a shard"
                raise ValueError(broken_link(path) or missing) from None
            except SafetensorError as error:
                raise ValueError(
                    lfs_pointer(path)
                    or f"'{path}' is truncated or not a safetensors file ({error}); its size is "
                    f"{path.stat().st_size} bytes. Download it again"
                ) from None
        return self._open[file]

    def _index(self) -> dict[str, str]:
        """Return tensor name -> file name."""
        index = index_of(self.directory)
        if index is not None:
            return read_weight_map(index)
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        raise ValueError(self._nothing_to_read())

    def _nothing_to_read(self) -> str:
        pickled = sorted(path.name for path in self.directory.glob("pytorch_model*.bin"))
        if pickled:
            return (
                f"'{self.directory}' has {pickled[0]} but no safetensors; llmpq reads no pickle "
                f"files. Run: llmpq-dist convert {self.directory} {self.directory}-safetensors"
            )
        other = other_form(self.directory)
        if other is not None:
            return other
        return f"no {SINGLE} or {INDEX} in '{self.directory}': expected a local model directory"


def _without_ones(piece: Tensor, dims: int) -> Tensor:
    """Return a tensor without dimensions of one, where it has more than the part it is of."""
    many = [n for n in piece.shape if n != 1]
    beyond = piece.ndim > dims and len(many) <= dims
    return piece.reshape([1] * (dims - len(many)) + many) if beyond else piece


def _serves_mapped(piece: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is used as it is stored, and is worth the mapping of the file that it keeps."""
    return piece.dtype == dtype and piece.is_contiguous() and piece.nbytes >= _MAPPED_BYTES


def _read_in(mapped: Tensor) -> Tensor:
    """Touch every page of a tensor, so that the disk is read here and not in the first step."""
    mapped.view(torch.uint8).flatten()[::_PAGE_BYTES].sum()
    return mapped


def _and_more(count: int) -> str:
    return "" if count == 1 else f", nor are {count - 1} others"


def stored_name(name: str) -> str:
    """Return what the tensor is called that a name, maybe of a row, is read from."""
    row = ROW.fullmatch(name)
    return name.removesuffix(TRANSPOSED) if row is None else row["name"]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weight_files(source: CheckpointSource) -> list[list[str | int]]:
    """Return what tells one checkpoint's weights from another's: names, bytes, changed in ns.

    To read them all takes minutes.
    """
    names = sorted(set(source.file_of.values()))
    stats = [(source.directory / name).stat() for name in names]
    return [[name, s.st_size, s.st_mtime_ns] for name, s in zip(names, stats, strict=True)]


class RandomSource:
    """Seeded random weights of an architecture: the same whatever the split into stages."""

    def __init__(
        self, spec: ModelSpec, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.device = torch.device(device)
        self._member: Member | None = None

    def take_member(self, member: Member) -> None:
        """Hand out of decoder layers what one device of a stage in tensor parallel holds."""
        self._member = member

    def keep_codes(self, schemes: Mapping[int, WeightScheme | None]) -> None:
        """Do nothing: random weights are values."""

    def embedding(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make the embedding's parts."""
        return self._parts(embedding_shapes(self.spec), 0, dtype)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make one decoder layer's parts."""
        whole = self._parts(layer_shapes(self.spec.of_layer(index)), 1 + index, dtype)
        return whole if self._member is None else cut_parts(whole, self._member.cuts(index))

    def head(self, dtype: torch.dtype, *, with_output: bool = True) -> dict[str, Tensor]:
        """Make the head's parts; a tied output matrix is the embedding's."""
        shapes = head_shapes(self.spec)
        if not with_output or self.spec.tied_embeddings:
            del shapes["output.weight"]
        parts = self._parts(shapes, 1 + self.spec.num_layers, dtype)
        if with_output and self.spec.tied_embeddings:
            parts["output.weight"] = self.embedding(dtype)["tokens.weight"]
        return parts

    def mtp(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make the parts of a head that predicts a further token."""
        return self._parts(mtp_shapes(self.spec), 2 + self.spec.num_layers, dtype)

    def _parts(self, shapes: Shapes, stream: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return N(0, 0.02^2) matrices; norm weights around 1, biases around 0."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 100_003 + stream)
        parts = {}
        for part, shape in shapes.items():
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            centre = 1.0 if part.endswith("norm.weight") else 0.0
            parts[part] = tensor.normal_(centre, 0.02, generator=generator)
        return parts
