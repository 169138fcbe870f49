"""Kernels are compiled side by side, and not launched, before code that needs them runs.

Without a GPU: a driver that knows its target, and whose launches would fail.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from llmpq.kernels import compile_missing
from llmpq.kernels.compile_missing import compiling_missing

pytestmark = pytest.mark.compile


@triton.jit
def _double(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def _broken(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), tl.dot(1, 2))


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    """A Hopper that compiles to an empty folder and launches nothing."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_benchmarker=None,
    )
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    for kernel in (_double, _broken):
        kernel.device_caches.clear()
    yield driver
    triton.runtime.driver._active = before
    for kernel in (_double, _broken):
        kernel.device_caches.clear()


def _kernels(function):
    return [made for made in function.device_caches[0][0].values() if made is not None]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_what_is_missing_is_compiled_once_by_others_and_not_launched(no_gpu, processes):
    """A listener hears of a compilation here: by forked processes there is none."""
    heard, x = [], torch.ones(64)

    def listener(*, src, cache_hit, **_):
        heard.append((src.name, cache_hit))

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listener
        with compiling_missing(processes=processes):
            for size in (16, 32, 16, 32):
                assert _double[(1,)](x, size) is None
    assert heard == [("_double", processes > 1)] * 2
    assert x.tolist() == [1] * 64
    assert [bool(made.asm["cubin"]) for made in _kernels(_double)] == [True, True]


def test_what_launches_a_kernel_is_built_beside_it(no_gpu, tmp_path):
    """Triton 3.6 compiles C for it, which the first launch waits for."""

    def build(src, metadata):
        (tmp_path / f"{src.name} {os.getpid() != own}").touch()

    no_gpu.launcher_cls, own, x = build, os.getpid(), torch.ones(64)
    with compiling_missing(processes=2):
        _double[(1,)](x, 16)
        _double[(1,)](x, 32)
    assert [path.name for path in tmp_path.glob("_double *")] == ["_double True"]


@pytest.mark.parametrize("hangs", [True, False])
def test_processes_that_hang_or_die_leave_their_share_to_this_one(no_gpu, monkeypatch, hangs):
    x, own = torch.ones(64), os.getpid()
    plain = triton.compile

    def compile_(*given, **options):
        if os.getpid() != own:
            time.sleep(60) if hangs else os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given, **options)

    monkeypatch.setattr(compile_missing, "LIMIT_S", 1.5)
    monkeypatch.setattr(triton.compiler, "compile", compile_)
    with compiling_missing(processes=2):
        _double[(1,)](x, 16)
        _double[(1,)](x, 32)
    assert len(_kernels(_double)) == 2


def test_what_does_not_compile_says_so_when_it_is_launched(no_gpu):
    x = torch.ones(64)
    with compiling_missing(processes=1):
        _broken[(1,)](x, 16)
        _double[(1,)](x, 16)
    assert not _kernels(_broken) and len(_kernels(_double)) == 1
    with pytest.raises(Exception, match="dot"):
        _broken[(1,)](x, 16)


def test_other_threads_compile_and_launch_as_ever(no_gpu):
    """Another engine of the process is not held up, and never gets a kernel that does nothing."""
    x, seen = torch.ones(64), []

    def other():
        try:
            _double[(1,)](x, 32)
        except AttributeError as error:  # this driver launches nothing
            seen.append(error)

    with compiling_missing(processes=1):
        _double[(1,)](x, 32)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1


def test_memory_without_values_is_zeroed_within(no_gpu):
    """What a kernel would have written may be an index."""
    full = torch.full((1 << 16,), 7)
    with compiling_missing(processes=1):
        for made in (
            torch.empty(1 << 16, dtype=torch.long), full.new_empty(1 << 16),
            torch.empty_like(full), torch.empty_strided((4, 5), (1, 4), dtype=torch.long),
        ):  # fmt: skip
            assert not made.any()


def test_a_start_does_not_import_what_nothing_of_it_calls():
    code = (
        "import sys, torch\n"
        "from llmpq.kernels.compile_missing import compiling_missing\n"
        "with compiling_missing(), torch.inference_mode():\n"
        "    x = torch.empty(3, 4).new_empty(2, 2) @ torch.ones(2, 2)\n"
        "assert 'torch._dynamo' not in sys.modules and not x.any()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
