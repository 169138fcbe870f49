"""The Triton dequantise kernel, in the interpreter, against the plain-torch twin."""

import itertools

import pytest
import torch
from triton import knobs

from llmpq.kernels.dequantize import dequantize_triton
from llmpq.kernels.formats import Layout
from llmpq.kernels.quantize import quantize_weight
from llmpq.precision import WeightScheme

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("bits,group", itertools.product((3, 4, 8), (128, None)))
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.FRAGMENT])
def test_dequantise_matches_its_twin(bits, group, layout):
    for symmetric, (n, k) in itertools.product((True, False), ((16, 128), (37, 200))):
        scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
        q = quantize_weight(torch.randn(n, k), scheme, dtype=torch.float16, layout=layout)
        assert torch.equal(dequantize_triton(q, torch.float32), q.dequantize(torch.float32))
        part = dequantize_triton(q, torch.float32, 0, 16)
        assert torch.equal(part, q.dequantize(torch.float32)[:16])


def test_a_swapped_nibble_is_seen():
    q = quantize_weight(
        torch.randn(16, 128), WeightScheme(bits=4), dtype=torch.float16, layout=Layout.FRAGMENT
    )
    exact = q.dequantize(torch.float32)
    byte = int(q.planes[0][9])
    q.planes[0][9] = (byte >> 4 | byte << 4) & 255 if byte % 17 else byte ^ 1
    assert not torch.equal(dequantize_triton(q, torch.float32), exact)
