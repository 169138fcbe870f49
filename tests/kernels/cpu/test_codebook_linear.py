"""Products with codes of a table on the CPU, every level of instructions, against float64."""

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.cpu import codebook_linear
from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.native import library as native
from llmpq.kernels.weights.codebook_weight import CodebookWeight, codebook_weight
from reference.gemm_twins import relative_error

pytestmark = pytest.mark.cpu
FORMS = ("mxfp4", "nvfp4", "nf4", "fp4", "iq4")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Rounding of the output and, from 17 rows on, of the weight."""


def weight(form: str, n: int, k: int) -> CodebookWeight:
    torch.manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    size = {"nvfp4": 16, "nf4": 64, "fp4": 64}.get(form, 32)
    scale = torch.rand(n, -(-k // size)) / 8 + 0.02
    factor = None
    if form == "mxfp4":
        scale = torch.randint(118, 125, scale.shape, dtype=E8M0)
    elif form == "nvfp4":
        scale, factor = (scale * 2000).to(E4M3), torch.rand(n) / 10000 + 0.0001
    elif form != "fp4":
        scale = scale.half() / (100 if form == "iq4" else 1)
    codebook = Codebook.E2M1 if form.endswith("xfp4") or form == "nvfp4" else Codebook(form)
    return codebook_weight(codes, scale, codebook=codebook, group_size=size, factor=factor)


@pytest.fixture(params=[level.name for level in native.usable_levels()] or ["none"])
def level(request, monkeypatch):
    if request.param == "none":
        pytest.skip("no level of instructions that we have code for")
    found = native.LEVELS[request.param]
    monkeypatch.setattr(native, "best_level", lambda: found)
    return request.param


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products(form, dtype, level):
    q = weight(form, 70, 320)
    for rows in (1, 2, 3, 4, 7, 16, 33):
        x, bias = torch.randn(rows, 320).to(dtype), torch.randn(70).to(dtype)
        want = x.double() @ q.dequantize(torch.float64).T + bias.double()
        assert relative_error(q.matmul(x, bias), want) < TOLERANCE[dtype], rows
    rounded = codebook_linear.dequantize_rows(q, dtype, 3, 70)
    assert torch.equal(rounded, q.dequantize(dtype)[3:])


def test_scales_at_the_ends(level):
    """2^-127 is a subnormal, as are small E4M3."""
    q = weight("mxfp4", 16, 128)
    q = replace(q, scale=torch.arange(64, dtype=E8M0) // 16 * 60)
    assert torch.equal(
        codebook_linear.dequantize_rows(q, torch.float32, 0, 16), q.dequantize(torch.float32)
    )
    q = weight("nvfp4", 16, 256)
    q = replace(q, scale=torch.arange(256, dtype=torch.uint8).clamp(max=126).view(E4M3))
    assert torch.equal(
        codebook_linear.dequantize_rows(q, torch.float32, 0, 16), q.dequantize(torch.float32)
    )


@pytest.mark.parametrize("form", FORMS)
def test_planted_faults_are_seen(form):
    q = weight(form, 40, 256)
    x = torch.randn(5, 256)
    want = x.double() @ q.dequantize(torch.float64).T
    wrong = [
        replace(q, scale=q.scale.view(40, -1)[:, torch.arange(q.groups) - 1].reshape(-1)),
        replace(q, plane=q.plane >> 4 | q.plane << 4),
    ]
    for planted in wrong:
        assert relative_error(planted.matmul(x), want) > 0.05
