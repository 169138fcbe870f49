"""A layer's stacked experts, kernels interpreted: what experts one after the other give."""

import copy

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.codebooks import E8M0, Codebook
from llmpq.kernels.weights.codebook_weight import codebook_weight
from llmpq.kernels.weights.fp8_weight import fp8_weight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from llmpq.runtime.backends.gpu import cuda_experts
from llmpq.runtime.backends.gpu.cuda_experts import GroupedMLP, sparse_mlp
from llmpq.runtime.models.experts import Routing, SparseMLP
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.models.mlps import MLP, GatedMLP, GatedSharedMLP, GateFunction
from llmpq.runtime.models.norms import Norm

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
EXPERTS, HIDDEN, FFN = 5, 32, 24
FOUR = WeightScheme(bits=4, group_size=128, symmetric=False)


def matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.3


def dense(rows, columns, seed):
    return Linear(matrix(rows, columns, seed), None)


def both(gate="silu", *, bias=False, shared=False):
    """Return the mixture as one after the other and stacked."""
    biases = [(torch.ones(2 * FFN) * e, torch.ones(HIDDEN) * -e) for e in range(EXPERTS)]
    made = [
        GatedMLP(
            Linear(matrix(2 * FFN, HIDDEN, e), biases[e][0] if bias else None),
            Linear(matrix(HIDDEN, FFN, 50 + e), biases[e][1] if bias else None),
            GateFunction(gate, limit=1.0, slope=1.7),
        )
        for e in range(EXPERTS)
    ]
    alike = made[0] if shared else None
    routing = Routing(matrix(EXPERTS, HIDDEN, 99), 2)
    return SparseMLP(routing, made, alike), sparse_mlp(routing, iter(made), EXPERTS, alike)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_silu"])
@pytest.mark.parametrize("rows", [1, 7])
def test_experts_together_give_what_they_give_in_turn(gate, rows):
    plain, stacked = both(gate, bias=gate != "silu", shared=gate == "silu")
    x = matrix(rows, HIDDEN, 7)[:, None]
    assert isinstance(stacked, GroupedMLP) and not stacked.asks_host
    torch.testing.assert_close(stacked(x), plain(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stacked(x.flip(-1)), plain(x), rtol=1e-2)


@pytest.mark.parametrize("activation", ["relu2", "gelu_erf"])
def test_experts_without_gates_together(activation):
    parts = [(dense(FFN, HIDDEN, e), dense(HIDDEN, FFN, 50 + e)) for e in range(EXPERTS)]
    made = [MLP(up, down, activation) for up, down in parts]
    routing = Routing(matrix(EXPERTS, HIDDEN, 99), 2)
    plain, stacked = (
        SparseMLP(routing, made, made[0]),
        sparse_mlp(routing, iter(made), EXPERTS, made[0]),
    )
    x = matrix(7, HIDDEN, 7)[:, None]
    assert isinstance(stacked, GroupedMLP) and not stacked.asks_host
    torch.testing.assert_close(stacked(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 20])
def test_a_layers_experts_are_added_to_the_stream(rows):
    plain, stacked = both(shared=True)
    norm, x = Norm(matrix(1, HIDDEN, 6)[0], None, 1e-5), matrix(rows, HIDDEN, 7)[:, None]
    want = x + plain(norm(x))
    torch.testing.assert_close(stacked.added(x.clone(), norm), want, rtol=1e-4, atol=1e-5)
    handle = stacked.experts[0].down.register_forward_pre_hook(lambda *_: None)
    torch.testing.assert_close(stacked.added(x.clone(), norm), want, rtol=1e-4, atol=1e-5)
    handle.remove()
    biased = Norm(norm.weight, norm.weight + 1, 1e-5)
    want = x + plain(biased(x))
    torch.testing.assert_close(stacked.added(x.clone(), biased), want, rtol=1e-4, atol=1e-5)


@pytest.mark.thin
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("experts", "rows"), [(5, 1), (5, 2), (40, 3), (40, 12)])
def test_a_shared_mlp_as_wide_as_an_expert_is_one(experts, rows, gated, monkeypatch):
    """Of few rows, sorted or not; of more, and where it is watched, it runs by itself."""
    made = [GatedMLP(dense(2 * FFN, HIDDEN, e), dense(HIDDEN, FFN, 50 + e)) for e in range(experts)]
    parts = dense(2 * FFN, HIDDEN, 97), dense(HIDDEN, FFN, 98)
    gate = matrix(1, HIDDEN, 96)
    own = GatedSharedMLP(*parts, GateFunction(), gate) if gated else GatedMLP(*parts)
    routing = Routing(matrix(experts, HIDDEN, 99), 2)
    plain, stacked = SparseMLP(routing, made, own), sparse_mlp(routing, made, experts, own)
    assert isinstance(stacked, GroupedMLP) and isinstance(stacked.shared, type(own))
    norm, x = Norm(matrix(1, HIDDEN, 6)[0], None, 1e-5), matrix(rows, HIDDEN, 7)[:, None]
    want, alone = x + plain(norm(x)), []
    handle = stacked.shared.down.register_forward_pre_hook(lambda *_: alone.append(1))
    torch.testing.assert_close(stacked.added(x.clone(), norm), want, rtol=1e-4, atol=1e-5)
    assert alone, "a watched one was not called"
    handle.remove()
    monkeypatch.setattr(Linear, "forward", lambda *_: pytest.fail("it ran by itself"))
    torch.testing.assert_close(stacked.added(x.clone(), norm), want, rtol=1e-4, atol=1e-5)
    monkeypatch.undo()
    monkeypatch.setattr(cuda_experts, "MOST_BESIDE", rows - 1)
    torch.testing.assert_close(stacked.added(x.clone(), norm), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stacked(x), plain(x), rtol=1e-4, atol=1e-5)


def test_another_weight_or_a_watcher_is_heeded():
    """A draft's view holds other linears; calibration watches those that there are."""
    _, stacked = both()
    x = matrix(3, HIDDEN, 8)[:, None]
    before, seen = stacked(x), []
    view = copy.copy(stacked)
    view._modules = dict(stacked._modules)
    halves = [
        GatedMLP(e.gate_up, Linear(e.down.weight.map_tensors(lambda t: t * 0.5), None))
        for e in stacked.experts
    ]
    view.experts = torch.nn.ModuleList(halves)
    assert view.asks_host
    torch.testing.assert_close(view(x), before * 0.5, rtol=1e-4, atol=1e-5)
    handle = stacked.experts[0].down.register_forward_pre_hook(lambda *_: seen.append(1))
    assert stacked.asks_host
    torch.testing.assert_close(stacked(x), before, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert not stacked.asks_host


@pytest.mark.parametrize("rows", [1, 9])
def test_experts_of_gpt_oss_keep_their_codes(rows):
    """MXFP4, biases and clamped gates, as its checkpoint has them."""
    seeded = torch.Generator().manual_seed(5)

    def linear(n, k):
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=seeded)
        scale = torch.randint(118, 123, (n, k // 32), dtype=torch.uint8, generator=seeded)
        weight = codebook_weight(codes, scale.view(E8M0), codebook=Codebook.E2M1, group_size=32)
        return Linear(weight, torch.randn(n, generator=seeded))

    gate = GateFunction("clamped_silu", limit=1.0, slope=1.7)
    experts = [GatedMLP(linear(256, 128), linear(128, 128), gate) for _ in range(4)]
    routing = Routing(matrix(4, 128, 99), 2)
    stacked = sparse_mlp(routing, iter(experts), 4, None)
    assert isinstance(stacked, GroupedMLP) and not stacked.asks_host
    x = matrix(rows, 128, 7)[:, None]
    torch.testing.assert_close(stacked(x), SparseMLP(routing, experts)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "fp8", "4 bits"])
def test_a_stack_that_some_do_not_fit_is_given_up(kind):
    """Its rooms for all experts are no weight's memory in the end."""

    def weight(rows, columns, seed):
        w = matrix(rows, columns, seed)
        if kind == "4 bits":
            return quantize_weight(w, FOUR, dtype=torch.float32)
        codes = (w * 99).to(torch.float8_e4m3fn)
        return w if kind == "dense" else fp8_weight(codes, torch.ones(1), None, torch.float32)

    experts = [
        GatedMLP(Linear(weight(2 * f, 128, f), None), Linear(weight(128, f, f), torch.ones(128)))
        for f in (128, 128, 128, 256)
    ]
    routing = Routing(matrix(4, 128, 99), 2)
    x = matrix(4, 128, 3)[:, None]
    want = SparseMLP(routing, experts)(x)
    made = sparse_mlp(routing, iter(experts), 4, None)
    assert not isinstance(made, GroupedMLP)
    torch.testing.assert_close(made(x), want)
    for expert in made.experts:
        for held in (expert.gate_up.weight, expert.down.weight):
            tensors = held.tensors.values()
            assert tensors and all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def test_what_cannot_be_stacked_runs_in_turn():
    routing = Routing(matrix(2, HIDDEN, 99), 1)
    mixed = [
        MLP(dense(2 * FFN, HIDDEN, 0), dense(HIDDEN, 2 * FFN, 1), "gelu"),
        GatedMLP(dense(2 * FFN, HIDDEN, 2), dense(HIDDEN, FFN, 3)),
    ]
    unlike = [GatedMLP(dense(2 * f, HIDDEN, f), dense(HIDDEN, f, f)) for f in (8, 16)]
    for experts in (mixed, unlike):
        made = sparse_mlp(routing, experts, 2, None)
        x = matrix(4, HIDDEN, 3)[:, None]
        assert made.asks_host and not isinstance(made, GroupedMLP)
        torch.testing.assert_close(made(x), SparseMLP(routing, experts)(x))
