"""Few rows times a 16-bit weight, interpreted, against float64."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.gemm.few_dense import DenseForm, few_dense, few_dense_reference
from llmpq.kernels.gemm.reference import relative_error

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}
"""The interpreter truncates to bfloat16 where a GPU rounds."""


def normal(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 40, 72), (8, 100, 320), (17, 64, 256)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", ["no", "apart", "in place"])
def test_a_product_of_few_rows(dtype, rows, n, k, bias, residual):
    x, w = normal(rows, 1, k, dtype=dtype, seed=0), normal(n, k, dtype=dtype, seed=1)
    b = normal(n, dtype=dtype, seed=2) if bias else None
    r = None if residual == "no" else normal(rows, 1, n, dtype=dtype, seed=3)
    want = few_dense_reference(x, w, b, r)
    place = residual == "in place"
    given = None if r is None else r.clone()
    form = DenseForm(16, 64, 3, 4, 2048)
    y = few_dense(x, w, b, given, into_residual=place, form=form)
    assert y.shape == want.shape and relative_error(y, want) < TOLERANCE[dtype]
    assert relative_error(y.flip(-1), want) > 0.1
    if given is not None:
        assert torch.equal(given, y if place else r)
