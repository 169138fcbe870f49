"""Which kernel multiplies a shape, and how: measured tables (`tuned/*.json`), else a default.

Knows no launch: linear_gpu.py makes that of a `ProductPlan`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.config import DENSE, Config, ProductPlan, make_plan
from llmpq.kernels.gemm.gluon_plan import prefill_config, suits

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
) -> ProductPlan:
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
    if capability == GLUON_CAPABILITY and rows >= GLUON_ROWS:
        return prefill_config(bits, n, k, rows, multiprocessors=multiprocessors)
    return default_config(bits, n, k, rows, multiprocessors=multiprocessors)


def _measured(gpu: str, bits: int, n: int, k: int, rows: int, form: str) -> Config | None:
    """The nearest measurement: bits and forms without their own use that of 4 bits, float16."""
    own = bucket(rows) or M_BUCKETS[-1]
    for m in (m for m in M_BUCKETS if own <= m <= 1 << (own - 1).bit_length()):
        for b, f in ((bits, form), (bits, None), (4, form), (4, None)):
            config = _tuned().get(_Key(gpu, b, n, k, m, f))
            if config is not None and suits(config, bits):
                return config
    return None
