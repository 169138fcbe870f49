"""Decoding rows over a pool of blocks: our own code beside torch's, and what refuses to differ."""

import pytest
import torch

from llmpq.kernels.cpu import block_attention
from llmpq.kernels.cpu.block_attention import BlockRows, attend_blocks, attend_gathered
from llmpq.kernels.native.library import library
from llmpq.sizes.kv_format import BLOCK_TOKENS

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def pool_and_rows(ends, *, heads, groups, dim, dtype, seed=0):
    """Return queries, a pool in which every row's blocks are scattered, and the rows.

    What no row has is not finite, as a request whose logits were not may have left it.
    """
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-end // BLOCK_TOKENS) for end in ends]
    order = torch.randperm(sum(blocks) + 3, generator=random).tolist()
    tables = torch.zeros((len(ends), max(blocks)), dtype=torch.long)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    shape = ((sum(blocks) + 3) * BLOCK_TOKENS, groups, dim)
    k, v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    q = torch.randn((len(ends), heads, dim), generator=random).to(dtype)
    unused = torch.ones(len(k), dtype=torch.bool)
    for row, end in enumerate(ends):
        at = torch.arange(end)
        unused[tables[row, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS] = False
    k[unused], v[unused] = float("nan"), float("inf")
    return q, k, v, BlockRows(tables, torch.tensor(ends))


def by_hand(q, k, v, rows, *, scale, window, slopes):
    """Softmax of every head by itself, float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    rep = q.shape[1] // k.shape[1]
    for row, end in enumerate(rows.ends_B.tolist()):
        seen = range(max(0, end - window) if window else 0, end)
        table = rows.tables_BM[row].tolist()
        at = [table[t // BLOCK_TOKENS] * BLOCK_TOKENS + t % BLOCK_TOKENS for t in seen]
        for head in range(q.shape[1]):
            scores = k[at, head // rep].double() @ q[row, head].double() * scale
            if slopes is not None:
                scores += slopes[head].double() * (torch.tensor(list(seen)) - (end - 1))
            out[row, head] = scores.softmax(0) @ v[at, head // rep].double()
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(4, 4, 64), (7, 1, 80), (12, 2, 24), (8, 4, 128)]
)
@pytest.mark.parametrize(("window", "sloped"), [(0, False), (0, True), (100, False), (1, False)])
@pytest.mark.parametrize("compiled", [True, False])
def test_single_queries_see_their_blocks(
    dtype, heads, groups, dim, window, sloped, compiled, monkeypatch
):
    if compiled and library() is None:
        pytest.skip("no compiler here")
    if not compiled:
        monkeypatch.setattr(block_attention, "library", lambda: None)
    q, k, v, rows = pool_and_rows(
        [1, 127, 128, 129, 300], heads=heads, groups=groups, dim=dim, dtype=dtype
    )
    slopes = torch.rand(heads) if sloped else None
    scale = dim**-0.5
    got = attend_blocks(q, k, v, rows, scale=scale, window=window, alibi_slopes_H=slopes)
    wanted = by_hand(q, k, v, rows, scale=scale, window=window, slopes=slopes)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * 4)


@pytest.mark.native
def test_large_scores_do_not_overflow_and_far_ones_vanish():
    q, k, v, rows = pool_and_rows([200], heads=2, groups=1, dim=64, dtype=torch.float32)
    got = attend_blocks(q * 300, k, v, rows, scale=1.0)
    torch.testing.assert_close(got, attend_gathered(q * 300, k, v, rows, scale=1.0))
    assert torch.isfinite(got).all()
