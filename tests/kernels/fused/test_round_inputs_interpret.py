"""Inputs rounded to 4 bits in one pass, for drafts: as its twin."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.fused import round_inputs
from reference import fused_twins

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("columns", [128, 1152])
def test_inputs_rounded_in_one_pass(columns):
    """The twin's numbers, a group of zeros and halves between two codes included."""
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    x[1, :128] = 0
    x[2, :128] = torch.arange(128) % 16 - 7.5
    scheme = AtomScheme(activation_clip=1.0)
    got = round_inputs.round_restore(x, scheme)
    assert torch.equal(got, fused_twins.round_restore_reference(x, scheme))
    assert not torch.equal(got, fused_twins.round_restore_reference(x, AtomScheme()))
