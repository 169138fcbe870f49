"""Rotary, gate, norm and plain attention kernels in the interpreter, against their twins."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused import argmax as fused_argmax
from llmpq.kernels.fused import gated_mlp
from llmpq.kernels.fused import layer_norm as fused_layer_norm
from llmpq.kernels.fused import norm_behind as fused_behind
from llmpq.kernels.fused import rms_norm as fused_norm
from llmpq.kernels.fused import rope_append as fused_rope
from llmpq.kernels.kv.paged import tiles
from reference import fused_twins
from reference.cubin import SHARED_LIMIT
from reference.gemm_twins import relative_error

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

# Both sides round once from float32; the interpreter truncates to bfloat16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch, q_len, heads, groups, dim, dtype):
    """Return q, k, v as slices of one product."""
    fused = normal(batch, q_len, heads + 2 * groups, dim, dtype=dtype)
    return fused.split([heads, groups, groups], dim=2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads,groups,dim", [(10, 1, 16), (4, 4, 24), (2, 2, 64)])
@pytest.mark.parametrize(("rotated", "factor"), [(1.0, 1.0), (0.5, 1.0), (0.25, 1.4), (0.0, 1.0)])
def test_rotation_and_append(dtype, heads, groups, dim, rotated, factor):
    """Whole heads, a part of the channels, scaled cosines, no rotation."""
    q, k, v = (x[0] for x in qkv(1, 6, heads, groups, dim, dtype))
    pools = [torch.full((3, groups, 8, dim), 7.0, dtype=dtype) for _ in range(2)]
    rows = [torch.tensor(x) for x in ([20, 21, -1, 7, 8, -1], [4, 5, 6, 9, 10, 0])]
    inv_freq = 1.0 / 100 ** torch.linspace(0, 1, int(rotated * dim) // 2) if rotated else None
    expected = [pool.clone() for pool in pools]
    given = (*rows, inv_freq, factor)
    want = fused_twins.rope_append_pages_reference(q, k, v, *expected, *given)
    got = fused_rope.rope_append_pages(q, k, v, *pools, *given)
    for mine, theirs in zip((got, *pools), (want, *expected), strict=True):
        assert relative_error(mine, theirs) < TOLERANCE[dtype]
    assert int((pools[0] != 7.0).any(-1).sum()) == 4 * groups, "padding reached the pool"


def test_rotation_without_a_cache():
    q, k, _ = qkv(2, 3, 6, 2, 32, torch.float32)
    start, inv_freq = torch.tensor([5, 0]), 1.0 / 100 ** torch.linspace(0, 1, 16)
    for mine, theirs in zip(
        fused_rope.rope(q, k, start, inv_freq),
        fused_twins.rope_reference(q, k, start, inv_freq),
        strict=True,
    ):
        assert relative_error(mine, theirs) < TOLERANCE[torch.float32]
        assert relative_error(mine, theirs.roll(1, dims=1)) > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("features", [32, 100, 2500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gate(dtype, features, activation):
    gate_up = normal(2, 3, 2 * features, dtype=dtype) * 3
    kind = {"activation": activation, "limit": 2.0, "slope": 1.7}
    want = fused_twins.gate_mul_reference(gate_up, **kind)
    assert relative_error(gated_mlp.gate_mul(gate_up, **kind), want) < TOLERANCE[dtype]
    assert relative_error(gated_mlp.gate_mul(gate_up.flip(-1), **kind), want) > 0.1
    kind |= {"limit": 1.9, "slope": 1.6} if activation == "clamped_silu" else {"activation": "silu"}
    if activation != "silu":
        assert relative_error(gated_mlp.gate_mul(gate_up, **kind), want) > 5e-3


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [64, 100])
def test_norm(dtype, columns):
    x, weight = normal(2, 3, columns, dtype=dtype), normal(columns, dtype=dtype, seed=2)
    want = fused_twins.rms_norm_reference(x, weight, 1e-5)
    assert relative_error(fused_norm.rms_norm(x, weight, 1e-5), want) < TOLERANCE[dtype]
    assert relative_error(fused_norm.rms_norm(x, weight, 0.5), want) > 0.05


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("follows", [True, False])
def test_norm_behind(dtype, columns, follows):
    a, x = (normal(2, 3, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    behind, following = (normal(columns, dtype=dtype, seed=seed) for seed in (2, 3))
    after = (following, 1e-3) if follows else None
    mine, given = a.clone(), x.clone()
    want = fused_twins.norm_behind_reference(a, x, behind, 1e-5, after)
    got = fused_behind.norm_behind(mine, given, behind, 1e-5, after)
    assert got[0] is mine and torch.equal(given, x)
    for found, expected in zip(got, want, strict=True):
        assert relative_error(found, expected) < 2 * TOLERANCE[dtype]
    other = fused_behind.norm_behind(a.clone(), x, following, 1e-5, after)
    assert relative_error(other[0], want[0]) > 0.1
    if follows:
        assert relative_error(got[1], got[0]) > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biases", ["", "before", "after", "before after"])
def test_layer_norm(dtype, biases):
    columns = 100
    x, weight, bias = (normal(*shape, columns, dtype=dtype, seed=seed)
                       for shape, seed in (((2, 3), 0), ((), 1), ((), 2)))  # fmt: skip
    x += 3.0  # a mean that matters
    given = {
        name: normal(columns, dtype=dtype, seed=3 + i) for i, name in enumerate(biases.split())
    }
    mine, theirs = x.clone(), x.clone()
    got = fused_layer_norm.layer_norm(mine, weight, bias, 1e-5, **given)
    want = fused_twins.layer_norm_reference(theirs, weight, bias, 1e-5, **given)
    assert relative_error(got, want) < 2 * TOLERANCE[dtype]
    assert relative_error(mine, theirs) < TOLERANCE[dtype]
    assert torch.equal(mine, x) == (not given)
    if "before" in given:
        without = fused_layer_norm.layer_norm(x.clone(), weight, bias, 1e-5)
        assert relative_error(got, without) > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_largest(dtype):
    x = normal(5, 10_000, dtype=dtype).clamp_(max=2.5)  # many equals, in several blocks
    assert (x[0] == x[0].max()).sum() > 1
    x[1, 9_999] = 3.0
    x[2].fill_(-float("inf"))
    want = fused_twins.argmax_reference(x)
    assert torch.equal(fused_argmax.argmax(x), want)
    table, slots = torch.full((7,), -1), torch.tensor([6, 0, 3, 2, 5])
    fused_argmax.argmax(x, slots_B=slots, table_S=table)
    assert torch.equal(table[slots], want) and table[1] == table[4] == -1
    assert not torch.equal(fused_argmax.argmax(x.flip(-1)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_of_rows_with_nan_is_a_column_of_the_row(dtype):
    x = normal(7, 9_001, dtype=dtype)
    x[0].fill_(float("nan"))
    x[1].fill_(-float("nan"))
    x[2, [4_100, 8_999]] = float("nan")
    x[2, 3] = float("inf")
    x[3, 9_000] = -float("nan")
    x[4].fill_(-float("inf"))
    x[4, 9_000] = float("nan")
    x[5] = -x[5].abs()
    x[5, [17, 8_000]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    want = fused_twins.argmax_reference(x)
    assert want.tolist()[:6] == [0, 0, 4_100, 9_000, 9_000, 17]
    assert torch.equal(fused_argmax.argmax(x), want)
    x = torch.cat((x, torch.full((3, 9_001), -float("inf"), dtype=dtype)))
    x[8, 4_200] = float("inf")
    x[9, 5] = torch.finfo(dtype).min
    want = fused_twins.argmax_reference(x)
    wrong = ~x.max(dim=-1).values.isfinite()
    assert wrong.tolist() == [True] * 5 + [False] * 2 + [True] * 2 + [False]
    table, slots = torch.full((10,), -1), torch.arange(10)
    found = fused_argmax.argmax(x, slots_B=slots, table_S=table, not_finite=-2)
    assert torch.equal(found, want.masked_fill(wrong, -2)) and torch.equal(table, want)


def test_splits_fill_the_gpu_and_are_never_empty():
    assert tiles.choose_splits(256, 612, 64, 132) == 1
    assert tiles.choose_splits(8, 612, 64, 132) == 10
    assert tiles.choose_splits(8, 32768, 64, 132) == 16


def test_stages_let_two_programs_fill_a_multiprocessor_of_any_listed_card():
    tile = 2 * 64 * 128 * 2  # keys and values of 64 tokens
    for arch, limit in SHARED_LIMIT.items():
        stages = tiles.choose_stages(tile, limit, limit + 1024)
        held = (stages - 1) * tile + tiles.BESIDE
        assert held <= limit and stages == (4 if limit > 200_000 else 3 if arch == 80 else 2)
        if stages > 2:
            assert 2 * (held + 1024) <= limit + 1024 < 3 * ((stages - 1) * tile + 1024)
    assert tiles.choose_stages(4 * tile, 101_376, 102_400) == 2
