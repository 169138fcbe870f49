"""What one kind of device is: its memory, its peak rates and where the figures come from.

The table is `clusters/gpus.yaml`; a cluster may also describe a device inline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

import yaml
from pydantic import Field

from llmpq.errors import unknown_name
from llmpq.file_form import FileForm
from llmpq.units import Size


class DeviceSpec(FileForm):
    """Memory and peak rates of one device kind; a rate it has no units for is None."""

    memory: Size
    """Memory the driver reports as total."""
    mem_gbps: float = Field(gt=0)
    """Memory bandwidth, 1e9 bytes per second."""
    fp16_tflops: float = Field(gt=0)
    """Dense 16-bit matrix rate (tensor cores where present), 1e12 per second."""
    fp32_tflops: float | None = None
    int8_tops: float | None = None
    fp8_tflops: float | None = None
    int4_tops: float | None = None
    capability: str | None = None
    """CUDA compute capability such as `8.0`; None where it is not an NVIDIA GPU."""
    context: Size = 0
    """Memory the framework takes before the first tensor (CUDA context, libraries)."""
    matmul_efficiency: float = Field(default=0.55, gt=0, le=1)
    """Share of the peak rate that large matrix products reach; used by the roofline estimate."""
    memory_efficiency: float = Field(default=0.7, gt=0, le=1)
    """Share of the bandwidth that reading weights reaches; used by the roofline estimate."""
    sms: int | None = Field(default=None, gt=0)
    """Streaming multiprocessors (compute units on AMD); an emulated share is scaled by it."""
    aliases: tuple[str, ...] = ()
    """Other names of the same card, as drivers, clouds and papers spell it."""
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether stages of this kind run on the host's cores."""
        return self.capability is None and "cpu" in self.aliases

    @property
    def unpacks_weights(self) -> bool:
        """Whether long prompts meet a packed weight as one dense matrix (not on Hopper)."""
        return self.capability != "9.0"


@lru_cache(maxsize=1)
def device_specs() -> Mapping[str, DeviceSpec]:
    """Return the shipped table, by canonical name."""
    text = resources.files("llmpq.clusters").joinpath("gpus.yaml").read_text()
    table = yaml.safe_load(text)
    return {k: DeviceSpec.parse_data(v, where=f"gpus.yaml: {k}") for k, v in table.items()}


def canonical_kind(name: str) -> str:
    """Return the table's name of a device kind; `ValueError` offers the nearest one."""
    by_name: dict[str, str] = {}
    for kind, spec in device_specs().items():
        for spelling in (kind, *spec.aliases):
            by_name[_key(spelling)] = kind
    if _key(name) not in by_name:
        spellings = [k for k in device_specs()]
        spellings += [a for spec in device_specs().values() for a in spec.aliases]
        raise unknown_name("device", name, spellings)
    return by_name[_key(name)]


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
