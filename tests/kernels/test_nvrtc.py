"""CUDA C++ is compiled once, kept whole, and noted instead where kernels are compiled ahead."""

import pytest
import torch

from llmpq.kernels import nvrtc
from llmpq.kernels.compile_missing import compiling_missing

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC (nvidia-cuda-nvrtc)"),
]

EMPTY = 'extern "C" __global__ void nothing() {}'


def test_machine_code_is_kept_whole_or_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = nvrtc.machine_code(EMPTY)
    (path,) = (tmp_path / "llmpq" / "cuda").iterdir()
    calls = []
    monkeypatch.setattr(nvrtc, "compile_text", lambda t, architecture: calls.append(t) or b"anew")
    assert nvrtc.machine_code(EMPTY) == first and not calls
    path.write_bytes(path.read_bytes()[:-3])
    assert nvrtc.machine_code(EMPTY) == b"anew" and len(calls) == 1
    assert nvrtc.machine_code(EMPTY) == b"anew" and len(calls) == 1


def test_what_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile_text("__global__ void broken() { nowhere(); }")


def test_what_is_missing_is_compiled_ahead_and_not_launched(tmp_path, monkeypatch):
    """A launch would fail: there is no driver here, and nothing to launch on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = [nvrtc.CudaFunction("nothing", EMPTY + comment, 0) for comment in ("", "// 2")]
    with compiling_missing(processes=2):
        for kernel in kernels * 2:
            kernel.launch(torch.device("cuda", 0), 1, 32, (), overlapping=False)
    assert len(list((tmp_path / "llmpq" / "cuda").iterdir())) == 2
    monkeypatch.setattr(
        nvrtc, "compile_text", lambda text, architecture: pytest.fail("compiled again")
    )
    assert nvrtc.machine_code(EMPTY)
