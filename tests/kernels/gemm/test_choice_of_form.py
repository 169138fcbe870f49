"""What of W4's and W8's plans a weight with more scales or of a table takes."""

import pytest
import torch

pytest.importorskip("triton")
from llmpq.kernels.formats.codebooks import E4M3, E8M0, Codebook  # noqa: E402
from llmpq.kernels.formats.weight_layout import Layout  # noqa: E402
from llmpq.kernels.gemm.choice import (  # noqa: E402
    BROAD,
    NARROW,
    for_form,
    is_narrow,
)
from llmpq.kernels.gemm.ranking.config import DENSE, Config, make_plan  # noqa: E402
from llmpq.kernels.kernel_table import SPLITK_ROWS, gpu  # noqa: E402
from llmpq.kernels.weights.codebook_weight import codebook_weight  # noqa: E402
from llmpq.kernels.weights.quantized_weight import from_codes  # noqa: E402

pytestmark = pytest.mark.cpu
N, K = 64, 256
TALL = Config(kernel="wgmma_gemm", blocks=2, bm=128, stages=5)


def weight(form: str):
    codes = torch.zeros(N, K, dtype=torch.uint8)
    if form.startswith("w4 in 32"):
        scale = torch.ones(N, K // 32, dtype=torch.float16)
        zero = scale if form.endswith("zeros") else None
        return from_codes(
            codes, scale, zero, bits=4, group_size=32, in_features=K, layout=Layout.FRAGMENT
        )
    if form == "nvfp4":
        scale, factor = torch.ones(N, K // 16).to(E4M3), torch.ones(N)
        q = codebook_weight(codes, scale, codebook=Codebook.E2M1, group_size=16, factor=factor)
    elif form == "mxfp4":
        scale = torch.full((N, K // 32), 127, dtype=E8M0)
        q = codebook_weight(codes, scale, codebook=Codebook.E2M1, group_size=32)
    else:
        q = codebook_weight(
            codes, torch.ones(N, K // 64).half(), codebook=Codebook.NF4, group_size=64
        )
    return q.in_fragments()


def chosen(form: str, config: Config, rows: int) -> Config:
    return for_form(make_plan(config, (9, 0)), weight(form), rows, gpu((9, 0))).config


def test_forms():
    names = {"mxfp4": "e2m1", "nvfp4": "nvfp4", "nf4": "nf4", "w4 in 32": "parts"}
    assert {form: weight(form).form for form in names} == names


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "nf4", "w4 in 32"])
def test_few_rows_are_multiplied_as_w4(form):
    tile = Config(kernel="splitk_gemm", bm=16, split=2)
    assert chosen(form, tile, 16) == tile
    assert not chosen(form, Config(kernel="splitk_gemm", scale_w=True), 16).scale_w


def test_prompts():
    """Two blocks of rows a warp have no registers for scales; NVFP4 has no program of wgmma."""
    assert chosen("w4 in 32", TALL, 128) == NARROW and chosen("nf4", TALL, 128) == NARROW
    assert chosen("mxfp4", TALL, 128) == TALL
    assert chosen("w4 in 32", BROAD, 300) == BROAD
    assert chosen("w4 in 32, zeros", BROAD, 300) == NARROW
    assert chosen("nvfp4", TALL, 128).kernel == "splitk_gemm"
    assert chosen("nvfp4", TALL, SPLITK_ROWS + 1) == DENSE
    # Two multiprocessors stand in for a GPU's: 40 k-groups of each are 40 tiles of 256 rows.
    assert chosen("mxfp4", TALL, 256 * 39) == TALL and chosen("mxfp4", TALL, 256 * 40) == BROAD


def test_programs_of_all_of_k_must_be_enough():
    rows = Config(kernel="gemv", warps=8)
    many, few = (make_plan(c, (9, 0)) for c in (rows, Config(kernel="gemv", blocks=4)))
    assert not is_narrow(many, weight("nf4")) and is_narrow(few, weight("nf4"))
    assert not is_narrow(make_plan(Config(kernel="splitk_gemm"), (9, 0)), weight("nf4"))
