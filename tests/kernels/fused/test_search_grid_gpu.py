"""The one-pass clip search on a GPU, against torch's operators there."""

import pytest
import torch

from llmpq.kernels.weights import round_to_nearest
from llmpq.kernels.weights.quantized_weight import from_codes
from llmpq.kernels.weights.round_to_nearest import quantize_codes
from llmpq.precision import WeightScheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _off(w, found, scheme):
    codes, scale, zero = found
    q = from_codes(
        *(codes, scale, zero),
        bits=scheme.bits,
        group_size=scheme.group_size,
        in_features=w.shape[1],
    )
    return float((q.dequantize(torch.float32) - w.float()).square().sum())


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_those_of_torchs_operators_but_for_ties(bits, symmetric, dtype, monkeypatch):
    w = torch.randn(1000, 4100, device="cuda").pow(3).to(dtype)
    w[0], w[1, :2000] = 0, 1e-9
    scheme = WeightScheme(bits=bits, symmetric=symmetric)
    found = quantize_codes(w, scheme, scale_dtype=dtype)
    monkeypatch.setattr(round_to_nearest, "_has_triton", lambda device: False)
    plain = quantize_codes(w, scheme, scale_dtype=dtype)
    assert [None if t is None else (t.shape, t.dtype) for t in found] == [
        None if t is None else (t.shape, t.dtype) for t in plain
    ]
    same = (found[0] == plain[0]).float().mean()
    assert same > 0.9999, f"only {same:.5f} of the codes: sums of squares differ in order alone"
    assert _off(w, found, scheme) <= _off(w, plain, scheme) * (1 + 1e-6)
