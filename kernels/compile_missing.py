"""Compiles kernels in threads: those that a piece of code would launch, all of them at once.

    with compiling_ahead():
        forward()     launches nothing that has yet to be compiled, so its results mean nothing
    forward()         finds every kernel

Triton compiles a kernel when it is first launched, seconds each and one after the other. Here a
launch that finds no kernel starts a thread that compiles it and returns: code runs through in
milliseconds and its kernels are compiled side by side. Four fifths of a compilation hold no
interpreter lock (Triton 3.6 and 3.9: passes, LLVM, ptxas). What was compiled is kept on disk, by
content, and in memory.

Kernels that are there are launched as ever, over what others did not compute. So memory that is
taken meanwhile is zeroed: indices made of it are valid, and asking a tensor for a value is too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOST_THREADS = 16
"""Compilations at once: the interpreter's lock keeps more from being quicker."""


@contextmanager
def compiling_ahead(threads: int | None = None) -> Iterator[None]:
    """Have this thread's launches compile what is missing instead, by so many others.

    Ends once everything is compiled. What does not compile raises its error when it is launched.
    """
    count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as pool, _CompileOnly(pool, ignore_errors=True), _Zeroed():
        yield


class _CompileOnly(triton.AsyncCompileMode):
    """Compiles as Triton's mode does, but a launch of what is not there yet is left out.

    Triton's own waits for the kernel at its launch.
    """

    def submit(self, *compilation: Any) -> None:
        """Start a compilation, once; None stands for no kernel, which is not launched."""
        super().submit(*compilation)


class _Zeroed(TorchDispatchMode):
    """Zeroes tensors that are made without values."""

    _EMPTY = frozenset(
        {
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_like.default,
            torch.ops.aten.empty_strided.default,
            torch.ops.aten.new_empty.default,
            torch.ops.aten.new_empty_strided.default,
        }
    )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and zero what it leaves open."""
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._EMPTY and isinstance(out, Tensor) else out
