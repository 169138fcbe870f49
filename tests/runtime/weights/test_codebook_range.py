"""Codes of a table whose scales are beyond what float16 has: refused there, kept in bfloat16."""

import pytest
import torch

from llmpq.kernels.formats.codebooks import E8M0, Codebook
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.runtime.weights.codebook_forms import bounded

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("codebook", "scale", "factor"),
    [
        (Codebook.E2M1, torch.full((2, 2), 141, dtype=torch.uint8).view(E8M0), None),
        (Codebook.E2M1, torch.full((2, 2), 400.0).to(torch.float8_e4m3fn), torch.full((2,), 90.0)),
        (Codebook.NF4, torch.full((2, 2), 7e4), None),
    ],
    ids=["mxfp4", "nvfp4", "nf4"],
)  # fmt: skip
def test_beyond_float16(codebook, scale, factor):
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 4)
    made = codebook_weight(codes, scale, codebook=codebook, group_size=32, factor=factor)
    assert made.dequantize(torch.float16).isinf().any()
    with pytest.raises(ValueError, match="beyond float16's 65504; run it in bfloat16"):
        bounded(made, torch.float16)
    assert bounded(made, torch.bfloat16) is made
    small = codebook_weight(codes * 0 + 1, scale, codebook=codebook, group_size=32, factor=factor)
    if codebook is Codebook.E2M1:  # half of the scale is in float16's range
        assert bounded(small, torch.float16) is small
