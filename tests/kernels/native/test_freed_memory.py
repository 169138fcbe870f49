"""Large allocations stay mappings of their own, in large pages, however large ones were freed."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ctypes
from llmpq.kernels.native.freed_memory import give_back_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "a", "b", "c", "d", "e")]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = Info
if GIVES_BACK:
    give_back_freed_memory()
libc.free(libc.malloc(24 << 20))
before = libc.mallinfo2().hblkhd
held = libc.malloc(4 << 20)
print(libc.mallinfo2().hblkhd - before >= 4 << 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
@pytest.mark.parametrize("gives_back", [True, False])
def test_an_allocation_behind_a_larger_one_is_mapped(gives_back, monkeypatch):
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    code = CODE.replace("GIVES_BACK", str(gives_back))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(gives_back)


FAULTS = """
import resource
import torch
from llmpq.kernels.native.freed_memory import give_back_freed_memory

if GIVES_BACK:
    give_back_freed_memory()
torch.empty(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[madvise]" not in LARGE_PAGES.read_text(),
    reason="needs a Linux that gives large pages to those who ask",
)
@pytest.mark.parametrize("gives_back", [True, False])
def test_a_large_tensor_is_paged_in_by_large_pages(gives_back, monkeypatch):
    for name in ("THP_MEM_ALLOC_ENABLE", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    code = FAULTS.replace("GIVES_BACK", str(gives_back))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small = (64 << 20) // 4096
    assert int(done.stdout) < small // 4 if gives_back else int(done.stdout) >= small
