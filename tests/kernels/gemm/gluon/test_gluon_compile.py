"""The Gluon kernel of long prefills compiles for sm_90 without a GPU, and stays asynchronous.

No interpreter runs Gluon: `kernel_bench.py check gemm` compares it with its twin on a GPU.
"""

import pytest
import torch
from triton.experimental.gluon import language as gl

from llmpq.kernels.gemm.gluon import gluon_launch as gemm_gluon_launch
from llmpq.kernels.gemm.gluon import wgmma_gemm as gemm_gluon
from llmpq.kernels.gemm.gluon.wgmma_gemm import wgmma_gemm_kernel
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.candidates import GLUON_FORMS, gluon_candidates
from llmpq.kernels.gemm.ranking.config import Config, make_plan
from llmpq.kernels.gemm.ranking.machine import REFERENCE
from llmpq.kernels.gemm.ranking.predict import Product
from llmpq.kernels.gemm.ranking.wgmma_plan import (
    SHARED_BYTES,
    aligned,
    parts_of,
    schedule,
    shared_bytes,
    slot_columns,
    suits,
)
from reference.check_gemm import random_weight
from reference.cubin import compile_kernel
from reference.machine_code import overwritten, product_loops

pytestmark = pytest.mark.compile

WIDE = Config(kernel="wgmma_gemm", bm=256, stages=5)
TALL = Config(kernel="wgmma_gemm", blocks=2, bm=128, stages=5)
BROAD = Config(kernel="wgmma_gemm", bm=128, stages=5, warpgroups=3)
SMALL = Config(kernel="wgmma_gemm", bm=128, stages=6)
ASKER = Config(kernel="wgmma_gemm", bm=128, stages=6, asker=True)
PARTS = Config(kernel="wgmma_gemm", bm=192, stages=7)
BROAD_PARTS = Config(kernel="wgmma_gemm", bm=160, stages=7, warpgroups=3)


def _compile(config, bits, dtype, symmetric, split, grouped=1, **options):
    columns = slot_columns(config)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = dict.fromkeys(("P0", "P1", "S", "Z", "ARRIVED"), "*i32") | {"PARTIAL": "*fp32"}
    types |= dict.fromkeys(("BIAS", "RESIDUAL"), f"*{dtype}")
    aligned = tuple(types)
    constants = {}
    for box, which in zip(parts_of(config), ("", "2"), strict=True):
        y_type = f"tensordesc<{dtype}[{box},64],{layout!r}>"
        some = {f"y{which}_desc": y_type, f"head{which}_desc": y_type}
        some[f"x{which}_desc"] = f"tensordesc<{dtype}[{box},{columns}],{layout!r}>"
        if box:
            types |= some
        else:
            constants |= dict.fromkeys(some)
    sizes = ("M", "N", "m_tiles", "n_tiles", "blocks", "groups", "whole", "together")
    constants |= {
        "BITS": bits,
        "GROUPED": grouped,
        "SYMMETRIC": symmetric,
        "HAS_BIAS": True,
        "HAS_RESIDUAL": False,
        "SPLIT": split,
        "BH": config.blocks,
        "BT": parts_of(config)[0],
        "EXTRA": parts_of(config)[1],
        "KS": columns,
        "STAGES": config.stages,
        "FAR": 4,
        "LATE": config.blocks == 1,
        "PDL": True,
        "WGS": config.warpgroups,
        "ASKER": config.asker,
    }
    return compile_kernel(
        wgmma_gemm_kernel,
        90,
        types | dict.fromkeys(sizes, "i32"),
        constants,
        aligned=aligned,
        options={"num_warps": 4, "maxnreg": config.registers} | options,
    )


def seldom(*case):
    """In `make test-all` only: `make test` has each width, type and kind of zero in some tile."""
    return pytest.param(*case, marks=pytest.mark.seldom)


@pytest.mark.parametrize(
    "config,bits,dtype,symmetric,split,grouped",
    [
        seldom(WIDE, 4, "fp16", True, True, 1),
        seldom(TALL, 4, "fp16", True, False, 1),
        seldom(SMALL, 4, "bf16", False, True, 1),
        seldom(WIDE, 3, "bf16", False, False, 1),
        seldom(WIDE, 8, "fp16", False, True, 1),
        seldom(BROAD, 4, "fp16", True, True, 1),
        seldom(ASKER, 4, "bf16", False, True, 1),
        seldom(PARTS, 4, "bf16", False, True, 1),
        seldom(BROAD_PARTS, 4, "fp16", True, False, 1),
        seldom(WIDE, 4, "bf16", True, True, 4),
        seldom(WIDE, 4, "bf16", False, True, 2),
        seldom(PARTS, 4, "bf16", False, True, 4),
        seldom(SMALL, 4, "bf16", False, True, 4),
        seldom(SMALL, 8, "bf16", True, True, 4),
        seldom(BROAD, 4, "bf16", False, True, 2),
        seldom(ASKER, 4, "fp16", True, True, 4),
        seldom(PARTS, 8, "bf16", False, True, 2),
        seldom(WIDE, 4, "bf16", "e2m1", True, 1),
        seldom(TALL, 4, "fp16", "e2m1", False, 1),
        seldom(SMALL, 4, "bf16", "e2m1", True, 1),
        seldom(BROAD_PARTS, 4, "bf16", "e2m1", True, 1),
        seldom(WIDE, 4, "bf16", "nf4", True, 2),
        seldom(SMALL, 4, "bf16", "iq4", True, 4),  # tables differ in their numbers alone
        seldom(BROAD, 4, "fp16", "fp4", True, 2),
        seldom(Config(kernel="wgmma_gemm", bm=160, stages=8), 4, "bf16", "nf4", True, 2),
        seldom(
            Config(kernel="wgmma_gemm", bm=128, stages=5, warpgroups=3), 4, "bf16", "nf4", True, 2
        ),
        seldom(ASKER, 4, "bf16", "nf4", True, 2),
        seldom(PARTS, 4, "bf16", "iq4", True, 4),
        (TALL, 4, "bf16", "nf4", True, 2),
        (ASKER, 8, "fp16", True, True, 4),
        (BROAD_PARTS, 3, "bf16", False, False, 1),
    ],
)
def test_every_form_compiles_and_a_product_stays_in_flight(
    config, bits, dtype, symmetric, split, grouped
):
    """ptxas turns every wgmma into a synchronous one when it fails to follow its registers.

    It forgets them at the end of a loop if a wait leaves two products in flight (Triton 3.6, 3.9).
    """
    made = _compile(config, bits, dtype, symmetric, split, grouped)
    assert made.cubin and made.shared_bytes <= min(SHARED_BYTES, shared_bytes(config))
    code = made.machine_code()
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    # Each warpgroup: a wait for each 64 k of 64 rows, that is for four products, and a last one.
    parts = 2 if config.bm in (160, 192) else 1
    assert products == config.warpgroups * 2 * config.blocks * parts * 4
    assert waits == products // 4 + config.warpgroups
    loops = product_loops(code)
    assert len(loops) == config.warpgroups
    assert not any(op.startswith("STL") for loop in loops for op, _ in loop)
    assert overwritten(code) == []
    # The loops as they are, but with one more product in flight than the code allows for.
    assert overwritten(code.replace("gsb0, 0x1", f"gsb0, {1 + parts:#x}"))


@pytest.mark.seldom  # what `overwritten` finds in a form's own code is in `make test`
def test_too_few_registers_would_be_noticed():
    code = _compile(TALL, 4, "fp16", True, False, maxnreg=128).machine_code()
    assert "STL" in code and code.count("WARPGROUP.DEPBAR") > code.count("HGMMA") // 4 + 2


def test_schedules_cover_every_tile():
    for tiles in (1, 5, 96, 132, 133, 448, 3584):
        for config in (
            WIDE,
            Config(kernel="wgmma_gemm", cut=1),
            Config(kernel="wgmma_gemm", cut=2),
        ):
            programs, whole = schedule(config, tiles, 32, 132)
            rest = (tiles - whole) * 32
            assert 0 <= whole <= tiles and 0 < programs <= 132
            assert rest == 0 or programs <= rest
            if not rest:
                continue
            cuts = [p * rest // programs for p in range(programs + 1)]
            owners = [((u + 1) * programs - 1) // rest for u in range(rest)]
            assert all(cuts[p] <= u < cuts[p + 1] for u, p in enumerate(owners))
            if config.cut and tiles % programs:
                assert whole % programs == 0
    assert schedule(WIDE, 448, 32, 132) == (132, 448)
    assert schedule(Config(kernel="wgmma_gemm", cut=1), 448, 32, 132) == (132, 396)
    assert schedule(Config(kernel="wgmma_gemm", cut=2), 448, 32, 132) == (132, 264)
    assert schedule(Config(kernel="wgmma_gemm", cut=1, programs=128), 64, 32, 132) == (128, 0)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_candidates_fit(bits):
    for n, k, m in [(16, 128, 65), (6144, 4096, 256), (28672, 4096, 2048), (4096, 14336, 77)]:
        found = list(gluon_candidates(Product(bits, n, k, m), REFERENCE))
        assert found and all(suits(config, bits) for config in found)
        assert all(shared_bytes(config) <= SHARED_BYTES for config in found)
    assert not suits(TALL, 8) and suits(TALL, 4) and suits(WIDE, 8)


@pytest.mark.seldom
def test_every_form_that_may_be_chosen_compiles(seeds):
    known = {WIDE, BROAD, ASKER, SMALL, PARTS}
    for config in seeds([config for config in GLUON_FORMS if config not in known]):
        made = _compile(config, 4, "bf16", False, True)
        assert made.cubin and made.shared_bytes <= min(SHARED_BYTES, shared_bytes(config))


def test_a_warp_that_asks_needs_registers_for_the_rest():
    assert ASKER.asker
    for tiles in ({"bm": 256}, {"blocks": 2, "bm": 128}, {"bm": 64, "warpgroups": 3}):
        with pytest.raises(ValueError, match="168 registers"):
            Config(kernel="wgmma_gemm", asker=True, **tiles)


@pytest.mark.parametrize("config", [WIDE, SMALL, PARTS], ids=["wide", "small", "parts"])
def test_each_row_is_stored_once_and_no_long_x_is_read_past_its_end(config, monkeypatch):
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *values, **_: launches.append(values)

    monkeypatch.setattr(gemm_gluon, "wgmma_gemm_kernel", Recorder())
    monkeypatch.setattr(gemm_gluon_launch, "multiprocessors", lambda device: 132)
    plan = make_plan(config, (9, 0))
    q = random_weight(64, 128, 4, True, 128, torch.float16, torch.device("cpu"))
    bt = config.bm
    for m in (1, bt - 1, bt, bt + 1, 2 * bt - 1, 2 * bt, 5 * bt + 3):
        x, y = torch.zeros(m, 128).half(), torch.zeros(m, 64).half()
        gemm_gluon_launch.launch(plan, LinearOperands(x, q, None, None, y))
        given = dict(zip(wgmma_gemm_kernel.arg_names, launches[-1], strict=False))
        stored = torch.zeros(m)
        for tile in range(given["m_tiles"]):
            start = max(0, m - (given["m_tiles"] - tile) * bt)
            assert start + bt <= max(m, bt)
            name = "y" if start else "head"
            for view in (given[f"{name}_desc"], given[f"{name}2_desc"]):
                if view is not None:
                    end = start + view.block_shape[0]
                    stored[start : min(end, view.shape[0])] += 1
                    start = end
        assert (stored == 1).all()


def test_rows_off_16_bytes_do_not_fit():
    x = torch.zeros(4, 136, dtype=torch.float16)
    assert aligned(x, 4096) and not aligned(x, 4097) and not aligned(x[:, :132].contiguous(), 64)
    assert not aligned(torch.zeros(4 * 136 + 1, dtype=torch.float16)[1:].view(4, 136), 64)
    assert not aligned(x, 64, torch.zeros(64, 4).t())
