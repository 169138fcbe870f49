"""The C++ of this folder as a library: compiled once a machine, kept in the user's cache, opened.

    ~/.cache/llmpq/native/<mark>.so      mark: sources, flags, compiler, OpenMP library
    ~/.cache/llmpq/native/<mark>.sha256  of the library: a damaged one is compiled anew, not opened

Where it cannot be compiled (no compiler, not x86-64, no AVX2) there is none, and one line says so;
torch's operators serve then. Threads are those of the OpenMP library that torch itself has loaded:
one pool, `torch.get_num_threads()` of it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from llmpq.kernels.kernel_table import CPU_LEVELS
from llmpq.kernels.native.file_lock import file_lock

_log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_SOURCES = (
    "packed_attention.cpp",
    "products.cpp",
    "attention.cpp",
    "layer.cpp",
    "recurrent.cpp",
    "fp8.cpp",
    "codebook.cpp",
)
"""The one that takes longest first."""
_COMPILERS = ("g++", "c++", "clang++")
_OPENMP = ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*")


_LONG_AGO_S = 3600.0
"""No compilation takes as long."""
OPTIMISED = "LLMPQ_NATIVE_OPTIMISED"
"""Environment variable, "-O3" where it is not set: "-O1" compiles in a third of the time, "-O0" in
a sixth, to the same values (`make test` does)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """Instructions to compile for."""

    name: str
    needs: frozenset[str]
    """Names in /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Flags of the compiler."""


def _levels() -> tuple[Level, ...]:
    """Return the levels, the best last; each has all that the one before has."""
    steps = (
        ("avx2", ("avx2", "fma", "f16c"), ("avx2", "fma", "f16c")),
        (
            "avx512",
            ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
            ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
        ),
        ("avx512_vnni", ("avx512_vnni",), ("avx512vnni",)),
        ("avx512_bf16", ("avx512_bf16",), ("avx512bf16",)),
        (
            "amx_int8",
            ("amx_tile", "amx_int8", "amx_bf16"),
            ("amx-tile", "amx-int8", "amx-bf16"),
        ),
    )
    levels: list[Level] = []
    needs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    for name, more, options in steps:
        needs, flags = needs + more, (*flags, *(f"-m{option}" for option in options))
        levels.append(Level(name=name, needs=frozenset(needs), flags=flags))
    return tuple(levels)


DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What vectors.h calls them."""

LEVELS = {level.name: level for level in _levels()}


def usable_levels() -> list[Level]:
    """Return the levels that this machine's CPU has, the best last."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith("flags")), "")
    present = set(flags.partition(":")[2].split())
    return [level for level in LEVELS.values() if level.needs <= present]


@functools.cache
def best_level() -> Level | None:
    """Return the widest level this CPU has; None where we have no code for it."""
    levels = usable_levels()
    return levels[-1] if levels else None


def library() -> ctypes.CDLL | None:
    """Return the library for this machine, compiled now if it never was; None without one."""
    level = best_level()
    return None if level is None else library_of(level)


@functools.cache
def library_of(level: Level) -> ctypes.CDLL | None:
    """Return the library of one level."""
    compiler = _compiler()
    if compiler is None:
        _log.warning(
            "no C++ compiler (%s) here: products on this CPU run on torch's operators, tens of "
            "times slower. Install one, g++ say, for llmpq's own.",
            ", ".join(_COMPILERS),
        )
        return None
    try:
        return _opened(level, compiler)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "llmpq's own products for this CPU could not be compiled (%s): torch's operators "
            "serve, several times slower",
            _reason(error),
        )
        return None


def expected_level() -> str:
    """Return what products of this CPU are compiled for, or will be: one of `CPU_LEVELS`."""
    level = best_level()
    return CPU_LEVELS[0] if level is None or _compiler() is None else level.name


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def call(name: str, *arguments: int) -> None:
    """Call a function of the library; addresses and sizes are 64 bits wide each."""
    found = library()
    assert found is not None
    function = getattr(found, name)
    if function.argtypes is None:
        function.argtypes = [ctypes.c_size_t] * len(arguments)
        function.restype = None
    function(*arguments)


def address(tensor: torch.Tensor | None) -> int:
    """Return where a tensor lies, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in str(error.stderr).splitlines() if line.strip()]
        return lines[0] if lines else f"{error.cmd[0]} ended with code {error.returncode}"
    return str(error)


def _opened(level: Level, compiler: str) -> ctypes.CDLL:
    # Without contraction, search.h rounds where torch does.
    command = [
        compiler,
        _optimised(),
        "-std=c++17",
        "-ffp-contract=off",
        "-fPIC",
        "-fopenmp",
        *level.flags,
    ]
    openmp = _openmp_library()
    mark = _mark(command, openmp)
    refused = OSError("they belong to another user")  # whose code is not run
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"llmpq-native-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():
                continue
            with file_lock(folder / f"{mark}.lock"):
                path = folder / f"{mark}.so"
                if not _whole(path):
                    _compile(command, openmp, path)
        except OSError as error:  # read-only, full, not there: the next one may do
            refused = error
            continue
        if openmp is not None:
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    raise OSError(f"no folder to keep it in: {refused}; XDG_CACHE_HOME names one")


def cache_folder() -> Path:
    """Return where compiled libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmpq" / "native"


def _optimised() -> str:
    """Return how far to optimise; `ValueError` names what the variable may be."""
    level = os.environ.get(OPTIMISED, "-O3")
    if level not in ("-O0", "-O1", "-O2", "-O3"):
        raise ValueError(f"{OPTIMISED}: got '{level}', expected -O0, -O1, -O2 or -O3; unset it")
    return level


def _openmp_library() -> Path | None:
    """Return the OpenMP library that torch brings along; None where it uses the system's."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for pattern in _OPENMP:
            found = sorted(folder.glob(pattern))
            if found:
                return found[0]
    return None


def _mark(command: list[str], openmp: Path | None) -> str:
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    hashed = hashlib.sha256("\0".join([*command, version, str(openmp)]).encode())
    for path in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp")]):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:24]


def _whole(path: Path) -> bool:
    """Whether the library is there, byte for byte as it was compiled."""
    try:
        expected = path.with_suffix(".sha256").read_text()
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _remove_left(path: Path) -> None:
    """Remove what a compilation that was killed has left: this library's, and any of long ago."""
    for folder in path.parent.iterdir():
        if folder.is_dir():
            own = folder.name.startswith(f"{path.stem}-")  # whose lock is held here
            if own or time.time() - folder.stat().st_mtime > _LONG_AGO_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _process_group() -> Iterator[int]:
    """Yield a group for processes that end with the block, and with this process however it ends.

    A compiler's own processes hear of neither: a shell of their group reads a pipe, which ends.
    """
    watch = subprocess.Popen(
        ["sh", "-c", "read _; kill -KILL 0"], stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield watch.pid
    finally:
        os.killpg(watch.pid, signal.SIGKILL)
        watch.communicate()


def _compile(command: list[str], openmp: Path | None, path: Path) -> None:
    _log.warning("compiling kernels for this CPU, once; this takes about a minute (%s)", path)
    _remove_left(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as folder:
        parts = [Path(folder) / f"{source}.o" for source in _SOURCES]
        made = Path(folder) / "products.so"
        with ThreadPoolExecutor(len(_SOURCES)) as pool, _process_group() as group:
            run = functools.partial(
                subprocess.run,
                capture_output=True,
                text=True,
                check=True,
                timeout=280,
                process_group=group,
            )
            steps = [
                [*command, "-c", str(_HERE / source), "-o", str(part)]
                for source, part in zip(_SOURCES, parts, strict=True)
            ]
            list(pool.map(run, steps))
            # Linked without -fopenmp, which would bring a second OpenMP library.
            link = ["-fopenmp"] if openmp is None else [str(openmp)]
            run([command[0], "-shared", *map(str, parts), *link, "-o", str(made)])
        digest = Path(folder) / "digest"
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        digest.replace(path.with_suffix(".sha256"))
        made.replace(path)
