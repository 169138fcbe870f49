"""The Triton KV kernels in the interpreter, against the plain-torch cache and the whole history."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv.storage import DeviceRows, allocate_layer
from llmpq.precision import KVPrecision
from reference import kv_history

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from llmpq.kernels.kv import launch_plan, reference, step_view  # noqa: E402
from llmpq.kernels.kv import ops as kv_ops  # noqa: E402
from llmpq.kernels.kv.low_bit import attend as kv_attend  # noqa: E402
from llmpq.kernels.kv.low_bit import ring_attend  # noqa: E402
from reference.check_kv import TOLERANCE, WORDS_EQUAL, KvCase, random_steps, run_case  # noqa: E402

pytestmark = [pytest.mark.interpret, pytest.mark.thin(2)]
STEPS = [[(0, 280), (0, 20)], [(280, 1), (20, 1)]]
P = KVPrecision


def check(fmt, *, heads, kv_heads, steps, dtype=torch.float16, tolerance=None, **kind):
    case = KvCase(fmt=fmt, heads=heads, kv_heads=kv_heads, dtype=dtype, steps=steps, **kind)
    outcome = run_case(case, torch.device("cpu"))
    assert outcome.words_equal > WORDS_EQUAL
    assert outcome.error < (tolerance or TOLERANCE[dtype])


@pytest.mark.thin
@pytest.mark.parametrize("precision", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("key_group", [128, 64, 32, None])
def test_every_format(precision, key_group):
    fmt = KVFormat(precision=precision, head_dim=64, key_group=key_group)
    check(fmt, heads=4, kv_heads=2, steps=STEPS)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len"),
    [(8, 2, 1), (2, 2, 4), (4, 1, 1), (4, 1, 4), (6, 1, 3), (4, 2, 8)],
)
def test_heads_and_verified_tokens(heads, kv_heads, q_len):
    """GQA, MHA and MQA, one to several column chunks, across the line at 272 = 128 + 144."""
    fmt = KVFormat(precision=P.KV4, head_dim=64)
    steps = [[(0, 268), (0, 150)], [(268, q_len), (150, q_len)], [(269, q_len), (150, 1)]]
    check(fmt, heads=heads, kv_heads=kv_heads, steps=steps)


def test_bf16_head_dim_128_contiguous_and_alibi():
    """The interpreter truncates to bf16 where a GPU rounds: twice the error of the output."""
    fmt = KVFormat(precision=P.KV4, head_dim=128)
    kind = {"dtype": torch.bfloat16, "paged": False, "alibi": True, "tolerance": 4e-3}
    check(fmt, heads=2, kv_heads=1, steps=STEPS, **kind)


@pytest.mark.parametrize("length", [127, 143, 144, 145, 272])
def test_lengths_around_the_lines(length):
    fmt = KVFormat(precision=P.KV2, head_dim=64)
    steps = [[(0, length), (0, 1)], [(length, 2), (1, 2)]]
    check(fmt, heads=2, kv_heads=1, steps=steps)


def test_a_chunk_continues_a_block():
    fmt = KVFormat(precision=P.KV4, head_dim=64)
    steps = [[(0, 100)], [(100, 200)], [(300, 1)], [(301, 20)], [(321, 1)]]
    check(fmt, heads=2, kv_heads=1, steps=steps)


@pytest.mark.parametrize("heads", [4, 6])
def test_positions_are_rotated_in_the_append(heads):
    """Steps of 1 and 3 tokens; the second packs a block that holds rotated keys."""
    fmt = KVFormat(precision=P.KV4, head_dim=32)
    steps = [[(0, 142), (0, 20)], [(142, 1), (20, 1)], [(143, 3), (21, 2)]]
    check(fmt, heads=heads, kv_heads=2, steps=steps, rope=True)


@pytest.mark.parametrize(
    ("programs", "first"),
    [
        (1, 0),
        (2, 4),
        (50, 2),
        *(pytest.param(*c, marks=pytest.mark.seldom) for c in ((2, 0), (3, 2))),
    ],
)
def test_programs_that_draw_their_share(programs, first):
    """Requests of very unequal length; one launch after another finds the counters at zero."""
    fmt = KVFormat(precision=P.KV4, head_dim=32)
    steps = [[(0, 700), (0, 20), (0, 150)], [(700, 1), (20, 1), (150, 1)]]
    steps.append([(701, 2), (21, 2), (151, 1)])
    check(fmt, heads=4, kv_heads=2, steps=steps, programs=programs, first=first)


RULES = {
    "window": {"window": 100},
    "one": {"window": 1},
    "cap": {"cap": 5.0},
    "sinks": {"sinks": True},
    "all": {"window": 200, "cap": 5.0, "sinks": True},
}


@pytest.mark.thin
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("programs", [0, 2])
def test_windows_caps_and_sinks(rule, programs):
    """Requests longer and shorter than the window, one token and several, dealt and drawn tiles."""
    fmt = KVFormat(precision=P.KV4, head_dim=32)
    steps = [[(0, 700), (0, 20), (0, 150)], [(700, 1), (20, 1), (150, 1)]]
    steps.append([(701, 3), (21, 2), (151, 1)])
    check(fmt, heads=4, kv_heads=2, steps=steps, programs=programs, **RULES[rule])


@pytest.mark.thin
@pytest.mark.parametrize("precision", [P.KV8, P.KV4, P.KV2], ids=lambda p: p.value)
@pytest.mark.parametrize("key_group", [128, 64, 32, None])
def test_rules_in_every_format(precision, key_group):
    fmt = KVFormat(precision=precision, head_dim=64, key_group=key_group)
    check(fmt, heads=4, kv_heads=2, steps=STEPS, **RULES["all"])


@pytest.mark.parametrize("wrong", [{"window": 101}, {"cap": 4.0}, {"sinks_H": None}])
def test_a_wrong_rule_is_caught(monkeypatch, wrong):
    monkeypatch.setattr(kv_history, "_ruled", _with(kv_history._ruled, wrong))
    fmt = KVFormat(precision=P.KV4, head_dim=32)
    rule = {"window": 100, "cap": 5.0, "sinks": True}
    with pytest.raises(AssertionError):
        check(fmt, heads=4, kv_heads=2, steps=STEPS, **rule)


def _with(ruled, wrong):
    return lambda scores, rule, position: ruled(scores, replace(rule, **wrong), position)


def test_a_wrong_rotation_is_caught(monkeypatch):
    """Planted bug: every token at the position of the one before."""
    fmt = KVFormat(precision=P.KV4, head_dim=32)
    honest = reference.rotated
    rows = step_view.Rows
    monkeypatch.setattr(
        reference,
        "rotated",
        lambda x, r, f: honest(
            x, rows(slots_B=r.slots_B, start_B=r.start_B - 1, num_new_B=r.num_new_B), f
        ),
    )
    with pytest.raises(AssertionError):
        check(fmt, heads=2, kv_heads=1, steps=[[(5, 1)]], rope=True)


LENGTH = st.sampled_from([0, 1, 127, 128, 142, 143, 144])


@settings(max_examples=6)
@given(
    lengths=st.tuples(LENGTH, LENGTH),
    moves=st.lists(
        st.tuples(*[st.tuples(st.integers(1, 3), st.integers(0, 3))] * 2), min_size=1, max_size=4
    ),
    key_group=st.sampled_from([128, None]),
)
def test_random_drafts_and_truncations(lengths, moves, key_group):
    """Prompts, then steps of 1 to 3 tokens of which some are forgotten again."""
    fmt = KVFormat(precision=P.KV2, head_dim=32, key_group=key_group)
    check(fmt, heads=2, kv_heads=1, steps=random_steps(lengths, moves), width=3)


@pytest.mark.parametrize("name", ["HOLDBACK", "P_SHIFT"])
def test_a_wrong_constant_is_caught(monkeypatch, name):
    """Planted bugs: a line one block off, and probabilities that leave fp16's range."""
    value = {"HOLDBACK": 144, "P_SHIFT": -20.0}[name]
    where = ring_attend if name == "HOLDBACK" else kv_attend
    monkeypatch.setattr(where, name, triton.language.constexpr(value))
    fmt = KVFormat(precision=P.KV2, head_dim=64)
    with pytest.raises(AssertionError):
        check(fmt, heads=2, kv_heads=1, steps=STEPS)


def test_the_ops_have_fakes():
    """Shapes are known without running, and appending is known to write."""
    fmt = KVFormat(precision=P.KV4, head_dim=64)
    with FakeTensorMode():
        kind = {"slots": 2, "kv_heads": 2, "dtype": torch.float16, "device": "cpu"}
        layer = allocate_layer(fmt, pages=4, **kind)
        table = torch.zeros(2, 2, dtype=torch.int32)
        rows = DeviceRows(**{n: table[:, 0] for n in ("slots", "starts", "counts")})
        q, kv = torch.empty(2, 3, 4, 64).half(), torch.empty(2, 3, 2, 64).half()
        kv_ops.run_append(fmt, layer, table, kv, kv, rows, paged=False)
        plan = launch_plan.plan_attend(
            batch=2, q_len=3, heads=4, kv_heads=2, max_end=300, device=table.device, bits=4
        )
        out = kv_ops.run_attend(fmt, layer, table, q, rows, plan, scale=0.1, paged=False)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    mutated = [a.name for a in torch.ops.llmpq.kv_append.default._schema.arguments if a.is_write]
    assert mutated == [*("k_ring", "v_ring", "k_words", "k_params", "v_words", "v_params", "q_out")]


def test_a_chunk_fills_whole_waves_and_stays_short():
    resident = 132 * 12
    for tiles in (2, 30, 128, 510, 2046):
        for rows in (8, 32, 64, 256, 1024):
            chunk = launch_plan.choose_chunk(tiles, rows, resident, 1, 2)
            assert 1 <= chunk <= launch_plan.MAX_CHUNK and chunk % 2 == 0
            programs = rows * (-(-tiles // chunk) + 1)
            assert programs >= min(resident, rows * tiles // 2) / 2 or chunk == 2


def test_the_combine_takes_every_output_once():
    for parts in (2, 5, 49, 133, 300):
        for outputs in (1, 8, 12, 1024):
            for dim in (32, 64, 128):
                for merge in (4096, 8192, 16384):
                    shape = {"parts": parts, "outputs": outputs, "dim": dim}
                    step = launch_plan.combine_steps(**shape, merge=merge)
                    assert outputs % step["N_STEP"] == 0 and dim % step["D_STEP"] == 0
                    assert step["X_STEP"] * step["D_STEP"] * step["N_STEP"] <= merge
                    assert step["X_STEP"] >= min(parts, 256)


def test_measured_launches_are_used_near_their_shape(monkeypatch):
    entry = {"bits": 4, "columns": 8, "rows": 64, "blocks": 255}
    launch = dict(
        chunk=28, ring_parts=1, tiles=2, stages=2, ahead=0, programs=0, first=0, early=1, merge=8192
    )
    monkeypatch.setattr(launch_plan, "tuning_table", lambda: ({**entry, **launch},))
    assert launch_plan.tuned_launch(4, 8, 64, 250) == launch_plan.KvLaunch(**launch)
    assert launch_plan.tuned_launch(4, 8, 64, 100) is None
    assert launch_plan.tuned_launch(2, 8, 64, 255) is None


def test_programs_that_do_not_start_together_draw_all_their_tiles(monkeypatch):
    """Keys of 32 tokens a group need more shared memory: 11 programs an SM instead of 12."""
    monkeypatch.setattr(launch_plan, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch_plan, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch_plan, "shared_memory", lambda device: (232_448, 233_472))
    shape = {"batch": 8, "q_len": 1, "heads": 32, "kv_heads": 8, "max_end": 32769, "bits": 4}
    plans = {
        group: launch_plan.plan_attend(**shape, device=torch.device("cuda", 7), key_group=group)
        for group in (128, 32)
    }
    assert plans[128].launch.first > plans[128].launch.chunk
    assert plans[32].launch == replace(plans[128].launch, first=plans[32].launch.chunk)
    assert launch_plan.programs_per_sm(4, 128, 8, 2, 2, key_group=32) == 11


def test_plans_follow_the_shared_memory_of_the_card(monkeypatch):
    monkeypatch.setattr(launch_plan, "multiprocessors", lambda device: 108)
    monkeypatch.setattr(launch_plan, "capability", lambda device: (8, 9))
    monkeypatch.setattr(launch_plan, "tuned_launch", lambda *shape: None)
    shape = {"batch": 9, "q_len": 1, "heads": 32, "kv_heads": 8, "max_end": 6000, "bits": 8}
    splits = {}
    for index, kib in enumerate((228, 164, 100)):
        launch_plan.plan_attend.cache_clear()
        shared = (kib * 1024 - 1024, kib * 1024)
        monkeypatch.setattr(launch_plan, "shared_memory", lambda device, shared=shared: shared)
        splits[kib] = launch_plan.plan_attend(**shape, device=torch.device("cuda", index)).splits
    launch_plan.plan_attend.cache_clear()
    residents = [launch_plan.programs_per_sm(8, 128, 8, 1, 3, shared=k * 1024) for k in splits]
    assert residents == [6, 4, 2]
    assert len(set(splits.values())) == 3, splits


def test_shipped_launches_are_complete():
    for entry in launch_plan.tuning_table():
        plan = launch_plan.tuned_launch(*(entry[k] for k in ("bits", "columns", "rows", "blocks")))
        assert plan is not None
        assert plan.chunk % plan.tiles == 0
        assert plan.ring_parts in (1, 5)
