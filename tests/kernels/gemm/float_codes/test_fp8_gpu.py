"""Products of E4M3 weights on a GPU, against their dequantised twin."""

import pytest
import torch

from llmpq.kernels.weights.fp8_weight import Fp8Weight
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BLOCKS = {"tensor": (None, None), "channel": (1, None), "blocks": (128, 128), "rows": (1, 64)}


def weight(n, k, kind, dtype) -> Fp8Weight:
    """Every code there is, NaN left out, and scales of a block each."""
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8)
    codes = torch.where(codes >= 127, codes + 1, codes)
    rows, columns = BLOCKS[kind]
    rows, columns = rows or n, columns or k
    scale = torch.rand(-(-n // rows), -(-k // columns)) * 0.01 + 0.001
    made = Fp8Weight(codes_NK=codes, scale=scale, rows=rows, columns=columns, dtype=dtype)
    return made.to("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(150, 330), (1024, 2048), (4096, 512)])
def test_products(dtype, kind, n, k):
    q = weight(n, k, kind, dtype)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}[dtype]
    for rows in (1, 5, 17, 33, 65, 200, 257, 700):
        x = torch.randn(rows, k, device="cuda").to(dtype) / 16
        bias = torch.randn(n, device="cuda").to(dtype)
        residual = torch.randn(rows, n, device="cuda").to(dtype)
        want = linear_reference(x, q, bias, exact=True) + residual
        error = relative_error(q.matmul(x, bias, residual), want)
        assert error < tolerance, (rows, error)


def test_experts():
    from llmpq.kernels.gemm.experts.expert_dispatch import assign
    from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
    from llmpq.kernels.gemm.experts.gated import GateRule
    from reference.gemm_twins import experts_reference

    for dtype, kind in ((torch.bfloat16, "blocks"), (torch.float16, "channel")):
        stack, weights = ExpertStack(8), []
        for e in range(8):
            q = weight(256, 384, kind, dtype)
            weights.append(q.dequantize(torch.float64))
            stack.put(e, q, None)
        for tokens in (1, 9, 100, 900):
            expert_TK = torch.rand(tokens, 8, device="cuda").topk(2, dim=1).indices
            dispatch = assign(expert_TK, 8)
            for back in (False, True):
                x = torch.randn(tokens * (1 + back), 384, device="cuda").to(dtype) / 16
                want = experts_reference(x, weights, expert_TK, back=back)
                assert relative_error(stack.product(x, dispatch, back=back), want) < 4e-3
            x = torch.randn(tokens, 384, device="cuda").to(dtype) / 256
            if stack.gates(x, dispatch):
                gate, up = experts_reference(x, weights, expert_TK).chunk(2, 1)
                want = torch.nn.functional.silu(gate) * up
                got = stack.product(x, dispatch, gate=GateRule("silu"))
                assert relative_error(got, want) < 6e-3
