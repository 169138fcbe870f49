"""The few driver calls torch does not offer: memory shared between processes, waits of a stream,
streams on some of a GPU's multiprocessors.

Addresses and streams are plain integers (`tensor.data_ptr()`, `stream.cuda_stream`). Everything but
`share` and `open` is enqueued on a stream and returns at once.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

HANDLE_BYTES = 64
SHARED_BYTES = HANDLE_BYTES + 8
"""What `share` returns: the driver's handle of an allocation and the tensor's place in it."""
_LAZY_PEER_ACCESS = 1
_MULTIPROCESSORS = 1
"""The kind of a device's resource."""
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1
"""What a green context is made with, and a stream of it."""
_GREATER_OR_EQUAL = 0


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


class _Resource(ctypes.Structure):
    """`CUdevResource`: its kind, then from byte 96 on what there is of it."""

    _fields_ = [
        ("kind", ctypes.c_uint),
        ("inside", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        ("more", ctypes.c_ubyte * 36),
        ("next", ctypes.c_void_p),
    ]


class CudaDriver:
    """The driver's library; a call that fails raises `RuntimeError` with the driver's words."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no CUDA driver here: {error}") from None

    def share(self, tensor: Tensor) -> bytes:
        """Return what another process of this host needs to `open` a tensor's memory."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        address = ctypes.c_uint64(tensor.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.data) + (tensor.data_ptr() - base.value).to_bytes(8, "little")

    def open(self, shared: bytes) -> int:
        """Return the address here of what another process shared; it may be on another GPU."""
        handle = _Handle.from_buffer_copy(shared[:HANDLE_BYTES])
        base = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        return base.value + int.from_bytes(shared[HANDLE_BYTES:], "little")

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between devices, or on one; the copy engines do it, no SM is taken."""
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream),
        )

    def write(self, address: int, value: int, stream: int) -> None:
        """Write a 32-bit number."""
        self._stream_value("cuStreamWriteValue32_v2", address, value, stream, 0)

    def wait(self, address: int, value: int, stream: int) -> None:
        """Hold a stream until the 32-bit number at an address has reached a value."""
        self._stream_value("cuStreamWaitValue32_v2", address, value, stream, _GREATER_OR_EQUAL)

    def stream_on(self, device: int, multiprocessors: int) -> tuple[int, int]:
        """Return a stream whose kernels run on some multiprocessors, and how many it got.

        The driver rounds them up to its own granularity (8 on Hopper). Stream and green context
        stay for as long as the process does.
        """
        number, found, part, rest = ctypes.c_int(), _Resource(), _Resource(), _Resource()
        parts, description = ctypes.c_uint(1), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        kind = ctypes.c_uint(_MULTIPROCESSORS)
        self._call("cuDeviceGetDevResource", number, ctypes.byref(found), kind)
        self._call(
            "cuDevSmResourceSplitByCount",
            ctypes.byref(part),
            ctypes.byref(parts),
            ctypes.byref(found),
            ctypes.byref(rest),
            ctypes.c_uint(0),
            ctypes.c_uint(multiprocessors),
        )
        one = ctypes.c_uint(1)
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(part), one)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        flags = ctypes.c_uint(_DEFAULT_STREAM)
        self._call("cuGreenCtxCreate", ctypes.byref(context), description, number, flags)
        flags = ctypes.c_uint(_NON_BLOCKING)
        self._call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, flags, ctypes.c_int(0))
        assert stream.value is not None
        return stream.value, int(part.count)

    def _stream_value(self, name: str, address: int, value: int, stream: int, flags: int) -> None:
        self._call(
            name,
            ctypes.c_void_p(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value & 0xFFFFFFFF),
            ctypes.c_uint(flags),
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"the CUDA driver refused {name}: {words} (error {code})")
