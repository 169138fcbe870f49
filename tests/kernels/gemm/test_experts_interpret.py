"""Products of a mixture's experts in the interpreter against their twin."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.round_to_nearest import quantize_weight
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm import expert_stack as module
from llmpq.kernels.gemm.expert_stack import ExpertStack, assign, experts_reference
from llmpq.kernels.gemm.reference import relative_error
from llmpq.precision import WeightScheme

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 2e-6}
"""As test_gemm_interpret.py: rounding of the output; float32: of the sums."""


def routing(tokens, experts, per_token, seed=0):
    """Return [T, k] different experts of each token; expert 1 gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    wish = torch.rand(tokens, experts, generator=generator)
    wish[:, 1] = -1
    return wish.topk(per_token, dim=1).indices


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 700])
def test_pairs_are_sorted_by_expert(tokens):
    expert_TK = routing(tokens, 6, 3)
    sent, flat = assign(expert_TK, 6), expert_TK.flatten()
    assert torch.equal(sent.order_C.long(), flat.argsort(stable=True))
    counts = flat.bincount(minlength=6)
    assert torch.equal(sent.ends_E.long(), counts.cumsum(0))
    assert torch.equal(sent.starts_E.long(), counts.cumsum(0) - counts)


def both_ways(weights, put, dtype, *, bias, tokens=9, per_token=2):
    """Return errors of the gathering and of the returning product, and of a wrong routing."""
    experts, (n, k) = len(weights), weights[0].shape
    biases = [normal(n, dtype=dtype) + e for e in range(experts)] if bias else None
    stack = ExpertStack(experts)
    for e, weight in enumerate(put):
        view, _ = stack.put(e, weight, biases[e] if biases else None)
        assert e or view is stack.first
    expert_TK = routing(tokens, experts, per_token)
    sent, errors = assign(expert_TK, experts), []
    for back in (False, True):
        x = normal(tokens * per_token if back else tokens, k, dtype=dtype)
        want = experts_reference(x, weights, expert_TK, biases=biases, back=back)
        errors.append(relative_error(stack.product(x, sent, back=back), want))
        other = experts_reference(x, weights, expert_TK.flip(0), biases=biases, back=back)
        assert relative_error(other, want) > 0.1, "the twin would not see a wrong routing"
    return errors


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_experts(bits, group, symmetric):
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    put = [
        quantize_weight(normal(48, 200) + e, scheme, dtype=torch.float16, layout=Layout.FRAGMENT)
        for e in range(4)
    ]
    weights = [q.dequantize(torch.float64) for q in put]
    for error in both_ways(weights, put, torch.float16, bias=bits == 4):
        assert error < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_experts(dtype, bias):
    put = [normal(40, 72, dtype=dtype) + e for e in range(5)]
    for error in both_ways(put, put, dtype, bias=bias):
        assert error < TOLERANCE[dtype]


def test_an_expert_with_many_blocks_of_pairs(monkeypatch):
    """Programs walk over blocks of 16 pairs, shared out among three."""
    monkeypatch.setattr(module, "rows_of", lambda *_: (16, 3))
    put = [normal(16, 128) + e for e in range(4)]
    assert max(both_ways(put, put, torch.float16, bias=False, tokens=75)) < 5e-4


def test_views_share_the_stack():
    stack = ExpertStack(2)
    given = [normal(16, 128), normal(16, 128) + 1]
    views = [stack.put(e, weight, None)[0] for e, weight in enumerate(given)]
    assert all(torch.equal(view, weight) for view, weight in zip(views, given, strict=True))
    assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()


def test_programs_follow_an_even_routing():
    assert module.rows_of(8, 128) == (16, 1)
    assert module.rows_of(32 * 8, 128) == (16, 1)
    assert module.rows_of(4096 * 8, 128) == (128, 1)
    assert module.rows_of(65536 * 8, 128) == (128, 8)
