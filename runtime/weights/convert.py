"""`llmpq-dist convert`: a directory with `pytorch_model.bin` becomes one with safetensors.

Old checkpoints (OPT's, say) are pickles, which can run code when read. They are read with
`weights_only=True`, which refuses everything but tensors, one shard at a time and memory-mapped
where the file allows it. The tensors themselves are not changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.tensor_names import INDEX, SINGLE
from llmpq.runtime.weights.atomic_write import write_bytes, write_tensors, write_text
from llmpq.runtime.weights.weight_map import read_weight_map
from llmpq.units import format_size

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files that go along: config, tokenizer, vocabulary, chat template."""
REMEDY = "nothing is left of the conversion, free some space or give another directory"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion wrote."""

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int


def convert(source: str | Path, target: str | Path) -> Converted:
    """Write `source`'s weights to `target` as safetensors, with its config and tokenizer."""
    source, target = Path(source), Path(target)
    shards = _shards(source)
    if target.exists() and not target.is_dir():
        raise ValueError(f"'{target}' is a file; give a new directory for the safetensors")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"'{target}' is not empty; give a new directory")
    with _whole_directory(target):
        weight_map, total = _write_weights(shards, target)
        _write_rest(source, target)
    files = tuple(sorted(set(weight_map.values())))
    return Converted(files=files, num_tensors=len(weight_map), num_bytes=total)


@contextmanager
def _whole_directory(target: Path) -> Iterator[None]:
    """Make an empty directory to write files to; if that fails, take away what was written."""
    existed = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in target.iterdir():
            path.unlink()
        if not existed:
            target.rmdir()
        raise


def _write_weights(shards: list[Path], target: Path) -> tuple[dict[str, str], int]:
    """Write shard by shard; return which file a tensor is in, and the bytes of all."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = dict(_distinct(_load(shard)))
        write_tensors(tensors, target / name, {}, remedy=REMEDY)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(json.dumps(index, indent=1) + "\n", target / INDEX, remedy=REMEDY)
    return weight_map, total


def _write_rest(source: Path, target: Path) -> None:
    """Copy the other files; config.json last, without which no loader takes the directory."""
    found = {path for pattern in COPIED for path in source.glob(pattern)}
    for path in sorted(found, key=lambda path: (path.name == "config.json", path.name)):
        if path.name != BIN_INDEX:
            write_bytes(path.read_bytes(), target / path.name, remedy=REMEDY)


def convert_and_say(source: str | Path, target: str | Path) -> int:
    """Convert, say what was written, and return the exit code."""
    done = convert(source, target)
    files = f"{len(done.files)} file{'s' if len(done.files) > 1 else ''}"
    size = format_size(done.num_bytes)
    sys.stdout.write(f"wrote {done.num_tensors} tensors, {size}, in {files} to {target}\n")
    return 0


def _shards(source: Path) -> list[Path]:
    """Return the pickled files of a checkpoint, in order; every one must exist."""
    if (source / BIN_INDEX).exists():
        names = read_weight_map(source / BIN_INDEX).values()
        shards = [source / name for name in sorted(set(names))]
    elif (source / BIN).exists():
        shards = [source / BIN]
    else:
        raise ValueError(f"no {BIN} or {BIN_INDEX} in '{source}': nothing to convert")
    for shard in shards:
        if not shard.exists():
            raise ValueError(f"'{shard}' is missing; {BIN_INDEX} names it as a shard")
    return shards


def _load(path: Path) -> dict[str, Any]:
    """Read one pickled shard, tensors only; `ValueError` if it holds anything else."""
    # Files of torch < 1.6 are not zip archives and cannot be mapped.
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # unpickling raises whatever the bytes lead it to
        if "weights_only" in str(error) or type(error).__name__ == "UnpicklingError":
            reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0]
            raise ValueError(
                f"'{path}' holds more than tensors ({reason or type(error).__name__}); reading it "
                "could run code, so it is refused. Get the model as safetensors"
            ) from None
        raise ValueError(
            f"'{path}' cannot be read, truncated perhaps ({type(error).__name__}: {error}). "
            "Download it again"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"'{path}' holds a {type(content).__name__}, expected named tensors")
    return content


def _distinct(content: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, dense and owning their storage: safetensors knows no sharing.

    A name that is the same tensor as an earlier one (a tied head) is kept as a copy, so that
    readers need not know which of the two was dropped.
    """
    seen: set[int] = set()
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"'{name}' is a {type(tensor).__name__}, expected a tensor")
        shared = tensor.untyped_storage().data_ptr() in seen
        seen.add(tensor.untyped_storage().data_ptr())
        yield name, tensor.detach().clone() if shared else tensor.detach().contiguous()
