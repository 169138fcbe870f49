"""A mixture whose shared MLP is an expert more, on a GPU: what its parts give one by one."""

import pytest
import torch

from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from llmpq.runtime.backends.gpu import cuda_experts
from llmpq.runtime.backends.gpu.cuda_experts import GroupedMLP, sparse_mlp
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import GatedMLP, GatedSharedMLP, GateFunction
from llmpq.runtime.models.norms import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
EXPERTS, PER_TOKEN, HIDDEN, FFN = 64, 6, 512, 256
FOUR = WeightScheme(bits=4, group_size=128, symmetric=False)
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
"""Relative errors of a row: of 16 bits what is normed, gated and summed is rounded."""


def matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.06


def mixture(dtype, *, four):
    """Return it stacked on the GPU, and in float32 on the host with the same weights."""

    def linear(rows, columns, seed):
        w = matrix(rows, columns, seed).to(dtype)
        if not four:
            return Linear(w.cuda(), None), Linear(w.float(), None)
        packed = quantize_weight(w.float(), FOUR, dtype=dtype)
        return Linear(packed.to("cuda"), None), Linear(packed.dequantize(torch.float32), None)

    pairs = [(linear(2 * FFN, HIDDEN, e), linear(HIDDEN, FFN, 900 + e)) for e in range(EXPERTS + 1)]
    gate = matrix(1, HIDDEN, 800).to(dtype)
    router = (matrix(EXPERTS, HIDDEN, 700) * 4).to(dtype)
    norm = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)
    made = []
    for side, place in ((0, "cuda"), (1, "cpu")):
        experts = [GatedMLP(up[side], down[side]) for up, down in pairs[:-1]]
        last = tuple(part[side] for part in pairs[-1])
        kind = torch.float32 if side else dtype
        own = (x.to(place, kind) for x in (gate, router, norm))
        token_gate, weight_Eh, norm_weight = own
        shared = GatedSharedMLP(*last, GateFunction(), token_gate)
        routing = Routing(weight_Eh, PER_TOKEN)
        if side:
            mlp = SparseMLP(routing, experts, shared)
        else:
            mlp = sparse_mlp(routing, iter(experts), EXPERTS, shared)
        made.append((mlp, Norm(norm_weight, None, 1e-6)))
    return made


@pytest.mark.parametrize(
    ("dtype", "four"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_shared_mlp_runs_with_the_experts(dtype, four, monkeypatch):
    """Of few tokens, sent as they are chosen or sorted; of more it is a product of its own."""
    (stacked, norm), (plain, plain_norm) = mixture(dtype, four=four)
    assert isinstance(stacked, GroupedMLP)
    for rows in (1, 2, 3, 8, 10, 32, 40):
        x = matrix(rows, HIDDEN, rows).mul(16).to(dtype)
        want = x.float() + plain(plain_norm(x.float())[:, None])[:, 0]
        for most in (32, 0):
            monkeypatch.setattr(cuda_experts, "MOST_BESIDE", most)
            got = stacked.added(x.cuda()[:, None], norm)[:, 0].cpu().float()
            errors = (got - want).norm(dim=1) / want.norm(dim=1)
            assert errors.max() < CLOSE[dtype], (rows, most, errors)
