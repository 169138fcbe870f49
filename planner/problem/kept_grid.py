"""On which grid a checkpoint's own codes are kept: groups of 32 or 64 weights, with zeros or not.

    GGUF                             groups of 32
    GPTQ, AWQ, compressed-tensors    groups of 32 or 64, where all linears have the same

CPUs keep them. On GPUs they are numbers that are rounded anew in groups of 128, which take fewer
bytes, unless `--weight-group-size` asks for groups as they are stored. Codes of MXFP4, NVFP4 and
bitsandbytes are kept on any grid (own_codes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.cluster import Device
from llmpq.memory import Quantization
from llmpq.planner.problem import gguf_layers
from llmpq.planner.problem.stored_precisions import small_groups


def kept_grid(
    path: str | Path, devices: Sequence[Device], asked: int | None = None
) -> Quantization | None:
    """Return the grid on which codes stay as they are, None where it is the usual one.

    `asked`: weights that shall share a scale, where the user says so.
    """
    if asked is None and not all(device.spec.is_cpu for device in devices):
        return None
    kept = gguf_layers.kept_grid(path) if is_gguf(path) else small_groups(path)
    return kept if kept is None or asked in (None, kept.group_size) else None
