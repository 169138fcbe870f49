"""Which errors mean that a device, or the host, has no memory left. Standard library only."""

from __future__ import annotations

from itertools import pairwise

_NO_MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def first_line(error: BaseException) -> str:
    """Return what an error says first, and NCCL's cause: a native stack may follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no message"
    cause = "".join(after for line, after in pairwise(lines) if line.startswith("Last error:"))
    return lines[0][:300] + (f": {cause[:300]}" if cause else "")


def out_of_memory(error: BaseException) -> bool:
    """Whether it is a GPU's OutOfMemoryError or what stands for it elsewhere.

    The host's allocator, the driver (kernels and graphs that it loads), Triton and cuBLAS say it in
    a plain RuntimeError.
    """
    # By name: torch is not imported to ask, and has these names in every version we run.
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return True
    plain = name in ("RuntimeError", "AcceleratorError", "DistBackendError")
    return plain and any(words in str(error) for words in _NO_MEMORY)
