"""Whether a checkpoint has a head that predicts a further token (MTP): by its tensors' names."""

from __future__ import annotations

import re
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.tensor_names import tensor_names
from llmpq.families import FAMILIES
from llmpq.models.model_spec import ModelSpec


def has_mtp_head(path: str | Path | None, spec: ModelSpec) -> bool:
    """Return whether a model's directory holds such a head; without weights, if its family has.

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
    stored = tensor_names(Path(path))
    return not stored or any(root + join in stored for root in roots)


def has_further_layers(path: str | Path | None, spec: ModelSpec) -> bool:
    """Return whether a model's files hold tensors of layers behind its last one."""
    if path is None or not spec.further_layers:
        return False
    stored = open_gguf(path).tensors if is_gguf(path) else tensor_names(Path(path))
    prefix = "blk" if is_gguf(path) else "layers"
    behind = re.compile(rf"(^|\.){prefix}\.{spec.num_layers}\.")
    return any(behind.search(name) for name in stored)
