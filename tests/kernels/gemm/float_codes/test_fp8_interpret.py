"""Products of E4M3 weights in the interpreter, against their dequantised twin."""

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.weights.fp8_weight import Fp8Weight
from reference.gemm_twins import experts_reference, linear_reference, relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.gemm.experts.expert_dispatch import assign  # noqa: E402
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack  # noqa: E402
from llmpq.kernels.gemm.experts.gated import GateRule  # noqa: E402
from llmpq.kernels.gemm.float_codes import fp8_products  # noqa: E402

pytestmark = [pytest.mark.interpret, pytest.mark.thin]
BLOCKS = {"tensor": (None, None), "channel": (1, None), "blocks": (128, 128), "rows": (1, 64)}


def weight(n, k, kind, dtype=torch.float16) -> Fp8Weight:
    """Every code there is, NaN left out, and scales of a block each."""
    torch.manual_seed(n + k)
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8)
    codes = torch.where(codes >= 127, codes + 1, codes)
    rows, columns = BLOCKS[kind]
    rows, columns = rows or n, columns or k
    scale = torch.rand(-(-n // rows), -(-k // columns)) * 0.01 + 0.001
    return Fp8Weight(codes_NK=codes, scale=scale, rows=rows, columns=columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_products(dtype, kind, rows):
    q = weight(150, 330, kind, dtype)
    x, bias = torch.randn(rows, 330).to(dtype), torch.randn(150).to(dtype)
    residual = torch.randn(rows, 150).to(dtype)
    want = linear_reference(x, q, bias, exact=True) + residual
    got = fp8_products.fp8_linear_gpu(x, q, bias, residual)
    assert relative_error(got, want) < (1e-3 if dtype is torch.float16 else 3e-3)
    assert torch.equal(fp8_products.dequantized(q, dtype), q.dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("rows", [1, 7, 20, 70])
def test_products_of_fragments(dtype, kind, rows):
    plain = weight(208, 640, kind, dtype)
    q = plain.in_fragments()
    assert q.fragment and torch.equal(q.rows_of_codes(), plain.codes_NK)
    assert not weight(200, 640, kind).in_fragments().fragment
    x, bias = torch.randn(rows, 640).to(dtype), torch.randn(208).to(dtype)
    residual = torch.randn(rows, 208).to(dtype)
    want = linear_reference(x, q, bias, exact=True) + residual
    got = fp8_products.fp8_linear_gpu(x, q, bias, residual)
    assert relative_error(got, want) < (1e-3 if dtype is torch.float16 else 3e-3)
    assert torch.equal(fp8_products.dequantized(q, dtype), plain.dequantize(dtype))
    wrong = replace(q, scale=q.scale.roll(1))
    if kind != "tensor":
        got = fp8_products.fp8_linear_gpu(x, wrong, bias, residual)
        assert relative_error(got, want) > 0.1, "planted: scales one on"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_code_is_exact(dtype):
    """Against a unit matrix: 254 codes, subnormals too, with a scale of one."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes[codes & 0x7F == 0x7F] = 0
    q = Fp8Weight(codes_NK=codes, scale=torch.ones(1, 1), rows=2, columns=128, dtype=dtype)
    got = fp8_products.multiply(
        torch.eye(128, dtype=dtype), q, None, None, fp8_products.tile_of(128, 128)
    )
    assert torch.equal(got.t(), codes.view(torch.float8_e4m3fn).to(dtype))


def test_shares_of_k_are_added_in_order():
    q = weight(64, 1024, "blocks")
    x = torch.randn(3, 1024).half()
    tile = fp8_products.tile_of(3, 128)
    want = linear_reference(x, q, exact=True)
    for splits in (1, 3, 8):
        assert relative_error(fp8_products.multiply(x, q, None, None, tile, splits), want) < 1e-3


def test_another_blocks_scale_is_seen():
    """Planted: scales one block on."""
    q = weight(256, 256, "blocks")
    x = torch.randn(5, 256).half()
    wrong = replace(q, scale=q.scale.roll(1))
    got = fp8_products.fp8_linear_gpu(x, wrong, None, None)
    assert relative_error(got, linear_reference(x, q, exact=True)) > 0.1


def routing(tokens, experts, per_token):
    """Return [T, k] different experts of each token; expert 1 gets nothing."""
    wish = torch.rand(tokens, experts)
    wish[:, 1] = -1
    return wish.topk(per_token, dim=1).indices


def stacked(kind, dtype, n, k, bias, fragment=False):
    put = [weight(n, k, kind, dtype) for _ in range(4)]
    put = [replace(q, codes_NK=q.codes_NK.roll(i, 0), scale=q.scale + i) for i, q in enumerate(put)]
    put = [q.in_fragments() for q in put] if fragment else put
    assert put[0].fragment == fragment
    biases = [torch.randn(n).to(dtype) for _ in put] if bias else None
    stack = ExpertStack(4)
    for e, q in enumerate(put):
        assert q.expert_key and stack.takes(q, biases and biases[e])
        view, _ = stack.put(e, q, biases and biases[e])
        assert torch.equal(view.dequantize(dtype), q.dequantize(dtype))
    return stack, [q.dequantize(torch.float64) for q in put], biases


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("tokens", [3, 70])
def test_experts(dtype, kind, tokens):
    stack, weights, biases = stacked(kind, dtype, 140, 200, kind == "channel")
    assert not stack.takes(weight(140, 136, kind, dtype), biases and biases[0])
    expert_TK = routing(tokens, 4, 2)
    dispatch = assign(expert_TK, 4)
    for back in (False, True):
        x = torch.randn(tokens * 2 if back else tokens, 200).to(dtype)
        want = experts_reference(x, weights, expert_TK, biases=biases, back=back)
        got = stack.product(x, dispatch, back=back)
        assert relative_error(got, want) < (1e-3 if dtype is torch.float16 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_experts_in_fragments(dtype, kind, tokens):
    stack, weights, biases = stacked(kind, dtype, 144, 256, kind == "channel", fragment=True)
    expert_TK = routing(tokens, 4, 2)
    dispatch = assign(expert_TK, 4)
    for back in (False, True):
        x = torch.randn(tokens * 2 if back else tokens, 256).to(dtype)
        want = experts_reference(x, weights, expert_TK, biases=biases, back=back)
        got = stack.product(x, dispatch, back=back)
        assert relative_error(got, want) < (1e-3 if dtype is torch.float16 else 4e-3)


@pytest.mark.parametrize("fragment", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_gated_experts(kind, fragment):
    if fragment and kind == "rows":
        return  # 64 columns share a scale there
    k = 256 if fragment else 192
    stack, weights, _ = stacked(kind, torch.float16, 256, k, False, fragment)
    expert_TK, x = routing(6, 4, 2), torch.randn(6, k).half() * 0.01
    dispatch = assign(expert_TK, 4)
    assert stack.gates(x, dispatch)
    gate, up = experts_reference(x, weights, expert_TK).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    assert relative_error(stack.product(x, dispatch, gate=GateRule("silu")), want) < 1e-3
