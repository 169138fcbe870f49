"""Which kernel multiplies a shape, and how: the fastest by the model of the machine (predict.py).

Corrections go first, where a search on the GPU found better than the model expects: `tuned/*.json`,
for a compute capability and a number of multiprocessors, and what `llmpq-profile tune` left in the
user's cache directory. Knows no launch: linear_gpu.py makes that of a `ProductPlan`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from llmpq.kernels.formats.weight_layout import BLOCK_ROWS
from llmpq.kernels.gemm.config import DENSE, Config, ProductPlan, make_plan
from llmpq.kernels.gemm.gluon.gluon_plan import suits
from llmpq.kernels.gemm.ranking.candidates import candidates
from llmpq.kernels.gemm.ranking.learned import learned
from llmpq.kernels.gemm.ranking.machine import Machine, machine_of
from llmpq.kernels.gemm.ranking.predict import Product, expected_us

TENSOR_CORE_CAPABILITY = (8, 0)
"""Oldest compute capability for which Triton emits tensor-core code."""

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 320, *range(384, 2048, 128), 2048, 4096)
"""Tuned entries are kept per bucket: the least one that is >= M."""

NEAR = 0.875
"""Of a bucket of more than 16 rows: fewer take what the model says for their number."""


def bucket(rows: int) -> int | None:
    """Return the least of `M_BUCKETS` that holds `rows`, or None above all."""
    return next((m for m in M_BUCKETS if rows <= m), None)


def rounded_rows(rows: int) -> int:
    """Return the number of rows that a plan is made for: plans are kept, and not for every one."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 16 if rows <= 256 else 32 if rows <= 1024 else 128
    return -(-rows // step) * step


@dataclass(frozen=True)
class _Key:
    """What a tuned entry was measured for; entries without a form were measured in float16,
    symmetric, and serve the other forms too where these have none."""

    gpu: tuple[int, int, int]
    """Compute capability and multiprocessors."""
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
            gpu = (*table["capability"], table["multiprocessors"])
            key = _Key(gpu, e["bits"], e["n"], e["k"], e["m"], e.get("form"))
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
    machine = machine_of(device)
    if machine.capability < TENSOR_CORE_CAPABILITY or n < BLOCK_ROWS:
        return make_plan(DENSE, machine.capability)
    product = Product(bits, n, k, rows, form_name(dtype, symmetric))
    config = _tried.get(product) or learned(device).get(product)
    config = config or _measured(machine, product) or choose(product, machine)
    return make_plan(config, machine.capability)


_tried: dict[Product, Config] = {}


def run_as(product: Product, config: Config | None) -> None:
    """Have a product run so in this process, whatever was found before; None: as it would."""
    if config is None:
        _tried.pop(product, None)
    else:
        _tried[product] = config
    plan.cache_clear()


def read_again() -> None:
    """Forget what the cache directory held: it has changed."""
    learned.cache_clear()
    plan.cache_clear()


def choose(product: Product, machine: Machine) -> Config:
    """Return the configuration that the model of the machine expects to be the fastest."""
    found = candidates(product, machine)
    return min(found, key=lambda config: expected_us(config, product, machine), default=DENSE)


def _measured(machine: Machine, product: Product) -> Config | None:
    """The nearest measurement; 3 bits and forms without their own use those of 4 bits, float16."""
    gpu = (*machine.capability, machine.multiprocessors)
    own, rows = bucket(product.rows), product.rows
    if own is None or (own > 16 and rows < NEAR * own):
        return None
    kinds = ((product.bits, product.form), (product.bits, None))
    for b, f in (*kinds, (4, product.form), (4, None)) if product.bits == 3 else kinds:
        config = _tuned().get(_Key(gpu, b, product.n, product.k, own, f))
        if config is not None and suits(config, product.bits):
            return config
    return None
