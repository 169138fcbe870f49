"""Attention over a pool of blocks, interpreted, against its twin: rows of any lengths."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton import knobs

from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.kv.paged import paged_plan
from llmpq.kernels.kv.paged.paged_attend import paged_attend
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.paged.paged_rows import WORK_SPLIT, row_table, share_of, split_work, spread
from llmpq.kernels.kv.reference import ScoreRule
from llmpq.sizes.kv_format import BLOCK_TOKENS
from reference.fused_twins import rope_append_pages_reference
from reference.latent_steps import error
from reference.paged_twins import paged_attend_reference, spread_reference

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SLOTS, COLUMNS = 6, 4
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}
CPU = torch.device("cpu")

# (slot, start, count): decoding rows before, between and behind chunks, at and beside block ends.
MIXES = {
    "decode": [(2, 0, 1), (0, 127, 1), (5, 128, 1), (1, 400, 1)],
    "one": [(3, 511, 1)],
    "chunks": [(4, 0, 130), (1, 126, 5), (0, 300, 2)],
    "equal": [(slot, 199, 1) for slot in range(6)],
    "mixed": [(0, 300, 1), (4, 3, 70), (3, 0, 1), (1, 255, 33), (5, 500, 1), (2, 0, 2)],
}


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def tables(seed=0):
    """Return block tables whose blocks are nobody else's, in no order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(SLOTS * COLUMNS, generator=generator)
    return blocks.view(SLOTS, COLUMNS).to(torch.int32)


def step(mix, plan, *, rows=None, places=None):
    """Return the rows' table and the number of places, with padding unless asked otherwise."""
    slots, starts, counts = zip(*mix, strict=True)
    places = sum(counts) + 3 if places is None else places
    table = row_table(
        *(slots, starts, counts),
        num_rows=len(mix) + 2 if rows is None else rows,
        num_places=places,
        tile_queries=plan.tile_queries,
        tile_keys=plan.tile_keys,
        window=plan.window,
    )
    return torch.tensor(table, dtype=torch.int32), places


def work_split(rows, plan):
    """Return what the programs take of a rows' table."""
    numbers = split_work(rows.numpy(), plan.programs, windowed=plan.window > 0)
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    "lengths,programs,share",
    [((9, 9, 9), 3, 9), ((9, 9, 9), 9, 3), ((9, 0, 2), 4, 3), ((), 4, 1), ((5,) * 4, 2, 10)],
)
def test_the_line_of_tiles_is_split_work(lengths, programs, share):
    """Rows of one length are dealt out whole, or evenly; all tiles have one program each."""
    sums = [sum(lengths[: row + 1]) for row in range(len(lengths))] or [0]
    assert share_of(np.array(sums), programs) == share
    slots, starts = [*range(7, 7 + len(sums))], [10] * len(sums)
    unread = [0] * len(sums)
    table = np.array([slots, starts, unread, unread, unread, sums, sums])
    work = split_work(table, programs, windowed=False).tolist()
    assert split_work(table, programs, windowed=True).tolist() == work * 2
    ends = [0]
    for row, row_last, last, own_share, begin, end, slot, tokens in batched(work, WORK_SPLIT):
        assert own_share == share
        if row_last < row:
            continue
        assert begin <= ends[-1] < end == sums[row] and sums[row_last] >= last
        assert (slot, tokens) == (7 + row, 11)
        ends.append(last)
    assert ends[-1] == sums[-1] and len(work) == WORK_SPLIT * programs


def batched(values, size):
    return [values[at : at + size] for at in range(0, len(values), size)]


@pytest.mark.thin
@pytest.mark.parametrize(
    "mix,programs,counted",
    [("decode", 3, True), ("one", 7, False), ("one", 7, True), ("chunks", 1, False),
     ("mixed", 1, True), ("mixed", 7, False), ("equal", 2, True), ("equal", 7, True)],
)  # fmt: skip
@pytest.mark.parametrize(
    "heads,groups,dim,dtype,alibi",
    [
        (8, 2, 64, torch.float16, False),
        (7, 1, 24, torch.float32, False),
        (4, 4, 80, torch.float32, True),
    ],
)
def test_attention(heads, groups, dim, dtype, alibi, mix, programs, counted, monkeypatch):
    monkeypatch.setattr(paged_plan, "COUNTED_ROWS", 1 if counted else 1000)
    plan = replace(PagedPlan.of(heads, groups, dim, dtype, CPU), programs=programs)
    rows, places = step(MIXES[mix], plan)
    shape = (SLOTS * COLUMNS, groups, BLOCK_TOKENS, dim)
    k, v = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    q = normal(places, heads, dim, dtype=dtype)
    slopes = torch.linspace(0.1, 0.5, heads) if alibi else None
    options = {"scale": dim**-0.5, "alibi_slopes_H": slopes}
    used = sum(count for _, _, count in MIXES[mix])
    want = paged_attend_reference(q, k, v, rows, tables(), **options)[:used]
    options |= {"chunks": mix in ("chunks", "mixed")}
    got = paged_attend(q, k, v, rows, work_split(rows, plan), tables(), plan, **options)
    assert error(got[:used], want) < TOLERANCE[dtype]
    assert not got[used:].any(), "padding gets zeros"
    if mix == "decode":  # planted faults: another's blocks, a query without its own key
        wrong = paged_attend(q, k, v, rows, work_split(rows, plan), tables(1), plan, **options)[
            :used
        ]
        assert error(wrong, want) > 0.1
        rows[1, : len(MIXES[mix])] -= 1
        rows[1].clamp_(min=0)
        wrong = paged_attend(q, k, v, rows, work_split(rows, plan), tables(), plan, **options)[
            :used
        ]
        assert error(wrong, want) > 0.01


def rules(heads):
    sinks = torch.linspace(0, 9, heads)
    return {
        "window": ScoreRule(window=37),
        "wide": ScoreRule(window=150),
        "chunked": ScoreRule(window=70, chunked=True),
        "cap": ScoreRule(cap=3.0),
        "sinks": ScoreRule(sinks_H=sinks),
        "all": ScoreRule(window=64, cap=5.0, sinks_H=sinks),
    }


@pytest.mark.thin
@pytest.mark.parametrize("kind", rules(1))
@pytest.mark.parametrize(
    "mix,programs,dtype,widest",
    [
        ("decode", 3, torch.float32, 200),
        ("one", 7, torch.float32, 0),
        ("mixed", 7, torch.float16, 0),
    ],
)
def test_rules(kind, mix, programs, dtype, widest):
    """Blocks that have left the widest window hold nonsense: another request's."""
    heads, groups, dim = 8, 2, 64
    rule = rules(heads)[kind]
    plan = PagedPlan.of(heads, groups, dim, dtype, CPU, max(widest, rule.window))
    plan = replace(plan, programs=programs)
    rows, places = step(MIXES[mix], plan)
    shape = (SLOTS * COLUMNS, groups, BLOCK_TOKENS, dim)
    k, v = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    q = normal(places, heads, dim, dtype=dtype)
    options = {"scale": 2 * dim**-0.5, "rule": rule}
    used = sum(count for _, _, count in MIXES[mix])
    want = paged_attend_reference(q, k, v, rows, tables(), **options)[:used]
    for slot, start, _ in MIXES[mix] if rule.window else ():
        left = tables()[slot, : max(start + 1 - plan.window, 0) // BLOCK_TOKENS].long()
        k[left], v[left] = float("nan"), float("nan")
    options |= {"chunks": mix == "mixed"}
    got = paged_attend(q, k, v, rows, work_split(rows, plan), tables(), plan, **options)[:used]
    assert error(got, want) < TOLERANCE[dtype]
    others = {"window": ScoreRule(window=36), "wide": ScoreRule(window=120)}
    others["chunked"] = ScoreRule(window=70)
    other = others.get(kind, ScoreRule())
    wrong = paged_attend(
        q, k, v, rows, work_split(rows, plan), tables(), plan, **options | {"rule": other}
    )[:used]
    assert not error(wrong, want) < 1e-2, "the planted fault: another rule"


def test_a_window_wider_than_planned_is_refused():
    plan = PagedPlan.of(8, 2, 64, torch.float16, CPU, 30)
    rows, places = step(MIXES["one"], plan)
    pool = torch.zeros(4, 2, BLOCK_TOKENS, 64, dtype=torch.float16)
    q, rule = torch.zeros(places, 8, 64, dtype=torch.float16), ScoreRule(window=31)
    with pytest.raises(ValueError, match="the plan's 30 tokens at most, got 31"):
        paged_attend(
            q, pool, pool, rows, work_split(rows, plan), tables(), plan, scale=1.0, rule=rule
        )


@pytest.mark.parametrize("dim", [96, 256, 512])
def test_wide_heads(dim):
    plan = PagedPlan.of(4, 2, dim, torch.float16, CPU)
    rows, places = step(MIXES["mixed"], plan)
    shape = (SLOTS * COLUMNS, 2, BLOCK_TOKENS, dim)
    k, v = (normal(*shape, dtype=torch.float16, seed=seed) for seed in (1, 2))
    q = normal(places, 4, dim, dtype=torch.float16)
    used = sum(count for _, _, count in MIXES["mixed"])
    want = paged_attend_reference(q, k, v, rows, tables(), scale=dim**-0.5)[:used]
    got = paged_attend(q, k, v, rows, work_split(rows, plan), tables(), plan, scale=dim**-0.5)[
        :used
    ]
    assert error(got, want) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("mix", MIXES)
def test_tokens_find_their_places(mix):
    plan = PagedPlan.of(8, 2, 64, torch.float16, CPU)
    for exact in (False, True):
        own = MIXES[mix]
        places = sum(count for _, _, count in own) if exact else None
        rows, places = step(own, plan, rows=len(own) if exact else None, places=places)
        got = spread(rows, tables(), places, padding_slot=SLOTS)
        want = spread_reference(rows, tables(), places, padding_slot=SLOTS)
        for name in ("positions_T", "slots_T", "places_T", "slots_R", "last_R"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        live = want.places_T >= 0
        assert int(live.sum()) == sum(count for _, _, count in own)
        assert len(want.places_T[live].unique()) == int(live.sum()), "two tokens at one place"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rotary", [True, False])
def test_append(rotary, keep):
    plan = PagedPlan.of(8, 2, 48, torch.float16, CPU)
    rows, places = step(MIXES["mixed"], plan)
    where = spread_reference(rows, tables(), places, padding_slot=SLOTS)
    qkv = normal(places, 12, 48, dtype=torch.float16)
    q, k, v = qkv.split([8, 2, 2], dim=1)
    inv_freq = 1e4 ** (-torch.arange(24) / 24) if rotary else None
    pools = [
        normal(SLOTS * COLUMNS, 2, BLOCK_TOKENS, 48, dtype=torch.float16, seed=s) for s in (3, 4)
    ]
    want_pools, at = [pool.clone() for pool in pools], (where.places_T, where.positions_T)
    want_k, before = k.clone(), qkv.clone()
    want = rope_append_pages_reference(q, want_k, v, *want_pools, *at, inv_freq, keep=keep)
    got = rope_append_pages(q, k, v, *pools, *at, inv_freq, keep=keep)
    assert error(k, want_k) < TOLERANCE[torch.float16]
    assert torch.equal(q, before[:, :8]) and torch.equal(v, before[:, 10:])
    assert torch.equal(k, before[:, 8:10]) != (keep and rotary)
    k.copy_(before[:, 8:10])
    assert error(got, want) < TOLERANCE[torch.float16]
    for pool, other in zip(pools, want_pools, strict=True):
        assert error(pool, other) < TOLERANCE[torch.float16]
    shifted = (at[0], at[1] + 1)
    if rotary:
        assert error(rope_append_pages(q, k, v, *pools, *shifted, inv_freq), want) > 0.1
    padding = where.places_T < 0
    assert padding.any() and torch.equal(padding, torch.arange(places) >= places - 3)


def test_rows_that_do_not_fit_are_refused():
    plan = PagedPlan.of(8, 2, 64, torch.float16, CPU)
    with pytest.raises(ValueError, match="6 rows of 108 tokens do not go into a step of 6 rows"):
        step(MIXES["mixed"], plan, rows=6, places=112)
    with pytest.raises(ValueError, match="and 4 places"):
        step(MIXES["mixed"], plan, places=4)
    shape = (4, 2, BLOCK_TOKENS, 64)
    rows, places = step(MIXES["one"], plan)
    with pytest.raises(ValueError, match="keys must be"):
        bad = torch.zeros(shape).transpose(1, 2)
        paged_attend(
            torch.zeros(places, 8, 64),
            bad,
            bad,
            rows,
            work_split(rows, plan),
            tables(),
            plan,
            scale=1.0,
        )
