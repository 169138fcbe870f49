"""Attention to latents that an indexer chooses, interpreted, against a CPU: rows of any lengths."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.paged import chosen_latents, paged_latents
from llmpq.kernels.kv.paged.chosen_latents import attend_chosen_latents, token_rows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan
from llmpq.kernels.kv.reference import IndexQueries
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.paged_twins import chosen_latents_reference, spread_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SLOTS, COLUMNS, PADDING = 6, 3, 2
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}
CPU = torch.device("cpu")
# (slot, start, count)
MIXES = {
    "decode": [(2, 0, 1), (0, 127, 1), (5, 128, 1), (1, 300, 1)],
    "chunks": [(4, 0, 20), (1, 126, 5), (0, 200, 2)],
    "mixed": [(0, 300, 1), (4, 3, 9), (3, 0, 1), (1, 250, 5), (2, 0, 2)],
}


@pytest.fixture(autouse=True)
def _new_memory_is_no_number():
    """What was not written is NaN, not whatever was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(
    mix, *, heads=4, dim=32, value_dim=24, index=(6, 16), topk=20, dtype=torch.float32, sms=4,
    wrong_table=False, wrong_weights=False,
):  # fmt: skip
    """Return what the kernels and the twin give, and how many places are used."""
    torch.manual_seed(heads + dim)
    index_heads, channels = index
    plan = LatentPlan.of(heads, dim, value_dim, dtype, CPU, index_dim=channels)
    plan = replace(plan, sms=sms)
    used = sum(count for _, _, count in mix)
    places = used + PADDING
    table = plan.table(*zip(*mix, strict=True), num_rows=len(mix) + 2, num_places=places)
    rows_FR = torch.tensor(table, dtype=torch.int32)
    table_SM = torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).int()
    pool = torch.randn(SLOTS * COLUMNS, 1, BLOCK_TOKENS, dim + channels).to(dtype)
    q = torch.randn(places, heads, dim).to(dtype)
    queries = torch.randn(places, index_heads, channels).to(dtype)
    asked = IndexQueries(queries, torch.randn(places, index_heads).to(dtype), topk)
    where = spread_reference(rows_FR, table_SM, places, padding_slot=SLOTS)
    used_table = table_SM.roll(1, 0) if wrong_table else table_SM
    given = replace(asked, weights_TX=-asked.weights_TX) if wrong_weights else asked
    rows_4T, longest = token_rows(where), COLUMNS * BLOCK_TOKENS - 10
    got = attend_chosen_latents(
        q, given, pool, rows_4T, used_table, plan, scale=dim**-0.5, longest=longest
    )
    want = chosen_latents_reference(q, asked, pool, rows_FR, table_SM, scale=dim**-0.5)
    return got, want[..., :value_dim], used


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.thin
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "index", "dtype"),
    [
        (4, 32, 24, (6, 16), torch.float32),
        (20, 48, 40, (16, 24), torch.float32),
        (16, 576, 512, (64, 128), torch.float16),
    ],
)
def test_rows_of_any_lengths(mix, heads, dim, value_dim, index, dtype):
    """Heads fewer and more than a program's rows; DeepSeek's own sizes."""
    got, want, used = run(
        MIXES[mix], heads=heads, dim=dim, value_dim=value_dim, index=index, dtype=dtype
    )
    assert error(got[:used], want[:used]) < TOLERANCE[dtype]
    assert not got[used:].any(), "padding gets zeros"


@pytest.mark.parametrize("topk", [1, 16, 90, 2048])
@pytest.mark.parametrize("sms", [1, 64])
def test_choices_of_any_length_in_shares(topk, sms):
    """Fewer keys than a tile, and more than a request has."""
    got, want, used = run(MIXES["decode"], topk=topk, sms=sms)
    assert error(got[:used], want[:used]) < TOLERANCE[torch.float32]


def test_tokens_in_pieces(monkeypatch):
    whole, _, used = run(MIXES["chunks"])
    monkeypatch.setattr(chosen_latents, "chosen_at_once", lambda keys, sums: 16)
    assert used + PADDING > 16
    got, want, used = run(MIXES["chunks"])
    assert error(got[:used], want[:used]) < TOLERANCE[torch.float32]
    assert torch.allclose(got, whole, atol=1e-6) and not got[used:].any()


def test_tiles_of_cards_before_ampere(monkeypatch):
    monkeypatch.setattr(paged_latents, "older_than", lambda *_: True)
    LatentPlan.of.__func__.cache_clear()
    got, want, used = run(MIXES["mixed"], heads=12, dim=72, value_dim=64)
    LatentPlan.of.__func__.cache_clear()
    assert error(got[:used], want[:used]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fault", ["wrong_table", "wrong_weights"])
def test_a_fault_is_seen(fault):
    got, want, used = run(MIXES["mixed"], **{fault: True})
    assert error(got[:used], want[:used]) > 0.1


def test_pools_of_another_form_are_refused():
    plan = LatentPlan.of(4, 32, 24, torch.float32, CPU, index_dim=16)
    asked = IndexQueries(torch.zeros(1, 6, 16), torch.zeros(1, 6), 4)
    table, pool = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, BLOCK_TOKENS, 32)
    rows = torch.zeros(4, 1, dtype=torch.int32)
    given = (torch.zeros(1, 4, 32), asked, pool, rows, table, plan)
    with pytest.raises(ValueError, match="latents must be"):
        attend_chosen_latents(*given, scale=1.0, longest=10)
