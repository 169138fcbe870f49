"""Products of a mixture's experts in the interpreter against their twin."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.weight_layout import Layout
from llmpq.kernels.gemm.experts import expert_dispatch as sent_module
from llmpq.kernels.gemm.experts import expert_rows_launch, gluon_expert_launch
from llmpq.kernels.gemm.experts import expert_stack as module
from llmpq.kernels.gemm.experts.expert_dispatch import assign
from llmpq.kernels.gemm.experts.expert_stack import ExpertStack
from llmpq.kernels.gemm.experts.gated import GateRule
from llmpq.kernels.weights.dense_weight import DenseWeight
from llmpq.kernels.weights.round_to_nearest import quantize_weight
from llmpq.precision import WeightScheme
from reference.fused_twins import gate_mul_reference
from reference.gemm_twins import experts_reference, relative_error

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 2e-6}
"""As test_gemm_interpret.py: rounding of the output; float32: of the sums."""


def routing(tokens, experts, per_token, seed=0):
    """Return [T, k] different experts of each token; expert 1 gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    wish = torch.rand(tokens, experts, generator=generator)
    wish[:, 1] = -1
    return wish.topk(per_token, dim=1).indices


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("tokens", [1, 2, 7, 700])
def test_pairs_are_sorted_by_expert(tokens):
    expert_TK = routing(tokens, 6, 3)
    dispatch, flat = assign(expert_TK, 6), expert_TK.flatten()
    assert torch.equal(dispatch.order_C.long(), flat.argsort(stable=True))
    counts = flat.bincount(minlength=6)
    ends = counts.cumsum(0)
    runs = torch.stack([torch.arange(6), ends - counts, ends], 1)
    if dispatch.blocks is None:  # who has rows first
        runs = runs[counts.eq(0).long().argsort(stable=True)]
    own = dispatch.runs_E.long()
    if expert_TK.numel() <= 6:  # a run for each pair, of which the first of an expert's has rows
        assert len(own) == expert_TK.numel() == dispatch.most_runs
        own, runs = (found[found[:, 1] < found[:, 2]] for found in (own, runs))
        own = own[own[:, 0].argsort()]
    assert torch.equal(own, runs)


@pytest.mark.parametrize("tokens", [1, 90, 300])
def test_many_pairs_come_in_blocks(tokens, monkeypatch):
    """Sorted as few are; every block of 128 rows stands once, an expert's side by side."""
    monkeypatch.setattr(sent_module, "MANY", 0)
    expert_TK = routing(tokens, 6, 3)
    dispatch, flat = assign(expert_TK, 6), expert_TK.flatten()
    assert torch.equal(dispatch.order_C.long(), flat.argsort(stable=True))
    counts = flat.bincount(minlength=6)
    want, starts = [], (counts.cumsum(0) - counts).tolist()
    for e, rows in enumerate(counts.tolist()):
        own = -(-rows // 128)
        want += [[e, starts[e], starts[e] + rows, len(want)]] * own
        assert dispatch.runs_E[e].tolist() == [e, starts[e], starts[e] + rows]
    assert dispatch.blocks[: len(want)].tolist() == want
    apart, broad = (blocks_apart(counts.tolist(), starts, wide) for wide in (128, 256))
    assert dispatch.count.tolist() == [len(want), 0, 0, len(broad)]
    assert len(want) <= dispatch.blocks.shape[0]
    assert dispatch.apart[: len(want)].tolist() == apart
    assert dispatch.broad[: len(broad)].tolist() == broad


def blocks_apart(counts, starts, wide):
    """Blocks of so many rows, and last those of half as many and fewer."""
    full, short = [], []
    for e, (rows, start) in enumerate(zip(counts, starts, strict=True)):
        rest = rows % wide if rows % wide <= wide // 2 else 0
        own = -(-(rows - rest) // wide)
        full += [[e, start, start + rows - rest, len(full)]] * own
        short += [[e, start + rows - rest, start + rows]] * (rest > 0)
    return full + [[*block, len(full) + i] for i, block in enumerate(short)]


def test_rows_are_gathered_by_expert(monkeypatch):
    monkeypatch.setattr(sent_module, "MANY", 0)
    expert_TK, x = routing(90, 6, 3), normal(90, 600)
    dispatch = assign(expert_TK, 6)
    assert torch.equal(gluon_expert_launch.gathered(x, dispatch), x[dispatch.order_C.long() // 3])


def test_few_pairs_and_hundreds_of_experts_have_no_blocks():
    assert assign(routing(9, 4, 2), 4).blocks is None
    assert assign(routing(3, 300, 2), 300).blocks is None


def as_weight(w):
    return DenseWeight(w) if isinstance(w, torch.Tensor) else w


def both_ways(weights, put, dtype, *, bias, tokens=9, per_token=2):
    """Return errors of the gathering and of the returning product, and of a wrong routing."""
    experts, (n, k) = len(weights), weights[0].shape
    biases = [normal(n, dtype=dtype) + e for e in range(experts)] if bias else None
    stack = ExpertStack(experts)
    for e, weight in enumerate(put):
        view, _ = stack.put(e, as_weight(weight), biases[e] if biases else None)
        assert e or view is stack.first
    expert_TK = routing(tokens, experts, per_token)
    dispatch, errors = assign(expert_TK, experts), []
    for back in (False, True):
        x = normal(tokens * per_token if back else tokens, k, dtype=dtype)
        want = experts_reference(x, weights, expert_TK, biases=biases, back=back)
        errors.append(relative_error(stack.product(x, dispatch, back=back), want))
        other = experts_reference(x, weights, expert_TK.flip(0), biases=biases, back=back)
        assert relative_error(other, want) > 0.1, "the twin would not see a wrong routing"
    return errors


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_experts(bits, group, symmetric):
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    put = [
        quantize_weight(normal(48, 200) + e, scheme, dtype=torch.float16, layout=Layout.FRAGMENT)
        for e in range(4)
    ]
    weights = [q.dequantize(torch.float64) for q in put]
    for error in both_ways(weights, put, torch.float16, bias=bits == 4):
        assert error < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_experts(dtype, bias):
    put = [normal(40, 72, dtype=dtype) + e for e in range(5)]
    for error in both_ways(put, put, dtype, bias=bias):
        assert error < TOLERANCE[dtype]


def test_an_expert_with_many_blocks_of_pairs(monkeypatch):
    """Programs walk over blocks of 16 pairs, shared out among three."""
    monkeypatch.setattr(module, "rows_of", lambda *_: (16, 3))
    put = [normal(16, 128) + e for e in range(4)]
    assert max(both_ways(put, put, torch.float16, bias=False, tokens=75)) < 5e-4


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float16, (40, 72)), (torch.bfloat16, (512, 64))]
)
def test_a_prompts_rows_in_wide_tiles(dtype, shape):
    """Experts of some 200 pairs: a block of 128 and one of 72 (or of 64 rows and fewer)."""
    put = [normal(*shape, dtype=dtype) + e for e in range(4)]
    assert assign(routing(300, 4, 2), 4).blocks is not None
    errors = both_ways(put, put, dtype, bias=shape == (40, 72), tokens=300)
    assert max(errors) < TOLERANCE[dtype]


GATES = (GateRule(), GateRule("gelu_tanh"), GateRule("clamped_silu", 2.0, 1.7))
SHAPES = ((40, 72), (512, 64), (72, 40))


def gated_error(weights, put, gate, dtype, *, bias, tokens):
    """Return the error of the gated product, float32 from sums to the end."""
    stack, n = ExpertStack(len(put)), weights[0].shape[0]
    biases = [normal(n, dtype=dtype) + e for e in range(len(put))] if bias else None
    for e, weight in enumerate(put):
        stack.put(e, as_weight(weight), biases[e] if biases else None)
    expert_TK = routing(tokens, len(put), 2)
    x, dispatch = (
        normal(tokens, weights[0].shape[1], dtype=dtype) * 0.1,
        assign(expert_TK, len(put)),
    )
    assert stack.gates(x, dispatch)
    floats = [b.float() for b in biases] if biases else None
    wide = experts_reference(x.float(), [w.float() for w in weights], expert_TK, biases=floats)
    numbers = {"limit": gate.limit, "slope": gate.slope}
    want = gate_mul_reference(wide, gate.activation, **numbers)
    other = gate_mul_reference(wide.flip(-1), gate.activation, **numbers)
    assert relative_error(other, want) > 0.1, "the twin would not see gate and up changed about"
    return relative_error(stack.product(x, dispatch, gate=gate), want)


@pytest.mark.parametrize(("gate", "shape"), zip(GATES, SHAPES, strict=True))
def test_a_prompts_gated_product(gate, shape):
    put = [normal(*shape) + 0.1 * e for e in range(4)]
    error = gated_error(put, put, gate, torch.float16, bias=shape[1] != 64, tokens=300)
    assert error < TOLERANCE[torch.float16]


@pytest.mark.thin
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bits", [16, 8, 4, 3])
def test_a_decode_steps_gated_product(gate, bits):
    put = [normal(96 if bits == 3 else 160, 200) + 0.1 * e for e in range(4)]
    weights: list[torch.Tensor] = put
    if bits < 16:
        scheme = WeightScheme(bits=bits, group_size=128, symmetric=bits == 8, clip_search=False)
        packed = {"dtype": torch.float16, "layout": Layout.FRAGMENT}
        put = [quantize_weight(w, scheme, **packed) for w in put]
        weights = [q.dequantize(torch.float64) for q in put]
    for tokens in (9, 4):  # experts of few pairs: 8 of 4 bits at a time
        error = gated_error(weights, put, gate, torch.float16, bias=gate == GATES[0], tokens=tokens)
        assert error < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("bits", "form"), [(3, (1, 2, 4)), (4, (2, 2, 2)), (8, (1, 2, 1)), (4, (1, 1, 1))]
)
def test_few_pairs_with_all_of_k_in_a_program(bits, form, monkeypatch):
    """K of 200 is two k-groups, one half full; experts of more than 8 pairs, and of none."""
    form = expert_rows_launch.RowsForm(*form, 128)
    monkeypatch.setattr(expert_rows_launch, "form_of", lambda *_, **__: form)
    scheme = WeightScheme(bits=bits, group_size=128, symmetric=bits == 8, clip_search=False)
    packed = {"dtype": torch.float16, "layout": Layout.FRAGMENT}
    put = [quantize_weight(normal(96, 200) + 0.1 * e, scheme, **packed) for e in range(6)]
    weights = [q.dequantize(torch.float64) for q in put]
    for tokens in (7, 20):
        for error in both_ways(weights, put, torch.float16, bias=bits == 4, tokens=tokens):
            assert error < TOLERANCE[torch.float16]
        error = gated_error(weights, put, GATES[0], torch.float16, bias=True, tokens=tokens)
        assert error < TOLERANCE[torch.float16]


def test_two_warps_take_more_k_groups_than_are_in_flight():
    """What gated products of a pair an expert take: 10 k-groups, 4 of a warp asked for at once."""
    scheme = WeightScheme(bits=4, group_size=128, symmetric=False, clip_search=False)
    packed = {"dtype": torch.float16, "layout": Layout.FRAGMENT}
    put = [quantize_weight(normal(64, 1280) + 0.1 * e, scheme, **packed) for e in range(24)]
    form = expert_rows_launch.form_of(put[0], 24, 24, 2, fused=True)
    assert form == expert_rows_launch.RowsForm(1, 2, 4, 168)
    weights = [q.dequantize(torch.float64) for q in put]
    error = gated_error(weights, put, GATES[0], torch.float16, bias=True, tokens=6)
    assert error < TOLERANCE[torch.float16]


def test_when_all_of_k_is_taken_at_once():
    def form(k, pairs, programs, fused, bits=4):
        scheme = WeightScheme(bits=bits, group_size=128, symmetric=True, clip_search=False)
        weight = quantize_weight(normal(16, k), scheme, dtype=torch.float16, layout=Layout.FRAGMENT)
        return expert_rows_launch.form_of(weight, pairs, 128, programs, fused=fused)

    assert form(2048, 8, 0, True).warps == 4 and form(768, 8, 0, False).warps == 2
    assert form(768, 256, 4, False).warps == 1 and form(1408, 8, 0, True) is None
    assert form(7168, 8, 1, True) is None
    assert form(2048, 64, 5, True).warps == 2 and form(2048, 64, 5, False) is None
    assert form(2048, 256, 5, True) is None and form(4096, 64, 5, True) is None
    assert form(768, 1024, 4, False) is None, "8 pairs of an expert: its words are read again"
    assert form(768, 64, 4, False, bits=8) is None and form(200, 8, 0, False) is None


def test_no_gate_in_half_blocks_of_rows():
    stack = ExpertStack(2)
    for e in range(2):
        scheme = WeightScheme(bits=4, group_size=128, symmetric=True, clip_search=False)
        weight = normal(48, 128)
        stack.put(
            e, quantize_weight(weight, scheme, dtype=torch.float16, layout=Layout.FRAGMENT), None
        )
    assert not stack.gates(normal(4, 128), assign(routing(4, 2, 1), 2))


def test_wide_tiles_need_shared_memory():
    assert module.wide_fits(166912) and module.wide_fits(232448)
    assert not module.wide_fits(101376)


def test_views_share_the_stack():
    stack = ExpertStack(2)
    given = [normal(16, 128), normal(16, 128) + 1]
    views = [stack.put(e, DenseWeight(weight), None)[0].values for e, weight in enumerate(given)]
    assert all(torch.equal(view, weight) for view, weight in zip(views, given, strict=True))
    assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()


def test_programs_follow_an_even_routing():
    assert module.rows_of(8, 128) == (16, 1)
    assert module.rows_of(32 * 8, 128) == (16, 1)
    assert module.rows_of(128 * 8, 128) == (16, 1)
    assert module.rows_of(128 * 4, 32) == (32, 1)
    assert module.rows_of(4096 * 8, 128) == (128, 1)
    assert module.rows_of(65536 * 8, 128) == (128, 8)
