"""CUDA C++ to functions of a GPU: compiled by NVRTC, kept in the user's cache, then loaded.

    $XDG_CACHE_HOME/llmpq/cuda/<mark>.cubin      (~/.cache where it is not set)
                mark: a hash of the text, its options and NVRTC's version; the file begins with its
                content's SHA-256, so that a damaged one is compiled anew

torch brings NVRTC along wherever it runs on CUDA; where there is none, kernels written in CUDA C++
are not among the candidates (kernel_table.py, `needs`). Knows nothing of what kernels compute.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch

HOPPER = "sm_90a"
"""The architecture of texts with Hopper's own instructions."""
_DIGEST_BYTES = 32  # SHA-256
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_OVERLAPPING = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TENSOR_TYPES = {torch.int32: 3, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
Described = ctypes.Array[ctypes.c_char]
"""A CUtensorMap: how TMA finds boxes of a matrix."""
_SWIZZLE_128, _PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B

_noted: ContextVar[dict[str, Callable[[], object]] | None] = ContextVar("noted", default=None)
"""What `noting_missing` of this thread collects, by mark; None outside of it."""


def available() -> bool:
    """Whether there is an NVRTC."""
    return _nvrtc() is not None


@contextmanager
def noting_missing(found: dict[str, Callable[[], object]]) -> Iterator[None]:
    """Have this thread's launches compile nothing: what they miss goes to `found`, to be called.

    `found`: mark -> what compiles. Such a launch does nothing.
    """
    token = _noted.set(found)
    try:
        yield
    finally:
        _noted.reset(token)


def architecture(capability: tuple[int, int]) -> str:
    """Return what NVRTC calls a compute capability."""
    return "sm_{}{}".format(*capability)


@functools.cache
def compiles_for(capability: tuple[int, int]) -> bool:
    """Whether there is an NVRTC that knows a card (that of CUDA 13 knows none before Turing)."""
    nvrtc, count = _nvrtc(), ctypes.c_int()
    if nvrtc is None or nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
        return False
    known = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    return 10 * capability[0] + capability[1] in known


def integer(value: int) -> ctypes.c_int:
    """Return an int of CUDA as an argument of a kernel."""
    return ctypes.c_int(value)


def compile_text(text: str, architecture: str = HOPPER) -> bytes:
    """Return a text's machine code; raises `RuntimeError` with NVRTC's log."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise RuntimeError("no NVRTC (libnvrtc.so) here: install nvidia-cuda-nvrtc")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        given = _options(architecture)
        options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        failed = nvrtc.nvrtcCompileProgram(program, len(given), options)
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC could not compile a kernel: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        made = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, made)
        return made.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def machine_code(text: str, architecture: str = HOPPER) -> bytes:
    """Return a text's machine code, from the cache if it is there."""
    path = cache_folder() / f"{_mark(text, architecture)}.cubin"
    found = _whole(path)
    if found is None:
        found = compile_text(text, architecture)
        with suppress(OSError):  # a cache that cannot be written only costs time
            _keep(path, found)
    return found


def cache_folder() -> Path:
    """Return where machine code is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmpq" / "cuda"


class CudaFunction:
    """A kernel of one device, loaded when it is first needed there."""

    def __init__(self, name: str, text: str, shared_bytes: int, architecture: str = HOPPER) -> None:
        self._name, self._shared_bytes = name, shared_bytes
        self._text, self._architecture = text, architecture
        self._loaded: dict[int, ctypes.c_void_p] = {}

    def launch(
        self,
        device: torch.device,
        programs: int,
        threads: int,
        arguments: Sequence[ctypes.Array[ctypes.c_char] | ctypes.Structure | ctypes.c_int | int],
        *,
        overlapping: bool,
    ) -> None:
        """Launch on the device's current stream; an argument is an address or what it points to.

        `overlapping`: the kernel may start before the one before has ended (PDL).
        """
        function = self._of(device)
        if function is None:
            return
        values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(_address, values))
        attribute = _Attribute(_OVERLAPPING, 0, 1)
        stream = torch.cuda.current_stream(device).cuda_stream
        config = _Launch(programs, 1, 1, threads, 1, 1, self._shared_bytes, stream)
        config.attributes, config.count = ctypes.addressof(attribute), int(overlapping)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "launch")

    def _of(self, device: torch.device) -> ctypes.c_void_p | None:
        """Return the function of a device, loading it first; None where that was noted instead."""
        index = torch.cuda.current_device() if device.index is None else device.index
        found = self._loaded.get(index)
        if found is None:
            noted, mark = _noted.get(), _mark(self._text, self._architecture)
            if noted is not None and _whole(cache_folder() / f"{mark}.cubin") is None:
                noted[mark] = functools.partial(machine_code, self._text, self._architecture)
                return None
            with torch.cuda.device(index):
                torch.cuda.current_stream()  # a context
                found = self._load()
            self._loaded[index] = found
        return found

    def _load(self) -> ctypes.c_void_p:
        module, function, driver = ctypes.c_void_p(), ctypes.c_void_p(), _driver()
        code = machine_code(self._text, self._architecture)
        _check(driver.cuModuleLoadData(ctypes.byref(module), code), "load")
        name = self._name.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name), "find")
        set_attribute = driver.cuFuncSetAttribute
        _check(set_attribute(function, _MAX_DYNAMIC_SHARED, self._shared_bytes), "prepare")
        return function


@functools.lru_cache(maxsize=1 << 14)
def tensor_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], stride: int, box: tuple[int, int]
) -> Described:
    """Return how TMA moves boxes of a matrix; rows of 128 bytes of 16-bit numbers are swizzled.

    Strides are of elements; rows start on multiples of 16 bytes.
    """
    memory = (ctypes.c_char * 192)()
    found = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    made = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(found),
        _TENSOR_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(shape[1], shape[0]),
        (ctypes.c_uint64 * 1)(dtype.itemsize * stride),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128 if dtype.itemsize == 2 else 0,
        _PROMOTE_256,
        0,
    )
    _check(made, f"describe a matrix {shape} to")
    return found


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Launch(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def _address(
    value: ctypes.Array[ctypes.c_char] | ctypes.Structure | ctypes.c_int | ctypes.c_uint64,
) -> int:
    return ctypes.addressof(value)


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver could not {what} a kernel: error {result}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """Return NVRTC, that of torch's own packages before the system's."""
    packages = (glob.glob(f"{folder}/nvidia/*/lib/libnvrtc.so.*") for folder in sys.path if folder)
    found = [path for paths in packages for path in sorted(paths) if ".alt." not in path]
    for path in (*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            for part in glob.glob(str(Path(path).with_name("libnvrtc-builtins.so.*"))):
                ctypes.CDLL(part, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


@functools.cache
def _version() -> str:
    nvrtc, major, minor = _nvrtc(), ctypes.c_int(), ctypes.c_int()
    if nvrtc is not None:
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _options(architecture: str) -> tuple[str, ...]:
    return f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"


def _mark(text: str, architecture: str) -> str:
    parts = (*_options(architecture), _version(), text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _whole(path: Path) -> bytes | None:
    """Return the code of a cached file; None where there is none, or a damaged one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Write a cached file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(hashlib.sha256(code).digest() + code)
    Path(file.name).replace(path)
