"""Which kernel multiplies a shape, and how: measured tables (`tuned/*.json`), else a default.

Knows no launch: gemm.py makes that of a `Plan`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from llmpq.kernels.formats import BLOCK_ROWS

GLUON_CAPABILITY = (9, 0)
"""The compute capability that `gluon_kernel` is written for."""

GLUON_ROWS = 65
"""Fewest rows of x that it takes where nothing was measured."""

TENSOR_CORE_CAPABILITY = (8, 0)
"""Oldest compute capability for which Triton emits tensor-core code."""

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 320, *range(384, 2048, 128), 2048, 4096)
"""Tuned entries and plans are kept per bucket: the least one that is >= M.

From 256 rows on they follow the tiles of x (320 are two of 160); where one was not measured, the
next one up to a power of two serves.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to compute a product; `kernel` is "rows", "tile", "gluon" or "dense".

    "dense" is dequantise, then cuBLAS.
    """

    kernel: str
    blocks: int = 1
    """16-row blocks of w a warp holds (BH)."""
    warps: int = 4
    depth: int = 2
    """k-groups of w in flight in registers."""
    x_depth: int = 2
    """rows: k-groups of x in flight."""
    bm: int = 16
    """tile, gluon: rows of x a program multiplies; gluon: two powers of two at most, as in 160."""
    stages: int = 1
    """tile: cp.async stages; 1 keeps weights in registers instead. gluon: slots of the x ring."""
    split: int = 1
    """tile: programs that share one tile's K."""
    scale_w: bool = False
    """tile: scale the operand instead of the accumulator."""
    registers: int | None = None
    """tile, gluon: registers of a thread at most; None leaves it to the launch."""
    cut: int = 0
    """gluon: last waves of tiles whose K is shared out evenly, the unfinished one first."""
    programs: int = 0
    """gluon: programs at most; 0: one a multiprocessor."""
    warpgroups: int = 2
    """gluon: warpgroups of 64 * blocks rows of w: 2 or 3."""
    asker: bool = False
    """gluon: a warp of its own asks for x, not the first warpgroup."""

    def __post_init__(self) -> None:
        # Triton 3.6 overlaps the next step's operand with wgmma still reading the last one's
        # registers when a pipelined loop feeds it from arithmetic: wrong sums (H200).
        if self.scale_w and self.stages > 1:
            raise ValueError("scale_w needs stages = 1: pipelined loops of it compute wrong sums")
        if self.asker and (self.warpgroups != 2 or self.blocks * self.bm > 128):
            raise ValueError(
                f"asker: got {self.warpgroups} warpgroups with tiles of {self.blocks} x {self.bm}, "
                "expected 2 and at most 128: with its warp, a thread has 168 registers"
            )
        rest = self.bm - (1 << self.bm.bit_length() - 1)
        if rest and (self.kernel != "gluon" or self.blocks > 1 or rest < 8 or rest & (rest - 1)):
            raise ValueError(
                f"bm: got {self.bm} with {self.kernel} and {self.blocks} blocks, expected a power "
                "of two or, gluon with one block, the sum of two from 8 on"
            )


DENSE = Config(kernel="dense")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decided product: the configuration and the launch it makes."""

    config: Config
    pdl: bool
    kwidth4: bool
    interpret: bool


def bucket(rows: int) -> int | None:
    """Return the least of `M_BUCKETS` that holds `rows`, or None above all."""
    return next((m for m in M_BUCKETS if rows <= m), None)


def default_config(bits: int, n: int, k: int, rows: int, *, multiprocessors: int) -> Config:
    """Return a sane configuration for shapes and GPUs that nobody tuned."""
    groups = -(-k // 128)
    if rows <= 2:
        many = n // BLOCK_ROWS >= 2.5 * multiprocessors
        return Config(kernel="rows", warps=4 if many else 8, depth=4 if bits == 8 else 6)
    if rows > 256:
        return DENSE
    bm = max(16, min(128, 1 << (rows - 1).bit_length()))
    tiles = -(-n // 128) * -(-rows // bm)
    split = max(1, min(groups // 2, 2 * multiprocessors // tiles)) if rows <= bm else 1
    if rows > 32:
        return Config(kernel="tile", warps=8, bm=bm, stages=3, split=split)
    return Config(kernel="tile", warps=8, bm=bm, depth=2 if groups % 2 == 0 else 1, split=split)


@dataclass(frozen=True)
class _Key:
    """What a tuned entry was measured for; entries without a form were measured in float16,
    symmetric, and serve the other forms too where these have none."""

    gpu: str
    bits: int
    n: int
    k: int
    m: int
    form: str | None = None


def form_name(dtype: torch.dtype, symmetric: bool) -> str:
    """Return how entries name a kind of weight other than float16, symmetric: "bf16 zeros"."""
    return ("bf16" if dtype == torch.bfloat16 else "fp16") + ("" if symmetric else " zeros")


@functools.cache
def _tuned() -> dict[_Key, Config]:
    """What was measured, to the configuration that was fastest."""
    found = {}
    for path in sorted((Path(__file__).parent / "tuned").glob("*.json")):
        table = json.loads(path.read_text())
        for e in table["entries"]:
            key = _Key(table["gpu"], e["bits"], e["n"], e["k"], e["m"], e.get("form"))
            found[key] = Config(**e["config"])
    return found


def tuned_shapes() -> list[tuple[int, int]]:
    """Return every tuned (N, K)."""
    return sorted({(key.n, key.k) for key in _tuned()})


@functools.cache
def plan(
    bits: int,
    n: int,
    k: int,
    rows: int,
    device: torch.device,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = True,
) -> Plan:
    """Decide how to multiply `rows` rows of x by a weight [n, k] on `device`."""
    if device.type != "cuda":
        raise ValueError(f"plan: got device {device}, expected a CUDA GPU")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if capability < TENSOR_CORE_CAPABILITY or n < BLOCK_ROWS:
        return make_plan(DENSE, capability)
    config = _measured(properties.name, bits, n, k, rows, form_name(dtype, symmetric))
    if config is None:
        count = properties.multi_processor_count
        config = _default(bits, n, k, rows, multiprocessors=count, capability=capability)
    return make_plan(config, capability)


def _default(
    bits: int, n: int, k: int, rows: int, *, multiprocessors: int, capability: tuple[int, int]
) -> Config:
    """What serves a shape that nobody measured."""
    from llmpq.kernels import gemm_gluon_plan  # builds on Config

    if capability == GLUON_CAPABILITY and rows >= GLUON_ROWS:
        return gemm_gluon_plan.prefill_config(bits, n, k, rows, multiprocessors=multiprocessors)
    return default_config(bits, n, k, rows, multiprocessors=multiprocessors)


def _measured(gpu: str, bits: int, n: int, k: int, rows: int, form: str) -> Config | None:
    """The nearest measurement: bits and forms without their own use that of 4 bits, float16."""
    from llmpq.kernels import gemm_gluon_plan  # builds on Config

    own = bucket(rows) or M_BUCKETS[-1]
    for m in (m for m in M_BUCKETS if own <= m <= 1 << (own - 1).bit_length()):
        for b, f in ((bits, form), (bits, None), (4, form), (4, None)):
            config = _tuned().get(_Key(gpu, b, n, k, m, f))
            if config is not None and gemm_gluon_plan.suits(config, bits):
                return config
    return None


def make_plan(config: Config, capability: tuple[int, int], *, interpret: bool = False) -> Plan:
    """Fit a configuration to a compute capability."""
    hopper_on = capability >= (9, 0)
    return Plan(
        config=config,
        pdl=hopper_on and not interpret,
        kwidth4=not hopper_on,
        interpret=interpret,
    )


def config_entry(config: Config) -> dict[str, object]:
    """Return the fields of a configuration that differ from the defaults, for `tuned/*.json`."""
    plain = asdict(Config(kernel=config.kernel))
    return {k: v for k, v in asdict(config).items() if k == "kernel" or v != plain[k]}
