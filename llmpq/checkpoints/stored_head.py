"""Whether a checkpoint has a head that predicts a further token (MTP): by its tensors' names."""

from __future__ import annotations

import json
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.families import FAMILIES
from llmpq.file_form import read_json
from llmpq.model_spec import ModelSpec

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def has_mtp_head(path: str | Path | None, spec: ModelSpec) -> bool:
    """Return whether a model's directory holds such a head; without one, whether its family does.

    Quantised directories that were written without the head have none, whatever config.json says.
    """
    names = FAMILIES[spec.family].names
    if names.mtp is None or (names.mtp.rooted and not spec.further_layers):
        return False
    if path is None or not Path(path).exists():
        return True
    if is_gguf(path):
        return False
    (join,) = names.of_mtp(spec)["join.weight"]
    roots = names.roots if names.mtp.rooted else ("",)
    stored = _tensor_names(Path(path))
    return any(root + join in stored for root in roots)


def _tensor_names(directory: Path) -> frozenset[str]:
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
