"""Configurations that the model of the machine chooses from.

The forms are those that between them were within 0.2 % (mean) of the fastest of all, in timings of
every configuration on an H200 (benchmarks/gemm_search.py): more would only be more to be wrong
about, and to compile. Two are timed for bfloat16 with zeros alone, where they are the fastest for
17 to 32 rows. Each fits the machine's shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmpq.kernels.gemm.config import DENSE, Config
from llmpq.kernels.gemm.gluon.gluon_plan import schedule, shared_bytes, suits, tiles_of
from llmpq.kernels.gemm.ranking.machine import Machine
from llmpq.kernels.gemm.ranking.predict import Product, resident, step_time

FEW_ROWS = 8
"""Most rows of x that `gemv_kernel` multiplies."""
FEW_ROWS_OF = {"bf16 zeros": 2}
"""The same of 4-bit weights whose tiles have times of their own: the few rows' kernel, which has
float16's, would be expected too fast (timed in layers, H100)."""
TILE_ROWS = 256
"""Most rows of x for `splitk_gemm_kernel`: past them each tile of w is unpacked many times."""
GLUON_FROM = 33
"""Fewest rows of x for `wgmma_gemm_kernel`."""
GLUON_CAPABILITY = (9, 0)
"""The compute capability that it is written for."""
MOST_TILES = 24
"""Of `wgmma_gemm_kernel` a program: past them the largest tiles are the fastest."""

ROWS_FORMS = {bits: [Config(kernel="gemv", warps=w, depth=d) for w, d in forms] for bits, forms in (
    (4, ((4, 4), (4, 6), (4, 12), (8, 4))),
    (8, ((4, 2), (4, 4), (4, 6), (8, 2), (8, 4))),
)}  # fmt: skip
TILE_FORMS = tuple(
    Config(
        kernel="splitk_gemm", warps=warps, bm=bm, depth=depth, stages=stages, registers=registers
    )
    for warps, bm, depth, stages, registers in (
        (4, 16, 1, 1, None),
        (4, 16, 2, 1, None),
        (8, 16, 2, 1, 128),
        (4, 32, 1, 1, None),
        (4, 32, 2, 1, None),
        (4, 32, 2, 3, None),
        (4, 32, 2, 4, None),
        (4, 32, 2, 1, 128),
        (4, 64, 1, 1, None),
        (8, 64, 1, 1, 128),
        (4, 64, 2, 3, None),
        (8, 64, 2, 4, None),
        (4, 128, 2, 3, None),
    )
)
GLUON_FORMS = (
    Config(kernel="wgmma_gemm", bm=64, stages=8),
    Config(kernel="wgmma_gemm", bm=64, stages=8, warpgroups=3),
    Config(kernel="wgmma_gemm", bm=96, stages=7),
    Config(kernel="wgmma_gemm", bm=128, stages=6, asker=True),
    Config(kernel="wgmma_gemm", bm=128, stages=6),
    Config(kernel="wgmma_gemm", bm=128, stages=5, warpgroups=3),
    Config(kernel="wgmma_gemm", bm=160, stages=8),
    Config(kernel="wgmma_gemm", bm=192, stages=7),
    Config(kernel="wgmma_gemm", bm=256, stages=5),
)


def candidates(product: Product, machine: Machine) -> list[Config]:
    """Return every configuration that may serve a product on a machine."""
    found: list[Config] = []
    rows = product.rows
    few = FEW_ROWS_OF.get(product.form, FEW_ROWS) if product.bits < 8 else FEW_ROWS
    if rows <= few:
        found += ROWS_FORMS[8 if product.bits == 8 else 4]
    if rows <= TILE_ROWS:
        found += tile_candidates(product, machine)
    if machine.capability == GLUON_CAPABILITY:
        if rows >= GLUON_FROM:
            found += gluon_candidates(product, machine)
    elif rows > FEW_ROWS:
        found.append(DENSE)
    return found


def tile_candidates(product: Product, machine: Machine) -> Iterator[Config]:
    """Yield tiles whose K is split so that one or two waves of programs fill the machine."""
    rows = product.rows
    for form in TILE_FORMS:
        if (form.bm > 16 and form.bm >= 2 * rows) or (form.bm < 64 and rows > 4 * form.bm):
            continue
        time = step_time(form, product.bits, product.form)
        if time is None:
            continue
        residents = resident(form, product, machine, time.of(product.form))
        if residents == 0:
            continue
        slots = residents * machine.multiprocessors
        tiles = -(-rows // form.bm) * -(-product.n // (16 * form.warps))
        even = {1, slots // tiles, slots // tiles // 2, 2 * slots // tiles}
        even |= {machine.multiprocessors * i // tiles for i in range(1, residents)}
        for split in sorted(even):
            if 1 <= split <= max(1, min(32, product.groups // 4)):
                yield replace(form, split=split)


def gluon_candidates(product: Product, machine: Machine) -> Iterator[Config]:
    """Yield persistent tiles, whole or with the last waves' K shared out."""
    groups = product.groups
    for form in GLUON_FORMS:
        tiles = tiles_of(form, product.n, product.rows)
        if not suits(form, product.bits) or shared_bytes(form) > machine.shared_block:
            continue
        if form.bm >= 2 * max(product.rows, 32):
            continue
        if form.bm < 256 and tiles > MOST_TILES * machine.multiprocessors:
            continue
        programs = machine.multiprocessors
        yield form
        if tiles % programs == 0:
            continue
        for cut in (1, 2) if tiles > programs else (1,):
            shared = replace(form, cut=cut)
            if schedule(shared, tiles, groups, programs)[1] < tiles:
                yield shared
        if tiles <= programs // 2:
            yield replace(form, cut=1, programs=tiles * (programs // tiles))
