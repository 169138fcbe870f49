"""Packed words with x in float32, which no packed kernel multiplies: torch makes w."""

import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.linear_gpu import linear_gpu
from llmpq.kernels.weights.quantized_weight import from_codes

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rows", [1, 40])
def test_float32_is_multiplied_by_w_itself(bits, rows):
    torch.manual_seed(0)
    codes = torch.randint(0, 1 << bits, (40, 256), dtype=torch.uint8)
    scale = torch.rand(40, 2) + 0.1
    q = from_codes(
        codes, scale, None, bits=bits, group_size=128, in_features=256, layout=Layout.FRAGMENT
    )
    x, bias, residual = torch.randn(rows, 256), torch.randn(40), torch.randn(rows, 40)
    expected = x.double() @ q.dequantize(torch.float64).T + bias + residual
    torch.testing.assert_close(
        linear_gpu(x, q, bias, residual), expected.float(), rtol=1e-4, atol=1e-3
    )
