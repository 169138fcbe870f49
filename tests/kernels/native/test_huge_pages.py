"""Memory in large pages holds what other memory does, and begins where it should."""

import pytest
import torch

from llmpq.kernels.cpu.pack_contiguous import pack_contiguous
from llmpq.kernels.native import huge_pages
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme

pytestmark = pytest.mark.cpu
SIZES = [huge_pages.LEAST, huge_pages.LEAST + 12, 3 * huge_pages.LEAST - 4]


@pytest.mark.parametrize("size", SIZES)
def test_zeros_are_zeros_that_can_be_written(size):
    made = huge_pages.zeros((size // 4,), torch.float32, "cpu")
    assert made.shape == (size // 4,) and made.dtype == torch.float32 and not made.any()
    assert made.data_ptr() % huge_pages.PAGE == 0 or not huge_pages.are_here()
    made += torch.arange(size // 4)
    assert torch.equal(made, torch.arange(size // 4).float())


def test_small_ones_are_as_ever():
    made = huge_pages.zeros((3, 5), torch.bfloat16, "cpu")
    assert made.shape == (3, 5) and not made.any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_side_by_side_are_the_same_weights(symmetric):
    scheme = WeightScheme(bits=4, group_size=128, symmetric=symmetric, clip_search=False)
    torch.manual_seed(0)
    made = [
        quantize_weight(torch.randn(n, k), scheme, dtype=torch.bfloat16)
        for n, k in ((4096, 2048), (37, 300), (64, 128))
    ]
    moved = pack_contiguous(made)
    if huge_pages.are_here():
        assert moved[0].planes[0].data_ptr() % huge_pages.PAGE == 0
        assert moved[0].planes[0].data_ptr() != made[0].planes[0].data_ptr()
    for before, after in zip(made, moved, strict=True):
        assert torch.equal(before.planes[0], after.planes[0])
        assert torch.equal(before.scale, after.scale)
        assert (before.zero is None) == (after.zero is None) == symmetric
        assert after.nbytes == before.nbytes and after.bits == before.bits
        assert after.planes[0].data_ptr() % 64 == 0
    assert pack_contiguous(moved[:1])[0] is moved[0]
    assert pack_contiguous(made[1:])[0] is made[1]
