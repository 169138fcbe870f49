"""Scaled operands in the interpreter: small groups and tables by W4's kernels, against the twin."""

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.ranking.config import DENSE, Config, make_plan
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.quantized_weight import from_codes
from reference.gemm_twins import relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.gemm import linear_gpu  # noqa: E402

pytestmark = pytest.mark.interpret
K = 672
"""Five k-groups and a quarter."""
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}
TABLES = ("mxfp4", "nvfp4", "nf4", "fp4", "iq4")
GROUPS = tuple((bits, g, zeros) for bits in (3, 4, 8) for g in (32, 64) for zeros in (False, True))
WAYS = (
    (1, Config(kernel="gemv", warps=4)),
    (7, Config(kernel="gemv", blocks=2, warps=2)),
    (7, Config(kernel="splitk_gemm", bm=8, split=2)),
    (20, Config(kernel="splitk_gemm", bm=32, blocks=2, warps=2, depth=1)),
    (20, Config(kernel="splitk_gemm", bm=16, stages=3)),
    (5, DENSE),
)


def table(form: str, n: int = 96, k: int = K):
    torch.manual_seed(n)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    size = {"nvfp4": 16, "nf4": 64, "fp4": 64}.get(form, 32)
    scale, factor = torch.rand(n, -(-k // size)) + 0.1, None
    if form == "mxfp4":
        scale = torch.randint(116, 122, scale.shape, dtype=E8M0)
    elif form == "nvfp4":
        scale, factor = (scale * 400).to(E4M3), torch.rand(n) / 1000 + 0.001
    else:
        scale = scale.half() / (100 if form == "iq4" else 1)
    codebook = Codebook.E2M1 if form in ("mxfp4", "nvfp4") else Codebook(form)
    return codebook_weight(codes, scale, codebook=codebook, group_size=size, factor=factor)


def grouped(bits: int, size: int, zeros: bool, dtype: torch.dtype, n: int = 96, k: int = K):
    """Zeros are no whole numbers, as those of K-quants."""
    torch.manual_seed(bits * size)
    padded = -(-k // 128) * 128
    codes = torch.randint(0, 2**bits, (n, padded), dtype=torch.uint8)
    scale = (torch.rand(n, padded // size) + 0.1).to(dtype)
    zero = (torch.rand(n, padded // size) * 2**bits).to(dtype) if zeros else None
    return from_codes(
        codes, scale, zero, bits=bits, group_size=size, in_features=k, layout=Layout.FRAGMENT
    )


def errors(q, dtype: torch.dtype, twin=None, ways=WAYS) -> list[float]:
    """What every way is off the twin by: `twin`, or the weight's own."""
    w = (q if twin is None else twin).dequantize(torch.float64)
    found = []
    for rows, config in ways:
        x = torch.randn(rows, K).to(dtype)
        bias, residual = torch.randn(w.shape[0]).to(dtype), torch.randn(rows, w.shape[0]).to(dtype)
        want = x.double() @ w.T + bias.double() + residual.double()
        plan = make_plan(config, (9, 0), interpret=True)
        found.append(relative_error(linear_gpu.run(plan, x, q, bias, residual), want))
    return found


@pytest.mark.thin
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", TABLES)
def test_tables(form, dtype):
    q = table(form)
    words = q.in_fragments()
    assert words.form == {"mxfp4": "e2m1"}.get(form, form)
    assert torch.equal(words.dequantize(torch.float64), q.dequantize(torch.float64))
    assert max(errors(words, dtype, q)) < TOLERANCE[dtype]


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits,size,zeros", GROUPS)
def test_small_groups(bits, size, zeros, dtype):
    q = grouped(bits, size, zeros, dtype)
    assert q.form == "parts"
    assert max(errors(q, dtype)) < TOLERANCE[dtype]


def test_rows_past_the_last_block():
    q = grouped(4, 32, True, torch.bfloat16, n=101)
    assert max(errors(q, torch.bfloat16)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[] if form in ("nvfp4", "nf4") else [pytest.mark.seldom])
        for form in TABLES
    ],
)
def test_planted_faults_of_tables_are_seen(form):
    q = table(form).in_fragments()
    scale = q.scale.view(torch.uint8).roll(128).view(q.scale.dtype)
    wrong = [replace(q, scale=scale), replace(q, plane=q.plane >> 4 | q.plane << 4)]
    if q.factor is not None:
        wrong.append(replace(q, factor=q.factor.roll(1)))
    for planted in wrong:  # by a kernel of each kind
        assert min(errors(planted, torch.float16, q, WAYS[1::2])) > 0.05


def test_planted_faults_of_groups_are_seen():
    q = grouped(4, 32, True, torch.float16)
    assert q.zero is not None
    wrong = [replace(q, scale=q.scale.roll(16)), replace(q, zero=q.zero.roll(16))]
    for planted in wrong:
        assert min(errors(planted, torch.float16, q)) > 0.05
