"""Products of E4M3 weights on CPUs, at every level of instructions, against their twin."""

import itertools

import pytest
import torch

from llmpq.kernels.cpu import fp8_linear
from llmpq.kernels.native import library
from llmpq.kernels.weights.fp8_weight import Fp8Weight
from reference.gemm_twins import linear_reference, relative_error

pytestmark = pytest.mark.cpu
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5.5e-4}
LEVELS = [level.name for level in library.usable_levels()]
SHAPES = [(1, 1), (33, 200), (80, 256), (65, 2176), (129, 1000)]
KINDS = {"tensor": (None, None), "channel": (1, None), "blocks": (128, 128), "rows": (1, 64)}


@pytest.fixture(params=[*LEVELS, "torch"])
def level(request, monkeypatch):
    """Dispatch forced to one level, or to torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(fp8_linear, "library", lambda: None)
    else:
        monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[request.param])
    return request.param


def weight(n, k, kind, dtype) -> Fp8Weight:
    """Every code there is, NaN left out, and scales of a block each."""
    torch.manual_seed(n + k)
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8)
    codes = torch.where(codes >= 127, codes + 1, codes)
    rows, columns = KINDS[kind]
    rows, columns = rows or n, columns or k
    scale = torch.rand(-(-n // rows), -(-k // columns)) * 0.01 + 0.001
    return Fp8Weight(codes_NK=codes, scale=scale, rows=rows, columns=columns, dtype=dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_products_equal_their_twin(level, dtype):
    for kind, (n, k) in itertools.product(KINDS, SHAPES):
        q = weight(n, k, kind, dtype)
        for m in (1, 2, 7, 13, 40):
            x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
            y = q.matmul(x, bias)
            assert y.dtype == dtype
            error = relative_error(y, linear_reference(x, q, bias, exact=True))
            assert error < TOLERANCE[dtype], (kind, n, k, m)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_are_those_of_torch(level, dtype):
    for kind in KINDS:
        q = weight(70, 333, kind, dtype)
        if level != "torch":
            got = fp8_linear.dequantize_rows(q, dtype, 3, 70)
            assert torch.equal(got, q.dequantize(dtype, 3, 70))


def test_every_code_is_exact(level):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes[codes & 0x7F == 0x7F] = 0
    q = Fp8Weight(codes_NK=codes, scale=torch.ones(1, 1), rows=2, columns=128, dtype=torch.float32)
    for rows in (8, 128):  # as codes, as numbers
        got = torch.cat([q.matmul(part) for part in torch.eye(128).split(rows)])
        assert torch.equal(got.t(), codes.view(torch.float8_e4m3fn).float())


def test_another_blocks_scale_is_seen(level):
    """Planted: scales one block on."""
    q = weight(256, 256, "blocks", torch.float32)
    x = torch.randn(3, 256)
    want = linear_reference(x, q, exact=True)
    q.scale.copy_(q.scale.roll(1))
    assert relative_error(q.matmul(x), want) > 0.1
