"""Attention to latents that an indexer chooses, interpreted, against a CPU: rows of any lengths."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.paged import chosen_latents
from llmpq.kernels.kv.paged.chosen_latents import attend_chosen_latents, token_rows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan
from llmpq.kernels.kv.reference import IndexQueries
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.latent_steps import (
    COLUMNS,
    CPU,
    MIXES,
    PADDING,
    SLOTS,
    TOLERANCE,
    error,
    latent_step,
)
from reference.paged_twins import chosen_latents_reference, spread_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def run(
    mix, *, heads=4, dim=32, value_dim=24, index=(6, 16), topk=20, dtype=torch.float32, sms=4,
    wrong_table=False, wrong_weights=False,
):  # fmt: skip
    """Return what the kernels and the twin give, and how many places are used."""
    torch.manual_seed(heads + dim)
    index_heads, channels = index
    plan = LatentPlan.of(heads, dim, value_dim, dtype, CPU, index_dim=channels)
    plan = replace(plan, sms=sms)
    step = latent_step(mix, plan, dim + channels, dtype)
    places, pool, table_SM = step.places, step.pool_P1BE, step.table_SM
    q = torch.randn(places, heads, dim).to(dtype)
    queries = torch.randn(places, index_heads, channels).to(dtype)
    asked = IndexQueries(queries, torch.randn(places, index_heads).to(dtype), topk)
    where = spread_reference(step.rows_FR, table_SM, places, padding_slot=SLOTS)
    given = replace(asked, weights_TX=-asked.weights_TX) if wrong_weights else asked
    rows_4T, longest = token_rows(where), COLUMNS * BLOCK_TOKENS - 10
    own_table = step.asked_of(wrong_table=wrong_table)
    got = attend_chosen_latents(
        q, given, pool, rows_4T, own_table, plan, scale=dim**-0.5, longest=longest
    )
    want = chosen_latents_reference(q, asked, pool, step.rows_FR, table_SM, scale=dim**-0.5)
    return got, want[..., :value_dim], step.used


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


@pytest.mark.usefixtures("before_ampere")
def test_tiles_of_cards_before_ampere():
    got, want, used = run(MIXES["mixed"], heads=12, dim=72, value_dim=64)
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
