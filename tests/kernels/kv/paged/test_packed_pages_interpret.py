"""Attention over a pool of packed blocks, interpreted, against its twin: rows of any lengths."""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from llmpq.kernels.formats.kv_block import KVFormat, pool_format
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows, attend_packed_pages
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule
from llmpq.kernels.kv.storage import KVLayer, allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import TAIL_TOKENS
from reference.latent_steps import error
from reference.packed_pages import attend_packed_pages_reference

pytestmark = [
    pytest.mark.thin(2),
    pytest.mark.interpret,
    pytest.mark.usefixtures("new_memory_is_nan"),
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SLOTS, COLUMNS, PADDING = 6, 5, 3
TOLERANCE = {torch.float16: 2e-3, torch.float32: 5e-6}
CPU = torch.device("cpu")
WORDS_EQUAL = 0.9999
"""Codes at the edge between two levels may fall to either, by a last bit of a rotated key."""

# (slot, start, count): rows before, at and behind the lines where blocks are packed (144, 272).
MIXES = {
    "decode": [(2, 0, 1), (0, 143, 1), (5, 144, 1), (1, 415, 1), (3, 272, 1)],
    "one": [(3, 511, 1)],
    "chunks": [(4, 0, 130), (1, 126, 200), (0, 300, 2)],
    "mixed": [(0, 272, 1), (4, 3, 170), (3, 0, 1), (1, 400, 17), (5, 130, 15), (2, 0, 2)],
}


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def tables(seed=0):
    """Return block tables whose blocks are nobody else's, in no order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(SLOTS * COLUMNS, generator=generator)
    return blocks.view(SLOTS, COLUMNS).to(torch.int32)


def pool(fmt, groups, dtype, *, prefix_cache=True):
    layer = allocate_layer(
        fmt, pages=SLOTS * COLUMNS, slots=SLOTS, kv_heads=groups, dtype=dtype, device=CPU
    )
    shape = (SLOTS * COLUMNS if prefix_cache else 0, groups, TAIL_TOKENS, fmt.head_dim)
    behind = [torch.zeros(shape, dtype=dtype) for _ in "kv"]
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def parts(pages):
    return {**vars(pages.layer), "k_behind": pages.k_behind_PGTD, "v_behind": pages.v_behind_PGTD}


def copied(pages):
    layer = KVLayer(**{name: value.clone() for name, value in vars(pages.layer).items()})
    behind = (pages.k_behind_PGTD.clone(), pages.v_behind_PGTD.clone())
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def step_of(mix, plan, *, rows=None, places=None, seed=0):
    """Return a step's rows, with padding behind them unless asked otherwise."""
    slots, starts, counts = zip(*mix, strict=True)
    places = sum(counts) + PADDING if places is None else places
    num_rows = len(mix) + 2 if rows is None else rows
    table = plan.table(slots, starts, counts, num_rows=num_rows, num_places=places)
    rows_FR = torch.tensor(table, dtype=torch.int32)
    return PackedRows(
        rows_FR=rows_FR,
        work_split=torch.tensor(plan.work_split(table), dtype=torch.int32),
        table_SM=tables(seed),
        chunks=max(counts) > 1,
    )


def filled(mix, fmt, groups, plan, dtype, **options):
    """Return a pool that holds what the rows of a mix have before it, by the twin."""
    pages = pool(fmt, groups, dtype, **options)
    before = [(slot, 0, start) for slot, start, _ in mix if start]
    for row in before:
        step = step_of([row], plan, rows=1, places=row[2])
        k, v = (normal(row[2], groups, fmt.head_dim, dtype=dtype, seed=s + row[0]) for s in (7, 70))
        q = torch.zeros(row[2], plan.heads, fmt.head_dim, dtype=dtype)
        attend_packed_pages_reference(q, k, v, pages, step, fmt, scale=1.0)
    return pages


def check(
    kv, mix, *, heads, groups, dim, dtype, programs=3, alibi=False, rotary=0, rule=EVERYTHING,
    **options,
):  # fmt: skip
    """Run a step by kernels and by the twin; compare all that they leave."""
    fmt = pool_format(kv, dim)
    plan = replace(PackedPlan.of(fmt, heads, groups, dtype, CPU), programs=programs)
    want_pages = filled(MIXES[mix], fmt, groups, plan, dtype, **options)
    got_pages, before = copied(want_pages), copied(want_pages)
    step = step_of(MIXES[mix], plan)
    used = sum(count for _, _, count in MIXES[mix])
    places = used + PADDING
    q, k, v = normal(places, heads + 2 * groups, dim, dtype=dtype).split(
        [heads, groups, groups], dim=1
    )
    asked = {
        "scale": dim**-0.5,
        "alibi_slopes_H": torch.linspace(0.01, 0.05, heads) if alibi else None,
        "inv_freq": 1e4 ** (-torch.arange(rotary) / rotary) if rotary and not step.chunks else None,
        "factor": 1.25 if rotary else 1.0,
        "rule": rule,
    }
    want = attend_packed_pages_reference(q, k, v, want_pages, step, fmt, **asked)
    got = attend_packed_pages(q, k, v, got_pages, step, plan, **asked)
    single = torch.tensor([place for s, place in singles(step)])
    others = torch.ones(used, dtype=torch.bool).index_fill_(0, single.long(), False)
    if len(single):
        assert error(got[single], want[single]) < TOLERANCE[dtype]
    if others.any():
        assert error(got[:used][others], want[:used][others]) < TOLERANCE[dtype]
    assert not got[used:].any(), "padding gets zeros"
    for name, part in parts(got_pages).items():
        other = parts(want_pages)[name]
        if "words" in name:
            assert float((part == other).float().mean()) > WORDS_EQUAL, name
        else:
            assert torch.allclose(part.float(), other.float(), atol=2e-3, rtol=2e-3), name
    return want, step, plan, before, (q, k, v), asked


def singles(step):
    rows = step.rows_FR.T.tolist()
    return [(row[0], row[3]) for row in rows if row[0] >= 0 and row[2] == 1]


KVS = [kv for kv in KVPrecision if kv is not KVPrecision.KV16]


@pytest.mark.thin
@pytest.mark.parametrize("kv", KVS, ids=lambda kv: kv.value)
@pytest.mark.parametrize("mix", MIXES)
def test_every_precision_and_mix(kv, mix):
    check(kv, mix, heads=4, groups=2, dim=64, dtype=torch.float16, rotary=32)


@pytest.mark.parametrize(
    "mix,heads,groups,dim,dtype,programs,how",
    [
        ("decode", 8, 1, 32, torch.float32, 1, {"alibi": True}),
        ("decode", 12, 1, 32, torch.float16, 7, {}),
        ("decode", 20, 1, 32, torch.float16, 2, {"rotary": 16}),
        ("mixed", 3, 3, 32, torch.float32, 2, {"alibi": True}),
        ("mixed", 6, 2, 32, torch.float32, 50, {"rotary": 8, "prefix_cache": False}),
        ("chunks", 4, 2, 128, torch.float16, 1, {}),
    ],
)
def test_shapes(mix, heads, groups, dim, dtype, programs, how):
    """Groups of 1, 3, 8, 12 and 20 query heads, heads that rotate in part, many programs."""
    shape = {"heads": heads, "groups": groups, "dim": dim, "dtype": dtype, "programs": programs}
    check(KVPrecision.KV4, mix, **shape, **how)


SIZES = [
    (64, KVPrecision.KV8, "mixed", 1, torch.float32, {"rotary": 8}),
    (72, KVPrecision.KV2, "mixed", 4, torch.float16, {"rotary": 36}),
    (80, KVPrecision.KV4, "decode", 4, torch.float32, {"rotary": 16}),
    (80, KVPrecision.KV8, "mixed", 1, torch.float16, {"rule": ScoreRule(window=100)}),
    (96, KVPrecision.KV8, "decode", 1, torch.float16, {"rotary": 48}),
    (96, KVPrecision.KV2, "mixed", 7, torch.float32, {"alibi": True}),
    (112, KVPrecision.KV4, "mixed", 7, torch.float16, {}),
    (128, KVPrecision.KV2, "mixed", 1, torch.float32, {"rule": ScoreRule(window=150, cap=1.0)}),
    (192, KVPrecision.KV4, "mixed", 1, torch.float16, {"rule": ScoreRule(window=1)}),
    (192, KVPrecision.KV8, "decode", 4, torch.float32, {}),
    (20, KVPrecision.KV4, "mixed", 2, torch.float16, {}),
    (250, KVPrecision.KV2, "decode", 1, torch.float16, {}),
    (80, KVPrecision.KV8V4, "mixed", 4, torch.float16, {"rotary": 16}),
    (96, KVPrecision.KV4V2, "decode", 1, torch.float32, {"alibi": True}),
    (128, KVPrecision.KV8V2, "mixed", 1, torch.float16, {"rule": ScoreRule(window=150, cap=1.0)}),
    (72, KVPrecision.KV16V8, "mixed", 4, torch.float16, {"rotary": 36}),
    (160, KVPrecision.KV16V2, "decode", 1, torch.float16, {}),
    (112, KVPrecision.KV16V4, "mixed", 1, torch.float32, {"rule": ScoreRule(window=100)}),
    (32, KVPrecision.KV16V2, "mixed", 4, torch.float16, {"rule": ScoreRule(cap=1.0)}),
    (64, KVPrecision.KV16V4, "decode", 12, torch.float32, {"alibi": True}),
]


@pytest.mark.thin(apart=True)
@pytest.mark.parametrize(
    "dim,kv,mix,group,dtype,how", SIZES, ids=lambda value: str(getattr(value, "value", value))[:20]
)
def test_heads_of_any_size(dim, kv, mix, group, dtype, how):
    """Channels that are no power of two, no multiple of 32 or of 8."""
    check(kv, mix, heads=group, groups=1, dim=dim, dtype=dtype, **how)


RULES = {
    "window": ScoreRule(window=100),
    "chunked": ScoreRule(window=70, chunked=True),
    "one": ScoreRule(window=1),
    "cap": ScoreRule(cap=1.0),
    "sinks": ScoreRule(sinks_H=torch.linspace(-2, 4, 4)),
    "all": ScoreRule(window=150, cap=1.0, sinks_H=torch.linspace(-2, 4, 4)),
}


@pytest.mark.thin
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mix", ["decode", "chunks", "mixed"])
def test_windows_caps_and_sinks(mix, rule):
    shape = {"heads": 4, "groups": 2, "dim": 32, "dtype": torch.float16, "rule": RULES[rule]}
    check(KVPrecision.KV4, mix, **shape)


@pytest.mark.parametrize(
    "kv",
    [KVPrecision.KV8, pytest.param(KVPrecision.KV2, marks=pytest.mark.seldom)],
    ids=lambda kv: kv.value,
)
def test_rules_in_other_precisions(kv):
    shape = {"heads": 4, "groups": 1, "dim": 64, "dtype": torch.float16, "rule": RULES["all"]}
    want, step, plan, pages, given, asked = check(kv, "mixed", **shape)
    for wrong in ({"window": 151}, {"cap": 1.2}, {"sinks_H": RULES["all"].sinks_H + 0.2}):
        changed = asked | {"rule": replace(RULES["all"], **wrong)}
        got = attend_packed_pages(*given, copied(pages), step, plan, **changed)
        assert error(got, want) > 4e-3, wrong


@pytest.mark.parametrize("mix", ["decode", "chunks"])
def test_what_a_fault_changes_is_seen(mix):
    """Planted: another's blocks, tokens one place back, a ring that belongs to somebody else."""
    shape = {"heads": 4, "groups": 2, "dim": 32, "dtype": torch.float16}
    want, step, plan, pages, given, asked = check(KVPrecision.KV8, mix, **shape)

    def wrong(step, pages=pages):
        got = attend_packed_pages(*given, copied(pages), step, plan, **asked)
        return error(got, want)

    assert wrong(step) < 2e-3
    assert wrong(replace(step, table_SM=tables(1))) > 0.02
    rows = step.rows_FR.clone()
    rows[1, : len(MIXES[mix])] = (rows[1, : len(MIXES[mix])] - 1).clamp_(min=0)
    assert wrong(replace(step, rows_FR=rows)) > 0.02
    other = copied(pages)
    other.layer.k_ring_SGRD.copy_(pages.layer.k_ring_SGRD.roll(1, 0))
    assert wrong(step, other) > 0.02


def test_steps_follow_each_other():
    """A request token by token over a line beside one in chunks: all is as the twin leaves it."""
    kv, heads, groups, dim = KVPrecision.KV4, 2, 1, 32
    fmt = pool_format(kv, dim)
    plan = replace(PackedPlan.of(fmt, heads, groups, torch.float16, CPU), programs=2)
    mixes = [[(0, 0, 140), (1, 0, 9)], [(0, 140, 1), (1, 9, 150)]]
    mixes += [[(0, 141 + i, 1), (1, 159 + i, 1)] for i in range(5)]
    got_pages, want_pages = pool(fmt, groups, torch.float16), pool(fmt, groups, torch.float16)
    for number, mix in enumerate(mixes):
        step = step_of(mix, plan)
        q, k, v = (
            normal(
                sum(row[2] for row in mix) + PADDING,
                n,
                dim,
                dtype=torch.float16,
                seed=3 * number + i,
            )
            for i, n in enumerate((heads, groups, groups))
        )
        want = attend_packed_pages_reference(q, k, v, want_pages, step, fmt, scale=0.2)
        got = attend_packed_pages(q, k, v, got_pages, step, plan, scale=0.2)
        assert error(got, want) < 2e-3, number
    for name, part in parts(got_pages).items():
        assert torch.equal(part, parts(want_pages)[name]), name


def test_what_does_not_fit_is_refused():
    for fmt in (
        KVFormat(precision=KVPrecision.KV4, head_dim=80),  # its keys do not stand by octet
        pool_format(KVPrecision.KV4, 264),
    ):
        with pytest.raises(ValueError, match="at most 256 channels"):
            PackedPlan.of(fmt, 4, 2, torch.float16, CPU)
    fmt = KVFormat(precision=KVPrecision.KV4, head_dim=32)
    plan, step_mix = PackedPlan.of(fmt, 4, 2, torch.float16, CPU), MIXES["one"]
    step, pages = step_of(step_mix, plan), pool(fmt, 2, torch.float16)
    new = torch.zeros(4, 2, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="queries, keys and rings must be"):
        attend_packed_pages(new, new, new, pages, step, plan, scale=1.0)
    q = torch.zeros(4, 4, 32, dtype=torch.float16)
    other = pool(KVFormat(precision=KVPrecision.KV8, head_dim=32), 2, torch.float16)
    for wrong in (other, pool(pool_format(KVPrecision.KV4V2, 32), 2, torch.float16)):
        with pytest.raises(ValueError, match="blocks of kv4 must have"):
            attend_packed_pages(q, new, new, wrong, step, plan, scale=1.0)
