"""Unquantised products on the CPU: the packed weight is the same matrix in the same bytes."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from llmpq.kernels.cpu.dense import dense_linear, native_dense, pack_dense, plain_dense
from llmpq.kernels.native import huge_pages, library

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, k", [(128, 256), (200, 96), (7, 33)])
@pytest.mark.parametrize("rows", [1, 8, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_float64(dtype, n, k, rows, biased):
    torch.manual_seed(0)
    weight, x = torch.randn(n, k).to(dtype), torch.randn(2, rows, k).to(dtype)
    bias = torch.randn(n).to(dtype) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Rounding of the inputs' products to the dtype, over sums of k terms.
    limit = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]

    def error(w: torch.Tensor) -> float:
        return float((dense_linear(x, w, bias).double() - exact).norm() / exact.norm())

    assert error(weight) < limit
    assert error(pack_dense(weight)) < limit
    assert error(weight.roll(1, dims=0)) > limit, "rows in another order must not pass"


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [level.name for level in library.usable_levels()])
def test_our_own_product_equals_float64(dtype, level, monkeypatch):
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[level])
    torch.manual_seed(0)
    limit = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5.5e-4}[dtype]
    for (n, k), m in itertools.product([(129, 1000), (7, 33), (64, 8), (1, 1)], (1, 2, 3, 15, 33)):
        weight, x, bias = (torch.randn(size).to(dtype) for size in ((n, k), (m, k), (n,)))
        exact = x.double() @ weight.double().T + bias.double()
        got = native_dense(x, weight, bias)
        assert got.dtype == dtype
        assert float((got.double() - exact).norm() / exact.norm()) < limit, (n, k, m)
        if n > 1:
            weight[-1, -1] += 8
            wrong = native_dense(x, weight, bias)
            assert float((wrong.double() - exact).norm() / exact.norm()) > limit, "planted"


@pytest.mark.skipif(
    "amx_int8" not in [level.name for level in library.usable_levels()], reason="AMX"
)
@pytest.mark.parametrize("m", [2, 16, 17, 40, 64, 70])
def test_bfloat16_with_amx_stays_plain_in_large_pages(m):
    weight = torch.randn(2100, 1024).bfloat16()
    kept = pack_dense(weight)
    assert not kept.is_mkldnn and kept.data_ptr() % huge_pages.PAGE == 0
    assert torch.equal(kept, weight)
    x = torch.randn(m, 1024).bfloat16()
    exact = x.double() @ weight.double().T
    assert float((dense_linear(x, kept, None).double() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("n, k", [(128, 256), (200, 96), (7, 33)])
def test_packing_keeps_values_shape_and_bytes(n, k):
    weight = torch.randn(n, k)
    packed = pack_dense(weight)
    assert packed.shape == weight.shape and packed.nbytes == weight.nbytes
    if packed.is_mkldnn:
        assert torch.ops.mkldnn._nbytes(packed) == weight.nbytes
    assert torch.equal(plain_dense(packed), weight)


def test_rows_with_gaps_are_read_where_they_lie():
    weight, x = pack_dense(torch.randn(64, 64)), torch.randn(5, 3, 128)[:, -1, ::2]
    expected = x @ plain_dense(weight).T
    torch.testing.assert_close(dense_linear(x, weight, None), expected)


def test_weights_with_gaps_cost_no_more_than_a_copy():
    """Sliced padding must not reach oneDNN's reference loops (a hundred times slower)."""
    torch.set_num_threads(1)
    padded, x = torch.randn(256, 128), torch.randn(256, 64)

    def seconds(weight: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            start = time.thread_time()
            dense_linear(x, weight, None)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(padded[:, :64]) < 10 * seconds(padded[:, :64].contiguous())
