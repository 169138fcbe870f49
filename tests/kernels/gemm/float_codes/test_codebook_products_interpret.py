"""Products with codes of a table in the interpreter, against their dequantised twin."""

from dataclasses import replace

import pytest
import torch

from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook
from llmpq.kernels.weights.codebook_weight import CodebookWeight, codebook_weight
from reference.gemm_twins import relative_error

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.gemm.float_codes import codebook_products  # noqa: E402

pytestmark = pytest.mark.interpret
FORMS = ("mxfp4", "nvfp4", "nf4", "fp4", "iq4")


def weight(form: str, n: int, k: int) -> CodebookWeight:
    torch.manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    size = {"nvfp4": 16, "nf4": 64, "fp4": 64}.get(form, 32)
    scale = torch.rand(n, -(-k // size)) + 0.1
    factor = None
    if form == "mxfp4":
        scale = torch.randint(110, 135, scale.shape, dtype=E8M0)
    elif form == "nvfp4":
        scale, factor = (scale * 400).to(E4M3), torch.rand(n) / 1000 + 0.001
    else:
        scale = scale.half() / (100 if form == "iq4" else 1)
    codebook = Codebook.E2M1 if form.endswith("xfp4") or form == "nvfp4" else Codebook(form)
    return codebook_weight(codes, scale, codebook=codebook, group_size=size, factor=factor)


@pytest.mark.thin
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_products(form, rows):
    q = weight(form, 70, 320)
    x = torch.randn(rows, 320)
    bias, residual = torch.randn(70), torch.randn(rows, 70)
    want = x.double() @ q.dequantize(torch.float64).T + bias + residual
    assert relative_error(codebook_products.codebook_linear_gpu(x, q, bias, residual), want) < 2e-6
    assert torch.equal(codebook_products.dequantized(q, torch.float32), q.dequantize(torch.float32))
    half = q.dequantize(torch.float16)
    assert torch.equal(codebook_products.dequantized(q, torch.float16), half)
    assert relative_error(half, q.dequantize(torch.float64)) < 5e-4


@pytest.mark.parametrize("form", FORMS)
def test_planted_faults_are_seen(form):
    """Scales one group on, codes' halves changed about, another row's factor."""
    q = weight(form, 40, 256)
    x = torch.randn(5, 256)
    want = x.double() @ q.dequantize(torch.float64).T
    wrong = [
        replace(q, scale=q.scale.view(40, -1)[:, torch.arange(q.groups) - 1].reshape(-1)),
        replace(q, plane=q.plane >> 4 | q.plane << 4),
    ]
    if q.factor is not None:
        wrong.append(replace(q, factor=q.factor.roll(1)))
    for planted in wrong:
        assert (
            relative_error(codebook_products.codebook_linear_gpu(x, planted, None, None), want)
            > 0.1
        )
