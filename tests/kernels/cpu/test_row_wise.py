"""Norms, gates and rotary positions by our own code at every level, against torch's."""

import pytest
import torch
from torch.nn import functional

from llmpq.kernels.cpu import row_wise
from llmpq.kernels.native import library

pytestmark = [pytest.mark.cpu, pytest.mark.native]
LEVELS = [level.name for level in library.usable_levels()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=sorted({*LEVELS[:1], *LEVELS[-1:]}))
def level(request, monkeypatch):
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[request.param])


def near(y, want):
    """Equal up to float32's own error; in 16 bits a number on the way may be its neighbour."""
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[y.dtype]
    assert y.dtype == want.dtype and y.shape == want.shape
    assert ((y.float() - want.float()).abs() <= step * want.float().abs() + 1e-6).all()
    if y.dtype != torch.float32:
        assert (y != want).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2048), (3, 5, 37), (2, 1, 8), (300, 1000)])
def test_norms(level, dtype, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).mul(3).to(dtype), torch.rand(shape[-1]).add(0.5).to(dtype)
    inverse = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    near(row_wise.rms_norm(x, weight, 1e-5), (x.float() * inverse * weight.float()).to(dtype))
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert torch.equal(row_wise.rms_norm(turned, weight, 1e-5), row_wise.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16384), (3, 5, 74), (2, 2), (40, 4096)])
def test_gates(level, dtype, shape):
    torch.manual_seed(0)
    both = torch.randn(shape).mul(8).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    near(row_wise.silu_gate(both), functional.silu(gate) * up)
    both[..., 0], both[..., shape[-1] // 2] = float("nan"), 1
    assert row_wise.silu_gate(both)[..., 0].isnan().all()
    both[..., 0] = -200
    assert row_wise.silu_gate(both)[..., 0].float().abs().max() < 1e-30
    both[..., 0] = 60000
    assert (row_wise.silu_gate(both)[..., 0] == both[..., 0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    "batch, q_len, heads, dim", [(1, 1, 40, 64), (3, 1, 5, 34), (2, 7, 3, 128)]
)
def test_rotary_positions(level, dtype, batch, q_len, heads, dim, alike):
    torch.manual_seed(0)
    whole = torch.randn(batch, q_len, heads + 2, dim).to(dtype)
    x = whole[:, :, :heads]
    angle = torch.randn(1 if alike else batch, q_len, 1, dim // 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert row_wise.can_rotate(x, cos)
    first, second = x.chunk(2, dim=-1)
    low = (first * cos).addcmul_(second, sin, value=-1)
    high = (second * cos).addcmul_(first, sin)
    y, want = row_wise.rotate(x, cos, sin), torch.cat((low, high), dim=-1)
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert (y.float() - want.float()).abs().max() <= step * want.float().abs().max()
    assert dtype == torch.float32 or (y != want).float().mean() < 0.02


def test_what_is_not_taken():
    x, cos = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 1, 4)
    assert row_wise.can_rotate(x, cos)
    assert not row_wise.can_rotate(x, cos[..., :2].contiguous())  # a part of each head
    assert not row_wise.can_rotate(x, cos[:, :1].contiguous())  # the same angles for all tokens
    assert not row_wise.can_rotate(x.transpose(2, 3), torch.randn(2, 3, 1, 2))
    assert not row_wise.can_rotate(x.bfloat16(), cos)
    assert not row_wise.takes(x.requires_grad_())
    assert not row_wise.takes(torch.ones(2, dtype=torch.float64))
