"""A GPU in the model that ranks kernels: counts and rates, read from the driver once.

Rates are those a product reaches, not those of a data sheet: of the memory's 4.81 TB/s an H200's
products read 4.0. Times measured on the reference machine (`predict.py`) are carried over by clock
and by what a multiprocessor's tensor cores do in a clock.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from llmpq.kernels import nvrtc

REACHED = 0.83
"""Share of the memory's rate on the data sheet that products reach on an H200."""

FLOPS_A_CLOCK = {
    (8, 0): 2048,
    (8, 6): 512,
    (8, 7): 1024,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}
"""Operations of a multiprocessor's tensor cores in a clock, by capability: 16-bit inputs, float32
sums. 8.6 and 8.9 are those of consumer cards, whose tensor cores halve their rate for such sums."""

_BANDWIDTH = {8: 0.6e12, 9: 3.3e12, 10: 7e12, 12: 0.9e12}  # where the driver does not say


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU's attributes; the defaults are those of the reference machine, an H200."""

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    shared_block: int = 232_448
    """Shared memory of a program at most."""
    shared_all: int = 233_472
    """Of a multiprocessor."""
    registers: int = 65_536
    """Of a multiprocessor."""
    l2_bytes: int = 62_914_560
    bandwidth: float = 4.0e12
    """Bytes a second that products read."""
    clock_hz: float = 1.98e9
    nvrtc: bool = True
    """Whether kernels in CUDA C++ can be compiled."""

    @property
    def flops_a_clock(self) -> int:
        """Operations of a multiprocessor's tensor cores in a clock."""
        known = FLOPS_A_CLOCK.get(self.capability)
        return known or FLOPS_A_CLOCK[max(c for c in FLOPS_A_CLOCK if c <= self.capability)]


REFERENCE = Machine()


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Return the attributes of a CUDA device."""
    p = torch.cuda.get_device_properties(device)
    clock_khz, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    bandwidth = 2e3 * clock_khz * width / 8 or _BANDWIDTH[min(max(p.major, 8), 12)]
    return Machine(
        capability=(p.major, p.minor),
        multiprocessors=p.multi_processor_count,
        shared_block=getattr(p, "shared_memory_per_block_optin", 101_376),
        shared_all=getattr(p, "shared_memory_per_multiprocessor", 102_400),
        registers=getattr(p, "regs_per_multiprocessor", 65_536),
        l2_bytes=getattr(p, "L2_cache_size", 4 << 20),
        bandwidth=bandwidth * REACHED,
        clock_hz=1e3 * (getattr(p, "clock_rate", 0) or 1_700_000),
        nvrtc=nvrtc.available(),
    )
