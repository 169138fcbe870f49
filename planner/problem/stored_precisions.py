"""At which precisions the layers of a quantised model directory can be served.

Reads config.json and the headers of the safetensors files, no weights; where there are no files,
what config.json says stands for their headers (described_headers.py). The names of a layer's
tensors tell its form (llmpq/checkpoints/stored_forms.py):

    integers                  weights only: their bits with 16-bit activations
    int8                      w8a8
    Atom                      bits of weights and activations in the file's metadata
    FP8 (E4M3)                w8a16, the codes kept; or any other, made of their values
    MXFP4, NVFP4, NF4, FP4    w4a16, the codes kept; or any other
    none of these             unquantised: 16 bits, or rounded while it loads; so are integers in
                              groups or orders that no kernel takes. Beside integers or E4M3 that a
                              layer keeps: as it is

A GGUF file's layers are planned at the bits nearest to those of most of their weights, and may be
served at any. Bits of other weights cannot change once stored; Atom's weights also multiply 16-bit
activations.

On which grid a checkpoint's own codes are kept: groups of 32 or 64 weights, with zeros or not.

    GGUF                             groups of 32
    GPTQ, AWQ, compressed-tensors    groups of 32 or 64, where all linears have the same

Integers are kept on every device. GPUs take a GGUF file's as numbers that are rounded anew in
groups of 128, which take fewer bytes, unless `--weight-group-size` asks for groups as they are
stored. Codes of MXFP4, NVFP4 and bitsandbytes are kept on any grid (checkpoint_codes.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from llmpq.checkpoints.gguf_file import GgufFile, is_gguf, open_gguf
from llmpq.checkpoints.quantization_config import (
    LAYER,
    SCHEMES,
    fp8_block,
    is_centred,
    is_kept_block,
    quantization_of,
    require_read,
)
from llmpq.checkpoints.stored_forms import (
    GROUPS,
    PACKED,
    QWEIGHT,
    CodesForm,
    integer_codes,
    quantised_linears,
    stored_form,
)
from llmpq.checkpoints.tensor_names import SINGLE, index_of
from llmpq.devices.cluster import Device
from llmpq.errors import shortened
from llmpq.file_form import read_json
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.problem.described_headers import (
    DescribedHeader,
    described_headers,
    is_described,
)
from llmpq.precision import Precision, WeightScheme
from llmpq.sizes.memory import Quantization

Source = str | Path | Mapping[str, Any]
"""A directory, a GGUF file, or a config without files: a built-in model's."""

GGUF_LAYER = re.compile(r"blk\.(\d+)\.")
GGUF_ROUTER = "ffn_gate_inp"
"""Never rounded."""
GGUF_BITS = {
    **dict.fromkeys(("F32", "F16", "BF16"), Precision.W16A16),
    **dict.fromkeys(("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0"), Precision.W8A16),
    **dict.fromkeys(("Q4_K", "Q4_1", "Q4_0", "IQ4_XS", "IQ4_NL", "MXFP4"), Precision.W4A16),
    **dict.fromkeys(("Q3_K", "Q2_K"), Precision.W4A16),
}
"""Type of blocks -> precision."""


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """How a layer is stored, and every precision it can be served at."""

    stored: Precision
    served: tuple[Precision, ...]
    kinds: tuple[tuple[str, int], ...] = ()
    """Of a GGUF file: types of blocks, and how many weights have each."""
    others_beside: bool = False
    """Whether it has 4-bit codes of a table, kept at 8 bits, too, and linears without such."""

    @property
    def as_stored(self) -> tuple[Precision, ...]:
        """The precisions at which its codes are kept, and other linears rounded to as many bits."""
        return (Precision.W8A16, self.stored) if self.others_beside else (self.stored,)


CENTRED = ("Q8_0", "Q4_0", "Q5_0", "MXFP4", "IQ4_NL", "IQ4_XS")
"""Types without a low end of their own."""
GGUF_GROUP = 32
"""Weights of a block that share a scale."""


GGUF_CODE_BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q4_K": 4, "Q5_K": 5}
"""Type of blocks -> bits of codes that a grid in groups of 32 holds as they are."""


def keeps_gguf_codes(kind: str, scheme: WeightScheme) -> bool:
    """Whether a layer of this scheme keeps the codes of a GGUF file's type of blocks."""
    if scheme.activation_bits != 16 or scheme.bits not in (4, 8):
        return False
    if kind == "MXFP4":
        return True
    if scheme.group_size != GGUF_GROUP:
        return False
    if kind in ("IQ4_NL", "IQ4_XS"):
        return True
    centred = kind in CENTRED or not scheme.symmetric
    return centred and GGUF_CODE_BITS.get(kind, 16) <= scheme.bits


def rounded_of_gguf(layer: StoredLayer, scheme: WeightScheme) -> float:
    """Return the share of a layer's weights whose codes in a GGUF file a scheme rounds again."""
    rounded = sum(count for kind, count in layer.kinds if not keeps_gguf_codes(kind, scheme))
    return rounded / max(1, sum(count for _, count in layer.kinds))


def gguf_grid(path: str | Path) -> Quantization | None:
    """Return the grid on which a GGUF file's codes are kept as they are; None without one."""
    tensors = open_gguf(path).tensors.items()
    kinds = {t.kind for name, t in tensors if GGUF_LAYER.match(name) and len(t.shape) > 1}
    kinds -= {"F32", "F16", "BF16"}
    return Quantization(group_size=GGUF_GROUP, symmetric=kinds <= set(CENTRED)) if kinds else None


def stored_in_gguf(file: GgufFile, num_layers: int) -> tuple[StoredLayer, ...] | None:
    """Return how every layer of a GGUF file is stored; None where none is quantised."""
    weights: list[Counter[Precision]] = [Counter() for _ in range(num_layers)]
    kinds: list[Counter[str]] = [Counter() for _ in range(num_layers)]
    for name, tensor in file.tensors.items():
        match = GGUF_LAYER.match(name)
        if match is not None and len(tensor.shape) > 1 and int(match[1]) < num_layers:
            weights[int(match[1])][GGUF_BITS[tensor.kind]] += prod(tensor.shape)
            if GGUF_ROUTER not in name:
                kinds[int(match[1])][tensor.kind] += prod(tensor.shape)
    stored = [max(found, key=lambda p: found[p], default=Precision.W16A16) for found in weights]
    if all(precision is Precision.W16A16 for precision in stored):
        return None
    return tuple(
        StoredLayer(stored=p, served=tuple(Precision), kinds=tuple(found.items()))
        for p, found in zip(stored, kinds, strict=True)
    )


GROUP, *SMALL = GROUPS
"""Weights that share a scale on the usual grid, and where a checkpoint's codes say so."""
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library allows."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of one safetensors file."""

    path: Path
    tensors: dict[str, Any]
    metadata: dict[str, str]
    data_start: int

    def whole_numbers(self, name: str) -> list[int]:
        """Return the values of a small tensor of integers."""
        start, end = self.tensors[name]["data_offsets"]
        width = 8 if self.tensors[name]["dtype"] == "I64" else 4
        with self.path.open("rb") as file:
            file.seek(self.data_start + start)
            content = file.read(end - start)
        places = range(0, len(content), width)
        return [int.from_bytes(content[i : i + width], "little", signed=True) for i in places]


AnyHeader = Header | DescribedHeader


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint, by the headers of its files."""

    file_of: Mapping[str, AnyHeader]
    """Tensor -> the header of the file that holds it."""

    def header(self, name: str) -> tuple[str, list[int]] | None:
        """Return a tensor's dtype and shape, None without it."""
        file = self.file_of.get(name)
        return None if file is None else (file.tensors[name]["dtype"], file.tensors[name]["shape"])

    def whole_numbers(self, name: str) -> list[int]:
        """Return the values of a small tensor of integers."""
        return self.file_of[name].whole_numbers(name)


def stored_layers(
    source: Source, spec: ModelSpec, *, kept: Quantization | None = None
) -> tuple[StoredLayer, ...] | None:
    """Return how every layer is stored; None for a model that is not quantised.

    `kept`: the grid of `small_groups`, where a plan has it; such layers may have other bits, too.
    """
    if is_gguf_file(source):
        return stored_in_gguf(open_gguf(source), spec.num_layers)
    described = quantization_of(source)
    if described is None:
        return None
    require_read(described, label_of(source))
    small = SMALL if kept is not None and kept.group_size in SMALL else ()
    headers = headers_of(source, spec)
    found: dict[int, set[Precision]] = {}
    for layer, precision in _quantised(headers, described, small):
        found.setdefault(layer, set()).add(precision)
    coded = dict(_own_codes(headers, described))
    made = (
        _layer(label_of(source), i, found.get(i, set()), coded.get(i, Precision.W16A16))
        for i in range(spec.num_layers)
    )
    return tuple(replace(one, served=tuple(Precision)) if small else one for one in made)


def small_groups(source: Source, spec: ModelSpec) -> Quantization | None:
    """Return the grid of a model whose integer codes all have groups of 32, or all of 64."""
    described = quantization_of(source) or {}
    if described.get("quant_method") not in ("gptq", "awq", "compressed-tensors"):
        return None
    headers = headers_of(source, spec)
    sizes, has_zeros = set(), False
    for name, stem, form in quantised_linears(headers.file_of, headers):
        if form is CodesForm.INTEGERS and LAYER.search(name):
            sizes.add(integer_codes(stem, headers, described).group_size)
            has_zeros |= f"{stem}.weight_zero_point" in headers.file_of
    size = sizes.pop() if len(sizes) == 1 else None
    if size not in SMALL:
        return None
    return Quantization(group_size=size, symmetric=is_centred(described, has_zeros))


def headers_of(source: Source, spec: ModelSpec) -> Headers:
    """Return the headers of a model's files; of one without files what its config says."""
    described = quantization_of(source)
    files = [] if isinstance(source, Mapping) else _files(Path(source))
    whole = all(file.exists() for file in files)
    if described is not None and (not files or (not whole and is_described(described))):
        return Headers(described_headers(spec, described, label_of(source)))
    read = map(_read_header, files)
    return Headers({name: header for header in read for name in header.tensors})


def tells_layers(source: Source) -> bool:
    """Whether files or config.json say how a model's layers are stored."""
    if is_gguf_file(source) or (not isinstance(source, Mapping) and _files(Path(source))):
        return True
    described = quantization_of(source)
    return described is None or is_described(described)


def is_gguf_file(source: Source) -> TypeGuard[str | Path]:
    """Whether a model is a GGUF file."""
    return not isinstance(source, Mapping) and is_gguf(source)


def label_of(source: Source) -> object:
    """Return what errors call a model."""
    return "config.json" if isinstance(source, Mapping) else source


def _files(directory: Path) -> list[Path]:
    """Return the checkpoint's files: the index's, or the single one; none where there is none."""
    index = index_of(directory)
    if index is None:
        return [directory / SINGLE] if (directory / SINGLE).exists() else []
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"'{index}' has no 'weight_map'; get the directory's files anew")
    return [directory / str(name) for name in sorted({*weight_map.values()}, key=str)]


def _read_header(path: Path) -> Header:
    """Return the header of a safetensors file; `ValueError` where it has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            content = json.loads(file.read(length), object_pairs_hook=_each_once)
        if not isinstance(content, dict):
            raise ValueError(f"its header is a {type(content).__name__}")
        metadata = content.pop("__metadata__", {})
        for name, entry in content.items():
            _require_entry(name, entry)
    except FileNotFoundError:
        raise ValueError(f"no such file: '{path}'; get the directory's files anew") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is not a safetensors file ({error}); get the directory's files anew"
        ) from None
    return Header(path=path, tensors=content, metadata=metadata, data_start=8 + length)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `ValueError` where a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name, count in names.items() if count > 1)
        raise ValueError(f"'{shortened(twice)}' is there twice")
    return found


def _require_entry(name: str, entry: Any) -> None:
    """Raise `ValueError` for a tensor without dtype, shape and bytes."""
    header = entry if isinstance(entry, dict) else {}
    shape, at = header.get("shape"), header.get("data_offsets")
    sizes = [*shape, *at] if isinstance(shape, list) and isinstance(at, list) else [None]
    whole = all(type(size) is int and size >= 0 for size in sizes) and len(at or ()) == 2
    if not whole or not isinstance(header.get("dtype"), str):
        raise ValueError(f"'{shortened(name)}' has no dtype, shape and bytes")


def _quantised(
    headers: Headers, described: Mapping[str, Any], small: Sequence[int]
) -> Iterator[tuple[int, Precision]]:
    """Yield layer and precision of every quantised linear; its tensors may be in several files."""
    for name, file in headers.file_of.items():
        layer = LAYER.search(name)
        if layer is not None:
            try:
                precision = _precision(headers, name, described, small)
            except (KeyError, TypeError, IndexError, ZeroDivisionError, json.JSONDecodeError):
                raise ValueError(
                    f"'{file.path}' does not say how '{name}' is quantised; get the file anew, "
                    "or quantise the model with llmpq-quantize"
                ) from None
            if precision is not None:
                yield int(layer[1]), precision


def _precision(
    headers: Headers, name: str, described: Mapping[str, Any], small: Sequence[int]
) -> Precision | None:
    """Return the precision that a tensor stands for; None for one that tells nothing."""
    stem, _, kind = name.rpartition(".")
    if kind == "codes":
        stated = json.loads(headers.file_of[name].metadata[SCHEMES])
        scheme = stated[LAYER.sub("", stem.removeprefix("llmpq"))]
        return _named(name, scheme["weight_bits"], scheme["activation_bits"])
    if kind not in ("weight", PACKED.codes, QWEIGHT.codes):
        return None
    form = stored_form(stem, headers)
    if form is CodesForm.INT8:
        _require_int8(name, headers.file_of[name].tensors[name]["dtype"])
        return Precision.W8A8
    if form is not CodesForm.INTEGERS:  # floats, or of `_own_codes`
        return None
    codes = integer_codes(stem, headers, described)
    if codes.is_ordered:
        return None
    if not codes.in_features:
        raise KeyError(f"{stem}.weight_shape")
    known = codes.groups is None or codes.group_size in (0, GROUP, *small)
    return _named(name, codes.bits) if known else None


def _own_codes(headers: Headers, described: Mapping[str, Any]) -> Iterator[tuple[int, Precision]]:
    """Yield the layers with codes of a table or of E4M3, and the precision that keeps them."""
    fp8 = set()
    for name, _, form in quantised_linears(headers.file_of, headers):
        layer = LAYER.search(name)
        if layer is None:
            continue
        if form.is_table:
            yield int(layer[1]), Precision.W4A16
        elif headers.file_of[name].tensors[name]["dtype"] == "F8_E4M3":
            fp8.add(int(layer[1]))
    if is_kept_block(fp8_block(described)):
        yield from ((layer, Precision.W8A16) for layer in fp8)


def _require_int8(name: str, dtype: str) -> None:
    """Refuse weights with a scale that are neither int8 nor FP8."""
    if dtype != "I8":
        raise ValueError(
            f"tensor '{name}' is {dtype} with a scale, expected I8; quantise the model with "
            "llmpq-quantize"
        )


def _named(name: str, weight_bits: int, activation_bits: int = 16) -> Precision:
    try:
        return Precision(f"w{weight_bits}a{activation_bits}")
    except ValueError:
        raise ValueError(
            f"tensor '{name}' has {weight_bits}-bit weights for {activation_bits}-bit activations, "
            f"expected one of {', '.join(p.value for p in Precision)}; quantise the model with "
            "llmpq-quantize"
        ) from None


def _layer(label: object, index: int, found: set[Precision], kept: Precision) -> StoredLayer:
    """Return a layer of these quantised linears; what others it has does not count."""
    if len(found) > 1:
        raise ValueError(
            f"'{label}': layer {index} is stored at {names_of(tuple(found))} together, "
            "expected one precision a layer; quantise the model with llmpq-quantize"
        )
    if not found:
        return StoredLayer(stored=kept, served=tuple(Precision))
    (stored,) = found
    weight_only = Precision(f"w{stored.weight_bits}a16")
    served = tuple(dict.fromkeys((stored, weight_only)))
    return StoredLayer(stored=stored, served=served)


def rounded_note(
    layers: Sequence[StoredLayer],
    offers: Sequence[Sequence[Precision]],
    shares: Mapping[Precision, Sequence[float]],
) -> str | None:
    """Return a sentence on linears that are rounded beside kept codes, None without such.

    `offers`: what each layer may have. `shares`: of each layer's weights, what a precision rounds.
    """
    rounded = [
        str(index)
        for index, layer in enumerate(layers)
        if layer.stored in shares and layer.stored in offers[index]
        if shares[layer.stored][index] and not (layer.kinds or layer.others_beside)
    ]
    if not rounded:
        return None
    return (
        f"layers {', '.join(rounded)} hold linears in other codes beside their own, which are "
        "rounded to as many bits as those have"
    )


def offered(
    layers: Sequence[StoredLayer], asked: Sequence[Precision] | None
) -> tuple[tuple[Precision, ...], ...]:
    """Return what each layer may be served at: as it is stored, or as `--bits` allows.

    `ValueError` for a layer that `--bits` leaves nothing, and for bits that no layer can have.
    """
    if asked is None:
        return tuple(layer.as_stored for layer in layers)
    for index, layer in enumerate(layers):
        if not set(asked) & set(layer.served):
            raise ValueError(
                f"--bits {names_of(asked)}: layer {index} is stored at {layer.stored.value}, "
                f"expected {' or '.join(p.value for p in layer.served)} among them; leave --bits "
                "out to plan every layer as it is stored, or plan the unquantised model"
            )
    idle = [p for p in asked if not any(p in layer.served for layer in layers)]
    if idle:
        raise ValueError(
            f"--bits {names_of(asked)}: no layer can be served at {names_of(idle)}, they are "
            f"stored at {names_of([layer.stored for layer in layers])}; leave "
            f"{names_of(idle)} out, or plan the unquantised model"
        )
    return tuple(tuple(p for p in asked if p in layer.served) for layer in layers)


def stored_line(directory: str, offers: Sequence[Sequence[Precision]]) -> str:
    """Return one line: how a directory is stored, and that it is planned so.

    `offers`: of each layer, the precisions that keep its codes.
    """
    stored = [choices[-1] for choices in offers]
    kinds = [p for p in Precision if p in stored]
    if any(len(choices) > 1 for choices in offers):
        return (
            f"'{directory}' is stored at {names_of(stored)} beside linears of more bits: layers of "
            "8 and of 4 bits keep its codes, the other linears are rounded to as many"
        )
    if len(kinds) == 1:
        return f"'{directory}' is stored at {kinds[0].value}: every layer is planned at it"
    counts = ", ".join(f"{p.value} on {_layers(stored.count(p))}" for p in kinds)
    return f"'{directory}' is stored at {counts}: each layer is planned at its own"


def names_of(precisions: Sequence[Precision]) -> str:
    """Return `w8a16,w4a16`: each once, most bits first."""
    return ",".join(p.value for p in Precision if p in precisions)


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def kept_grid(
    source: Source, spec: ModelSpec, devices: Sequence[Device], asked: int | None = None
) -> Quantization | None:
    """Return the grid on which codes stay as they are, None where it is the usual one.

    `asked`: weights that shall share a scale, where the user says so.
    """
    if not is_gguf_file(source):
        kept = small_groups(source, spec)
    elif asked is None and not all(device.spec.is_cpu for device in devices):
        kept = None
    else:
        kept = gguf_grid(source)
    return kept if kept is None or asked in (None, kept.group_size) else None
