"""Codes of other tools as values: groups are as long as the checkpoint says."""

from __future__ import annotations

import pytest
import torch

from llmpq.kernels.weights.integer_values import values_of_awq
from llmpq.kernels.weights.interchange import from_awq
from reference.interchange import awq_pack

pytestmark = [pytest.mark.cpu, pytest.mark.quick]


def awq_layer(k: int, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return AWQ tensors of [16, k] in groups of `size`, the last one short, and their values."""
    torch.manual_seed(k + size)
    groups = -(-k // size)
    codes_KN, zeros_GN = torch.randint(0, 16, (k, 16)), torch.randint(0, 16, (groups, 16))
    scales_GN = torch.rand(groups, 16) + 0.5
    packed = {"qweight": awq_pack(codes_KN), "qzeros": awq_pack(zeros_GN), "scales": scales_GN}
    at = torch.arange(k) // size
    return packed, ((codes_KN - zeros_GN[at]) * scales_GN[at]).t()


@pytest.mark.parametrize(
    ("k", "size"), [(96, 64), (96, 48), (160, 80), (160, 128), (200, 64), (96, 32), (128, 16)]
)
def test_groups_are_as_long_as_is_said(k: int, size: int) -> None:
    packed, expected = awq_layer(k, size)
    assert torch.equal(values_of_awq(packed, group_size=size), expected)
    if size in (32, 64, 128):
        weight = from_awq(packed).dequantize(torch.float32)[:, :k]
        torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-2)


def test_a_size_that_does_not_give_the_groups_is_refused() -> None:
    packed, _ = awq_layer(96, 64)
    with pytest.raises(ValueError, match="96 channels have 2 groups, expected 3 of 32 channels"):
        values_of_awq(packed, group_size=32)
