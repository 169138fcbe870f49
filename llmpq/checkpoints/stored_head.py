"""Whether a checkpoint has a head that predicts a further token (MTP): by its tensors' names."""

from __future__ import annotations

from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.checkpoints.tensor_names import tensor_names
from llmpq.families import FAMILIES
from llmpq.model_spec import ModelSpec


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
    stored = tensor_names(Path(path))
    return any(root + join in stored for root in roots)
