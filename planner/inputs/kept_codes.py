"""What a checkpoint's own codes are that layers of a plan keep, where they are no integers.

Codes of most weights count: a file may mix them. A plan's costs ask for it (costs/code_forms.py).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.model_config import read_config
from llmpq.checkpoints.quantization_config import BITSANDBYTES, LAYER
from llmpq.families.common.config_values import section
from llmpq.memory import Quantization
from llmpq.planner.inputs import gguf_layers
from llmpq.planner.inputs.stored_precisions import SMALL, headers_of

IQ4 = ("IQ4_NL", "IQ4_XS")


def kept_codes(path: str | Path | None, kept: Quantization | None) -> str | None:
    """Return their name; `kept`: the grid that a plan has because of the checkpoint."""
    if path is None:
        return None
    found = _in_gguf(Path(path), kept) if is_gguf(path) else _in_directory(Path(path))
    most = max(+found, key=lambda name: found[name], default=None)
    return most or None


def _in_gguf(path: Path, kept: Quantization | None) -> Counter[str]:
    """Return the weights of every form, "" where they are integers or numbers."""
    found: Counter[str] = Counter()
    small = kept is not None and kept.group_size in SMALL
    for name, tensor in open_gguf(path).tensors.items():
        if gguf_layers.LAYER.match(name) and len(tensor.shape) > 1:
            form = "mxfp4" if tensor.kind == "MXFP4" else ""
            form = "iq4" if small and tensor.kind in IQ4 else form
            found[form] += prod(tensor.shape)
    return found


def _in_directory(directory: Path) -> Counter[str]:
    """Return the tensors of every form of a directory's layers."""
    found: Counter[str] = Counter()
    if section(read_config(directory), "quantization_config") is None:
        return found
    file_of = headers_of(directory)
    for name, header in file_of.items():
        if LAYER.search(name) is None:
            continue
        stem, kind = name.rpartition(".")[::2]
        dtype = header.tensors[name]["dtype"]
        if kind == "weight_packed" and dtype == "U8":
            found["nvfp4" if f"{stem}.weight_global_scale" in file_of else "mxfp4"] += 1
        elif name.endswith("_blocks") and dtype == "U8":
            found["mxfp4"] += 1
        elif kind == "weight" and dtype == "F8_E4M3":
            found["e4m3"] += 1
        for form, state in zip(("nf4", "fp4"), BITSANDBYTES, strict=True):
            found[form] += name.endswith(f".weight.{state}")
    return found
