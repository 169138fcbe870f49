"""The header of a GGUF file: metadata, and where each tensor's blocks lie. No weight is read.

    "GGUF" | version u32 | tensors u64 | keys u64 | keys and values | tensors' names, shapes, types,
    offsets | padding to `general.alignment` | blocks

Everything a header says is checked against the file's size before it is believed. A model in parts
(`NAME-00001-of-00003.gguf`) is read from any of its parts. After the GGUF specification
(ggml, docs/gguf.md, version 3).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.errors import shortened
from llmpq.file_form import broken_link, lfs_pointer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC, VERSIONS = b"GGUF", (2, 3)
BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Number of a tensor's type -> its name, weights and bytes of a block."""
DTYPE_CODES = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Number of a value's type -> how `struct` and numpy call it."""
TEXT, ARRAY = 8, 9
MAX_KEY_BYTES, MAX_DIMENSIONS = 1 << 16, 4
MAX_VALUES, MAX_TEXT_BYTES = 1 << 21, 1 << 24
"""Of a list (tokens, merges), and of a text: more is damage, and would fill the memory."""
PROJECTOR = "clip"
"""`general.architecture` of projectors of images, which older ones say without `general.type`."""
PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor is: `shape` rows first, `offset` and `nbytes` in bytes of `path`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def blocks(self) -> NDArray[np.uint8]:
        """Return its bytes, mapped from the file; what is written to them stays in memory."""
        import numpy as np

        return np.memmap(self.path, np.uint8, "c", self.offset, (self.nbytes,))


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A model's metadata and tensors, of all its parts."""

    path: Path
    """The first part."""
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    parts: tuple[Path, ...] = field(default=())

    def floats(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor; `ValueError` for another type."""
        tensor = self.tensors[name]
        if tensor.kind != "F32":
            raise ValueError(f"'{self.path}': tensor '{name}' is {tensor.kind}, expected F32")
        return [float(value) for value in tensor.blocks().view("<f4")]


def is_gguf(path: str | Path) -> bool:
    """Whether a path is a GGUF model: a file by its name, or a folder of one such model's files.

    What is in them, `open_gguf` says.
    """
    return _file_at(Path(path)) is not None


def _file_at(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or the first of the only model in a folder."""
    try:
        if path.suffix == ".gguf" and path.is_file():
            return path
        if not path.is_dir() or (path / "config.json").exists():
            return None
        files = models_in(path)
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return None
    parts = [PART.fullmatch(file.name) for file in files]
    models = {match and (match["stem"], match["count"]) for match in parts}
    one = len(files) == 1 or (len(models) == 1 and None not in models)
    return files[0] if one else None


def models_in(folder: Path) -> list[Path]:
    """Return a folder's GGUF files without what lies beside a model: projectors, adapters."""
    files = sorted(folder.glob("*.gguf"))
    models = [file for file in files if _says_model(file)] if len(files) > 1 else files
    return models or files


def _says_model(path: Path) -> bool:
    """Whether a file's first keys, which are `general.`, say that it is a model, or nothing."""
    try:
        said = _Reader(path).general()
    except (OSError, ValueError):
        return True  # reading it says what is wrong
    kind = said.get("general.type", "model")
    return kind == "model" and said.get("general.architecture") != PROJECTOR


def is_model(path: str | Path) -> bool:
    """Whether a path is a model on this machine: a directory, or a GGUF file."""
    try:
        named = bool(str(path).strip())  # Path("") is the folder that one is in
        return named and (Path(path).is_dir() or is_gguf(path))
    except (OSError, ValueError):
        return False


def open_gguf(path: str | Path) -> GgufFile:
    """Read the header of a model's GGUF file and of its other parts; `ValueError` if it lies."""
    given = (_file_at(Path(path)) or Path(path)).absolute()
    try:
        parts = _parts(given)
    except ValueError:  # a link to one part, the others beside what it leads to
        if PART.fullmatch(given.resolve().name) is None or not given.is_symlink():
            raise
        parts = _parts(given.resolve())
    if len(parts) == 1 and given.is_symlink() and PART.fullmatch(given.resolve().name):
        parts = _parts(given.resolve())
    try:
        return _opened(tuple((p, p.stat().st_size, p.stat().st_mtime_ns) for p in parts))
    except OSError as error:
        broken = broken_link(given)
        raise ValueError(broken or f"cannot read '{path}': {error.strerror or error}") from None


def _parts(path: Path) -> list[Path]:
    """Return the files of a model, in order."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing or not count:
        lost = missing[0] if missing else path.name
        raise ValueError(
            broken_link(path.with_name(lost))
            or f"'{path}' is one of {count} parts and '{lost}' is not beside it; download all "
            "parts into one directory"
        )
    return [path.parent / name for name in names]


@lru_cache(maxsize=4)  # a run asks for config, tokenizer and tensors of the same file
def _opened(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    tensors: dict[str, GgufTensor] = {}
    first: Mapping[str, Any] = {}
    for index, (path, _, _) in enumerate(parts):
        metadata, own = _Reader(path).header()
        first = first or metadata
        _require_part(path, metadata, index, len(parts))
        twice = sorted(tensors.keys() & own.keys())
        if twice:
            raise ValueError(
                f"'{path}': tensor '{twice[0]}' is in another part, too; download again"
            )
        tensors |= own
    expected = first.get("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise ValueError(
            f"'{parts[0][0]}' says its parts hold {expected} tensors, they hold {len(tensors)}; "
            "download all parts again"
        )
    files = tuple(path for path, _, _ in parts)
    return GgufFile(path=files[0], metadata=first, tensors=tensors, parts=files)


def _require_part(path: Path, metadata: Mapping[str, Any], index: int, count: int) -> None:
    got = (metadata.get("split.no", 0), metadata.get("split.count", 1) or 1)
    if got != (index, count):
        raise ValueError(
            f"'{path}' says it is part {got[0]} (from 0) of {got[1]}, its name says {index} of "
            f"{count}; give the parts their names back, or download them again"
        )


class _Reader:
    """Walks through one file's header; every length is checked before it is used."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        with path.open("rb") as file:
            if path.stat().st_size < 24 or file.read(4) != MAGIC:
                raise ValueError(
                    lfs_pointer(path)
                    or f"'{path}' is not a GGUF file: it does not begin with 'GGUF'"
                )
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = len(MAGIC)

    def general(self) -> dict[str, Any]:
        """Return the first keys, up to one that is not `general.`."""
        self._at = len(MAGIC) + 12  # behind the version and the number of tensors
        found: dict[str, Any] = {}
        for _ in range(self._number("Q")):
            key = self._text("a key", MAX_KEY_BYTES)
            if not key.startswith("general."):
                break
            found[key] = self._value(self._number("I"), key)
        return found

    def header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return metadata and tensors."""
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(
                f"'{self._path}' is GGUF version {version}, expected {VERSIONS[0]} or "
                f"{VERSIONS[1]} (little-endian); convert the model again"
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a key", MAX_KEY_BYTES)
            if not key:
                raise self._broken("a key has no name")
            if key in metadata:
                raise self._broken(f"key '{shortened(key)}' is there twice")
            metadata[key] = self._value(self._number("I"), key)
        infos = [self._info() for _ in range(num_tensors)]
        names = Counter(name for name, _, _, _ in infos)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise self._broken(f"tensor '{shortened(twice)}' is there twice")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise self._broken(f"general.alignment={alignment!r} is not a multiple of 8")
        start = -(-self._at // alignment) * alignment
        return metadata, dict(self._placed(infos, start, alignment))

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensors where they are; none may reach past the file's end or into another."""
        end_before, name_before = start, ""
        for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
            if number not in BLOCKS:
                known = ", ".join(kind for kind, _, _ in BLOCKS.values())
                raise ValueError(
                    f"'{self._path}': tensor '{shortened(name)}' has type {number}, which llmpq "
                    f"does not read; it reads {known}"
                )
            kind, weights, block_bytes = BLOCKS[number]
            if shape[-1] % weights:
                raise self._broken(
                    f"tensor '{shortened(name)}' has rows of {shape[-1]}, {kind} has blocks of "
                    f"{weights}"
                )
            begin, size = start + offset, prod(shape) // weights * block_bytes
            if offset % alignment or begin < end_before:
                raise self._broken(
                    f"tensor '{shortened(name)}' begins at byte {begin}, "
                    + (f"inside '{shortened(name_before)}'" if begin < end_before else "unaligned")
                )
            if begin + size > len(self._data):
                raise self._broken(
                    f"tensor '{shortened(name)}' ends at byte {begin + size}, the file has "
                    f"{len(self._data)}"
                )
            end_before, name_before = begin + size, name
            yield (
                name,
                GgufTensor(
                    name=name, kind=kind, shape=shape, path=self._path, offset=begin, nbytes=size
                ),
            )

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape rows first, type and offset."""
        name = self._text("a tensor's name", MAX_KEY_BYTES)
        count = self._number("I")
        if not 0 < count <= MAX_DIMENSIONS:
            raise self._broken(f"tensor '{shortened(name)}' has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        if not all(0 < size < 1 << 40 for size in shape):
            raise self._broken(f"tensor '{shortened(name)}' has shape {list(shape)}")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self._text(f"'{shortened(key)}'")
        if kind != ARRAY:
            if kind not in DTYPE_CODES:
                raise self._broken(f"'{shortened(key)}' has the unknown type {kind}")
            return self._number(DTYPE_CODES[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner == TEXT:
            return [self._text(f"'{shortened(key)}'") for _ in range(self._fitting(count, 8, key))]
        if inner not in DTYPE_CODES:
            raise self._broken(f"'{shortened(key)}' is a list of the unknown type {inner}")
        one = struct.calcsize(f"<{DTYPE_CODES[inner]}")
        size = self._fitting(count, one, key) * one
        form = f"<{size // one}{DTYPE_CODES[inner]}"
        return list(struct.unpack(form, self._take(size, f"'{shortened(key)}'")))

    def _fitting(self, count: int, least_bytes: int, key: str) -> int:
        if count > MAX_VALUES or count * least_bytes > len(self._data) - self._at:
            raise self._broken(f"'{shortened(key)}' is said to have {count} values")
        return count

    def _text(self, what: str, most: int = MAX_TEXT_BYTES) -> str:
        length = self._number("Q")
        if length > most:
            raise self._broken(f"{what} is said to have {length} bytes")
        return self._take(length, what).decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._take(struct.calcsize("<" + form), "a number"))
        return value

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._data) - self._at:
            raise self._broken(f"{what} ends behind the file's {len(self._data)} bytes")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"'{self._path}' is truncated or damaged: {what}. Download it again")
