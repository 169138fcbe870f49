"""A chunk of a prompt over its context in pieces is what it is over all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.kernels.kv.reference import ScoreRule
from llmpq.runtime.cache import paged_kv
from llmpq.runtime.models.attention import alibi_slopes

pytestmark = pytest.mark.cpu
RULES = {
    "plain": {},
    "window": {"window": 50},
    "wide window": {"window": 300},
    "cap": {"cap": 3.0},
    "sinks": {"sinks_H": torch.linspace(-1, 2, 8)},
    "gpt-oss": {"sinks_H": torch.linspace(-1, 2, 8), "window": 50},
    "gemma 2": {"cap": 3.0, "window": 50},
    "alibi": None,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("start", [0, 1, 129, 500])
def test_pieces_are_the_whole(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(start)
    heads, groups, queries, dim = 8, 2, 64, 32
    rule = ScoreRule(**(RULES[name] or {}))  # type: ignore[arg-type]
    slopes = alibi_slopes(heads) if RULES[name] is None else None
    q = torch.randn(queries, heads, dim)
    k, v = torch.randn(2, start + queries, groups, dim)
    first = max(0, start - rule.window + 1) // 128 * 128 if rule.window else 0

    def past(most: int) -> Any:
        for at in range(first, start, most):
            yield at, k[at : min(at + most, start)], v[at : min(at + most, start)]

    scores = torch.einsum("qhd,nhd->hqn", q, k.repeat_interleave(4, 1)).double() * 0.3
    if rule.cap:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    at, keys = torch.arange(start, start + queries)[:, None], torch.arange(start + queries)
    if slopes is not None:
        scores += slopes.double()[:, None, None] * (keys - at)
    unseen = (keys > at) | ((keys <= at - rule.window) if rule.window else False)
    scores = scores.masked_fill(unseen, -torch.inf)
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.double()[:, None, None].expand(-1, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    share = scores.softmax(-1)[..., : start + queries]
    want = torch.einsum("hqn,nhd->qhd", share, v.repeat_interleave(4, 1).double())
    for elements, least in ((1 << 20, 128), (1 << 11, 16)):  # one piece, and many
        monkeypatch.setattr(paged_kv, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(paged_kv, "LEAST_KEYS", least)
        with torch.inference_mode():
            got = paged_kv.attend_chunk(
                q, k[start:], v[start:], past, start, scale=0.3, alibi_slopes_H=slopes, rule=rule
            )
        assert torch.allclose(got.double(), want, atol=1e-5)
