"""Quantised layers kept on disk, so that a stage that starts again need not quantise again.

    FOLDER/<hash of the checkpoint and of how it is stored>/<layer>.safetensors

A file appears whole or not at all. Weights whose activations are rounded are not kept, nor is a
layer with codes as the checkpoint has them (FP8, a table's 4 bits): little of it is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmpq.kernels.weights.quantized_weight import QuantizedWeight, best_layout
from llmpq.kernels.weights.weight import Weight
from llmpq.models.tensor_parallel import Member
from llmpq.precision import WeightScheme
from llmpq.runtime.weights.quantizing_source import QuantizingSource
from llmpq.runtime.weights.sources import CheckpointSource, weight_files

LAYOUTS = 4
"""One more when a layout's bytes change; which one this device has is in the mark, too."""
_SHAPES = "llmpq_weights"
"""Metadata key: linear -> what its tensors do not say of themselves, as JSON."""


class KeptLayers(QuantizingSource):
    """A checkpoint whose layers, once quantised, are read as they were stored."""

    _source: CheckpointSource

    def __init__(
        self,
        source: CheckpointSource,
        folder: str | Path,
        schemes: Mapping[int, WeightScheme | None],
        device: torch.device,
    ) -> None:
        """`schemes`: how each layer of the stage is stored."""
        super().__init__(source, schemes, device)
        self._folder = Path(folder)
        self._member: Member | None = None
        source.keep_codes(schemes)
        self.num_read = 0
        """Layers that were found on disk."""

    def take_member(self, member: Member) -> None:
        """Hand out of decoder layers what one device of a stage in tensor parallel holds."""
        self._member = member
        super().take_member(member)

    def layer(self, index: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a layer's parts, its linears quantised as its scheme says."""
        scheme = self._schemes[index]
        if scheme is None or scheme.activation_bits < 16:
            return self._source.layer(index, dtype)
        path = self._path(index, scheme, dtype)
        found = self._read(path)
        if found is not None:
            self.num_read += 1
            return found
        parts = self.quantized(index, dtype)
        if not any(isinstance(part, Weight) and part.keeps_codes for part in parts.values()):
            self._write(path, parts)
        return parts

    def _path(self, index: int, scheme: WeightScheme, dtype: torch.dtype) -> Path:
        spec = self._source.spec
        layout = best_layout(self._device, dtype, scheme.group_size)
        what = [
            spec.fingerprint(),
            weight_files(self._source),
            repr(scheme),
            str(dtype),
            self._device.type,
            *(["codes kept"] if self._source.may_keep_codes else []),
            LAYOUTS,
            layout.value,
            *([] if self._member is None else [self._member.shares, self._member.index]),
        ]
        mark = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        return self._folder / mark / f"{index}.safetensors"

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return a kept layer; None where there is none, or one that cannot be read."""
        try:
            with safe_open(path, framework="pt", device=str(self._device)) as kept:
                shapes = json.loads(kept.metadata()[_SHAPES])
                parts: dict[str, Any] = {}
                fields: dict[str, dict[str, Any]] = {name: {} for name in shapes}
                for key in kept.keys():  # noqa: SIM118 (it is no mapping)
                    name, _, field = key.rpartition(":")
                    (fields[name] if name else parts)[field or key] = kept.get_tensor(key)
        except (OSError, SafetensorError, KeyError, TypeError):
            return None
        return parts | {
            name: QuantizedWeight.of_shape(shapes[name], fields[name]) for name in shapes
        }

    def _write(self, path: Path, parts: Mapping[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        shapes: dict[str, dict[str, Any]] = {}
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                tensors[name] = _on_host(part)
                continue
            tensors |= {f"{name}:{key}": _on_host(tensor) for key, tensor in part.tensors.items()}
            shapes[name] = part.shape
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, unfinished, metadata={_SHAPES: json.dumps(shapes)})
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise ValueError(
                f"cannot write '{path}' of --layer-cache: {error}; free some space, give another "
                "folder or leave --layer-cache out"
            ) from None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with memory of its own, as a file needs it."""
    return tensor.detach().to("cpu", copy=True).contiguous()
