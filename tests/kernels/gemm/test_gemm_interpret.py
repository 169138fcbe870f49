"""The Triton weight kernels, in the interpreter, against their plain-torch twins."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.dequantize import dequantize_triton
from llmpq.kernels.gemm.linear_gpu import run
from llmpq.kernels.gemm.ranking.config import DENSE, PIECES, Config, make_plan
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

# float16: rounding of the output alone is 2.1e-4; the products are exact, the sums float32.
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def _random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _weight(n, k, bits, group=128, symmetric=True, dtype=torch.float16):
    w = _random(n, k)
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    return quantize_weight(w, scheme, dtype=dtype, layout=Layout.FRAGMENT)


@pytest.mark.parametrize("bits,group", itertools.product((3, 4, 8), (128, None)))
def test_dequantise_matches_its_twin(bits, group):
    for symmetric, (n, k) in itertools.product((True, False), ((16, 128), (37, 200))):
        q = _weight(n, k, bits, group, symmetric)
        assert torch.equal(dequantize_triton(q, interpret=True), q.dequantize(torch.float16))
        rows = _weight(n, k, bits, group, symmetric)
        assert torch.equal(
            dequantize_triton(rows.cut(n // 16 * 16, n), interpret=True),
            rows.dequantize(torch.float16)[n // 16 * 16 :],
        )


ROWS = Config(kernel="gemv", warps=4, depth=2, x_depth=1)
TILE = Config(kernel="splitk_gemm", warps=2, depth=2, bm=16, split=2)
PIPE = Config(kernel="splitk_gemm", warps=1, blocks=2, bm=8, stages=3, split=3)
SCALED = Config(kernel="splitk_gemm", warps=1, blocks=2, depth=1, bm=8, scale_w=True)


CONFIGS = {"rows": ROWS, "tile": TILE, "pipe": PIPE, "scaled": SCALED, "dense": DENSE}


@pytest.mark.thin
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("bits,symmetric", itertools.product((3, 4, 8), (True, False)))
def test_products_match_their_twin(config, bits, symmetric):
    n, k, m = 38, 600, 3
    cases = [(128, torch.float16), (None, torch.float16), (128, torch.bfloat16)]
    for (group, dtype), extra in zip(cases, (True, False, False), strict=True):
        q = _weight(n, k, bits, group, symmetric, dtype)
        x = _random(m, k).to(dtype)
        bias = _random(n).to(dtype) if extra else None
        residual = _random(m, n).to(dtype) if extra else None
        y = run(make_plan(config, (9, 0), interpret=True), x, q, bias, residual)
        exact = linear_reference(x, q, bias, exact=True)
        exact = exact if residual is None else exact + residual.double()
        assert relative_error(y, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("extra", [(), ("bias",), ("residual",), ("bias", "residual")])
@pytest.mark.parametrize("in_place", [False, True])
def test_w_may_be_made_piece_by_piece(extra, in_place, monkeypatch):
    """The last piece has rows past the last whole block."""
    monkeypatch.setattr(linear_gpu, "piece_rows", lambda *_: 32)
    made = []
    whole = linear_gpu._dequantized
    monkeypatch.setattr(
        linear_gpu, "_dequantized", lambda q, *rest: made.append(q.out_features) or whole(q, *rest)
    )
    q, x = _weight(70, 200, 4, symmetric=False), _random(5, 200).half()
    bias = _random(70).half() if "bias" in extra else None
    residual = _random(5, 70).half() if "residual" in extra else None
    exact = linear_reference(x, q, bias, exact=True)
    exact = exact if residual is None else exact + residual.double()
    plan = make_plan(PIECES[0], (9, 0), interpret=True)
    y = run(plan, x, q, bias, residual, into_residual=in_place and residual is not None)
    assert made == [32, 32, 6] and relative_error(y, exact) < TOLERANCE[torch.float16]
    assert not in_place or residual is None or y is residual


def test_many_rows_of_x_and_older_tensor_cores():
    q = _weight(64, 256, 4)
    x = _random(20, 256).half()
    exact = linear_reference(x, q, exact=True)
    config = Config(kernel="splitk_gemm", warps=2, depth=1, bm=8)
    for capability in ((8, 0), (9, 0)):
        y = run(make_plan(config, capability, interpret=True), x, q)
        assert relative_error(y, exact) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("stages", [1, 3])
def test_several_tiles_of_x_may_share_their_k_each(stages):
    """Every tile of x has sums and a counter of its own."""
    q = _weight(70, 640, 4)
    x = _random(37, 640).half()
    exact = linear_reference(x, q, exact=True)
    config = Config(kernel="splitk_gemm", warps=1, bm=16, depth=1, stages=stages, split=3)
    for _ in range(2):  # counters are left at zero
        y = run(make_plan(config, (9, 0), interpret=True), x, q)
        assert relative_error(y, exact) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("config", [ROWS, TILE], ids=["rows", "tile"])
@pytest.mark.parametrize("planted", ["scale", "nibble", "tail", "k tail"])
def test_planted_bugs_are_caught(config, planted):
    q = _weight(70, 200, 4)
    x = _random(2, 200).half()
    exact = linear_reference(x, q, exact=True)
    if planted == "scale":
        q.scale[7] *= 1.25
    elif planted == "nibble":
        words = q.planes[0]
        words[:64] = words[:64] >> 4 | words[:64] << 4
    y = run(make_plan(config, (9, 0), interpret=True), x, q)
    if planted == "tail":
        y[:, 64:] = 0
    elif planted == "k tail":
        short = x.clone()
        short[:, 192:] = 0
        y = run(make_plan(config, (9, 0), interpret=True), short, q)
    assert relative_error(y, exact) > 2 * TOLERANCE[torch.float16]


@triton.jit
def _store(X, Y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, tl.load(X + at).to(tl.bfloat16))


def test_the_interpreter_rounds_to_bfloat16_as_torch_does():
    x = torch.cat([_random(500) * 10.0 ** (_random(500) * 5), torch.tensor(
        [0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-39, float("inf"), -float("inf"),
         float("nan"), 255.99999, -0.99999]
    )])  # fmt: skip
    y = torch.empty(512, dtype=torch.bfloat16)
    _store[(1,)](x, y, 512)
    assert torch.equal(y.isnan(), x.isnan())
    real = ~x.isnan()
    assert torch.equal(y[real], x.bfloat16()[real])
