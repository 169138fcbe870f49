"""The compiled library: kept, mended when damaged, done without when it cannot be had."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.native import library
from llmpq.kernels.weights.quantized_weight import best_layout
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [pytest.mark.cpu, pytest.mark.native]


@pytest.fixture
def compiled() -> Path:
    """This machine's library, compiled when a test first asked for it."""
    return Path(library.library()._name)


def test_another_way_to_optimise_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv(library.OPTIMISED, "")
    with pytest.raises(ValueError, match="LLMPQ_NATIVE_OPTIMISED: got '', expected -O0"):
        library._optimised()


@pytest.fixture
def packed():
    """A weight that this machine's library has packed."""
    scheme = WeightScheme(bits=3, clip_search=False)
    return quantize_weight(torch.randn(70, 300), scheme, dtype=torch.bfloat16, layout=Layout.CPU)


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A cache of its own, and nothing opened yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library_of.cache_clear()
    yield library.cache_folder()
    library.library_of.cache_clear()


def test_a_library_is_compiled_once(compiled, anew, monkeypatch):
    """The compiler, which has run for this machine's own library, is a copy of that one here."""
    level = library.best_level()

    def copied(command, openmp, path):
        for suffix in (".so", ".sha256"):
            shutil.copy(compiled.with_suffix(suffix), path.with_suffix(suffix))

    monkeypatch.setattr(library, "_compile", copied)
    assert library.library_of(level) is not None
    (path,) = anew.glob("*.so")
    assert path.name == compiled.name and path.read_bytes() == compiled.read_bytes()
    made = path.stat().st_mtime_ns
    library.library_of.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.library_of(level) is not None
    assert path.stat().st_mtime_ns == made and len(list(anew.glob("*.so"))) == 1


@pytest.mark.parametrize("damage", ["cut short", "a byte changed", "no digest"])
def test_a_damaged_library_is_compiled_anew(anew, monkeypatch, damage):
    level = library.usable_levels()[0]
    made = []

    def copied(command, openmp, path):
        made.append(path)
        path.write_bytes(b"whole")
        path.with_suffix(".sha256").write_text(library.hashlib.sha256(b"whole").hexdigest())

    monkeypatch.setattr(library, "_compile", copied)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda *_, **__: object())
    library.library_of(level)
    (path,) = anew.glob("*.so")
    if damage == "no digest":
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes(b"who" if damage == "cut short" else b"whale")
    library.library_of.cache_clear()
    library.library_of(level)
    assert len(made) == 2 and path.read_bytes() == b"whole"


def test_without_a_compiler_torch_serves_and_one_line_says_so(anew, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        assert library.library() is None
        assert library.library() is None
    (line,) = caplog.messages
    assert "no C++ compiler" in line and "torch" in line
    scheme = WeightScheme(bits=4, clip_search=False)
    for dtype in (torch.bfloat16, torch.float32):
        assert best_layout(torch.device("cpu"), dtype) is Layout.ROWS
        q = quantize_weight(torch.randn(64, 256), scheme, dtype=dtype)
        x = torch.randn(3, 256).to(dtype)
        assert relative_error(q.matmul(x), linear_reference(x, q, exact=True)) < 4e-3


def test_a_weight_packed_for_the_library_runs_without_it(packed, anew, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    x = torch.randn(3, 300).bfloat16()
    assert library.library() is None
    assert relative_error(packed.matmul(x), linear_reference(x, packed, exact=True)) < 4e-3


@pytest.mark.parametrize("cause", [errno.EROFS, errno.ENOENT, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_gives_way_to_the_folder_for_temporary_files(
    anew, monkeypatch, tmp_path, caplog, cause
):
    """A read-only root of a container, a HOME that is not there: not torch's operators."""
    opened, temporary = [], tmp_path / "temporary"
    make = Path.mkdir

    def mkdir(path, *args, **kwargs):
        if path == anew or temporary.name == "none":
            raise OSError(cause, os.strerror(cause), str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(library, "_compile", lambda command, openmp, path: None)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path, **_: opened.append(path) or "made")
    assert library.library_of(library.usable_levels()[0]) == "made"
    assert Path(opened[-1]).is_relative_to(temporary)
    temporary = tmp_path / "none"
    library.library_of.cache_clear()
    assert library.library_of(library.usable_levels()[0]) is None
    (line,) = caplog.messages
    assert os.strerror(cause) in line and "XDG_CACHE_HOME" in line and "several times" in line


def test_a_compiler_that_fails_is_said(anew, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(broken))
    assert library.library() is None
    (line,) = caplog.messages
    assert "out of order" in line and "torch" in line
    assert not list(anew.glob("*.so"))


@pytest.mark.parametrize(
    ("capability", "dtype", "layout"),
    [
        ((7, 5), torch.float16, Layout.FRAGMENT),
        ((7, 5), torch.bfloat16, Layout.ROWS),
        ((8, 0), torch.bfloat16, Layout.FRAGMENT),
        ((8, 0), torch.float32, Layout.ROWS),
    ],
)
def test_small_groups_lie_in_rows_where_no_kernel_reads_words(
    monkeypatch, capability, dtype, layout
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda")
    assert best_layout(device, dtype, 32) is layout
    assert best_layout(device, dtype, 128) is Layout.FRAGMENT


def test_what_a_killed_compilation_has_left_is_removed(tmp_path, monkeypatch, caplog):
    """Its own folder, and any of long ago; another library's may be compiled meanwhile."""

    def compiled(command, **_):
        Path(command[command.index("-o") + 1]).write_bytes(b"made")

    monkeypatch.setattr(library.subprocess, "run", compiled)
    for name in ("mark-left", "other-now", "tmplong_ago"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "products.cpp.o").write_bytes(b"half")
    os.utime(tmp_path / "tmplong_ago", (0, 0))
    library._compile(["g++"], None, tmp_path / "mark.so")
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["mark.sha256", "mark.so", "other-now"]
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "compiling kernels for this CPU, once" in said.getMessage()


def test_a_compiler_ends_with_the_process_that_runs_it(tmp_path):
    """What g++ starts (cc1plus) hears of no signal, and goes on for a minute."""
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\nsleep 600 & echo $! >> {tmp_path}/started\nwait\n")
    compiler.chmod(0o755)
    work = "from pathlib import Path; from llmpq.kernels.native import library; import sys\n"
    work += "library._compile([sys.argv[1]], None, Path(sys.argv[2]))"
    words = [sys.executable, "-c", work, str(compiler), str(tmp_path / "mark.so")]
    compiling = subprocess.Popen(words)
    started = tmp_path / "started"
    until(lambda: started.exists() and len(started.read_text().split()) == len(library._SOURCES))
    compiling.kill()
    compiling.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started.read_text().split()))


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)
