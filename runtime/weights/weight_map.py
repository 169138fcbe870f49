"""The index of a checkpoint in several files: which file holds which tensor."""

from __future__ import annotations

import reprlib
from pathlib import Path, PurePosixPath

from llmpq.file_form import read_json


def read_weight_map(index: Path) -> dict[str, str]:
    """Return a checkpoint index's tensor name -> file name, files of its directory only."""
    content = read_json(index)
    if not isinstance(content, dict):
        raise ValueError(
            f"'{index}': got {type(content).__name__}, expected an object with 'weight_map'. "
            "Download it again"
        )
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"'{index}': 'weight_map' must be an object, got {reprlib.repr(weight_map)}. Download "
            "it again"
        )
    for name, file in weight_map.items():
        if not _is_file_name(file):
            raise ValueError(
                f"'{index}': '{name}' is said to be in {reprlib.repr(file)}, expected a file name "
                "inside the model directory. Download it again"
            )
    return weight_map


def _is_file_name(value: object) -> bool:
    """Whether it is a path that leads to a file below a directory, never out of it."""
    path = PurePosixPath(value) if isinstance(value, str) else PurePosixPath()
    return path.parts != () and not path.is_absolute() and ".." not in path.parts
