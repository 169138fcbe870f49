"""A kind of device: its memory, its peak rates and where the figures come from.

The table is `clusters/gpus.yaml`; a cluster may also describe a device inline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pydantic import Field

from llmpq.devices.card_names import card_name, find_kind, nearest_kinds
from llmpq.errors import shortened
from llmpq.file_form import FileForm
from llmpq.shipped_table import shipped_table
from llmpq.units import Size, format_size

GIB = 2**30
OLDEST_BFLOAT16 = (8, 0)
"""Oldest CUDA compute capability with bfloat16."""
OLDEST_TENSOR_CORES = (8, 0)
"""Oldest whose tensor cores Triton drives (kernels/kernel_table.py)."""
PACKED_ROWS = (((7, 5), 64), ((7, 0), 16))
"""Of older ones, Turing and Volta: most rows of x that kernels read a packed weight for."""
MAX_RATE = 1e6
"""Bandwidths in GB/s and rates in 1e12 per second: beyond it a number is a slip."""


class DeviceSpec(FileForm):
    """Memory and peak rates of one device kind; a rate it has no units for is None."""

    memory: Size
    """Memory that programs see as the device's total."""
    memory_source: str = ""
    """Where `memory` was read."""
    reserve: Size = 0
    """Memory left free unless a cluster or `--reserve` says otherwise: of a screen, mostly."""
    host_share: float | None = Field(default=None, gt=0, le=1)
    """Share that the GPU may use of memory that is the host's, too; None: it has its own."""
    sold_with: tuple[str, ...] = ()
    """Sizes of the memory of machines with this device, where they differ: a plan must say one."""
    mem_gbps: float = Field(ge=1e-3, le=MAX_RATE)
    """Memory bandwidth, 1e9 bytes per second."""
    fp16_tflops: float = Field(ge=1e-6, le=MAX_RATE)
    """Dense 16-bit matrix rate (tensor cores where present), 1e12 per second."""
    fp32_tflops: float | None = Field(default=None, ge=1e-6, le=MAX_RATE)
    int8_tops: float | None = Field(default=None, ge=1e-6, le=MAX_RATE)
    fp8_tflops: float | None = Field(default=None, ge=1e-6, le=MAX_RATE)
    int4_tops: float | None = Field(default=None, ge=1e-6, le=MAX_RATE)
    capability: str | None = Field(default=None, pattern=r"^\d+\.\d+$")
    """CUDA compute capability such as `8.0`; None where it is not an NVIDIA GPU."""
    context: Size = 0
    """Memory the framework takes before the first tensor (CUDA context, libraries)."""
    matmul_efficiency: float = Field(default=0.55, ge=1e-6, le=1)
    """Share of the peak rate that large matrix products reach; used by the roofline estimate."""
    memory_efficiency: float = Field(default=0.7, ge=1e-6, le=1)
    """Share of the bandwidth that reading weights reaches; used by the roofline estimate."""
    sms: int | None = Field(default=None, gt=0, le=65536)
    """Streaming multiprocessors (compute units on AMD); an emulated share is scaled by it."""
    maker: str = "NVIDIA"
    """Of a GPU: NVIDIA, AMD, Intel or Apple."""
    export_only: str | None = None
    """The engine that runs a plan on the device (`llmpq-algo export --to`) where llmpq-dist does
    not; None: llmpq-dist runs it."""
    aliases: tuple[str, ...] = ()
    """Other names of the same card, as drivers, clouds and papers spell it."""
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether stages of this kind run on the host's cores."""
        return self.capability is None and "cpu" in self.aliases

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16: of NVIDIA's GPUs, those from Ampere on."""
        return self.capability is None or _version(self.capability) >= OLDEST_BFLOAT16

    @property
    def drives_tensor_cores(self) -> bool:
        """Whether Triton drives its tensor cores: of NVIDIA's GPUs, from Ampere on.

        On older ones experts run one by one, and attention multiplies in float32.
        """
        return self.capability is None or _version(self.capability) >= OLDEST_TENSOR_CORES

    @property
    def most_packed_rows(self) -> int | None:
        """Most rows of x that meet a weight of few bits as it is stored; more, and it is made dense
        for every product. None: any. As kernels/kernel_table.py has it."""
        if self.drives_tensor_cores:
            return None
        assert self.capability is not None, "the others drive them"
        version = _version(self.capability)
        return next((rows for oldest, rows in PACKED_ROWS if version >= oldest), 0)

    def default_reserve(self, memory_bytes: int) -> int:
        """Return the bytes of its memory that a plan leaves free by default."""
        shared = 0 if self.host_share is None else round(memory_bytes * (1 - self.host_share))
        return min(self.reserve + shared, memory_bytes // 2)

    def installed(self, memory_bytes: int) -> int:
        """Return the memory of a machine named by a size it is sold with: 64 GB are 64 GiB."""
        gigabytes, rest = divmod(memory_bytes, 10**9)
        sold = not rest and f"{gigabytes} GB" in self.sold_with
        return gigabytes << 30 if sold else memory_bytes

    @property
    def unpacks_weights(self) -> bool:
        """Whether long prompts meet a packed weight as one dense matrix (not on Hopper)."""
        return self.capability != "9.0"


def _version(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


@lru_cache(maxsize=1)
def device_specs() -> Mapping[str, DeviceSpec]:
    """Return the shipped table, by canonical name."""
    table = shipped_table("llmpq.clusters", "gpus.yaml")
    return {k: DeviceSpec.parse_data(v, where=f"gpus.yaml: {k}") for k, v in table.items()}


def canonical_kind(name: str, memory_bytes: int | None = None) -> str:
    """Return the table's name of a device kind; `ValueError` offers the nearest ones.

    `memory_bytes` is what a driver reports: it tells cards of one name apart (RTX 4060 Ti).
    """
    kind = known_kind(name, memory_bytes)
    if kind is None:
        raise ValueError(
            f"{unknown_card(name)}; describe a card that is not in the table by 'spec' in a "
            "cluster YAML: spec: {memory: ... GiB, mem_gbps: ..., fp16_tflops: ...}"
        )
    return kind


def known_kind(name: str, memory_bytes: int | None = None) -> str | None:
    """Return the table's name of a device kind, None where it has none of this name."""
    specs = device_specs()
    sizes = {kind: spec.memory / GIB for kind, spec in specs.items()}
    kind = name if name in specs else find_kind(name, _spellings(), sizes)
    if kind is None or memory_bytes is None:
        return kind
    alike = [other for other in siblings(kind) if not specs[other].is_cpu]
    return min([kind, *alike], key=lambda other: abs(specs[other].memory - memory_bytes))


def siblings(kind: str) -> tuple[str, ...]:
    """Return the other kinds that differ from one in their memory's size by name: A100-40GB."""
    own = {card_name(name).core for name in (kind, *device_specs()[kind].aliases)}
    return tuple(
        other
        for other, names in _spellings().items()
        if other != kind and own & {card_name(name).core for name in (other, *names)}
    )


def which_memory(kind: str) -> str:
    """Return that a machine with this device is sold with several sizes of memory."""
    *sizes, last = (size.removesuffix(" GB") for size in device_specs()[kind].sold_with)
    return f"a machine with {kind} has {', '.join(sizes)} or {last} GB of memory: say which"


def unknown_card(name: str) -> str:
    """Return what is wrong with a name that the table does not have, and the nearest names."""
    stated, shown = card_name(name).memory_gb, shortened(name)
    bare = None if stated is None else known_kind(card_name(name).core)
    if bare is not None:
        sizes = [format_size(device_specs()[k].memory) for k in (bare, *siblings(bare))]
        return f"unknown device '{shown}': the {bare} of the table has {' or '.join(sizes)}"
    makers = {kind: spec.maker for kind, spec in device_specs().items()}
    near = nearest_kinds(name, _spellings(), makers)
    hint = f"nearest: {', '.join(near)}" if near else "no name of the table is like it"
    return f"unknown device '{shown}': {hint} (all: llmpq-algo devices --known)"


def _spellings() -> Mapping[str, tuple[str, ...]]:
    return {kind: spec.aliases for kind, spec in device_specs().items()}
