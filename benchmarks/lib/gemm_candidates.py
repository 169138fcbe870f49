"""Configurations that may serve a product on a machine: every one fits its shared memory.

What is listed here is what the model of the machine (predict.py) chooses from, what `llmpq-profile
tune` tries, and what the tests compile for every listed architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.wgmma_plan import shared_bytes, suits, tiles_of

FEW_ROWS = 8
"""Most rows of x that `gemv_kernel` multiplies."""
TILE_ROWS = 256
"""Most rows of x for which `splitk_gemm_kernel` is considered."""
GLUON_FROM = 17
"""Fewest rows of x for which `wgmma_gemm_kernel` is considered."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

_TILES = ((1, 4), (1, 8), (2, 4))  # blocks of 16 rows a warp holds, warps
_GLUON = (
    Config(kernel="wgmma_gemm", blocks=2, bm=32, stages=8),
    Config(kernel="wgmma_gemm", bm=64, stages=8),
    Config(kernel="wgmma_gemm", bm=64, stages=6, registers=128),
    Config(kernel="wgmma_gemm", blocks=2, bm=64, stages=6),
    Config(kernel="wgmma_gemm", bm=64, stages=8, warpgroups=3),
    Config(kernel="wgmma_gemm", bm=96, stages=7),
    Config(kernel="wgmma_gemm", bm=96, stages=6, warpgroups=3),
    Config(kernel="wgmma_gemm", bm=128, stages=6, asker=True),
    Config(kernel="wgmma_gemm", bm=128, stages=6),
    Config(kernel="wgmma_gemm", blocks=2, bm=128, stages=5),
    Config(kernel="wgmma_gemm", bm=128, stages=5, warpgroups=3),
    Config(kernel="wgmma_gemm", bm=144, stages=8),
    Config(kernel="wgmma_gemm", bm=160, stages=8),
    Config(kernel="wgmma_gemm", bm=192, stages=7),
    Config(kernel="wgmma_gemm", bm=256, stages=5),
)


def rows_candidates(bits: int) -> Iterator[Config]:
    """Yield forms of `gemv_kernel`: all of K in a program, k-groups in flight in registers."""
    for warps in (4, 8):
        for depth in (4, 6, 8, 12) if bits < 8 else (2, 4, 6):
            yield Config(kernel="gemv", warps=warps, depth=depth)


def tile_candidates(
    bits: int, n: int, k: int, rows: int, *, multiprocessors: int
) -> Iterator[Config]:
    """Yield forms of `splitk_gemm_kernel` whose programs fill the machine a few times."""
    groups = -(-k // 128)
    least = 16
    while least < min(rows, 128):
        least *= 2
    for bm in {max(16, least // 4), max(16, least // 2), least} if rows > 16 else {16}:
        for blocks, warps in _TILES:
            tiles = -(-n // (16 * blocks * warps)) * -(-rows // bm)
            for split in SPLITS:
                programs = tiles * split
                if split > 1 and (programs > 6 * multiprocessors or split > groups // 4):
                    continue
                if programs < 0.6 * multiprocessors and split < SPLITS[-1] and 2 * split <= groups:
                    continue
                tile = Config(kernel="splitk_gemm", blocks=blocks, warps=warps, bm=bm, split=split)
                yield from _loops(tile, bits, groups)


def _loops(tile: Config, bits: int, groups: int) -> Iterator[Config]:
    """Yield the loops of a tile: k-groups ahead in registers, or stages in shared memory."""
    if tile.bm <= 64:
        for depth in (1, 2) if groups % 2 == 0 else (1,):
            one = replace(tile, depth=depth)
            yield one
            if tile.warps == 8 or tile.bm == 32:
                yield replace(one, registers=128)
    if tile.bm >= 32:
        yield replace(tile, stages=3)
    if tile.bm <= 64:
        yield replace(tile, stages=4)


def gluon_candidates(
    bits: int, n: int, k: int, rows: int, *, multiprocessors: int, shared_limit: int
) -> Iterator[Config]:
    """Yield forms of `wgmma_gemm_kernel` whose tiles are not much larger than what is asked."""
    groups = -(-k // 128)
    for base in _GLUON:
        if not suits(base, bits) or shared_bytes(base) > shared_limit:
            continue
        if base.bm >= 2 * max(rows, 32):
            continue
        both = 2 if base.registers == 128 else 1  # programs that share a multiprocessor
        programs = both * multiprocessors
        tiles = tiles_of(base, n, rows)
        if tiles > 12 * programs:
            continue
        base = replace(base, programs=0 if both == 1 else programs)
        if tiles >= 0.5 * programs:
            yield base
        if tiles % programs and tiles * groups >= 2 * programs:
            yield replace(base, cut=1)
            if tiles > programs:
                yield replace(base, cut=2)
        if tiles < programs // 2:
            even = tiles * (programs // tiles)
            yield replace(base, cut=1, programs=even)
