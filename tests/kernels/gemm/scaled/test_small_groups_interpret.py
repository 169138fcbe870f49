"""Products of weights in groups of 32 and 64 in the interpreter, against their dequantised twin."""

import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.weights.quantized_weight import QuantizedWeight, from_codes
from reference.gemm_twins import relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.gemm.scaled import small_groups  # noqa: E402
from llmpq.kernels.kernel_table import KernelForm  # noqa: E402

pytestmark = [pytest.mark.interpret, pytest.mark.thin(2)]


def weight(n, k, *, bits, group, symmetric, dtype=torch.float16) -> QuantizedWeight:
    torch.manual_seed(n + k)
    padded = -(-k // 128) * 128
    codes = torch.randint(0, 1 << bits, (n, padded), dtype=torch.uint8)
    scale = (torch.rand(n, padded // group) * 0.1 + 0.01).to(dtype)
    zero = None if symmetric else (torch.rand(n, padded // group) * (1 << bits)).to(dtype)
    return from_codes(
        codes, scale, zero, bits=bits, group_size=group, in_features=k, layout=Layout.ROWS
    )


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_products(bits, group, symmetric, rows):
    q = weight(70, 300, bits=bits, group=group, symmetric=symmetric)
    x = torch.randn(rows, 300).half()
    bias, residual = torch.randn(70).half(), torch.randn(rows, 70).half()
    want = x.double() @ q.dequantize(torch.float64).T + bias + residual
    assert q.kernel_form is KernelForm.ROWS
    assert relative_error(small_groups.multiply(x, q, bias, residual), want) < 1e-3
    assert torch.equal(small_groups.dequantized(q, torch.float16), q.dequantize(torch.float16))


def test_float16_scales_of_a_float32_stage():
    q = weight(33, 128, bits=8, group=32, symmetric=True)
    x = torch.randn(2, 128)
    want = x.double() @ q.dequantize(torch.float64).T
    assert relative_error(small_groups.multiply(x, q, None, None), want) < 2e-6


def test_another_groups_scale_is_seen():
    """Planted: scales one group on."""
    from dataclasses import replace

    q = weight(40, 256, bits=4, group=32, symmetric=True)
    x = torch.randn(5, 256).half()
    want = x.double() @ q.dequantize(torch.float64).T
    wrong = replace(q, scale=q.scale.roll(1))
    assert relative_error(small_groups.multiply(x, wrong, None, None), want) > 0.1
