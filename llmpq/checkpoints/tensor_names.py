"""What a directory's tensors are called, without reading them."""

from __future__ import annotations

import json
from pathlib import Path

from llmpq.file_form import read_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of a directory's tensors; none of one that holds no safetensors."""
    if (directory / _INDEX).is_file():
        found = read_json(directory / _INDEX)
        weight_map = found.get("weight_map") if isinstance(found, dict) else None
        return frozenset(weight_map) if isinstance(weight_map, dict) else frozenset()
    if not (directory / _SINGLE).is_file():
        return frozenset()
    with (directory / _SINGLE).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size < 1 << 30 else b"{}"
    try:
        return frozenset(json.loads(header))
    except ValueError:
        return frozenset()  # loading the file reports what is wrong
