"""A prompt's products of experts on a Hopper GPU against float64: forms, gates, uneven routing."""

import pytest
import torch

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.experts import gluon_expert_launch
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.fused_twins import gate_mul_reference
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Rounding of the output, and of the scaled operand."""
RULE = GateRule("clamped_silu", 7.0, 1.702)


def exact(x, weights, dispatch, biases, *, back):
    """Return every pair's product in float64, an expert at a time."""
    order = dispatch.order_C.long()
    y = torch.empty(order.numel(), weights[0].shape[0], dtype=torch.float64, device="cuda")
    for e, first, end in dispatch.runs_E.tolist():
        pairs = order[first:end]
        rows = x[first:end] if back else x[pairs // dispatch.per_token]
        made = rows.double() @ weights[e].double().T + biases[e].double()
        y[pairs if back else slice(first, end)] = made
    return y


@pytest.mark.parametrize(
    "shape",
    [(16, 2880, 1536, 900), (8, 512, 5760, 700), (16, 768, 2048, 999), (16, 768, 2048, 450)],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [16, 4, 3])
@pytest.mark.parametrize("uneven", [True, False])
def test_a_prompts_products(shape, dtype, bits, uneven):
    experts, k, n, tokens = shape
    weights = [torch.randn(n, k, device="cuda", dtype=dtype) * 0.02 for _ in range(experts)]
    made = [DenseWeight(w) for w in weights]
    if bits < 16:
        scheme = WeightScheme(bits=bits, group_size=128, symmetric=uneven, clip_search=False)
        made = [quantize_weight(w, scheme, dtype=dtype, layout=Layout.FRAGMENT) for w in weights]
        weights = [q.dequantize(torch.float64) for q in made]
    biases = [torch.randn(n, device="cuda", dtype=dtype) for _ in range(experts)]
    stack = ExpertStack(experts)
    for e in range(experts):
        stack.put(e, made[e], biases[e])
    wish = torch.rand(tokens, experts, device="cuda")
    if uneven:
        wish[:, 0] += 0.5
        wish[:, 2] = -1
    dispatch = assign(wish.topk(4, dim=1).indices, experts)
    x = torch.randn(tokens, k, device="cuda", dtype=dtype)
    hidden = torch.randn(4 * tokens, k, device="cuda", dtype=dtype)
    assert gluon_expert_launch.fits(x, dispatch) and stack.gates(x, dispatch)
    up = exact(x, weights, dispatch, biases, back=False)
    gated = gate_mul_reference(up, RULE.activation, limit=RULE.limit, slope=RULE.slope)
    down = exact(hidden, weights, dispatch, biases, back=True)
    assert relative_error(down.flip(0), down) > 0.1, "the twin would not see a wrong order"
    for _ in range(2):  # programs that take the next item leave their counters as they were
        for y, want in (
            (stack.product(x, dispatch), up),
            (stack.product(x, dispatch, gate=RULE), gated),
            (stack.product(hidden, dispatch, back=True), down),
        ):
            assert relative_error(y, want) < TOLERANCE[dtype]
