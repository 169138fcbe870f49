"""The CUDA C++ kernel for any multiple of 8 rows compiles without a GPU, and stays asynchronous."""

import itertools
import re
from dataclasses import replace

import pytest

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm.cuda.rows_text import RowsTile, text
from llmpq.kernels.gemm.ranking.candidates import ROWS_TILES, rows_candidates
from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.machine import REFERENCE
from llmpq.kernels.gemm.ranking.predict import Product
from llmpq.kernels.gemm.ranking.wgmma_plan import SHARED_BYTES, schedule, tile_rows
from reference.cubin import Compiled
from reference.machine_code import overwritten, product_loops

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC (nvidia-cuda-nvrtc)"),
]

PLAIN = RowsTile(bits=4, kind="bf16", zeros=True, grouped=True, rows=200, warpgroups=2)


def seldom(tile):
    """In `make test-all` only: every width and kind of number is in `make test` once."""
    return pytest.param(tile, marks=pytest.mark.seldom)


def _machine_code(tile):
    code = nvrtc.compile_text(text(tile))
    return Compiled(cubin=code, ptx="", shared_bytes=tile.shared_bytes).machine_code()


@pytest.mark.parametrize(
    "tile",
    [
        seldom(PLAIN),
        replace(PLAIN, rows=256, bits=8),
        seldom(replace(PLAIN, rows=168, bits=8, kind="f16", warpgroups=3)),
        seldom(replace(PLAIN, rows=128, kind="f16", zeros=False)),
        replace(PLAIN, rows=168, bits=3, warpgroups=3),
        replace(PLAIN, rows=88, kind="f16", zeros=False, grouped=False),
        seldom(replace(PLAIN, rows=88, grouped=False)),
        seldom(replace(PLAIN, rows=96, bits=3, kind="f16", zeros=False)),
        seldom(replace(PLAIN, rows=128, bits=8, split=4)),
    ],
    ids=lambda t: f"{t.bits} {t.kind} {t.warpgroups}x{t.rows}x{t.split}",
)
def test_every_form_compiles_and_a_product_stays_in_flight(tile):
    """ptxas turns every wgmma into a synchronous one when it fails to follow its registers."""
    code = _machine_code(tile)
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    assert products == 8 and f"64x{tile.rows}x16" in code
    assert waits == products // 4 + 1
    loops = product_loops(code)
    assert len(loops) == 1
    assert not any(op.startswith(("STL", "LDL")) for op, _ in loops[0])
    assert overwritten(code) == []
    # Coordinates of the store under a condition: ptxas 13.0 took another predicate's value.
    before_store = code[: code.index("UTMASTG")].splitlines()[-40:]
    assert not [line for line in before_store if re.search(r"@!?P\d R2UR UR", line)]
    assert overwritten(code.replace("gsb0, 0x1", "gsb0, 0x2")), "one more in flight would show"


def test_every_tile_fits_the_shared_memory():
    kinds = itertools.product((3, 4, 8), ("f16", "bf16"), (True, False), (True, False))
    for (bits, kind, zeros, grouped), (warpgroups, rows) in itertools.product(kinds, ROWS_TILES):
        tile = RowsTile(
            bits=bits,
            kind=kind,
            zeros=zeros,
            grouped=grouped,
            rows=rows,
            warpgroups=warpgroups,
        )
        x, words = tile.slots
        assert tile.shared_bytes <= SHARED_BYTES and x >= 3 and words >= 2
        assert Config(kernel="wgmma_rows", bm=rows, warpgroups=warpgroups)


def test_candidates_leave_few_rows_past_the_end():
    for n, k, rows in ((16, 128, 65), (6144, 4096, 333), (28672, 4096, 2048), (4096, 14336, 777)):
        found = list(rows_candidates(Product(4, n, k, rows), REFERENCE))
        assert found
        for config in found:
            assert -(-rows // config.bm) * config.bm <= 1.25 * rows + 8
            tiles = -(-rows // config.bm) * -(-n // tile_rows(config))
            programs, whole = schedule(config, tiles, k // 128, 132)
            assert 2 * programs * tile_rows(config) * config.bm * 4 <= 34 << 20 or whole == tiles
            assert config.split * programs <= 132 or config.split == 1
    few = {c.split for c in rows_candidates(Product(8, 1536, 8960, 128), REFERENCE)}
    assert {1, 2, 4} <= few, "24 tiles of 64 rows: clusters share their K"
    best = {c.bm for c in rows_candidates(Product(4, 4096, 4096, 777), REFERENCE)}
    assert 200 in best, "four tiles of 200 rows: 23 past the end, not 247"


@pytest.mark.parametrize(
    "more", [{"bm": 100}, {"bm": 264}, {"bm": 200, "warpgroups": 3}, {"bm": 96, "blocks": 2}]
)
def test_tiles_that_the_kernel_does_not_know_are_refused(more):
    with pytest.raises(ValueError, match="multiple of 8"):
        Config(kernel="wgmma_rows", **more)
