"""Small kernels of mixtures' layers in the interpreter, against their twins."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.head_norm import head_norm
from llmpq.kernels.fused.weighted_sum import Shared, weighted_sum
from reference.fused_twins import head_norm_reference, weighted_sum_reference
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
# Both sides round once from float32; the interpreter truncates to bfloat16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "per_token", "columns"), [(1, 8, 64), (3, 3, 300)])
def test_weighted_sums(dtype, tokens, per_token, columns):
    made = normal(tokens * per_token, columns, dtype=dtype)
    weight, x = normal(tokens, per_token, dtype=dtype, seed=1), normal(tokens, columns, dtype=dtype)
    given, gate = normal(tokens, columns, dtype=dtype, seed=2), normal(1, columns, seed=3).to(dtype)
    whole = Shared(made_Th=normal(tokens, columns, dtype=dtype, seed=4))
    gated = replace(whole, given_Th=given, gate_1h=gate * columns**-0.5)
    for residual, shared in ((None, None), (x, None), (None, whole), (x, gated)):
        want = weighted_sum_reference(weight, made, residual, shared=shared)
        got = weighted_sum(weight, made, residual, shared=shared)
        assert relative_error(got, want) < TOLERANCE[dtype]
        other = weighted_sum(weight.flip(1), made, residual, shared=shared)
        assert relative_error(other, want) > 0.1
    last = normal(tokens, per_token + 1, columns, dtype=dtype, seed=5)  # what is shared comes last
    apart = replace(gated, made_Th=last[:, -1])
    want = weighted_sum_reference(weight, last[:, :-1].flatten(0, 1), x, shared=apart)
    got = weighted_sum(weight, last.flatten(0, 1), x, shared=apart)
    assert relative_error(got, want) < TOLERANCE[dtype]
    want = weighted_sum_reference(weight, made, x, shared=gated)
    ungated = weighted_sum_reference(weight, made, x, shared=whole)
    assert relative_error(ungated, want) > 0.1, "the gate is seen"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 32), (3, 1, 24)])
def test_norms_of_heads(dtype, heads, groups, dim):
    """Queries and keys by their own weights, values and what lies beyond the row as they were."""
    room = normal(5, (heads + 2 * groups) * dim + 8, dtype=dtype)
    qkv = room[:, :-8].view(5, heads + 2 * groups, dim)
    q_weight, k_weight = normal(dim, dtype=dtype, seed=2), normal(dim, dtype=dtype, seed=3)
    want = head_norm_reference(qkv, q_weight, k_weight, heads, 1e-5)
    other, beyond = head_norm_reference(qkv, k_weight, q_weight, heads, 1e-5), room[:, -8:].clone()
    assert relative_error(other, want) > 0.1
    head_norm(qkv, q_weight, k_weight, heads, 1e-5)
    assert relative_error(qkv, want) < TOLERANCE[dtype]
    assert torch.equal(qkv[:, heads + groups :], want[:, heads + groups :])
    assert torch.equal(room[:, -8:], beyond)
