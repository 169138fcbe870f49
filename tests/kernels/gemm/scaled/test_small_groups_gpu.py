"""Products of groups of 32 and 64 on a GPU against float64."""

import pytest
import torch

from llmpq.kernels.kernel_table import KernelForm
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_products(dtype, bits, group, symmetric):
    weight = torch.randn(1000, 1500, device="cuda", dtype=dtype) * 0.02
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    q = quantize_weight(weight, scheme, dtype=dtype)
    assert q.kernel_form is not KernelForm.ROWS
    for rows in (1, 5, 64, 300):
        x = torch.randn(rows, 1500, device="cuda", dtype=dtype)
        bias = torch.randn(1000, device="cuda", dtype=dtype)
        want = x.double() @ q.dequantize(torch.float64).T + bias.double()
        assert relative_error(q.matmul(x, bias), want) < TOLERANCE[dtype]
