"""The one-pass clip search in the interpreter, against torch's operators."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.search_grid import search_grid
from llmpq.kernels.weights.round_to_nearest import _CLIPS, quantize_codes
from llmpq.precision import WeightScheme

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def _weight(n, k):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) ** 3
    w[0], w[1, : k // 2] = 0, 1e-9
    w[2] = w[2].abs() + 1
    return w


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("group,n,k", [(128, 9, 384), (32, 5, 300), (64, 4, 128)])
def test_codes_scales_and_zeros_are_those_of_torchs_operators(bits, symmetric, clip, group, n, k):
    w = _weight(n, k).half()
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=clip)
    expected = quantize_codes(w, scheme, scale_dtype=torch.float16)
    clips = _CLIPS[bits] if clip else [1.0]
    options = dict(bits=bits, group=group, symmetric=symmetric, scale_dtype=torch.float16)
    found = search_grid(w, clips=clips, **options)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    if clip and bits < 8:
        other = search_grid(w, clips=[c * 0.99 for c in clips], **options)
        assert not torch.equal(other[1], expected[1]), "planted: another grid of clips shows"
