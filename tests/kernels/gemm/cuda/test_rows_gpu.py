"""The CUDA C++ kernel for any multiple of 8 rows on a Hopper GPU: forms, schedules, odd tails."""

import itertools

import pytest
import torch

from llmpq.kernels import nvrtc
from llmpq.kernels.gemm import linear_gpu
from llmpq.kernels.gemm.ranking.config import Config, make_plan
from reference.check_gemm import LIMITS, random_weight
from reference.gemm_twins import linear_reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC"),
]

KINDS = {
    "plain": Config(kernel="wgmma_rows", bm=200),
    "shared": Config(kernel="wgmma_rows", bm=112, cut=1),
    "tall": Config(kernel="wgmma_rows", bm=256, cut=2),
    "broad": Config(kernel="wgmma_rows", bm=88, warpgroups=3, cut=1),
    "cluster": Config(kernel="wgmma_rows", bm=128, split=2),
    "broad cluster": Config(kernel="wgmma_rows", bm=96, warpgroups=3, split=4),
}
GPU = torch.device("cuda")


def _product(config, x, q, bias=None, residual=None, **options):
    return linear_gpu.run(make_plan(config, (9, 0)), x, q, bias, residual, **options)


@pytest.mark.parametrize("config", [*KINDS.values()], ids=[*KINDS])
@pytest.mark.parametrize(
    "bits,dtype,symmetric", itertools.product((3, 4, 8), LIMITS.keys() - {torch.float32}, (0, 1))
)
def test_every_form_and_a_planted_bug(config, bits, dtype, symmetric):
    q = random_weight(528, 1000, bits, bool(symmetric), 128, dtype, GPU)
    x = torch.randn(300, 1000, device=GPU).to(dtype)
    exact = linear_reference(x, q, exact=True)
    assert relative_error(_product(config, x, q), exact) < LIMITS[dtype]
    q.planes[0][100:1400] = q.planes[0][100:1400] >> 4 | q.planes[0][100:1400] << 4
    assert relative_error(_product(config, x, q), exact) > 2 * LIMITS[dtype]


@pytest.mark.parametrize("config", [*KINDS.values()], ids=[*KINDS])
@pytest.mark.parametrize("n,k,m", [(6144, 1024, 2048), (1048, 4096, 77), (28672, 512, 1500)])
def test_every_schedule_gives_the_same_bits_each_time(config, n, k, m):
    q = random_weight(n, k, 4, True, 128, torch.float16, GPU)
    x = torch.randn(m, k, device=GPU).half()
    exact = linear_reference(x, q, exact=True)
    first = _product(config, x, q)
    assert relative_error(first, exact) < LIMITS[torch.float16]
    assert all(torch.equal(_product(config, x, q), first) for _ in range(10))


@pytest.mark.parametrize("config", [*KINDS.values()], ids=[*KINDS])
def test_nobody_writes_past_the_end(config):
    n, k = 1040, 1000
    q = random_weight(n, k, 4, True, 128, torch.float16, GPU)
    for m in (config.bm - 1, config.bm + 1, 257, 300):
        x, residual = torch.randn(m, k, device=GPU).half(), torch.randn(m, n, device=GPU).half()
        exact = linear_reference(x, q, exact=True)
        room = torch.full((m + config.bm, n), 7.0, device=GPU, dtype=torch.float16)
        room[:m] = residual
        into = _product(config, x, q, None, room[:m], into_residual=True)
        assert relative_error(into, exact + residual.double()) < LIMITS[torch.float16]
        assert (room[m:] == 7).all()


@pytest.mark.parametrize("group", [128, None])
def test_bias_and_residual_in_place(group):
    q = random_weight(2048, 2048, 4, False, group, torch.bfloat16, GPU)
    x = torch.randn(200, 2048, device=GPU).bfloat16()
    bias = torch.randn(2048, device=GPU).bfloat16()
    residual = 30 * torch.randn(200, 2048, device=GPU).bfloat16()
    exact = linear_reference(x, q, bias, exact=True) + residual.double()
    for config in KINDS.values():
        y = _product(config, x, q, bias, residual)
        assert relative_error(y, exact) < LIMITS[torch.bfloat16]
        into = residual.clone()
        assert torch.equal(_product(config, x, q, bias, into, into_residual=True), y)
        assert torch.equal(into, y)
