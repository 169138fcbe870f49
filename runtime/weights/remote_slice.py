"""A stage's slice of a checkpoint, copied from another host and kept: `--copy-weights`.

    FOLDER/copied/<hash of the checkpoint>-<layers>/
        config.json, the index      as they are there
        *.safetensors               every file of the checkpoint with this stage's tensors only
        copied.json                 SHA-256 of every file; written last

The reader reads ranges of files; every piece travels with its SHA-256. A folder with `copied.json`
is whole: its files are hashed again before they are used, and what differs is copied anew.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.checkpoints.tensor_names import INDEX, SINGLE, index_of
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.weights.sources import ATOM_ROOT
from llmpq.runtime.weights.weight_map import read_weight_map

PIECE_BYTES = 8 << 20
"""What travels at once."""
_DONE = "copied.json"
_TEXTS = ("*.json", "*.txt", "*.jinja")
"""What beside weights describes a model: config, tokenizer, chat template."""
_LENGTH = struct.Struct("<Q")
"""A safetensors file begins with the length of its header."""


class SliceSource(Protocol):
    """A holder of the whole checkpoint: `SliceReader`, here or on another host."""

    def listing(self) -> dict[str, Any]:
        """Return the checkpoint's JSON files, its index and the headers of its weight files."""
        ...

    def piece(self, file: str, start: int, end: int) -> tuple[bytes, str]:
        """Return the bytes `[start, end)` of a file and their SHA-256."""
        ...


class SliceReader:
    """Reads a checkpoint for stages on other hosts."""

    def __init__(self, directory: str) -> None:
        if is_gguf(directory):
            raise ValueError(
                f"--copy-weights copies safetensors, '{directory}' is a GGUF file; put it where "
                "every host sees it, under the same path"
            )
        self._directory = Path(directory)

    def listing(self) -> dict[str, Any]:
        """Return the checkpoint's JSON files, its index and the headers of its weight files."""
        found = [path for form in _TEXTS for path in self._directory.glob(form)]
        texts = {path.name: path.read_text() for path in sorted(found)}
        index = index_of(self._directory)
        if index is not None:
            file_of = read_weight_map(index)
        else:
            header, _ = _header(self._directory / SINGLE)
            file_of = {name: SINGLE for name in header if name != "__metadata__"}
        headers = {name: _header(self._directory / name) for name in sorted(set(file_of.values()))}
        stats = [(name, (self._directory / name).stat()) for name in headers]
        stated = [texts, headers, [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
        return {
            "name": self._directory.name,
            "mark": hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16],
            "texts": texts,
            "file_of": file_of,
            "headers": headers,
        }

    def piece(self, file: str, start: int, end: int) -> tuple[bytes, str]:
        """Return the bytes `[start, end)` of a file and their SHA-256."""
        if Path(file).name != file:
            raise ValueError(f"expected a file name inside the model directory, got '{file}'")
        with open(self._directory / file, "rb") as opened:
            opened.seek(start)
            data = opened.read(end - start)
        return data, hashlib.sha256(data).hexdigest()


def remote_slice(reader: SliceSource, folder: str | Path, layers: tuple[int, int]) -> Path:
    """Return a model directory with the tensors of `layers` `[start, end)` and of its ends.

    The embedding comes with the first layers, norm and head (and a tied embedding) with the last.
    `ValueError` says what cannot be written, or arrived broken.
    """
    listing = reader.listing()
    spec = ModelSpec.from_config(json.loads(listing["texts"]["config.json"]), name=listing["name"])
    target = Path(folder) / "copied" / f"{listing['mark']}-{layers[0]}-{layers[1]}"
    known = _finished(target)
    wanted = needed(listing["file_of"], spec, layers)
    try:
        target.mkdir(parents=True, exist_ok=True)
        hashes = {}
        for file, (header, data_at) in listing["headers"].items():
            names = [n for n in wanted if listing["file_of"][n] == file]
            if not names:
                continue
            path = target / file
            if file not in known or not path.exists() or _hash_of(path) != known[file]:
                _copy_file(reader, file, header, data_at, names, path)
            hashes[file] = known[file] if file in known else _hash_of(path)
        for name, text in listing["texts"].items():
            (target / name).write_text(text)
        (target / INDEX).write_text(json.dumps({"weight_map": listing["file_of"]}))
        (target / _DONE).write_text(json.dumps(hashes))
    except OSError as error:
        raise ValueError(
            f"cannot write '{target}' of --copy-weights: {error.strerror or error}; free some "
            "space, or give another folder with --layer-cache"
        ) from None
    return target


def needed(file_of: Mapping[str, str], spec: ModelSpec, layers: tuple[int, int]) -> list[str]:
    """Return the tensors of a slice by name: those of its layers, and of the model's ends."""
    names = FAMILIES[spec.family].names
    (token_name,) = names.embedding["tokens.weight"]
    root = next((root for root in names.roots if root + token_name in file_of), names.roots[0])
    prefixes = (root + names.layer_prefix, ATOM_ROOT)
    at_start = {root + name for stacked in names.embedding.values() for name in stacked}
    start, end = layers
    first, last = start == 0, end == spec.num_layers
    found = []
    for name in file_of:
        number = _layer_of(name, prefixes)
        if number is not None:
            keep = start <= number < end
        elif name in at_start:
            keep = first or (last and spec.tied_embeddings)
        else:
            keep = last
        if keep:
            found.append(name)
    return found


def _layer_of(name: str, prefixes: tuple[str, ...]) -> int | None:
    for prefix in prefixes:
        number = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and number.isdecimal():
            return int(number)
    return None


def _copy_file(
    reader: SliceSource,
    file: str,
    header: Mapping[str, Any],
    data_at: int,
    names: list[str],
    path: Path,
) -> None:
    """Write a safetensors file with some of another one's tensors; it appears whole."""
    ranges = sorted((header[name]["data_offsets"], name) for name in names)
    small = {key: header[key] for key in ("__metadata__",) if key in header}
    at = 0
    for (start, end), name in ranges:
        small[name] = {**header[name], "data_offsets": [at, at + end - start]}
        at += end - start
    text = json.dumps(small).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as opened:
        opened.write(_LENGTH.pack(len(text)) + text)
        for (start, end), _ in ranges:
            for begin in range(data_at + start, data_at + end, PIECE_BYTES):
                until = min(begin + PIECE_BYTES, data_at + end)
                opened.write(_checked(reader, file, begin, until))
    unfinished.replace(path)


def _checked(reader: SliceSource, file: str, start: int, end: int) -> bytes:
    """Return a piece whose hash is right; one that arrives broken is asked for once more."""
    for _ in range(2):
        data, digest = reader.piece(file, start, end)
        if len(data) == end - start and hashlib.sha256(data).hexdigest() == digest:
            return data
    raise ValueError(
        f"bytes {start} to {end} of '{file}' arrived broken twice (SHA-256 differs): was the "
        "checkpoint changed meanwhile? Look at the driver's copy and run it again"
    )


def _finished(target: Path) -> dict[str, str]:
    """Return the hashes of a copy that was finished, nothing of another one."""
    try:
        hashes = json.loads((target / _DONE).read_text())
    except (OSError, ValueError):
        return {}
    return hashes if isinstance(hashes, dict) else {}


def _hash_of(path: Path) -> str:
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and where its data begin."""
    try:
        with open(path, "rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            return json.loads(opened.read(length)), _LENGTH.size + length
    except (OSError, struct.error, ValueError, MemoryError) as error:
        raise ValueError(
            f"'{path}' is not a safetensors file that can be copied ({error}); --copy-weights "
            "needs the whole checkpoint on the driver's host. Download it again"
        ) from None
