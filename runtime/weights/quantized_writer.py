"""Writes a quantised model directory, one file a layer, so that an interrupted run resumes.

Layers that compressed-tensors can express (3-, 4- and 8-bit weights; w8a8) are written in its form
under their Hugging Face names and load in Transformers, but for what it joins of no codes
(`Family.codes_unread`: experts that are one tensor there and that it splits in no other model, and
what it joins of 16-bit tensors where it expects codes). Atom layers are written as
`quantized_checkpoint.py` describes. Embedding, head and the tokenizer's files go along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.gguf_tokenizer import tokenizer_of
from llmpq.checkpoints.model_config import read_config
from llmpq.checkpoints.quantization_config import SCHEMES
from llmpq.checkpoints.tensor_names import INDEX
from llmpq.families import FAMILIES
from llmpq.kernels.weights.interchange import pack_quantized
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.models.part_shapes import embedding_shapes, head_shapes
from llmpq.runtime.weights.atomic_write import write_bytes, write_tensors, write_text
from llmpq.runtime.weights.sources import ATOM_ROOT, ROW, TRANSPOSED, CheckpointSource

ENDS_FILE = "model-ends.safetensors"
REMEDY = "free some space and run the same command again: it continues; or give another directory"
"""What helps where a file cannot be written: the layers that are whole stay."""
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)


LOOKED_UP = ("tokens.", "positions.", "per_layer.")
"""Parts of an embedding of which rows are taken: none that a matrix is multiplied with."""


def layer_file(index: int) -> str:
    """Return the file name of a layer."""
    return f"model-layer-{index:04}.safetensors"


class CheckpointWriter:
    """Writes the layers of one model, then everything else with the configuration."""

    def __init__(self, directory: Path, spec: ModelSpec, source: CheckpointSource) -> None:
        self.directory = directory
        self.spec = spec
        self._source = source
        self._names = source.names.with_experts_apart()

    def write_layer(
        self, index: int, parts: Mapping[str, Tensor | Weight], dtype: torch.dtype
    ) -> None:
        """Write one layer; dense parts in `dtype`."""
        tensors: dict[str, Tensor] = {}
        metadata = {"format": "pt"}
        weights = {part: weight for part, weight in parts.items() if isinstance(weight, Weight)}
        atom = {
            part.removesuffix(".weight"): weight.stored_scheme
            for part, weight in weights.items()
            if weight.stored_scheme is not None
        }
        if atom:
            metadata[SCHEMES] = json.dumps(atom)
        for part, weight in parts.items():
            if atom:
                tensors |= _atom_tensors(index, part, weight, dtype)
            else:
                tensors |= self._named_tensors(index, part, weight, dtype)
        if not atom:
            tensors |= {name: self._source.read(name) for name in self._constants(index)}
        _save(tensors, self.directory / layer_file(index), metadata)
        self._write_index()

    def begin(self) -> None:
        """Write embedding and head, unless an earlier run has."""
        if not (self.directory / ENDS_FILE).exists():
            ends = [name for name in self._source.file_of if not self._is_of_a_layer(name)]
            _save({name: self._source.read(name) for name in ends}, self.directory / ENDS_FILE, {})
        self._write_index()

    def finish(self, quantization: Mapping[str, Any]) -> None:
        """Write the tokenizer's files and config.json: the directory is then whole."""
        if is_gguf(self._source.where):
            tokenizer_of(open_gguf(self._source.where)).save_pretrained(self.directory)
        for pattern in () if is_gguf(self._source.where) else COPIED:
            for path in self._source.directory.glob(pattern):
                write_bytes(path.read_bytes(), self.directory / path.name, remedy=REMEDY)
        config = read_config(self._source.where)
        if "architectures" not in config:  # a GGUF file names none; other readers ask for it
            from transformers.models.auto import modeling_auto

            names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            config["architectures"] = [names[config["model_type"]]]
        config["quantization_config"] = dict(quantization)
        write_text(
            json.dumps(config, indent=2) + "\n", self.directory / "config.json", remedy=REMEDY
        )

    def _named_tensors(
        self, index: int, part: str, weight: Tensor | Weight, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return a part under its Hugging Face names, fused rows taken apart."""
        found = self._names.of_layer(self.spec, index)[part]
        names = [self._source.root + name for name in found]
        stems = [name.removesuffix(TRANSPOSED).removesuffix(".weight") for name in names]
        if isinstance(weight, Tensor):
            dense = _under_own_names(names, self._apart(index, part, weight.to(dtype), len(names)))
            return {name: self._shaped(name, tensor) for name, tensor in dense.items()}
        rows = {
            kind: self._apart(index, part, whole, len(stems))
            for kind, whole in weight.stored_rows(dtype).items()
        }
        tensors: dict[str, Tensor] = {}
        for i, stem in enumerate(stems):
            piece = {kind: apart[i] for kind, apart in rows.items()}
            packed = pack_quantized(weight.bits, **piece) if "codes_NK" in piece else piece
            tensors |= {f"{stem}.{kind}": tensor for kind, tensor in packed.items()}
        return tensors

    def _constants(self, index: int) -> list[str]:
        """Return what a layer has that no part is read from, and that other readers look for."""
        layer = f"{self._source.root}{self._names.layer_prefix}{index}."
        stored = [name for name in self._source.file_of if name.startswith(layer)]
        return [name for name in stored if name.rpartition(".")[2] in self._names.buffers]

    def _shaped(self, name: str, tensor: Tensor) -> Tensor:
        """Return a dense tensor in the shape that the checkpoint has it in."""
        if name not in self._source.file_of or is_gguf(self._source.where):
            return tensor
        shape = self._source.read(name).shape
        return tensor.view(shape) if shape.numel() == tensor.numel() else tensor

    def _apart(self, index: int, part: str, whole: Tensor, pieces: int) -> tuple[Tensor, ...]:
        """Return the rows of each checkpoint tensor, in the checkpoint's order."""
        arrange = self._names.arranged(part)
        if arrange.offset:
            return (whole - arrange.offset,)
        if arrange.values is not None:
            return (arrange.values[1](whole, self.spec),)
        if arrange.rows is not None:
            order = arrange.rows(torch.arange(whole.shape[0])[:, None], self.spec)[:, 0]
            whole = whole[order.argsort()]
        sizes = [whole.shape[0] // pieces] * pieces
        own = self.spec.of_layer(index)
        kv = own.kv_heads * own.head_dim
        if pieces > 2 and part.startswith("qkv."):  # q, k, v, and a gate as large as q
            q = (whole.shape[0] - 2 * kv) // (pieces - 2)
            sizes = [q, kv, kv, q][:pieces]
        elif part.startswith("qk."):  # keys that are values, too
            sizes = [whole.shape[0] - kv, kv]
        if self.spec.recurrent is not None:
            sizes = list(self.spec.recurrent.rows_of_pieces(part, pieces) or sizes)
        return tuple(rows.contiguous() for rows in whole.split(sizes))

    def _is_of_a_layer(self, name: str) -> bool:
        return name.startswith(self._source.root + self._names.layer_prefix)

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for path in sorted(self.directory.glob("model-*.safetensors")):
            header = _header(path)
            weight_map |= dict.fromkeys(header, path.name)
            total += sum(end - start for start, end in header.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(json.dumps(index, indent=1) + "\n", self.directory / INDEX, remedy=REMEDY)


def _under_own_names(names: Sequence[str], pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return a part's dense tensors as the checkpoint stores them: rows of one, or transposed."""
    rows = [ROW.fullmatch(name) for name in names]
    found = {row["name"] for row in rows if row is not None}
    if len(found) == 1:
        return {found.pop(): torch.stack(tuple(pieces))}
    return {
        name.removesuffix(TRANSPOSED): piece.t() if name.endswith(TRANSPOSED) else piece
        for name, piece in zip(names, pieces, strict=True)
    }


def _atom_tensors(
    index: int, part: str, weight: Tensor | Weight, dtype: torch.dtype
) -> dict[str, Tensor]:
    if isinstance(weight, Tensor):
        return {f"{ATOM_ROOT}{index}.{part}": weight.to(dtype)}
    if weight.stored_scheme is None:
        raise ValueError(f"layer {index}: {part} is not in Atom's form, the rest of the layer is")
    stem = f"{ATOM_ROOT}{index}.{part.removesuffix('.weight')}"
    return {
        f"{stem}.{field}": tensor.to(dtype) if "scale" in field else tensor
        for field, tensor in weight.tensors.items()
    }


def compressed_config(
    spec: ModelSpec,
    precisions: Sequence[Precision],
    *,
    group_size: int | None,
    symmetric: bool,
    kv: KVPrecision = KVPrecision.KV16,
) -> dict[str, Any]:
    """Return the compressed-tensors configuration of weight-only and w8a8 layers."""
    names = FAMILIES[spec.family].names
    before = names.layer_prefix
    groups: dict[str, Any] = {}
    for number, precision in enumerate(sorted(set(precisions) - {Precision.W16A16}, key=str)):
        layers = [str(i) for i, p in enumerate(precisions) if p is precision]
        everywhere = len(layers) == len(precisions)
        pattern = before.replace(".", "\\.") + f"({'|'.join(layers)})\\..*"
        w8a8 = precision is Precision.W8A8
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if everywhere else [f"re:.*{pattern}"],
            "format": "int-quantized" if w8a8 else "pack-quantized",
            "weights": _arguments(
                precision.weight_bits, None if w8a8 else group_size, symmetric=w8a8 or symmetric
            ),
            "input_activations": _token_arguments() if w8a8 else None,
            "output_activations": None,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *_ends_of(spec), *names.never_quantised(spec)],
        "kv_cache_scheme": kv_cache_scheme(spec, kv),
        "config_groups": groups,
    }


def _ends_of(spec: ModelSpec) -> list[str]:
    """Return patterns of matrices in front of the layers or behind them, which stay whole."""
    names = FAMILIES[spec.family].names
    ends = ((embedding_shapes(spec), names.embedding), (head_shapes(spec), names.head))
    found = {
        name.removesuffix(".weight")
        for shapes, table in ends
        for part, shape in shapes.items()
        if len(shape) > 1 and not part.startswith(LOOKED_UP)
        for name in table.get(part, ())
    }
    return [rf"re:.*{re.escape(name)}$" for name in sorted(found)]


def kv_cache_scheme(spec: ModelSpec, kv: KVPrecision) -> dict[str, Any] | None:
    """Return compressed-tensors' words for a low-bit cache: a scale and zero per token and head.

    None where it has no words: one number of bits is of keys and of values.
    """
    if kv is KVPrecision.KV16 or kv.is_apart:
        return None
    return {
        "num_bits": kv.key_bits,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": spec.head_dim,
        "dynamic": True,
    }


def _arguments(bits: int, group_size: int | None, *, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }


def _token_arguments() -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _header(path: Path) -> dict[str, tuple[int, int]]:
    """Return the byte ranges of a safetensors file's tensors."""
    with path.open("rb") as file:
        content = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(at["data_offsets"]) for name, at in content.items() if name[:2] != "__"}


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a whole file or none: a half-written one must not pass for a finished layer."""
    dense = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    write_tensors(dense, path, metadata, remedy=REMEDY)
