"""Compiles kernels side by side: those that a piece of code would launch and that are not there.

    with compiling_missing():
        forward()     launches nothing that has yet to be compiled, so its results mean nothing
    forward()         finds every kernel

Triton compiles a kernel when it is first launched, a second or two each and one after the other.
Here a launch that finds no kernel is noted and left out, so that code runs through in milliseconds;
then forked processes compile what was noted, each its share, into Triton's folder of kernels (that
of nvrtc.py for CUDA C++), launchers included, where this process finds them by their content.
Threads would not do: a third of a compilation holds the interpreter's lock (51 kernels of
Llama-3.1-8B's steps, H200 and 16 cores: 30 s in threads, 9 so).

Kernels that are there are launched as ever, over what others did not compute. So memory that is
taken meanwhile is zeroed: indices made of it are valid, and asking a tensor for a value is too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.compiler import CompiledKernel

from llmpq.kernels.nvrtc import noting_missing

MOST_PROCESSES = 16
"""Compilations at once."""
LIMIT_S = 120.0
"""How long a process may take for its share; what it leaves is compiled when it is launched."""
_POLL_S = 0.01


@contextmanager
def compiling_missing(processes: int | None = None) -> Iterator[None]:
    """Have this thread's launches note what is missing instead; so many processes compile it.

    Ends once everything is compiled. What does not compile raises its error when it is launched.
    """
    missing, texts = _Missing(), dict[str, Callable[[], object]]()
    with missing, _Zeroed(), noting_missing(texts):
        yield
    found = [*missing.noted.values(), *(_Compilation(make, _nothing) for make in texts.values())]
    _compile_forked(found, processes or min(MOST_PROCESSES, len(os.sched_getaffinity(0))))
    for compilation in found:
        with suppress(Exception):  # which its launch raises
            compilation.finish(compilation.compile())


@dataclass(frozen=True)
class _Compilation:
    compile: Callable[[], Any]
    """Returns the kernel, from Triton's folder if it is there."""
    finish: Callable[[Any], None]
    """Has launches find it."""


def _nothing(made: Any) -> None:
    """A launch finds machine code of CUDA C++ in its own folder."""


class _Missing(triton.AsyncCompileMode):
    """Notes what launches miss, as Triton tells its own mode, which would wait for each kernel."""

    def __init__(self) -> None:
        super().__init__(executor=None)
        self.noted: dict[Any, _Compilation] = {}

    def submit(self, key: Any, compile_: Callable[[], Any], finish: Any, *_: Any) -> None:
        """Note a compilation, once; None stands for no kernel, which is not launched."""
        self.noted.setdefault(key, _Compilation(compile_, finish))


class _Zeroed(TorchFunctionMode):
    """Zeroes tensors that are made without values.

    What operators allocate themselves they fill. A `TorchDispatchMode` would see that, too, and
    import torch._dynamo for it, which takes about five seconds of a start.
    """

    _EMPTY = frozenset(
        {
            torch.empty,
            torch.empty_like,
            torch.empty_strided,
            Tensor.new_empty,
            Tensor.new_empty_strided,
        }
    )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and zero what it leaves open."""
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in self._EMPTY else out


def _compile_forked(found: Sequence[_Compilation], processes: int) -> None:
    """Have forked processes compile, each every so-manieth, into Triton's folder of kernels."""
    count = min(processes, len(found))
    if count < 2:
        return
    children = [_fork(found[number::count]) for number in range(count)]
    until_s = time.monotonic() + LIMIT_S
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until_s:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(_POLL_S)


def _with_launcher(made: Any) -> None:
    """Have Triton build what launches a kernel, too: 3.6 compiles C for each signature.

    H200, 39 kernels: 2.9 s of the first graphs, one after the other.
    """
    build = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if build is not None and isinstance(made, CompiledKernel):
        build(made.src, made.metadata)


def _fork(share: Sequence[_Compilation]) -> int:
    """Start a process that compiles and ends; return its number.

    It touches no GPU, which it could not, and leaves no trace but files: pipes and sockets of this
    process are closed there, so that none takes it for this one, and nothing is run at its end.
    """
    child = os.fork()
    if child:
        return child
    try:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        for _ in range(3):  # standard input, output and error
            os.open(os.devnull, os.O_RDWR)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(LIMIT_S))  # should this process be gone, too
        for compilation in share:
            with suppress(Exception):
                _with_launcher(compilation.compile())
    finally:
        os._exit(0)
