"""Products of experts in MXFP4, and dense ones with codes of tables, on a GPU against float64."""

import pytest
import torch

from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.weights.codebook_weight import CodebookWeight, codebook_weight
from reference.fused_twins import gate_mul_reference
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Rounding of the output: the operands are exact."""
RULE = GateRule("clamped_silu", 7.0, 1.702)


def mxfp4(n: int, k: int) -> CodebookWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scale = torch.randint(116, 122, (n, k // 32), dtype=E8M0, device="cuda")
    return codebook_weight(codes, scale, codebook=Codebook.E2M1, group_size=32)


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((8, 2880, 1536), 3),
        ((8, 2880, 1536), 33),
        ((8, 2880, 1536), 128),
        ((8, 512, 5760), 700),
        ((16, 768, 2048), 999),
        ((16, 2880, 1536), 450),
    ],
)
def test_experts(shape, tokens, dtype):
    """Few rows to a prompt's, uneven routing, an expert without rows."""
    experts, k, n = shape
    put = [mxfp4(n, k) for _ in range(experts)]
    biases = [torch.randn(n, device="cuda", dtype=dtype) for _ in put]
    stack = ExpertStack(experts)
    for e, weight in enumerate(put):
        assert stack.takes(weight, biases[e])
        stack.put(e, weight, biases[e])
    weights = [q.dequantize(torch.float64) for q in put]
    wish = torch.rand(tokens, experts, device="cuda")
    wish[:, 0] += 0.5
    wish[:, 2] = -1
    dispatch = assign(wish.topk(2, dim=1).indices, experts)
    x = torch.randn(tokens, k, device="cuda", dtype=dtype)
    hidden = torch.randn(2 * tokens, k, device="cuda", dtype=dtype)
    up = exact(x, weights, dispatch, biases, back=False)
    gated = gate_mul_reference(up, RULE.activation, limit=RULE.limit, slope=RULE.slope)
    down = exact(hidden, weights, dispatch, biases, back=True)
    for _ in range(3):
        found = [
            (stack.product(x, dispatch), up),
            (stack.product(hidden, dispatch, back=True), down),
        ]
        if stack.gates(x, dispatch):
            found.append((stack.product(x, dispatch, gate=RULE), gated))
        for y, want in found:
            assert relative_error(y, want) < TOLERANCE[dtype]


def test_every_code_comes_out_as_it_is():
    """A product with the unit matrix: subnormals of 16 bits are not flushed."""
    weight = mxfp4(32, 128)
    stack = ExpertStack(1)
    stack.put(0, weight, None)
    dispatch = assign(torch.zeros(128, 1, dtype=torch.long, device="cuda"), 1)
    for dtype in TOLERANCE:
        y = stack.product(torch.eye(128, device="cuda", dtype=dtype), dispatch)
        assert torch.equal(y.float(), weight.dequantize(torch.float32).t())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "nf4", "fp4", "iq4"])
def test_dense_products(form, dtype):
    n, k = 1008, 1568
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    size = {"nvfp4": 16, "nf4": 64, "fp4": 64, "iq4": 32}.get(form, 32)
    scale, factor = torch.rand(n, -(-k // size), device="cuda") + 0.1, None
    if form == "mxfp4":
        scale = torch.randint(116, 122, scale.shape, dtype=E8M0, device="cuda")
    elif form == "nvfp4":
        scale = (scale * 400).to(E4M3)
        factor = torch.rand(n, device="cuda") / 1000 + 0.001
    else:
        scale = scale.half() / 100
    codebook = Codebook.E2M1 if form in ("mxfp4", "nvfp4") else Codebook(form)
    q = codebook_weight(codes, scale, codebook=codebook, group_size=size, factor=factor)
    words = q.to("cuda")
    assert q.layout is Layout.ROWS and words.layout is Layout.FRAGMENT
    assert torch.equal(words.dequantize(torch.float64), q.dequantize(torch.float64))
    for rows in (1, 5, 17, 33, 64, 100, 200, 300):
        x = torch.randn(rows, k, device="cuda", dtype=dtype)
        bias = torch.randn(n, device="cuda", dtype=dtype)
        residual = torch.randn(rows, n, device="cuda", dtype=dtype)
        want = x.double() @ q.dequantize(torch.float64).T + bias.double() + residual
        # Numbers are rounded, of the table or after their scale.
        for held in (q, words):
            for _ in range(3):
                made = held.matmul(x, bias, residual)
                assert relative_error(made, want) < 1.5 * TOLERANCE[dtype], (rows, held.layout)


def test_products_are_the_same_every_time():
    """gpt-oss-20b's experts: sums whose operands are unpacked over would differ by timing."""
    put = [mxfp4(2880, 2880) for _ in range(32)]
    stack = ExpertStack(32)
    for e, weight in enumerate(put):
        stack.put(e, weight, None)
    weights = [q.dequantize(torch.bfloat16) for q in put]
    for tokens in (8, 32, 128, 256):
        expert_TK = torch.rand(tokens, 32, device="cuda").topk(4, dim=1).indices
        dispatch = assign(expert_TK, 32)
        x = torch.randn(4 * tokens, 2880, device="cuda", dtype=torch.bfloat16)
        y = stack.product(x, dispatch, back=True)
        want = exact(x, weights, dispatch, [x.new_zeros(2880)] * 32, back=True)
        assert relative_error(y, want) < TOLERANCE[torch.bfloat16]
        gated = stack.product(x, dispatch, gate=RULE) if stack.gates(x, dispatch) else None
        for _ in range(40):
            assert torch.equal(stack.product(x, dispatch, back=True), y)
            if gated is not None:
                assert torch.equal(stack.product(x, dispatch, gate=RULE), gated)
