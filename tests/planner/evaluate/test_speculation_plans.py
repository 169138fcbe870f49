"""The planner adds drafts to a plan where they fit and pay, and says why where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime
from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.families.common.spec_values import Indexer
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.evaluate.add_drafts import with_speculation
from llmpq.plans.plan import MemoryForm
from llmpq.plans.speculation import draft_bytes
from llmpq.precision import Precision

pytestmark = pytest.mark.pure
INDEXER = Indexer(heads=4, dim=16, topk=8)
CPUS = Cluster.from_counts(["CPU"], [2])


def entry(precision: str, phase: Phase, seconds: float) -> LatencyEntry:
    return LatencyEntry(
        device_kind="CPU@1t",
        part="layer",
        phase=phase,
        precision=Precision.parse(precision),
        dtype="float32",
        regimes=(Regime(terms={"1": seconds}),),
        source="profile",
    )


@pytest.fixture
def spec(demo_model) -> ModelSpec:
    return ModelSpec.from_directory(demo_model)


def priced(draft_s: float) -> CostModel:
    entries = (
        entry("w16a16", Phase.DECODE, 0.010),
        entry("w4a16", Phase.DECODE, draft_s),
        entry("w16a16", Phase.VERIFY, 0.011),
    )
    return CostModel(model="demo-7m", model_fingerprint="0" * 16, entries=entries)


def limited(plan, limit_bytes: int):
    memory = MemoryForm(
        weights_bytes=0,
        embedding_bytes=0,
        kv_bytes=0,
        workspace_bytes=0,
        context_bytes=0,
        total_bytes=10**6,
        limit_bytes=limit_bytes,
    )
    stages = tuple(stage.model_copy(update={"memory": memory}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def test_auto_takes_the_mode_that_gains_most(make_plan, demo_model, spec):
    plan = with_speculation(make_plan(demo_model, (3,)), spec, CPUS, priced(0.003), "auto")
    assert plan.speculation is not None and plan.speculation.mode == "w4kv4"
    assert plan.speculation.predicted_speedup is not None
    assert plan.speculation.predicted_speedup > 1.5
    assert plan.speculation.extra_bytes == sum(
        draft_bytes(plan, spec, index, "w4kv4") for index in range(2)
    )


def test_auto_leaves_a_plan_without_room_or_gain_alone(make_plan, demo_model, spec):
    plan = make_plan(demo_model, (3,))
    tight = limited(plan, 10**6 + 1)
    chosen = with_speculation(tight, spec, CPUS, priced(0.003), "auto").speculation
    assert chosen is None or chosen.mode == "ngram", "drafts that take no memory may stay"
    slow = CostModel(
        model="demo-7m",
        model_fingerprint="0" * 16,
        entries=(entry("w16a16", Phase.DECODE, 0.010), entry("w16a16", Phase.VERIFY, 0.05)),
    )
    assert with_speculation(plan, spec, CPUS, slow, "auto") == plan


def test_a_verify_has_logits_of_every_position(make_plan, demo_model, spec):
    """Drafts as long as the logits of their verify leave room for, and none where they do not."""
    shape = {"batch": 64, "prompt_len": 1, "prefill_microbatch": 1, "decode_microbatch": 64}
    plan = make_plan(demo_model, (3,), **shape)
    drafts = draft_bytes(plan, spec, 1, "w4kv4")
    token = 64 * (spec.vocab + 4 * spec.hidden) * 4  # logits; what is received, and on its way

    def gamma(room: int) -> int:
        last = limited(plan, 10**6 + drafts + room).stages[1]
        given = plan.model_copy(update={"stages": (plan.stages[0], last)})
        chosen = with_speculation(given, spec, CPUS, priced(0.001), "w4kv4").speculation
        return chosen.gamma if chosen is not None else 0

    rooms = (token, 2 * token - 1, 4 * token, 9 * token)
    assert [gamma(room) for room in rooms] == [1, 1, 4, 7]
    with pytest.raises(DoesNotFitError, match="w4kv4 do not fit: CPU-1 is short by"):
        gamma(token // 2)


@pytest.mark.parametrize(
    ("kind", "indexer", "why"),
    [("T4", None, "on GPUs before Ampere"), ("H200", INDEXER, "sparse attention over chosen")],
)
def test_copies_that_gpus_do_not_read_are_no_drafts(
    make_plan, demo_model, spec, kind, indexer, why
):
    """Neither of auto, which takes another mode or none, nor where they are asked for."""
    plan = make_plan(demo_model, (3,))
    on = {"kind": kind, "profile_kind": "CPU@1t", "threads": None}
    stages = tuple(stage.model_copy(update=on) for stage in plan.stages)
    plan, spec = plan.model_copy(update={"stages": stages}), replace(spec, indexer=indexer)
    chosen = with_speculation(plan, spec, CPUS, priced(0.003), "auto").speculation
    assert chosen is None or chosen.mode == "ngram"
    with pytest.raises(ValueError, match=why):
        with_speculation(plan, spec, CPUS, priced(0.003), "kv4")


def test_a_wish_that_cannot_be_met_says_why(make_plan, demo_model, spec):
    plan = make_plan(demo_model, (3,))
    with pytest.raises(DoesNotFitError, match=r"w4kv4 do not fit: CPU-0 is short by"):
        with_speculation(limited(plan, 10**6 + 1), spec, CPUS, priced(0.003), "w4kv4")
    with pytest.raises(ValueError, match="not predicted to pay"):
        with_speculation(plan, spec, CPUS, priced(0.012), "kv4")
    with pytest.raises(ValueError, match="can use auto, w4kv4, kv4, ngram"):
        with_speculation(plan, spec, CPUS, priced(0.003), "qspec")


def test_bytes_of_a_four_bit_copy(make_plan, demo_model, spec):
    plan = make_plan(demo_model, ())
    shapes = spec.linears()
    packed = sum(s.out_features * s.in_features // 2 for s in shapes)
    grids = sum(s.out_features * (s.in_features // 128) * 4 for s in shapes)
    cache = draft_bytes(plan, spec, 0, "kv4")
    head = spec.vocab * spec.hidden // 2 + spec.vocab * (spec.hidden // 128) * 4
    assert draft_bytes(plan, spec, 0, "w4kv4") - cache == spec.num_layers * (packed + grids) + head
    split = make_plan(demo_model, (3,))
    parts = [draft_bytes(split, spec, index, "w4kv4") for index in range(2)]
    assert sum(parts) == draft_bytes(plan, spec, 0, "w4kv4"), "the last stage alone has the head"
    assert draft_bytes(plan, spec, 0, "ngram") == 0 < cache
