"""GPTQ's inner loop in Triton's interpreter, against its twin and inside the whole method."""

from __future__ import annotations

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.gptq_block import round_block
from reference.fused_twins import round_block_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def problem(
    n: int = 20, columns: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights inside a wider matrix, a block of a factor, scales and zeros."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(n, 256, generator=generator)
    mixed = torch.eye(256) + 0.1 * torch.randn(256, 256, generator=generator)
    x = torch.randn(500, 256, generator=generator) @ mixed
    inverse = torch.linalg.inv((x.t() @ x).double() + torch.eye(256))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    first = 256 - columns
    scale = wide[:, first:].abs().amax(1, keepdim=True) / 7
    zero = torch.randint(-1, 2, (n, 1), generator=generator).float()
    return wide[:, first:], factor[first:, first:], scale, zero


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_codes_and_errors_are_the_twins(columns: int) -> None:
    given = problem(columns=columns)
    codes, errors = round_block(*given, (-8.0, 7.0))
    wanted_codes, wanted_errors = round_block_reference(*given, (-8.0, 7.0))
    # A sum rounded the other way may move a code that lies on an edge, and its row after it.
    same = (codes == wanted_codes).all(dim=1)
    assert float(same.float().mean()) > 0.9
    assert torch.allclose(errors[same], wanted_errors[same], rtol=1e-3, atol=1e-4)
    shifted = (given[0], given[1].roll(1, dims=1), *given[2:])
    assert not torch.equal(round_block(*shifted, (-8.0, 7.0))[0], wanted_codes)


def test_limits_hold() -> None:
    codes, _ = round_block(*problem(), (0.0, 3.0))
    assert float(codes.min()) == 0 and float(codes.max()) == 3


def test_a_block_of_another_width_is_refused() -> None:
    w, u, scale, zero = problem()
    with pytest.raises(ValueError, match="expected a power of two next to each other"):
        round_block(w[:, :96], u, scale, zero, (-8.0, 7.0))
