"""Our own CPU products at every level of instructions this machine has, against their twin."""

import itertools
import os
from dataclasses import replace
from functools import cache

import pytest
import torch

from llmpq.kernels.cpu.native_linear import dequantize_rows, multiply_packed
from llmpq.kernels.formats.weight_layout import GROUP, NATIVE, Layout
from llmpq.kernels.native import library
from llmpq.kernels.weights.quantized_weight import native_layout
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import linear_reference, relative_error, rounded_to_bytes

pytestmark = [pytest.mark.cpu, pytest.mark.native]

SCHEMES = list(itertools.product((3, 4, 8), (32, 64, 128, None), (True, False)))
LARGEST = (129, 5000)
SHAPES = [(1, 1), (33, 200), (80, 256), (65, 2176), LARGEST]
ALL = "LLMPQ_ALL_TESTS" in os.environ
# float32: sums of K products. 16 bits: the most that one rounding of y takes off (2^-8, 2^-11), and
# x off by 2^-16 of its group's largest.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5.5e-4}
LEVELS = [level.name for level in library.usable_levels()]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """Dispatch forced to one level."""
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[request.param])
    assert library.library() is not None
    return request.param


def _cases(shapes):
    """Every scheme with every shape; the largest with one of symmetric and not, in turn."""
    for place, (scheme, shape) in enumerate(itertools.product(SCHEMES, shapes)):
        of_pair, second = divmod(place // len(shapes), 2)
        if ALL or shape != LARGEST or second == of_pair % 2:
            yield scheme, shape


def _weight(n, k, bits, group, symmetric, dtype):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k + bits))
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    q = quantize_weight(w, scheme, dtype=dtype)
    assert q.layout in NATIVE and q.nbytes == scheme.nbytes(n, k, dtype.itemsize)
    return q


@cache
def _few_rows(dtype):
    """Return operands on odd shapes and the exact product, the same for every level."""
    torch.manual_seed(0)
    found = []
    for (bits, group, symmetric), (n, k) in _cases(SHAPES):
        q = _weight(n, k, bits, group, symmetric, dtype)
        for m in (1, 2, 7, 13):
            x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
            exact = linear_reference(x, q, bias, exact=True)
            found.append(((bits, group, symmetric, n, k, m), q, x, bias, exact))
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_few_rows_equal_their_twin_on_odd_shapes(level, dtype):
    for case, q, x, bias, exact in _few_rows(dtype):
        y = multiply_packed(x, q, bias)
        assert y.dtype == dtype
        assert relative_error(y, exact) < TOLERANCE[dtype], case


@cache
def _rows_of_bytes(dtype):
    """The same of numbers that 8 bits hold: where instructions round a half apart, sums differ."""
    torch.manual_seed(0)
    found = []
    for (bits, group, symmetric), (n, k) in _cases(SHAPES):
        q = replace(_weight(n, k, bits, group, symmetric, dtype), activation_bits=8)
        for m in (1, 3, 13):
            x = torch.randint(-126, 127, (m, k)).float()
            x[:, ::GROUP] = 127
            x, bias = (x / 16).to(dtype), torch.randn(n).to(dtype)
            x[0] *= 1 if m == 1 else 1 / 8
            assert (rounded_to_bytes(x) - x).abs().max() < 1e-6
            exact = linear_reference(x, q, bias, exact=True)
            found.append(((bits, group, symmetric, n, k, m), q, x, bias, exact))
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_in_eight_bits_equal_their_twin_on_odd_shapes(level, dtype):
    torch.manual_seed(0)
    for case, q, x, bias, exact in _rows_of_bytes(dtype):
        error = relative_error(multiply_packed(x, q, bias), exact)
        assert error < TOLERANCE[dtype], case
    x = torch.randn(5, 2176)
    for bits in (3, 4, 8):
        q = replace(_weight(65, 2176, bits, 128, False, torch.float32), activation_bits=8)
        twin = linear_reference(rounded_to_bytes(x), q, exact=True)
        off = relative_error(multiply_packed(x, q, None), twin)
        lost = relative_error(linear_reference(x, q, exact=True), twin)
        assert off < 2e-4 and off < lost / 10 and 2e-3 < lost < 2e-2, (bits, off, lost)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_dequantise_to_the_nearest_number(level, bits, dtype):
    for group in (32, 64, 128, None):
        q = _weight(129, 333, bits, group, False, dtype)
        for start, stop in ((0, 129), (64, 100)):
            got = dequantize_rows(q, dtype, start, stop)
            assert torch.equal(got, q.dequantize(dtype)[start:stop])


@cache
def _rows_of_a_prompt():
    torch.manual_seed(0)
    # A tile's columns and a few more; more rows than stay together, all of k in several parts.
    wanted = {(33, 200): (17, 33), (65, 2176): (70,), LARGEST: (545,)}
    found = []
    for (bits, group, symmetric), (n, k) in _cases(wanted):
        q = _weight(n, k, bits, group, symmetric, torch.bfloat16)
        for m in wanted[n, k]:
            x = torch.randn(m, k).bfloat16()
            found.append(((bits, group, symmetric, n, k, m), *_with_product(q, x)))
    return found


def _with_product(q, x):
    bias = torch.randn(q.out_features).to(x.dtype)
    return q, x, bias, linear_reference(x, q, bias, exact=True)


def test_rows_of_a_prompt_equal_their_twin_on_odd_shapes(level):
    for given in _rows_of_a_prompt():
        _check_rows(*given)


@cache
def _rows_in_other_numbers(dtype):
    torch.manual_seed(0)
    found = []
    for bits, group, symmetric in SCHEMES:
        q = _weight(81, 333, bits, group, symmetric, dtype)
        x = torch.randint(-126, 127, (50, 333)).float()
        x[:, ::GROUP] = 127
        plain = _with_product(q, torch.randn(43, 333).to(dtype))
        in_bytes = _with_product(replace(q, activation_bits=8), (x / 16).to(dtype))
        found += [
            ((bits, group, symmetric), *plain),
            ((bits, group, symmetric, "bytes"), *in_bytes),
        ]
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_of_a_prompt_in_other_numbers_equal_their_twin(level, dtype):
    for given in _rows_in_other_numbers(dtype):
        _check_rows(*given)


def _check_rows(case, q, x, bias, exact):
    y = q.matmul(x, bias)
    assert y.dtype == x.dtype and y.shape == exact.shape
    error = relative_error(y, exact)
    assert error < TOLERANCE[x.dtype], (case, error)


def test_a_prompt_is_as_exact_as_a_weight_of_bfloat16(level):
    torch.manual_seed(1)
    for bits, group in itertools.product((3, 4, 8), (32, 128)):
        q = _weight(64, 1024, bits, group, False, torch.bfloat16)
        x = torch.randn(40, 1024).bfloat16()
        exact = linear_reference(x, q, exact=True)
        rounded = x.double() @ q.dequantize(torch.bfloat16).double().t()
        lost = relative_error(rounded.bfloat16(), exact)
        assert relative_error(q.matmul(x, None), exact) < 1.05 * lost, (bits, group)


def test_many_rows_take_the_weight_in_pieces(level, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.cpu.dense.CHUNK_WEIGHTS", 64 * 256)
    q = _weight(200, 256, 4, 128, False, torch.float32)
    x, bias = torch.randn(70, 256), torch.randn(200)
    assert relative_error(q.matmul(x, bias), linear_reference(x, q, bias, exact=True)) < 2e-6


@pytest.mark.parametrize("m", [3, 40, 145])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_planted_faults_exceed_the_tolerance(level, bits, m):
    torch.manual_seed(bits)
    q = _weight(3, 256, bits, 128, False, torch.bfloat16)
    x = torch.randn(m, 256).to(torch.bfloat16)
    exact = linear_reference(x, q, exact=True)

    def error():
        return relative_error(q.matmul(x, None), exact)

    assert error() < TOLERANCE[torch.bfloat16]
    faults = ((q.scale, lambda t: t * 2), (q.zero, lambda t: t + 8), (q.planes[0], lambda t: ~t))
    for flat, change in faults:
        kept = flat[-4:].clone()
        flat[-4:] = change(kept)
        assert error() > TOLERANCE[torch.bfloat16]
        flat[-4:] = kept


def test_large_and_small_numbers_in_one_group_keep_their_bits(level):
    """One outlier of 1000: the others' error stays below 2^-16 of it, and zeros stay zeros."""
    q = _weight(64, 128, 8, 128, True, torch.bfloat16)
    x = torch.full((1, 128), 0.5)
    x[0, 7] = 1000
    exact = linear_reference(x.bfloat16(), q, exact=True)
    assert relative_error(multiply_packed(x.bfloat16(), q, None), exact) < TOLERANCE[torch.bfloat16]
    for dtype in (torch.bfloat16, torch.float32):
        assert not multiply_packed(torch.zeros(2, 128, dtype=dtype), q, None).any()
    tiny = torch.full((1, 128), 1e-38).bfloat16()
    assert torch.isfinite(multiply_packed(tiny, q, None)).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 9])
def test_the_largest_numbers_of_a_group_fit_in_two_bytes(level, bits, m):
    """255/128 of a power of two is 0x7f80 as a whole number: 128 and a low byte with a sign."""
    q = _weight(40, 400, bits, 128, False, torch.bfloat16)
    x = torch.randn(m, 400).bfloat16() / 4
    x[:, ::128] = 255 / 128
    x[0, 5] = -2
    exact = linear_reference(x, q, exact=True)
    assert relative_error(multiply_packed(x, q, None), exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_seen(level, wrong, dtype, m):
    q = _weight(64, 256, 4, 128, False, dtype)
    x = torch.ones(m, 256, dtype=dtype)
    x[1, 200] = wrong
    y = q.matmul(x, None)
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()
    assert torch.isfinite(y[2:]).all()


def test_rows_with_gaps_and_no_rows(level):
    q = _weight(64, 256, 4, 128, False, torch.float32)
    x = torch.randn(3, 512)[:, ::2]
    assert relative_error(multiply_packed(x, q, None), linear_reference(x, q, exact=True)) < 2e-6
    assert multiply_packed(torch.empty(0, 256), q, None).shape == (0, 64)


@pytest.mark.parametrize("layout", NATIVE)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_weight_of_another_cpu_is_multiplied_and_moves(level, bits, layout):
    """Rows by themselves where panels are quicker, and panels where no code knows them."""
    scheme = WeightScheme(bits=bits, clip_search=False)
    w = torch.randn(33, 200, generator=torch.Generator().manual_seed(bits))
    stored = quantize_weight(w, scheme, dtype=torch.bfloat16, layout=layout)
    assert stored.layout is layout
    for m in (1, 5, 40):
        x = torch.randn(m, 200).bfloat16()
        exact = linear_reference(x, stored, exact=True)
        assert relative_error(stored.matmul(x, None), exact) < TOLERANCE[torch.bfloat16]
    moved = stored.to("cpu")
    assert moved.layout is native_layout(128)
    assert torch.equal(moved.dequantize(torch.float32), stored.dequantize(torch.float32))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rows_of_a_stored_checkpoint_move_to_our_layout(bits):
    scheme = WeightScheme(bits=bits, clip_search=False)
    stored = quantize_weight(torch.randn(33, 200), scheme, dtype=torch.float32, layout=Layout.ROWS)
    moved = stored.to("cpu")
    assert moved.layout in NATIVE and moved.nbytes == stored.nbytes
    assert torch.equal(moved.dequantize(torch.float32), stored.dequantize(torch.float32))
