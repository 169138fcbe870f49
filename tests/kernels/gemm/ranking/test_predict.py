"""The model of the machine: what it chooses fits every listed GPU, and follows its attributes."""

import itertools
import math
from dataclasses import replace

import pytest

from llmpq.kernels.gemm.choice import _measured, choose
from llmpq.kernels.gemm.ranking.candidates import (
    GLUON_FORMS,
    ROWS_FORMS,
    TILE_FORMS,
    candidates,
)
from llmpq.kernels.gemm.ranking.config import Config, piece_rows
from llmpq.kernels.gemm.ranking.machine import REFERENCE, Machine
from llmpq.kernels.gemm.ranking.predict import Product, expected_us, shared_estimate, step_time
from llmpq.kernels.gemm.ranking.wgmma_plan import shared_bytes
from llmpq.kernels.kernel_table import RING_ROWS

pytestmark = pytest.mark.cpu

MACHINES = {
    "A100": Machine(
        capability=(8, 0), multiprocessors=108, shared_block=166_912, shared_all=167_936,
        l2_bytes=40 << 20, bandwidth=1.29e12, clock_hz=1.41e9,
    ),
    "RTX 3090": Machine(
        capability=(8, 6), multiprocessors=82, shared_block=101_376, shared_all=102_400,
        l2_bytes=6 << 20, bandwidth=0.78e12, clock_hz=1.7e9,
    ),
    "RTX 4090": Machine(
        capability=(8, 9), multiprocessors=128, shared_block=101_376, shared_all=102_400,
        l2_bytes=72 << 20, bandwidth=0.84e12, clock_hz=2.52e9,
    ),
    "H200": REFERENCE,
    "B200": Machine(
        capability=(10, 0), multiprocessors=148, l2_bytes=126 << 20, bandwidth=6.6e12,
    ),
    "RTX 5090": Machine(
        capability=(12, 0), multiprocessors=170, shared_block=101_376, shared_all=102_400,
        l2_bytes=96 << 20, bandwidth=1.49e12, clock_hz=2.4e9,
    ),
}  # fmt: skip
SHAPES = [(5760, 2304), (7168, 5120), (5120, 27648), (64, 128), (37888, 3584), (1024, 2048)]
ROWS = (1, 3, 8, 16, 48, 64, 96, 200, 256, 777, 4096)


def test_every_form_was_fitted():
    own = [form for form in TILE_FORMS if step_time(form, 4) is None]
    assert len(own) == 2 and all(step_time(form, 4, "bf16 zeros") for form in own)
    for form, bits in itertools.product((*TILE_FORMS, *GLUON_FORMS), (3, 4, 8)):
        assert form in own or step_time(form, bits) is not None, form
    assert all(step_time(form, bits) for bits, forms in ROWS_FORMS.items() for form in forms)


def test_times_of_a_form_of_weights_come_first():
    form = next(f for f in TILE_FORMS if f.bm == 32 and step_time(f, 4))
    assert (
        step_time(form, 4, "bf16 zeros") != step_time(form, 4) == step_time(form, 4, "fp16 zeros")
    )
    products = [Product(4, 5120, 27648, 32, weights) for weights in ("fp16", "bf16 zeros")]
    chosen = [choose(product, REFERENCE) for product in products]
    assert chosen[1].split == 6, "four programs of a multiprocessor hold bfloat16 with zeros"
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("form", ["fp16", "bf16 zeros"])
def test_what_is_chosen_fits_the_machine(name, form):
    machine = MACHINES[name]
    for bits, (n, k), rows in itertools.product((3, 4, 8), SHAPES, ROWS):
        product = Product(bits, n, k, rows, form)
        config = choose(product, machine)
        assert math.isfinite(expected_us(config, product, machine))
        if config.kernel == "wgmma_gemm":
            assert machine.capability == (9, 0) and shared_bytes(config) <= machine.shared_block
        elif config.kernel == "wgmma_rows":
            assert machine.capability == (9, 0) and rows > 48
        elif config.kernel == "ring_gemv":
            assert machine.capability == (9, 0) and rows <= RING_ROWS and bits == 4
        elif config.kernel != "dequantize":
            assert shared_estimate(config, bits, machine) <= machine.shared_block
            assert config.split <= max(1, k // 128)
        assert config.kernel != "gemv" or rows <= 8


def test_no_time_is_below_the_bytes_or_the_products():
    for bits, (n, k), rows in itertools.product((4, 8), SHAPES, ROWS):
        product = Product(bits, n, k, rows)
        found = [expected_us(c, product, REFERENCE) for c in candidates(product, REFERENCE)]
        floor_us = 1e6 * max(
            product.moved_bytes / (REFERENCE.bandwidth * 1.25), 2 * rows * n * k / 1.0e15
        )
        assert min(found) > 0.9 * floor_us


def test_a_faster_memory_and_more_multiprocessors_are_never_slower():
    product = Product(4, 7168, 5120, 16)
    config = Config(kernel="splitk_gemm", warps=4, bm=16, depth=2, split=4)
    base = expected_us(config, product, REFERENCE)
    assert expected_us(config, product, Machine(bandwidth=1e12)) > 1.5 * base
    assert expected_us(config, product, Machine(multiprocessors=66)) > 1.2 * base
    assert expected_us(config, product, Machine(clock_hz=0.99e9)) > 1.5 * base


def test_what_programs_read_of_x_is_a_bound():
    """5120 x 13824, 1024 rows in tiles of 256 (H200): 202 us, of which the L2 takes 180."""
    product = Product(4, 13824, 5120, 1024)
    config = Config(kernel="wgmma_gemm", bm=256, stages=5, cut=1)
    found = expected_us(config, product, REFERENCE)
    assert found == pytest.approx(202, rel=0.12)


def test_tiles_have_as_many_rows_as_x():
    """4096 x 4096, 777 rows: four tiles of 200 rows are one wave; tiles of 256 leave 247 empty."""
    product = Product(4, 4096, 4096, 777, "bf16 zeros")
    fit = Config(kernel="wgmma_rows", bm=200)
    wide = expected_us(replace(fit, bm=256), product, REFERENCE)
    assert expected_us(fit, product, REFERENCE) < 0.85 * wide
    half = expected_us(fit, product, Machine(multiprocessors=64))
    assert half > 1.7 * expected_us(fit, product, REFERENCE)


def test_without_nvrtc_no_kernel_in_cuda_is_chosen():
    product = Product(4, 4096, 4096, 777, "bf16 zeros")
    assert any(c.kernel == "wgmma_rows" for c in candidates(product, REFERENCE))
    none = Machine(nvrtc=False)
    assert all(c.kernel != "wgmma_rows" for c in candidates(product, none))
    assert choose(product, none).kernel == "wgmma_gemm"
    parts = candidates(product, REFERENCE, words=False)
    assert all(c.kernel != "wgmma_rows" for c in parts), "scales of groups of 32 are not read"


def test_long_k_of_one_row_is_split_over_programs():
    long = Product(4, 5120, 17408, 1)
    assert choose(long, REFERENCE, rings=False).split > 1
    assert choose(long, REFERENCE).kernel == "ring_gemv", "H200: 16.6 us, 17.4 by tiles"


def test_programs_past_the_last_wave_cost_another_one():
    """5120 x 17408, 16 rows (H200): 480 programs of 528 places took 17.3 us, 640 took 22.6."""
    product = Product(4, 5120, 17408, 16)
    form = Config(kernel="splitk_gemm", warps=4, bm=16, depth=2)
    times = {}
    for split in (6, 8):
        config = Config(kernel="splitk_gemm", warps=4, bm=16, depth=form.depth, split=split)
        times[split] = expected_us(config, product, REFERENCE)
    assert times[8] > 1.15 * times[6]
    assert times[6] == pytest.approx(17.3, rel=0.1) and times[8] == pytest.approx(22.6, rel=0.1)


def test_pieces_of_w_have_whole_tiles_and_are_alike():
    assert piece_rows(0, 4096, 4096) == 0 and piece_rows(32, 4096, 4096) == 0
    assert piece_rows(32, 28672, 4096) == 4096 and piece_rows(128, 28672, 4096) == 14336
    assert piece_rows(32, 5000, 4096) == 2560, "not 4096 and 904"
    assert piece_rows(1, 512, 8192) == 256, "one of cuBLAS's tiles at least"


@pytest.mark.parametrize("form", ["fp16", "bf16 zeros"])
def test_long_prompts_of_8_bits_are_made_16_bits_first(form):
    """On Hopper too, from where unpacking each tile again costs more than unpacking once."""
    chosen = {rows: choose(Product(8, 4096, 14336, rows, form), REFERENCE) for rows in (256, 4096)}
    assert chosen[256].kernel.startswith("wgmma") and chosen[4096].piece_mib


def test_entries_of_many_rows_serve_their_own_form_alone():
    """Few rows of other forms, and of 3 bits, are close to float16's without zeros."""

    def found(bits: int, rows: int, form: str) -> Config | None:
        return _measured(REFERENCE, Product(bits, 28672, 4096, rows, form))

    assert found(4, 4096, "fp16") is not None
    assert found(4, 4096, "bf16 zeros") is None and found(3, 4096, "fp16") is None
    assert found(4, 128, "bf16 zeros") == found(4, 128, "fp16") is not None
