"""Decoding rows over packed blocks: our own code beside its twin and the definition."""

import pytest
import torch

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.low_bit import native_attend
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule, Scoring
from llmpq.kernels.native import library
from llmpq.kernels.native.library import usable_levels
from llmpq.precision import KVPrecision
from reference.kv_history import attend_from_history, relative_error

pytestmark = pytest.mark.native
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
LENGTHS = (1, 143, 145, 300, 1200)
KVS = [kv for kv in KVPrecision if kv is not KVPrecision.KV16]
ENDS = sorted({level.name for level in (*usable_levels()[:1], *usable_levels()[-1:])})
"""The least and the best instructions here."""


def cache_of(fmt, kv_heads, lengths, dtype, *, seed=0):
    """Return a cache whose rows have so many tokens on scattered pages, and their history."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-max(lengths) // 128) + 1
    table = torch.randperm(len(lengths) * blocks, generator=random).int().view(len(lengths), -1)
    table = table[:, : (max(lengths) - 16) // 128 if max(lengths) >= 16 else 0].contiguous()
    cache = QuantizedKVCache(
        fmt, num_layers=1, kv_heads=kv_heads, slots=len(lengths), max_len=max(lengths) + 1,
        dtype=dtype, table_SN=table, pages=len(lengths) * blocks,
    )  # fmt: skip
    history = []
    for slot, length in enumerate(lengths):
        shape = (length, kv_heads, fmt.head_dim)
        k, v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
        history.append((k, v))
        for start in range(0, length - 1, 140):
            end = min(start + 140, length - 1)
            plan = step(cache, [slot], [start], end - start)
            cache.append(plan, 0, k[None, start:end], v[None, start:end])
    return cache, history


def step(cache, slots, starts, count):
    counts = torch.full((len(slots),), count)
    return cache.plan(
        torch.tensor(slots), torch.tensor(starts), counts, q_len=count,
        max_end=max(starts) + count,
    )  # fmt: skip


def last_step(cache, history, q, **how):
    """Return the attention of every row's last token."""
    plan = step(cache, list(range(len(history))), [len(k) - 1 for k, _ in history], 1)
    k, v = (torch.stack([pair[i][-1:] for pair in history]) for i in range(2))
    return cache.run(plan, 0, q[:, None], k, v, Scoring(**how))[:, 0]


@pytest.mark.thin(2)
@pytest.mark.parametrize("level", ENDS)
@pytest.mark.parametrize("kv", KVS, ids=lambda kv: kv.value)
@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(4, 4, 64), (7, 1, 128), (6, 2, 112), (4, 2, 256), (8, 1, 50)]
)
def test_rows_see_what_the_definition_says(level, kv, heads, groups, dim, monkeypatch):
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[level])
    fmt = KVFormat(precision=kv, head_dim=dim)
    cache, history = cache_of(fmt, groups, LENGTHS, torch.float32)
    q = torch.randn(len(LENGTHS), heads, dim, generator=torch.Generator().manual_seed(1))
    if not native_attend.native_takes(fmt, cache.layers[0], q):
        assert fmt.channels * fmt.key_bits // 64 % 4, "only odd rows of words are left to the twin"
    got = last_step(cache, history, q, scale=dim**-0.5)
    for row, (k, v) in enumerate(history):
        wanted = attend_from_history(fmt, q[row : row + 1], k, v, start=len(k) - 1, scale=dim**-0.5)
        assert relative_error(got[row], wanted[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rule", "sloped"),
    [
        (EVERYTHING, True),
        (ScoreRule(window=100), False),
        (ScoreRule(window=700, cap=3.0), False),
        (ScoreRule(sinks_H=torch.tensor([3.0, -1.0, 0.5, 8.0])), False),
    ],
)
def test_rules_are_the_twins(dtype, rule, sloped, monkeypatch):
    fmt = KVFormat(precision=KVPrecision.KV4, head_dim=64)
    q = torch.randn(len(LENGTHS), 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    how = {"scale": 0.3, "rule": rule, "alibi_slopes_H": torch.rand(4) if sloped else None}
    outs = []
    for taken in (True, False):
        cache, history = cache_of(fmt, 2, LENGTHS, dtype)
        if not taken:
            monkeypatch.setattr(native_attend, "native_takes", lambda *_: False)
        outs.append(last_step(cache, history, q, **how))
    assert relative_error(*outs) < TOLERANCE[dtype]


def test_a_wrong_page_or_a_changed_code_shows():
    fmt = KVFormat(precision=KVPrecision.KV4, head_dim=64)
    cache, history = cache_of(fmt, 2, (300,), torch.float32)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    right = last_step(cache, history, q, scale=0.125)
    for words in (cache.layers[0].k_words_PGW, cache.layers[0].v_words_PGW):
        page = cache.table_SN[0, 1]
        kept = words[page].clone()
        words[page] ^= 0x0F0F0F0F
        assert relative_error(last_step(cache, history, q, scale=0.125), right) > 0.05
        words[page] = kept
    cache.table_SN[0, 0] = 2 if cache.table_SN[0, 0] != 2 else 0
    assert relative_error(last_step(cache, history, q, scale=0.125), right) > 0.05


def test_rows_without_tokens_are_zero():
    fmt = KVFormat(precision=KVPrecision.KV8, head_dim=64)
    cache, _ = cache_of(fmt, 1, (200,), torch.float32)
    q = torch.randn(1, 2, 64)
    out = native_attend.attend_packed(
        fmt, cache.layers[0], cache.table_SN, q, slots_B=torch.tensor([0]),
        last_B=torch.tensor([-1]), scoring=Scoring(1.0),
    )  # fmt: skip
    assert not out.any()
