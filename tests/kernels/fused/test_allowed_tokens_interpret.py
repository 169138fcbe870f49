"""The kernel that takes forbidden tokens out of logits, against torch's operators."""

import math

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.allowed_tokens import only_allowed
from llmpq.runtime.models.ruled_sampling import unpacked

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 77, 4096, 9001])
def test_only_allowed_tokens_stay(columns, dtype):
    logits = torch.randn(3, columns + 5, generator=torch.manual_seed(columns)).to(dtype)
    logits = logits[:, :columns]  # rows lie apart
    bits = torch.randint(0, 256, (3, -(-columns // 32) * 4), dtype=torch.uint8)
    want = logits.masked_fill(~unpacked(bits, columns), -math.inf)
    before = logits.clone()
    assert torch.equal(only_allowed(logits, bits), want)
    assert torch.equal(logits, before), "what was given changed"
    if columns > 1:
        assert not torch.equal(only_allowed(logits, ~bits), want)


def test_bits_that_do_not_cover_the_tokens_are_refused():
    with pytest.raises(ValueError, match="bits must be uint8"):
        only_allowed(torch.zeros(2, 65), torch.zeros(2, 8, dtype=torch.uint8))
