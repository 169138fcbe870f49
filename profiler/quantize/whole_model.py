"""A model directory in, a quantised one out: layer by layer, resumable, each layer written at once.

`quantize.json` in the output says what made it; a second run with the same weights and settings
goes on where the first one stopped, any other is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.checkpoints.quantization_config import OWN_FORM
from llmpq.file_form import read_json
from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.weights.weight import Weight
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.profiler.quantize.layer_walk import CalibrationRun
from llmpq.profiler.quantize.linears_in_turn import quantize
from llmpq.profiler.quantize.recipes import Settings, recipe
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.weights.atomic_write import write_text
from llmpq.runtime.weights.quantized_checkpoint import QuantizedCheckpoint
from llmpq.runtime.weights.quantized_writer import (
    ENDS_FILE,
    REMEDY,
    CheckpointWriter,
    compressed_config,
    kv_cache_scheme,
    layer_file,
)
from llmpq.runtime.weights.sources import CheckpointSource, weight_files

STATE_FILE = "quantize.json"
ANY_LAYER = "model-layer-*.safetensors"

OnLayer = Callable[[int, int, bool], None]
"""Hears of every finished layer: index, bytes, whether it was there already."""


@dataclass(frozen=True, kw_only=True)
class QuantizeJob:
    """What to quantise and how."""

    spec: ModelSpec
    precisions: tuple[Precision, ...]
    settings: Settings
    windows_WT: Tensor
    """Calibration tokens."""
    kv: KVPrecision = KVPrecision.KV16
    """Bits of the KV cache the checkpoint is meant for; config.json says so."""

    def description(self, source: CheckpointSource, dtype: torch.dtype) -> dict[str, Any]:
        """Return what decides the result, as JSON values; `dtype` is what is computed in."""
        tokens = self.windows_WT.to(torch.int64).cpu().numpy().tobytes()
        return {
            "schema": 1,
            "model": self.spec.name,
            "fingerprint": self.spec.fingerprint(),
            "weights": weight_files(source),
            "dtype": str(dtype).removeprefix("torch."),
            "precisions": [precision.value for precision in self.precisions],
            "kv": self.kv.value,
            "settings": asdict(self.settings),
            "windows": list(self.windows_WT.shape),
            "calibration_sha256": hashlib.sha256(tokens).hexdigest(),
        }


def quantize_model(
    job: QuantizeJob,
    source: CheckpointSource,
    target: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    on_layer: OnLayer = lambda index, size, resumed: None,
) -> None:
    """Write the quantised model to `target`."""
    _claim(target, job.description(source, dtype))
    stored = DTYPES[job.spec.dtype]
    writer = CheckpointWriter(target, job.spec, source)
    writer.begin()
    run = CalibrationRun(job.spec, source, job.windows_WT, dtype=dtype, device=device)
    for index, precision in enumerate(job.precisions):
        resumed = (target / layer_file(index)).exists()
        parts: dict[str, Tensor | Weight]
        if resumed:
            described = {"quant_method": OWN_FORM, **quantization_config(job)}
            parts = QuantizedCheckpoint(target, job.spec, described).layer(index, dtype)
        else:
            chosen = recipe(precision, job.spec, job.settings)
            view = run.view(index)
            parts = dict(view.tensors)
            if chosen is not None:
                parts = quantize(run, view, chosen, dtype=stored)
            writer.write_layer(index, parts, stored)
        run.advance(parts)
        on_layer(index, (target / layer_file(index)).stat().st_size, resumed)
    writer.finish(quantization_config(job))


def quantization_config(job: QuantizeJob) -> dict[str, Any]:
    """Return config.json's `quantization_config`: compressed-tensors' where it can say it all.

    With W4A4 layers it has no `quant_method`: Transformers refuses that, and would run a method
    that it does not know with random weights.
    """
    settings = job.settings
    if Precision.W4A4 in job.precisions:
        chosen = recipe(Precision.W4A4, job.spec, settings)
        assert chosen is not None and isinstance(chosen.scheme, AtomScheme)
        return {
            "format": OWN_FORM,
            "precisions": [precision.value for precision in job.precisions],
            "group_size": settings.group_size,
            "symmetric": settings.symmetric,
            "outliers": chosen.scheme.outliers,
            "kv_cache_scheme": kv_cache_scheme(job.spec, job.kv),
        }
    return compressed_config(
        job.spec,
        job.precisions,
        group_size=settings.group_size,
        symmetric=settings.symmetric,
        kv=job.kv,
    )


def spread(precisions: Sequence[Precision], num_layers: int) -> tuple[Precision, ...]:
    """Return one precision per layer; a single one means all layers."""
    if len(precisions) == 1:
        return tuple(precisions) * num_layers
    if len(precisions) != num_layers:
        raise ValueError(
            f"--scheme names {len(precisions)} layers, the model has {num_layers}; give one for "
            "all, or one per layer"
        )
    return tuple(precisions)


def _claim(target: Path, description: dict[str, Any]) -> None:
    """Make the output directory, or check that it holds the same run unfinished.

    A run that finished no layer, since its settings did not work out, may be followed by another;
    of another model, embedding and head are not stored.
    """
    target.mkdir(parents=True, exist_ok=True)
    state = target / STATE_FILE
    if state.exists() and any(target.glob(ANY_LAYER)):
        found = _state(state)
        differing = sorted(k for k in description if found.get(k) != description[k])
        if differing:
            raise ValueError(
                f"'{target}' holds a quantisation that differs in {', '.join(differing)}; give a "
                "new directory, or the same arguments to continue it"
            )
        return
    if not state.exists() and any(target.iterdir()):
        raise ValueError(f"'{target}' is not empty and has no {STATE_FILE}; give a new directory")
    (target / ENDS_FILE).unlink(missing_ok=True)
    write_text(json.dumps(description, indent=1) + "\n", state, remedy=REMEDY)


def _state(path: Path) -> dict[str, Any]:
    """Read what a run noted about itself."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(
            f"'{path}' holds a {type(found).__name__}, expected what llmpq-quantize noted about "
            "its run; give a new directory"
        )
    return found
