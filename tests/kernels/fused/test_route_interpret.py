"""A router's choice as one kernel, interpreted, against `Routing.forward`."""

import pytest
import torch
from triton import knobs

from llmpq.families.common.spec_values import Router
from llmpq.kernels.fused import norm_route
from llmpq.kernels.fused.route import fits
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.runtime.backends.gpu.cuda_experts import _routed, norm_and_send
from llmpq.runtime.models.experts import Routing
from llmpq.runtime.models.norms import Norm

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def pairs_of(dispatch):
    """Return the pairs of each expert that has any, as the kernels find them."""
    found = {}
    for expert, first, end in dispatch.runs_E[: dispatch.most_runs].tolist():
        if end > first:
            found[expert] = sorted(found.get(expert, []) + dispatch.order_C[first:end].tolist())
    assert sum(map(len, found.values())) == len(dispatch.order_C)
    return found


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


RULES = {
    "mixtral": (8, 2, Router()),
    "qwen3": (128, 8, Router(normalise=False)),
    "odd": (6, 3, Router(scale=2.5)),
    "glm": (16, 4, Router(score="sigmoid", correction=True, scale=1.7)),
    "deepseek-v2": (
        16,
        3,
        Router(groups=4, groups_kept=2, group_score="max", normalise=False, scale=16.0),
    ),
    "deepseek-v3": (
        32,
        8,
        Router(score="sigmoid", correction=True, groups=8, groups_kept=4, group_score="top2"),
    ),
    "odd groups": (12, 3, Router(groups=3, groups_kept=2)),
}


@pytest.mark.parametrize("kind", RULES)
def test_choice_and_weights(kind):
    experts, per_token, rule = RULES[kind]
    correction = normal(experts, seed=3) if rule.correction else None
    routing = Routing(normal(experts, 24), per_token, rule, correction_E=correction)
    x = normal(11, 24, seed=1)
    weight, number = _routed(routing, x)
    want, chosen = routing(x)
    assert torch.equal(number, chosen), "not the same experts, or not the largest first"
    torch.testing.assert_close(weight, want, rtol=1e-5, atol=1e-7)
    assert not torch.equal(_routed(routing, x.flip(0))[1], chosen)


@pytest.mark.thin
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("tokens", [1, 5, 19])
def test_norm_and_choice_together(kind, tokens, monkeypatch):
    """Rows of two chunks of columns, in one block of tokens or in two."""
    monkeypatch.setattr(norm_route, "CHUNK", 16)
    experts, per_token, rule = RULES[kind]
    correction = normal(experts, seed=3) if rule.correction else None
    bias = normal(experts, seed=4) if kind in ("odd", "glm") else None
    weight = normal(experts, 24)
    routing = Routing(weight, per_token, rule, bias_E=bias, correction_E=correction)
    norm, x = Norm(normal(24, seed=5), None, 1e-5), normal(tokens, 24, seed=1) * 3
    made = norm_and_send(routing, norm, x)
    rows = norm(x)
    want, chosen = routing(rows)
    torch.testing.assert_close(made.x_Th, rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.weight_Tk, want, rtol=1e-5, atol=1e-6)
    assert made.dispatch.per_token == per_token
    assert pairs_of(made.dispatch) == pairs_of(assign(chosen, experts))
    both = norm_and_send(routing, norm, x, beside=True)
    if both.beside:
        assert both.dispatch.per_token == per_token + 1
        found = pairs_of(both.dispatch)
        assert [place // (per_token + 1) for place in found.pop(experts)] == list(range(tokens))
        routed = {
            e: [c + c // per_token for c in pairs] for e, pairs in pairs_of(made.dispatch).items()
        }
        assert found == routed
    assert norm_route.takes(x, experts, rule.groups) == (kind != "odd groups")


def test_what_the_kernel_takes():
    assert fits(128, 1) and fits(160, 1) and fits(256, 8)
    assert not fits(160, 8) and not fits(12, 3) and not fits(2048, 1)
