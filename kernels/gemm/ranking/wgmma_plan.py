"""How `wgmma_gemm_kernel` and `wgmma_rows` divide a product: tiles, shared memory, schedules."""

from __future__ import annotations

from torch import Tensor

from llmpq.kernels.gemm.ranking.config import Config

SHARED_BYTES = 232_448
"""Shared memory a program may use on Hopper."""

_LEAST_GROUPS = 2  # of a program where K is shared out
_TOGETHER_BYTES = 16 << 20


def slot_columns(config: Config) -> int:
    """Columns of x in a slot of the ring: half a k-group where tiles of x are widest."""
    return 64 if config.bm > 128 else 128


def parts_of(config: Config) -> tuple[int, int]:
    """Rows of the parts of a tile of x, both powers of two: 160 are 128 and 32."""
    most = 1 << config.bm.bit_length() - 1
    return most, config.bm - most


def shared_bytes(config: Config) -> int:
    """Return a program's shared memory: the ring of x, what y is staged in, barriers."""
    ring = config.stages * config.bm * slot_columns(config) * 2
    return ring + tile_rows(config) * config.bm * 2 + 16 * config.stages + 320


def tile_rows(config: Config) -> int:
    """Rows of w of a tile."""
    return 64 * config.warpgroups * config.blocks


def tiles_of(config: Config, n: int, rows: int) -> int:
    """Tiles of `tile_rows` rows of w and bm rows of x."""
    return -(-rows // config.bm) * -(-n // tile_rows(config))


def schedule(config: Config, tiles: int, groups: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many programs run and how many tiles they multiply whole, in turns.

    Those that share x count as one. The other tiles' k-groups are shared out evenly: those of the
    unfinished last wave (cut 1), of the last wave and the unfinished one (cut 2). Cut 0 shares
    nothing out.
    """
    if config.split > 1:
        return tiles, tiles
    programs = config.programs or multiprocessors
    if config.cut == 0 or tiles % programs == 0:
        return min(programs, tiles), tiles
    whole = max(0, tiles // programs - config.cut + 1) * programs
    if whole and (tiles - whole) * groups < programs * _LEAST_GROUPS:
        whole -= programs
    if whole == 0:
        programs = max(1, min(programs, tiles * groups // _LEAST_GROUPS))
    return programs, whole


def tiles_together(k: int, bm: int) -> int:
    """Tiles of x that take turns under a tile of w: what stays in the L2 beside the words."""
    return max(4, _TOGETHER_BYTES // (2 * k * bm))


def suits(config: Config, bits: int) -> bool:
    """Whether a thread's registers hold the words: two planes of two row blocks do not fit."""
    return config.kernel != "wgmma_gemm" or config.blocks == 1 or bits != 8


def aligned(x_MK: Tensor, n: int, residual_MN: Tensor | None = None) -> bool:
    """Whether TMA can read x and write y: rows must start on multiples of 16 bytes."""
    starts = x_MK.data_ptr() % 16 == 0 and x_MK.shape[1] % 8 == 0 and n % 8 == 0
    return starts and (residual_MN is None or residual_MN.is_contiguous())
