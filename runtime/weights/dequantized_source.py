"""Opens a model that is to be quantised: stored codes are dequantised as they are read."""

from __future__ import annotations

import logging
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.checkpoints.quantization_config import quantization_of
from llmpq.model_spec import ModelSpec
from llmpq.runtime.weights.gguf_checkpoint import GgufCheckpoint
from llmpq.runtime.weights.quantized_checkpoint import QuantizedCheckpoint
from llmpq.runtime.weights.sources import CheckpointSource

_log = logging.getLogger("llmpq.weights")


def open_dequantized(directory: str | Path, spec: ModelSpec) -> CheckpointSource:
    """Return the tensors of a model: 16 or 32 bits, a GGUF file, or quantised codes dequantised.

    FP8, MXFP4, NVFP4 and bitsandbytes are; a model that is made of them is rounded a second
    time. Other quantised directories are refused when they are read.
    """
    if is_gguf(directory):
        return GgufCheckpoint(directory, spec)
    described = quantization_of(directory)
    if described is not None:
        stored = QuantizedCheckpoint(directory, spec, described)
        if stored.has_values():
            _log.warning(
                "'%s' is stored quantised (%s): its values are rounded a second time; a plan of "
                "the directory itself keeps its codes",
                directory,
                described.get("quant_method"),
            )
            return stored
    return CheckpointSource(directory, spec)
