"""Which files hold a directory's weights, and what its tensors are called: none is read."""

from __future__ import annotations

import json
from pathlib import Path

from llmpq.file_form import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def index_of(directory: Path) -> Path | None:
    """Return the index by which a directory's weights are read, None where there is none.

    Beside a model.safetensors that it does not name it is left from other files: Transformers goes
    by that file.
    """
    index = directory / INDEX
    if not index.exists():
        return None
    files = list(_names(index).values()) if (directory / SINGLE).is_file() else []
    return None if files and SINGLE not in files else index


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of a directory's tensors; none of one that holds no safetensors."""
    index = index_of(directory)
    if index is not None:
        return frozenset(_names(index))
    if not (directory / SINGLE).is_file():
        return frozenset()
    with (directory / SINGLE).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size < 1 << 30 else b"{}"
    try:
        return frozenset(json.loads(header))
    except ValueError:
        return frozenset()  # loading the file reports what is wrong


def _names(index: Path) -> dict[str, object]:
    """Return an index's tensor name -> file; none of one that has no such table."""
    found = read_json(index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    return weight_map if isinstance(weight_map, dict) else {}
