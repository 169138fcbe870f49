"""Few rows of x by CUDA C++ (GPUs before Ampere), on whatever GPU there is: forms, tails, order."""

import itertools

import pytest
import torch

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.cuda import gemv_launch
from llmpq.kernels.gemm.operands.linear_operands import LinearOperands
from llmpq.kernels.gemm.ranking.config import Config, make_plan
from reference.check_gemm import LIMITS, random_weight
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HALF = torch.float16
FEW = make_plan(Config(kernel="cuda_gemv"), (7, 5))


@pytest.fixture(autouse=True)
def _compiler():
    if not nvrtc.compiles_for(torch.cuda.get_device_capability()):
        pytest.skip("needs an NVRTC that knows this GPU")


def _weight(n, k, bits, symmetric, group):
    return random_weight(n, k, bits, symmetric, group, HALF, torch.device("cuda"))


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize(
    "bits,group,symmetric", itertools.product((3, 4, 8), (None, 32, 64, 128), (True, False))
)
def test_every_form_and_number_of_rows(bits, group, symmetric, tensor_cores):
    if tensor_cores and torch.cuda.get_device_capability() < gemv_launch.TENSOR_CORES_FROM:
        pytest.skip("needs tensor cores")
    q = _weight(528, 1000, bits, symmetric, group)
    for rows in (1, 2, 3, 7, 8, 9, 16, 33, 70):
        x = torch.randn(rows, 1000, device="cuda").to(HALF)
        y = torch.empty(rows, 528, device="cuda", dtype=HALF)
        gemv_launch.launch(FEW, LinearOperands(x, q, None, None, y), tensor_cores=tensor_cores)
        exact = linear_reference(x, q, exact=True)
        assert relative_error(y, exact) < LIMITS[HALF], rows
    q.planes[0][100:1400] = q.planes[0][100:1400] >> 4 | q.planes[0][100:1400] << 4
    gemv_launch.launch(FEW, LinearOperands(x, q, None, None, y), tensor_cores=tensor_cores)
    assert relative_error(y, exact) > 2 * LIMITS[HALF], "a planted fault"


@pytest.mark.parametrize(
    "n,k,rows", [(4099, 4104, 5), (1040, 11008, 1), (33, 200, 3), (70, 128, 2)]
)
def test_tails_bias_residual_and_the_same_bits_each_time(n, k, rows):
    q, x = _weight(n, k, 4, False, 128), torch.randn(rows, k, device="cuda").to(HALF)
    bias, residual = torch.randn(n, device="cuda").to(HALF), torch.randn(rows, n, device="cuda")
    residual = residual.to(HALF)
    exact = linear_reference(x, q, exact=True) + bias.double() + residual.double()
    first = linear_gpu.run(FEW, x, q, bias, residual)
    assert relative_error(first, exact) < LIMITS[HALF]
    assert all(torch.equal(linear_gpu.run(FEW, x, q, bias, residual), first) for _ in range(10))


@pytest.mark.parametrize("bits,group", itertools.product((3, 4, 8), (None, 32, 128)))
def test_w_in_float16_is_the_plain_one(bits, group):
    q = _weight(100, 1000, bits, False, group)
    assert torch.equal(gemv_launch.dequantize(q), q.dequantize(HALF))
