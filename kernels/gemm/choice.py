"""How words are multiplied: of the kernels that the table lets compete, the quickest.

    `plan`          a shape: what `llmpq-profile tune` left in the user's cache directory, else
                    `tuned/*.json` (a search on the GPU found better than the model expects), else
                    what the model of the machine expects to be quickest (ranking/predict.py)
    `for_form`      of a weight with more scales or of a codebook: the tiles that it has registers
                    for, another kernel where the table (kernel_table.py) has not that one
    `choose_plan`   of x and a weight: both, and what memory x and y lie in

Knows no launch: linear_gpu.py makes that of a `ProductPlan`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from llmpq.kernels.formats.packed_words import PackedWords
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.cuda import ring_launch
from llmpq.kernels.gemm.ranking.candidates import candidates, ranked_kernels
from llmpq.kernels.gemm.ranking.config import DENSE, Config, ProductPlan, make_plan
from llmpq.kernels.gemm.ranking.learned import learned
from llmpq.kernels.gemm.ranking.machine import Machine, machine_of
from llmpq.kernels.gemm.ranking.predict import Product, expected_us
from llmpq.kernels.gemm.ranking.wgmma_plan import aligned, suits, tile_rows
from llmpq.kernels.kernel_table import Device, Kernel, eligible
from llmpq.kernels.multiprocessors import device_of, multiprocessors

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 320, *range(384, 2048, 128), 2048, 4096)
"""Tuned entries are kept per bucket: the least one that is >= M."""

NEAR = 0.875
"""Of a bucket of more than 16 rows: fewer take what the model says for their number."""

OWN_FORM_ROWS = 1024
"""Rows above which an entry serves its own form of weights alone.

H200, 4 bits in bfloat16 with zeros, 4096 x 28672 (K x N): by float16's entry and by the best of the
model's, 1,500 rows 510 and 462 us, 2,048 rows 690 and 597."""


def bucket(rows: int) -> int | None:
    """Return the least of `M_BUCKETS` that holds `rows`, or None above all."""
    return next((m for m in M_BUCKETS if rows <= m), None)


def rounded_rows(rows: int) -> int:
    """Return the number of rows that a plan is made for: plans are kept, and not for every one."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 16 if rows <= 512 else 32 if rows <= 2048 else 128
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
    *,
    words: bool = True,
    rings: bool = True,
) -> ProductPlan:
    """Decide how to multiply `rows` rows of x by a weight [n, k] on `device`.

    `words`: whether a row or a k-group of it has one scale; `rings`: whether `ring_gemv` reads x.
    """
    if device.type != "cuda":
        raise ValueError(f"plan: got device {device}, expected a CUDA GPU")
    machine = machine_of(device)
    product = Product(bits, n, k, rows, form_name(dtype, symmetric))
    if n < BLOCK_ROWS or not ranked_kernels(product, machine):
        return make_plan(DENSE, machine.capability)
    config = _tried.get(product) or learned(device).get(product)
    config = config or _measured(machine, product)
    served = words and machine.nvrtc
    lacks = {Kernel.WGMMA_ROWS: not served, Kernel.RING_GEMV: not (served and rings)}
    if config is None or lacks.get(Kernel(config.kernel), False):
        config = choose(product, machine, words=words, rings=rings)
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


def choose(product: Product, machine: Machine, *, words: bool = True, rings: bool = True) -> Config:
    """Return the configuration that the model of the machine expects to be the fastest.

    `words`, `rings`: as of `candidates`.
    """
    found = candidates(product, machine, words=words, rings=rings)
    return min(found, key=lambda config: expected_us(config, product, machine), default=DENSE)


def _measured(machine: Machine, product: Product) -> Config | None:
    """The nearest measurement; 3 bits and forms without their own use those of 4 bits, float16.

    Of many rows they do not.
    """
    gpu = (*machine.capability, machine.multiprocessors)
    own, rows = bucket(product.rows), product.rows
    if own is None or (own > 16 and rows < NEAR * own):
        return None
    if rows > OWN_FORM_ROWS and (product.bits == 3 or product.form != "fp16"):
        config = _tuned().get(_Key(gpu, product.bits, product.n, product.k, own, product.form))
        return config if config is not None and suits(config, product.bits) else None
    kinds = ((product.bits, product.form), (product.bits, None))
    for b, f in (*kinds, (4, product.form), (4, None)) if product.bits == 3 else kinds:
        config = _tuned().get(_Key(gpu, b, product.n, product.k, own, f))
        if config is not None and suits(config, product.bits):
            return config
    return None


_BY_TMA = (Kernel.WGMMA_GEMM, Kernel.WGMMA_ROWS)

PROGRAMS = 3
"""Of a multiprocessor, of forms that Gluon's kernel lacks."""
LONG, LEAST_STEPS = 448, 40
"""Rows of x from which tiles of 256 are the quickest where a multiprocessor has so many k-groups
to do (H200: 28672 x 4096, 512 rows, MXFP4 155 us, by W4's plan 170; 4096 x 4096 33 and 25)."""
MOST_OF_HEAVY = 192
BROAD = Config(kernel="wgmma_gemm", bm=256, stages=5, cut=1)
NARROW = Config(kernel="wgmma_gemm", bm=128, stages=6, cut=1)


def for_form(plan: ProductPlan, q: PackedWords, rows: int, device: Device) -> ProductPlan:
    """Return the plan for a weight that has more scales than a k-group, or a codebook."""
    config, kernels = plan.config, eligible(q.kernel_form, device, rows)
    if config.scale_w:
        config = replace(config, scale_w=False)
    if config.piece_mib:
        config = BROAD  # timed of integers alone
    if config.kernel == Kernel.WGMMA_GEMM:
        if Kernel.WGMMA_GEMM in kernels:
            config = _wgmma(config, q, rows)
        else:
            config = _tile(q, rows) if Kernel.SPLITK_GEMM in kernels else DENSE
    elif config.kernel == Kernel.SPLITK_GEMM and Kernel.SPLITK_GEMM not in kernels:
        config = NARROW
    return replace(plan, config=config)


def choose_plan(x_MK: Tensor, q: PackedWords, residual_MN: Tensor | None) -> ProductPlan:
    """Decide how x, whose rows follow each other, is multiplied by a weight's words."""
    rows, k = x_MK.shape
    rings = ring_launch.serves(x_MK)
    make = partial(plan, q.bits, q.out_features, k, words=not q.form, rings=rings)
    chosen = make(rounded_rows(rows), x_MK.device, x_MK.dtype, q.symmetric)
    if q.form:
        if is_narrow(chosen, q):
            chosen = make(8, x_MK.device, x_MK.dtype, q.symmetric)
        chosen = for_form(chosen, q, rows, device_of(q.device))
    if chosen.config.kernel in _BY_TMA and not aligned(x_MK, q.out_features, residual_MN):
        return replace(chosen, config=DENSE)
    return chosen


def is_narrow(plan: ProductPlan, q: PackedWords) -> bool:
    """Whether programs of all of K are fewer than multiprocessors: tiles of 8 rows of x share K.

    H200, 2048 x 11008, one row and eight: MXFP4 12.2 and 7.8 us, IQ4 22.1 and 11.9.
    """
    programs = q.out_features // (BLOCK_ROWS * plan.config.blocks)
    return plan.config.kernel == "gemv" and programs < multiprocessors(q.device)


def _wgmma(config: Config, q: PackedWords, rows: int) -> Config:
    if q.bits == 4 and rows >= LONG and _steps(q, rows) >= LEAST_STEPS and not _is_heavy(q):
        return BROAD  # words are unpacked half as often
    if _is_heavy(q) and config.bm > MOST_OF_HEAVY:
        return NARROW
    return NARROW if config.blocks > 1 and q.form != "e2m1" else config


def _is_heavy(q: PackedWords) -> bool:
    """Whether scales and zeros of four parts leave no registers for tiles of 256 rows of x."""
    return not q.symmetric and q.group_size == 32


def _steps(q: PackedWords, rows: int) -> int:
    """Return the k-groups that a multiprocessor has to do in tiles of BROAD."""
    tiles = -(-rows // BROAD.bm) * -(-q.out_features // tile_rows(BROAD))
    return tiles * -(-q.in_features // GROUP) // multiprocessors(q.device)


def _tile(q: PackedWords, rows: int) -> Config:
    """Return tiles of words, their K shared out to fill the multiprocessors."""
    bm = 64 if rows <= 64 else 128
    tiles = -(-rows // bm) * -(-q.out_features // 64)
    split = PROGRAMS * multiprocessors(q.device) // tiles
    groups = -(-q.in_features // GROUP)
    return Config(kernel="splitk_gemm", bm=bm, stages=3, split=max(1, min(groups // 3, split)))
