"""Which of the ways that suit W4 and W8 a weight with more scales or of a table takes.

The plan is that of integers of as many bits in groups of 128 (choice.py), but for what a form has
no registers or kernel for.
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.kernels.formats.codebook_weight import Codebook, CodebookWeight
from llmpq.kernels.formats.quantized_weight import QuantizedWeight
from llmpq.kernels.formats.weight_layout import BLOCK_ROWS, GROUP
from llmpq.kernels.gemm.config import DENSE, Config, ProductPlan
from llmpq.kernels.gemm.gluon.gluon_plan import tile_rows
from llmpq.kernels.gemm.ranking.machine import machine_of
from llmpq.kernels.gemm.scaled.forms import Coded, form_of
from llmpq.kernels.multiprocessors import multiprocessors

MOST_ROWS, PROGRAMS = 256, 3
"""Of NVFP4 and 3 bits, which Gluon's kernel lacks: rows of x that words are multiplied with,
programs of a multiprocessor."""
LONG, LEAST_STEPS = 448, 40
"""Rows of x from which tiles of 256 are the quickest where a multiprocessor has so many k-groups
to do (H200: 28672 x 4096, 512 rows, MXFP4 155 us, by W4's plan 170; 4096 x 4096 33 and 25)."""
MOST_OF_HEAVY = 192
WGMMA_ROWS = 64
"""Rows of x above which Gluon's programs hide looking up better (H200: 2048 x 11008, 128 rows, NF4
23.7 us, in tiles 32.1)."""
BROAD = Config(kernel="wgmma_gemm", bm=256, stages=5, cut=1)
NARROW = Config(kernel="wgmma_gemm", bm=128, stages=6, cut=1)


def for_form(plan: ProductPlan, q: Coded, rows: int) -> ProductPlan:
    """Return the plan for a weight that `form_of` names."""
    config = plan.config
    if config.scale_w:
        config = replace(config, scale_w=False)
    if config.kernel == "wgmma_gemm":
        config = _gluon(config, q, rows)
    elif config.kernel == "splitk_gemm" and rows > WGMMA_ROWS and _looks_up(q) and _on_hopper(q):
        config = NARROW
    return replace(plan, config=config)


def _looks_up(q: Coded) -> bool:
    return isinstance(q, CodebookWeight) and q.codebook is not Codebook.E2M1


def _on_hopper(q: Coded) -> bool:
    return q.device.type == "cuda" and machine_of(q.device).capability == (9, 0)


def is_narrow(plan: ProductPlan, q: Coded) -> bool:
    """Whether programs of all of K are fewer than multiprocessors: tiles of 8 rows of x share K.

    H200, 2048 x 11008, one row and eight: MXFP4 12.2 and 7.8 us, IQ4 22.1 and 11.9.
    """
    programs = q.out_features // (BLOCK_ROWS * plan.config.blocks)
    return plan.config.kernel == "gemv" and programs < multiprocessors(q.device)


def _gluon(config: Config, q: Coded, rows: int) -> Config:
    form = form_of(q)
    if form == "nvfp4" or q.bits == 3:
        return DENSE if rows > MOST_ROWS else _tile(q, rows)
    if q.bits == 4 and rows >= LONG and _steps(q, rows) >= LEAST_STEPS and not _is_heavy(q):
        return BROAD  # words are unpacked half as often
    if _is_heavy(q) and config.bm > MOST_OF_HEAVY:
        return NARROW
    return NARROW if config.blocks > 1 and form != "e2m1" else config


def _is_heavy(q: Coded) -> bool:
    """Whether scales and zeros of four parts leave no registers for tiles of 256 rows of x."""
    return isinstance(q, QuantizedWeight) and not q.symmetric and q.group_size == 32


def _steps(q: Coded, rows: int) -> int:
    """Return the k-groups that a multiprocessor has to do in tiles of BROAD."""
    tiles = -(-rows // BROAD.bm) * -(-q.out_features // tile_rows(BROAD))
    return tiles * -(-q.in_features // GROUP) // multiprocessors(q.device)


def _tile(q: Coded, rows: int) -> Config:
    """Return tiles of words, their K shared out to fill the multiprocessors."""
    bm = 64 if rows <= 64 else 128
    tiles = -(-rows // bm) * -(-q.out_features // 64)
    split = PROGRAMS * multiprocessors(q.device) // tiles
    groups = -(-q.in_features // GROUP)
    return Config(kernel="splitk_gemm", bm=bm, stages=3, split=max(1, min(groups // 3, split)))
