"""Attention over latents in blocks, interpreted, against its twin: rows of any lengths."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.paged import paged_latents
from llmpq.kernels.kv.paged.paged_latents import LatentPlan, attend_latent_pages
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.paged_twins import paged_attend_reference

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
    "chunks": [(4, 0, 40), (1, 126, 5), (0, 200, 2)],
    "mixed": [(0, 300, 1), (4, 3, 20), (3, 0, 1), (1, 250, 9), (2, 0, 2)],
}


@pytest.fixture(autouse=True)
def _new_memory_is_no_number():
    """What was not written is NaN, not whatever was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(mix, *, heads, dim, value_dim, dtype=torch.float32, sms=4, wrong_table=False):
    """Return what the kernels and the twin give, and how many places are used."""
    torch.manual_seed(heads + dim)
    plan = replace(LatentPlan.of(heads, dim, value_dim, dtype, CPU), sms=sms)
    used = sum(count for _, _, count in mix)
    table = plan.table(*zip(*mix, strict=True), num_rows=len(mix) + 2, num_places=used + PADDING)
    rows_FR = torch.tensor(table, dtype=torch.int32)
    table_SM = torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).int()
    pool = torch.randn(SLOTS * COLUMNS, 1, BLOCK_TOKENS, dim).to(dtype)
    q = torch.randn(used + PADDING, heads, dim).to(dtype)
    chunks = max(count for _, _, count in mix) > 1
    told = table_SM.roll(1, 0) if wrong_table else table_SM
    got = attend_latent_pages(q, pool, rows_FR, told, plan, scale=dim**-0.5, chunks=chunks)
    want = paged_attend_reference(q, pool, pool, rows_FR, table_SM, scale=dim**-0.5)
    return got, want[..., :value_dim], used


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.thin
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "dtype"),
    [
        (4, 32, 24, torch.float32),
        (6, 48, 40, torch.float32),
        (40, 24, 16, torch.float32),
        (16, 576, 512, torch.float16),
    ],
)
def test_rows_of_any_lengths(mix, heads, dim, value_dim, dtype):
    """Heads fewer and more than a program's rows; DeepSeek's own sizes."""
    got, want, used = run(MIXES[mix], heads=heads, dim=dim, value_dim=value_dim, dtype=dtype)
    assert error(got[:used], want[:used]) < TOLERANCE[dtype]
    assert not got[used:].any(), "padding gets zeros"


@pytest.mark.parametrize("sms", [1, 64])
def test_shares_of_keys(sms):
    got, want, used = run(MIXES["decode"], heads=4, dim=32, value_dim=24, sms=sms)
    assert error(got[:used], want[:used]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("mix", ["decode", "chunks"])
def test_tiles_of_cards_before_ampere(mix, monkeypatch):
    monkeypatch.setattr(paged_latents, "older_than", lambda *_: True)
    LatentPlan.of.__func__.cache_clear()
    got, want, used = run(MIXES[mix], heads=12, dim=72, value_dim=64)
    LatentPlan.of.__func__.cache_clear()
    assert error(got[:used], want[:used]) < TOLERANCE[torch.float32]


def test_anothers_blocks_are_seen():
    got, want, used = run(MIXES["mixed"], heads=4, dim=32, value_dim=24, wrong_table=True)
    assert error(got[:used], want[:used]) > 0.1


def test_pools_of_another_form_are_refused():
    plan = LatentPlan.of(4, 32, 24, torch.float32, CPU)
    rows = torch.tensor(plan.table([0], [0], [1], num_rows=1, num_places=1), dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="latents must be"):
        attend_latent_pages(
            torch.zeros(1, 4, 32), torch.zeros(1, 2, BLOCK_TOKENS, 32), rows, table, plan,
            scale=1.0, chunks=False,
        )  # fmt: skip
