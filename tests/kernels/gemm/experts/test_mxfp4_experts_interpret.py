"""Products of experts in MXFP4 in the interpreter against their dequantised twin."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.codebooks import E8M0, Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.weights.codebook_weight import CodebookWeight, codebook_weight
from reference.fused_twins import gate_mul_reference
from reference.gemm_twins import experts_reference, relative_error

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Rounding of the output: E2M1 times a power of two is exact in 16 bits."""
RULE = GateRule("clamped_silu", 2.0, 1.7)


def mxfp4(n: int, k: int, seed: int) -> CodebookWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.randint(119, 129, (n, -(-k // 32)), dtype=E8M0, generator=generator)
    return codebook_weight(codes, scale, codebook=Codebook.E2M1, group_size=32)


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def routing(tokens, experts, per_token):
    wish = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    wish[:, 1] = -1
    return wish.topk(per_token, dim=1).indices


def stack_of(put, biases):
    stack = ExpertStack(len(put))
    for e, weight in enumerate(put):
        assert stack.takes(weight, biases[e])
        view, _ = stack.put(e, weight, biases[e])
        assert view.layout is Layout.FRAGMENT
        assert torch.equal(view.dequantize(torch.float64), weight.dequantize(torch.float64))
    return stack


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [4, 11, 40])
def test_products(dtype, tokens):
    """K of 224 is a k-group and three groups of 32; experts of none, few and many pairs."""
    put = [mxfp4(96, 224, e) for e in range(4)]
    biases = [normal(96, dtype=dtype) + e for e in range(4)]
    stack = stack_of(put, biases)
    weights = [q.dequantize(torch.float64) for q in put]
    expert_TK = routing(tokens, 4, 2)
    dispatch = assign(expert_TK, 4)
    for back in (False, True):
        x = normal(tokens * 2 if back else tokens, 224, dtype=dtype)
        want = experts_reference(x, weights, expert_TK, biases=biases, back=back)
        assert relative_error(stack.product(x, dispatch, back=back), want) < TOLERANCE[dtype]
    x = normal(tokens, 224, dtype=dtype) * 0.1
    wide = experts_reference(
        x.float(), [w.float() for w in weights], expert_TK, biases=[b.float() for b in biases]
    )
    want = gate_mul_reference(wide, RULE.activation, limit=RULE.limit, slope=RULE.slope)
    assert stack.gates(x, dispatch)
    assert relative_error(stack.product(x, dispatch, gate=RULE), want) < TOLERANCE[dtype]


def test_planted_faults_are_seen():
    """Scales one group on, and of the rows eight further on; signs changed about."""
    put = [mxfp4(32, 256, e) for e in range(2)]
    expert_TK = routing(6, 2, 1) * 0
    dispatch, x = assign(expert_TK, 2), normal(6, 256)
    want = experts_reference(x, [q.dequantize(torch.float64) for q in put], expert_TK)
    wrong = [
        [replace(q, scale=q.scale.roll(1)) for q in put],
        [replace(q, scale=q.scale.view(32, -1).roll(8, 0).reshape(-1)) for q in put],
        [replace(q, plane=q.plane ^ 0x08) for q in put],
    ]
    assert relative_error(stack_of(put, [None] * 2).product(x, dispatch), want) < 5e-4
    for planted in wrong:
        made = stack_of(planted, [None] * 2).product(x, dispatch)
        assert relative_error(made, want) > 0.1


def test_what_a_stack_takes():
    large = mxfp4(32, 64, 0)
    large = replace(large, scale=large.scale.clone().fill_(129))
    assert large.expert_key is None, "a scale of 4 is more than a kernel's values hold"
    assert mxfp4(24, 64, 0).expert_key is None, "half a block of rows"
    stack = stack_of([mxfp4(32, 64, 0)], [None])
    assert not stack.takes(mxfp4(32, 96, 0), None) and stack.takes(mxfp4(32, 64, 2), None)
