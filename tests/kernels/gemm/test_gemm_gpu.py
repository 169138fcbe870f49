"""The weight kernels on a real GPU: odd shapes, tuned configurations, torch.compile, graphs."""

import itertools

import pytest
import torch

from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.ranking.config import DENSE, Config, make_plan
from reference.check_gemm import LIMITS, random_weight
from reference.gemm_twins import linear_reference, relative_error
from reference.kernel_commands import main as kernels_main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("shapes", ["odd", "tuned"])
def test_check_gemm_finds_nothing(shapes):
    """As many weights as compile in 20 s; the command itself takes minutes for all of them."""
    words = ["--bits", "4", "--m", "1,16,64", "--shapes", shapes, "--seconds", "20"]
    assert kernels_main(["check", "gemm", *words]) == 0


def test_compiled_and_captured_products_are_the_eager_ones():
    q = random_weight(256, 512, 4, False, 128, torch.float16, torch.device("cuda"))
    compiled = torch.compile(lambda x: q.matmul(x), fullgraph=True)
    for m in (1, 16):
        x = torch.randn(m, 512, device="cuda").half()
        y = q.matmul(x)
        assert torch.equal(compiled(x), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = q.matmul(x)
        for _ in range(3):
            captured.zero_()
            graph.replay()
        assert torch.equal(captured, y)


def test_shares_are_added_in_order():
    """Split products give the same bits every time."""
    q = random_weight(128, 8192, 4, True, 128, torch.float16, torch.device("cuda"))
    x = torch.randn(16, 8192, device="cuda").half()
    first = q.matmul(x)
    assert all(torch.equal(q.matmul(x), first) for _ in range(50))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bm,stages,split", [(64, 3, 1), (128, 3, 2), (16, 4, 2)])
def test_pipelined_sums_of_one_scale_a_channel(dtype, bm, stages, split):
    """wgmma that carried on its own sum lost operands here on some runs (H200: error 23)."""
    q = random_weight(4096, 4096, 4, True, None, dtype, torch.device("cuda"))
    x = torch.randn(bm, 4096, device="cuda").to(dtype)
    exact = linear_reference(x, q, exact=True)
    config = Config(kernel="splitk_gemm", warps=8, bm=bm, stages=stages, split=split)
    plan = make_plan(config, torch.cuda.get_device_capability())
    assert max(relative_error(linear_gpu.run(plan, x, q), exact) for _ in range(20)) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dense_product_adds_shares_in_float32(dtype):
    """cuBLAS splits this K and would add the shares in 16 bits: error 6.3e-4 in float16."""
    q = random_weight(605, 5604, 4, True, 128, dtype, torch.device("cuda"))
    x = torch.randn(417, 5604, device="cuda").to(dtype)
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    y = linear_gpu.run(make_plan(DENSE, torch.cuda.get_device_capability()), x, q)
    assert settings.allow_fp16_reduced_precision_reduction == before
    assert relative_error(y, linear_reference(x, q, exact=True)) < LIMITS[dtype]


@pytest.mark.parametrize(
    "bits,dtype", itertools.product((3, 4, 8), (torch.float16, torch.bfloat16))
)
def test_planted_bugs_are_caught(bits, dtype):
    q = random_weight(64, 512, bits, False, 128, dtype, torch.device("cuda"))
    x = torch.randn(3, 512, device="cuda").to(dtype)
    exact = linear_reference(x, q, exact=True)
    assert relative_error(q.matmul(x), exact) < LIMITS[dtype]
    q.planes[0][100:140] = q.planes[0][100:140] >> 4 | q.planes[0][100:140] << 4
    assert relative_error(q.matmul(x), exact) > 2 * LIMITS[dtype]
