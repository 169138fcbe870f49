"""Attention to latents that an indexer chooses on a GPU, plain and captured, against its twin."""

import pytest
import torch

from llmpq.kernels.kv.reference import IndexQueries
from llmpq.sizes.kv_format import BLOCK_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SLOTS, COLUMNS, PADDING, TOPK = 6, 20, 3, 2048
STEPS = (
    [(0, 2303, 1), (4, 100, 60), (3, 0, 1), (5, 2030, 30), (2, 0, 2)],
    [(1, 2400, 1), (4, 2200, 1), (3, 1, 90), (5, 145, 1), (2, 2047, 1)],
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "index_heads"), [(128, 64), (16, 32)])
def test_captured_steps_of_any_rows(dtype, heads, index_heads):
    """One graph serves both steps; a choice that falls otherwise at a tie is one key of 2,048."""
    from llmpq.kernels.kv.paged.chosen_latents import attend_chosen_latents, token_rows
    from llmpq.kernels.kv.paged.paged_latents import LatentPlan
    from llmpq.kernels.kv.paged.paged_rows import spread
    from reference.paged_twins import chosen_latents_reference

    torch.manual_seed(0)
    device, dim, rank, channels = torch.device("cuda"), 576, 512, 128
    plan = LatentPlan.of(heads, dim, rank, dtype, device, index_dim=channels)
    table_SM = torch.randperm(SLOTS * COLUMNS).view(SLOTS, COLUMNS).to(device, torch.int32)
    pool = torch.randn(SLOTS * COLUMNS, 1, BLOCK_TOKENS, dim + channels, device=device).to(dtype)
    places = PADDING + max(sum(count for *_, count in rows) for rows in STEPS)
    q = torch.randn(places, heads, dim, device=device).to(dtype)
    asked = IndexQueries(
        torch.randn(places, index_heads, channels, device=device).to(dtype),
        torch.randn(places, index_heads, device=device).to(dtype),
        TOPK,
    )
    scale, longest = dim**-0.5, COLUMNS * BLOCK_TOKENS
    tables = [
        torch.tensor(
            plan.table(*zip(*rows, strict=True), num_rows=len(rows) + 2, num_places=places),
            dtype=torch.int32,
            device=device,
        )
        for rows in STEPS
    ]
    rows_FR = tables[0].clone()

    def attended():
        rows_4T = token_rows(spread(rows_FR, table_SM, places, padding_slot=SLOTS))
        step = (q, asked, pool, rows_4T, table_SM, plan)
        return attend_chosen_latents(*step, scale=scale, longest=longest)

    plain, graph = attended(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended()
    graph.replay()
    assert torch.equal(captured, plain)
    for rows, step_rows in zip(STEPS, tables, strict=True):
        rows_FR.copy_(step_rows)
        graph.replay()
        used = sum(count for *_, count in rows)
        want = chosen_latents_reference(q, asked, pool, step_rows, table_SM, scale=scale)
        want = want[:used, :, :rank].double()
        apart = float((captured[:used].double() - want).norm() / want.norm())
        assert apart < (2e-3 if dtype is torch.float32 else 1e-2)
        assert not captured[used:].any(), "padding gets zeros"
