"""Few rows through rings of shared memory on a Hopper GPU: forms, schedules, what is refused."""

import itertools

import pytest
import torch

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.choice import choose_plan
from llmpq.kernels.gemm.dense_few import few_rows
from llmpq.kernels.gemm.ranking.config import make_plan
from llmpq.kernels.gemm.ranking.ring_plan import ring_config
from llmpq.kernels.weights.dense_weight import DenseWeight
from reference.check_gemm import LIMITS, random_weight
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC"),
]

GPU = torch.device("cuda")


def _product(x, q, bias=None, residual=None, **options):
    config = ring_config(q.bits, q.in_features, len(x), zeros=not q.symmetric)
    return linear_gpu.run(make_plan(config, (9, 0)), x, q, bias, residual, **options)


@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize(
    "dtype,symmetric", itertools.product((torch.float16, torch.bfloat16), (False, True))
)
def test_every_form_and_a_planted_bug(dtype, symmetric, group):
    q = random_weight(1040, 1152, 4, symmetric, group, dtype, GPU)
    for rows in (1, 3, 8):
        x, bias = (torch.randn(*s, device=GPU).to(dtype) for s in ((rows, 1152), (1040,)))
        residual = torch.randn(rows, 1040, device=GPU).to(dtype)
        exact = linear_reference(x, q, exact=True)
        assert relative_error(_product(x, q), exact) < LIMITS[dtype]
        added = exact + bias.double() + residual.double()
        y = _product(x, q, bias, residual, into_residual=True)
        assert relative_error(y, added) < LIMITS[dtype]
        assert y.data_ptr() == residual.data_ptr()
    q.planes[0][100:1400] = q.planes[0][100:1400] >> 4 | q.planes[0][100:1400] << 4
    torch.cuda.synchronize()
    assert relative_error(_product(x, q), exact) > 2 * LIMITS[dtype]


@pytest.mark.parametrize("n,k", [(6144, 4096), (4096, 14336), (28672, 512), (48, 128)])
def test_every_schedule_gives_the_same_bits_each_time(n, k):
    q = random_weight(n, k, 4, False, 128, torch.bfloat16, GPU)
    for rows in (1, 2, 5, 8) if k < 8192 else (1, 2):
        x = torch.randn(rows, k, device=GPU).bfloat16()
        first = _product(x, q)
        assert relative_error(first, linear_reference(x, q, exact=True)) < LIMITS[torch.bfloat16]
        assert all(torch.equal(_product(x, q), first) for _ in range(10))


def test_x_that_it_cannot_read_is_another_kernels():
    q = random_weight(4096, 1000, 4, True, 128, torch.float16, GPU)
    x = torch.randn(2, 1000, device=GPU).half()
    assert choose_plan(x, q, None).config.kernel != "ring_gemv", "K is no whole number of groups"
    q = random_weight(4096, 1024, 4, True, 128, torch.float16, GPU)
    shifted = torch.randn(2 * 1024 + 1, device=GPU).half()[1:].view(2, 1024)
    assert choose_plan(shifted, q, None).config.kernel != "ring_gemv"
    exact = linear_reference(shifted, q, exact=True)
    y = linear_gpu.linear_gpu(shifted, q, None, None)
    assert relative_error(y, exact) < LIMITS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n,k", [(6144, 4096), (4096, 14336), (2128, 1152)])
def test_weights_of_16_bits(n, k, dtype):
    w, x = torch.randn(n, k, device=GPU).to(dtype), torch.randn(1, 1, k, device=GPU).to(dtype)
    residual = torch.randn(1, 1, n, device=GPU).to(dtype)
    exact = x.double() @ w.double().t()
    assert relative_error(few_rows(x, w, None), exact) < LIMITS[dtype]
    weight = DenseWeight(w)
    y = weight.matmul(x, None, residual, into_residual=True)
    assert y.shape == (1, 1, n) and y.data_ptr() == residual.data_ptr()
    assert all(torch.equal(few_rows(x, w, None), few_rows(x, w, None)) for _ in range(10))
    others = ((x.expand(3, 1, k), w), (x[..., :-1], w[:, :-1]), (x, w[:256]))
    assert all(few_rows(*other, None) is None for other in others), "cuBLAS's"
