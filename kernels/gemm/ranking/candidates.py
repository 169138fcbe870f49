"""Configurations that the model of the machine chooses from.

The forms are those that between them were within 0.2 % (mean) of the fastest of all, in timings of
every configuration on an H200 (`benchmarks/gemm_model.py search`): more would only be more to be
wrong about, and to compile. Two are timed for bfloat16 with zeros alone, where they are the fastest
for 17 to 32 rows. Each fits the machine's shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmpq.kernels.gemm.ranking.config import DENSE, PIECES, Config
from llmpq.kernels.gemm.ranking.machine import Machine
from llmpq.kernels.gemm.ranking.predict import (
    X_IN_L2,
    Product,
    clusters_at_once,
    resident,
    step_time,
)
from llmpq.kernels.gemm.ranking.ring_plan import ring_config
from llmpq.kernels.gemm.ranking.rows_tile import RowsTile
from llmpq.kernels.gemm.ranking.wgmma_plan import schedule, shared_bytes, suits, tiles_of
from llmpq.kernels.kernel_table import Kernel, KernelForm, gpu, lines_of

MOST_TILES = 24
"""Of `wgmma_gemm_kernel` a program: past them the largest tiles are the fastest."""

SPLITS = (2, 3, 4)
"""Programs of a cluster that share K, of `wgmma_rows`."""

PAST_THE_END = 1.25
"""Rows of tiles of `wgmma_rows` over rows of x at most."""

PIECES_BITS = 8
"""Whose unpacking in the product costs more than making w in pieces. Of 4 bits (H200, float16,
1,500 to 4,096 rows) pieces take 1.03 to 1.08 times as long as tiles, all of w 1.08 to 1.10."""

ROWS_FORMS = {
    bits: [Config(kernel="gemv", warps=w, depth=d) for w, d in forms]
    for bits, forms in (
        (4, ((4, 4), (4, 6), (4, 12), (8, 4))),
        (8, ((4, 2), (4, 4), (4, 6), (8, 2), (8, 4))),
    )
}
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
ROWS_TILES = tuple(
    (warpgroups, rows)
    for warpgroups, tiles in (
        (2, (64, 80, 88, 96, 104, 112, 128, 136, 144, 160, 168, 176, 192, 200, 208, 216, 224, 256)),
        (3, (88, 96, 112, 128, 136, 144, 160, 168)),
    )
    for rows in tiles
)
"""Tiles of `wgmma_rows`: each is a text of its own, which NVRTC compiles in some three seconds."""


def candidates(
    product: Product, machine: Machine, *, words: bool = True, rings: bool = True
) -> list[Config]:
    """Return every configuration that may serve a product on a machine.

    `words`: whether a row or a k-group has one scale; only such weights take `wgmma_rows` and
    `ring_gemv`. `rings`: whether x lies as `ring_gemv` reads it.
    """
    found: list[Config] = []
    kernels = ranked_kernels(product, machine)
    if Kernel.GEMV in kernels:
        found += ROWS_FORMS[8 if product.bits == 8 else 4]
    if Kernel.RING_GEMV in kernels and machine.nvrtc and words and rings:
        found += ring_candidates(product)
    if Kernel.SPLITK_GEMM in kernels:
        found += tile_candidates(product, machine)
    if Kernel.WGMMA_ROWS in kernels and machine.nvrtc and words:
        found += rows_candidates(product, machine)
    elif Kernel.WGMMA_GEMM in kernels:
        found += gluon_candidates(product, machine)
    if Kernel.DEQUANTIZE in kernels:
        if Kernel.WGMMA_GEMM not in kernels:
            found.append(DENSE)
        elif product.bits == PIECES_BITS:
            found += PIECES
    return found


def ranked_kernels(product: Product, machine: Machine) -> set[Kernel]:
    """Return the kernels that compete for a product of words with one scale a k-group."""
    zeros = product.form == "bf16 zeros" and product.bits < 8
    form = KernelForm.WORDS_BF16_ZEROS if zeros else KernelForm.WORDS
    lines = lines_of(form, gpu(machine.capability), product.rows)
    return {line.kernel for line in lines if line.ranked}


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


def ring_candidates(product: Product) -> Iterator[Config]:
    """Yield the form of `ring_gemv` that suits a product."""
    zeros = product.form.endswith("zeros")
    found = ring_config(product.bits, product.k, product.rows, zeros=zeros)
    if found is not None:
        yield found


def rows_candidates(product: Product, machine: Machine) -> Iterator[Config]:
    """Yield tiles of `wgmma_rows` that leave few rows past the end, whole or with K shared out.

    Where the L2 does not hold x beside the rest, two waves that share K read it again (H200, 14336
    x 4096, 2,048 rows in tiles of 256: 392 us, 335 with one).
    """
    x_stays = 2 * product.rows * product.k <= X_IN_L2 * machine.l2_bytes
    for warpgroups, bm in ROWS_TILES:
        m_tiles = -(-product.rows // bm)
        if m_tiles * bm > PAST_THE_END * product.rows + 8:
            continue
        whole = Config(kernel="wgmma_rows", bm=bm, warpgroups=warpgroups)
        tiles = tiles_of(whole, product.n, product.rows)
        found = {schedule(whole, tiles, product.groups, machine.multiprocessors)}
        yield whole
        for split in SPLITS:
            most = clusters_at_once(split, machine)
            if bm % (8 * split) or tiles > most or split > product.groups // 4:
                continue
            shared = replace(whole, split=split)
            if _fits(shared, product):
                yield shared
        for cut in (1, 2) if x_stays else (1,):
            shared = replace(whole, cut=cut)
            made = schedule(shared, tiles, product.groups, machine.multiprocessors)
            if made not in found:
                found.add(made)
                yield shared


def _fits(config: Config, product: Product) -> bool:
    """Whether a program has shared memory for what others of its cluster send it, too."""
    tile = RowsTile(
        bits=product.bits,
        kind="bf16",
        zeros=product.form.endswith("zeros"),
        grouped=True,
        rows=config.bm,
        warpgroups=config.warpgroups,
        split=config.split,
    )
    return tile.fits


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
