"""Memory of pages of 2 MiB for what a CPU's steps read from end to end: weights and KV pools.

Linux gives them to who asks (`madvise`). Each page of 4 KiB costs a walk over page tables, in a
guest over two kinds of them. One row's products of 4 and 8 bits, 256 MiB of codes, two busy threads
of an Intel Xeon, GB/s, small pages / large: 6.7 / 8.2 and 6.9 / 10.0; a plain sum 6.8 / 12.4.
oneDNN's own layouts gain nothing (bfloat16, one row: 7.0 / 6.8).

Only whole large pages are asked for: a tail stays in small ones, so no byte is there for nothing.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
LEAST = 2 * PAGE
"""Bytes below which large pages are not worth their while: a cache holds them."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros, on a CPU in large pages, which are there once something is written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LEAST or not are_here():
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return room(size).view(dtype).view(tuple(shape))


def room(size: int) -> Tensor:
    """Return bytes [size] of zeros that begin with a large page."""
    held = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bytes_all = torch.frombuffer(held, dtype=torch.uint8)
    first, whole = -bytes_all.data_ptr() % PAGE, size // PAGE * PAGE
    if whole:
        with contextlib.suppress(OSError):  # a kernel without them
            held.madvise(mmap.MADV_HUGEPAGE, first, whole)
    return bytes_all[first : first + size]


def moved(tensor: Tensor) -> Tensor:
    """Return a tensor of a CPU in large pages, itself where that is not worth a copy."""
    if tensor.nbytes < LEAST or not are_here():
        return tensor
    return room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def are_here() -> bool:
    """Whether this system has them to ask for."""
    return hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_ANONYMOUS")
