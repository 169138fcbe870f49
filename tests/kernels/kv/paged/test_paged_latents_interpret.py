"""Attention over latents in blocks, interpreted, against its twin: rows of any lengths."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv.paged.paged_latents import LatentPlan, attend_latent_pages
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.latent_steps import CPU, MIXES, TOLERANCE, error, latent_step
from reference.paged_twins import paged_attend_reference

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def run(mix, *, heads, dim, value_dim, dtype=torch.float32, sms=4, wrong_table=False):
    """Return what the kernels and the twin give, and how many places are used."""
    torch.manual_seed(heads + dim)
    plan = replace(LatentPlan.of(heads, dim, value_dim, dtype, CPU), sms=sms)
    step = latent_step(mix, plan, dim, dtype)
    q, pool = torch.randn(step.places, heads, dim).to(dtype), step.pool_P1BE
    table_SM, how = step.asked_of(wrong_table=wrong_table), {"scale": dim**-0.5}
    got = attend_latent_pages(q, pool, step.rows_FR, table_SM, plan, chunks=step.chunks, **how)
    want = paged_attend_reference(q, pool, pool, step.rows_FR, step.table_SM, **how)
    return got, want[..., :value_dim], step.used


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


@pytest.mark.usefixtures("before_ampere")
@pytest.mark.parametrize("mix", ["decode", "chunks"])
def test_tiles_of_cards_before_ampere(mix):
    got, want, used = run(MIXES[mix], heads=12, dim=72, value_dim=64)
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
