"""On which grid a checkpoint's own codes are kept: groups of 32 or 64 weights, with zeros or not.

    GGUF                             groups of 32
    GPTQ, AWQ, compressed-tensors    groups of 32 or 64, where all linears have the same
    NVFP4                            groups of 16, scales of a byte: as much as 32 without zeros

CPUs keep them, and GPUs NVFP4. On GPUs, other codes are numbers that are rounded anew in groups of
128, which take fewer bytes, unless `--weight-group-size` asks for groups as they are stored.
Codes of MXFP4 and bitsandbytes are kept on any grid (runtime/weights/table_forms.py) that counts
the quarter of a bit a weight that their scales take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf
from llmpq.cluster import Device
from llmpq.memory import Quantization
from llmpq.planner.inputs import gguf_layers
from llmpq.planner.inputs.stored_precisions import has_tables, nvfp4_grid, small_groups

TABLE_GROUP = 64
"""Of MXFP4's and bitsandbytes' scales: what groups of so many without zeros take, at most."""


def kept_grid(
    path: str | Path, devices: Sequence[Device], asked: int | None = None
) -> Quantization | None:
    """Return the grid on which codes stay as they are, None where it is the usual one.

    `asked`: weights that shall share a scale, if somebody says so; `ValueError` where NVFP4's
    codes, which are kept all the same, would take more than that.
    """
    kept = None if is_gguf(path) else nvfp4_grid(path)
    if kept is not None and asked not in (None, kept.group_size):
        raise ValueError(
            f"'{path}' is NVFP4, whose codes are kept and take what groups of {kept.group_size} "
            f"do; got --weight-group-size {asked}: leave it out"
        )
    if kept is None and asked is None and not all(device.spec.is_cpu for device in devices):
        return None
    if kept is None:
        kept = gguf_layers.kept_grid(path) if is_gguf(path) else small_groups(path)
    return kept if kept is None or asked in (None, kept.group_size) else None


def require_counted(path: str | Path, grid: Quantization) -> None:
    """Raise `ValueError` for an explicit grid that counts less than a table's kept codes take."""
    size = grid.group_size
    counted = size is not None and size * (1 + grid.symmetric) <= 2 * TABLE_GROUP
    if counted or not has_tables(path):
        return
    wish = "--weight-group-size 0" if size is None else f"--symmetric with groups of {size}"
    raise ValueError(
        f"'{path}' has 4-bit codes of MXFP4 or bitsandbytes, which are kept and take a quarter of "
        f"a bit a weight for scales; {wish} would count less: leave it out"
    )
