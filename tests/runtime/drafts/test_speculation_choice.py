"""When drafting pays: the formulas, the automatic choice, and what the command line allows."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase, Regime
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import MemoryForm
from llmpq.plans.speculation import (
    MAX_GAMMA,
    PRIOR_ACCEPTANCE,
    MeasuredTimes,
    PlanTimes,
    best_gamma,
    choose_mode,
    expected_tokens,
    predicted_speedup,
    usable_modes,
)
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter, speculation_report
from llmpq.runtime.launch.plans.complete_plan import complete_plan, decide_drafts
from llmpq.runtime.options.engine_options import EngineOptions, as_flags
from llmpq.runtime.requests.request import Request
from llmpq.sizes.stage_shape import StageShape
from llmpq.sizes.workspace import workspace_bytes

pytestmark = pytest.mark.pure


@dataclass(frozen=True)
class Machine:
    """Artificial: weights are read once a step, compute grows with rows, a draft reads less."""

    weights_s: float = 8e-3
    kv_s: float = 1e-6
    """Per row and token of context."""
    compute_s: float = 2e-4
    """Per row and position, hidden behind the reads."""
    draft_share: float = 0.3

    def decode_s(self, rows, context):
        return self.verify_s(rows, context, 1)

    def draft_s(self, rows, context):
        reads_s = self.draft_share * (self.weights_s + self.kv_s * rows * context)
        return max(reads_s, self.compute_s * rows)

    def verify_s(self, rows, context, q_len):
        reads_s = self.weights_s + self.kv_s * rows * context
        return max(reads_s, self.compute_s * rows * q_len)


def decided(plan, mode=None, gamma=None, costs=None):
    """Return the decision: who drafts, how many tokens, by which costs."""
    found = decide_drafts(plan, EngineOptions(speculate=mode, gamma=gamma, costs=costs))
    return found.speculate, found.gamma, found.costs


def in_kv(plan, spec, kv):
    """Return the plan completed with a KV precision."""
    return complete_plan(plan, spec, EngineOptions(kv_cache_dtype=kv))[0]


def group(rows: int, context: int) -> list[Request]:
    return [Request(id=i, prompt=(1,) * context, max_new=9, output=[1]) for i in range(rows)]


def test_the_speed_up_formula_on_the_published_figures():
    """E at alpha 0.9, gamma 3 is 3.44; QSpec's L20 numbers (c 0.47) give 1.45."""
    assert expected_tokens(0.9, 3) == pytest.approx(3.44, abs=0.005)
    assert expected_tokens(1.0, 5) == 6

    class Published:
        def decode_s(self, rows, context):
            return 1.0

        def draft_s(self, rows, context):
            return 0.47

        def verify_s(self, rows, context, q_len):
            return 1.0

    got = predicted_speedup(Published(), 0.91, 3, rows=1, context=0)
    assert got == pytest.approx(1.45, abs=0.02)


def test_the_best_length_is_the_best_of_all():
    rng = random.Random(0)
    for _ in range(200):
        machine = Machine(draft_share=rng.uniform(0.05, 1.2), compute_s=rng.uniform(1e-5, 2e-3))
        rows, context, alpha = rng.randint(1, 64), rng.randint(0, 4000), rng.random()
        gamma, speedup = best_gamma(machine, alpha, rows=rows, context=context)
        every = [
            predicted_speedup(machine, alpha, g, rows=rows, context=context)
            for g in range(MAX_GAMMA + 1)
        ]
        assert speedup == every[gamma] >= 1.0, "never below plain decoding"
        assert speedup >= max(every) / 1.02


def test_measured_times_are_lines_between_what_was_timed():
    times = MeasuredTimes(
        draft={2: ((100, 1.0), (300, 3.0)), 8: ((100, 2.0), (300, 4.0))},
        verify={(2, 1): ((0, 4.0),), (2, 4): ((0, 10.0),), (8, 1): ((0, 5.0),)},
    )
    assert times.draft_s(1, 200) == 2.0 and times.draft_s(3, 100) == 2.0
    assert times.draft_s(2, 400) == 4.0 and times.draft_s(2, 0) == 0.0, "the outer pieces go on"
    assert times.draft_s(99, 300) == 4.0, "more rows than were timed: the most that were"
    assert times.decode_s(2, 50) == 4.0 and times.verify_s(2, 50, 2) == 6.0
    assert times.verify_s(8, 50, 4) == 5.0 and times.lengths == (3,)
    assert MeasuredTimes(verify={(1, 1): ((0, 1.0),)}).draft_s(1, 9) == 0.0


def test_a_plain_step_of_an_engine_that_drafts_is_timed_without_what_it_keeps_for_them():
    verify = {(2, 1): ((0, 5.0), (9, 5.0)), (2, 2): ((0, 6.0), (9, 6.0))}
    times = MeasuredTimes(verify=verify, plain={2: ((0, 4.0),)})
    assert times.decode_s(1, 7) == 4.0 and times.verify_s(1, 7, 1) == 5.0
    assert times.corners == ((2, 0), (2, 9))


def test_a_single_gpu_needs_no_cost_model_for_gamma_auto(demo_model, make_plan):
    plan = make_plan(demo_model)
    stage = plan.stages[0].model_copy(update={"threads": None, "kind": "H200"})
    on_gpu = plan.model_copy(update={"stages": (stage,)})
    assert decided(on_gpu, "kv4", "auto") == ("kv4", None, None)
    split = make_plan(demo_model, (3,))
    stages = tuple(s.model_copy(update={"threads": None, "kind": "H200"}) for s in split.stages)
    with pytest.raises(ValueError, match="or costs='costs.json'"):
        decided(split.model_copy(update={"stages": stages}), "kv4", "auto")


def test_auto_switches_off_and_on_as_the_batch_changes():
    drafter = AutoDrafter("w4kv4", Machine(), acceptance=0.9)
    lengths = [drafter.gamma(group(rows, 100)) for rows in (1, 8, 40, 160, 40, 1)]
    assert lengths[0] >= 3 and lengths[1] >= 3, "memory bound: positions are free"
    assert lengths[3] == 0, "compute bound: every position costs"
    assert lengths[2] == lengths[4] and lengths[5] == lengths[0], "and back on again"


def test_auto_chooses_from_the_lengths_it_is_given():
    for lengths in ((1, 3), (2, 7)):
        drafter = AutoDrafter("w4kv4", Machine(), acceptance=0.9, lengths=lengths)
        assert drafter.gamma(group(8, 100)) in lengths
        assert drafter.gamma(group(200, 100)) == 0


def test_auto_keeps_its_length_while_the_estimate_wavers():
    machine = Machine(compute_s=1e-6)  # a verify takes what a step takes
    drafter = AutoDrafter("w4kv4", machine, acceptance=0.9)
    first = drafter.gamma(group(8, 100))
    best = set()
    for estimate in (0.88, 0.92, 0.89, 0.91):
        drafter.estimate = estimate
        best.add(best_gamma(machine, estimate, rows=8, context=100)[0])
        assert drafter.gamma(group(8, 100)) == first
    assert len(best) > 1, "each estimate alone would choose anew"
    drafter.estimate = 0.5
    assert drafter.gamma(group(8, 100)) < first
    drafter.estimate = 0.1
    assert drafter.gamma(group(8, 100)) == 0


def test_auto_switches_on_as_the_context_grows():
    """A KV4 draft saves nothing on weights: it pays where the cache is what is read."""

    class Kv4Draft(Machine):
        def draft_s(self, rows, context):
            return self.weights_s + 0.28 * self.kv_s * rows * context

    drafter = AutoDrafter("kv4", Kv4Draft(compute_s=1e-6), acceptance=0.97)
    assert drafter.gamma(group(8, 100)) == 0
    assert drafter.gamma(group(8, 30_000)) > 0


def test_auto_learns_from_refused_drafts_and_gives_up():
    drafter = AutoDrafter("w4kv4", Machine(), acceptance=0.9)
    assert drafter.gamma(group(1, 100)) > 0
    for _ in range(300):
        drafter.observe(3, 0)
    assert drafter.estimate < 0.05 and drafter.gamma(group(1, 100)) == 0
    assert drafter.acceptance.rate == 0


@pytest.mark.parametrize("mode", ["w4kv4", "ngram"])
@pytest.mark.parametrize("context_of_the_other_corner", [100, 30_000])
def test_auto_gives_drafts_up_that_pay_at_no_corner(mode, context_of_the_other_corner):
    """Half of the drafts are kept, which pays in long contexts; n-grams cost nothing to keep."""

    class LongAlone(Machine):
        def draft_s(self, rows, context):
            return self.decode_s(rows, context) * (0.5 if context < 1000 else 0.1)

    corners = ((1, 100.0), (4, context_of_the_other_corner))
    drafter = AutoDrafter(mode, LongAlone(), acceptance=0.9, corners=corners)
    for round_ in range(120):
        if drafter.gamma(group(1, 100)) and round_ < 60:
            drafter.observe(2, round_ % 2)
    pays = context_of_the_other_corner > 1000
    assert drafter.in_vain is (mode == "w4kv4" and not pays)
    assert not AutoDrafter(mode, LongAlone(), acceptance=0.1, corners=corners).in_vain, "untried"


@pytest.mark.parametrize("accepted", [True, False])
def test_auto_tries_n_grams_that_do_not_seem_to_pay(accepted):
    """A verify of two positions takes 1.5 steps: drafts pay from an acceptance of 0.5 on."""

    class Costly(Machine):
        def draft_s(self, rows, context):
            return 0.0

        def verify_s(self, rows, context, q_len):
            return 0.5 * (q_len + 1)

    drafter = AutoDrafter("ngram", Costly(), acceptance=0.3)
    lengths = []
    for _ in range(400):
        lengths.append(drafter.gamma(group(1, 100)))
        drafter.observe(lengths[-1], lengths[-1] if accepted else 0)
    late = lengths[200:]
    if accepted:
        assert min(late) > 1, "learned that they pay, and more of them"
    else:
        assert 0 < sum(late) <= 4, "one in many rounds, of one token"
    other = AutoDrafter("kv4", Costly(), acceptance=0.3)
    assert {other.gamma(group(1, 100)) for _ in range(100)} == {0}, "a model's drafts cost a step"


def _tokens_per_second(
    round_s: dict[bool, float], acceptance: float, rounds: int, *, seed: int = 0, rows: int = 1
) -> float:
    """Decode with drafts by the clock; return the speed-up over plain rounds alone."""
    now = [0.0]
    drafter = AutoDrafter("ngram", Free(), acceptance=0.9, clock=lambda: now[0])
    draw, tokens = random.Random(seed), 0
    for _ in range(rounds):
        gamma = drafter.gamma(group(rows, 100))
        now[0] += round_s[gamma > 0] * draw.uniform(0.97, 1.03)
        for _ in range(rows):
            accepted = 0
            while accepted < gamma and draw.random() < acceptance:
                accepted += 1
            drafter.observe(gamma, accepted)
            tokens += accepted + 1
    return tokens / rows * round_s[False] / now[0]


class Free(Machine):
    """By its step times drafts and their positions cost nothing: all of them seem to pay."""

    def draft_s(self, rows, context):
        return 0.0

    def verify_s(self, rows, context, q_len):
        return super().verify_s(rows, context, 1)


@pytest.mark.parametrize("acceptance", [0.0, 0.15, 0.4])
@pytest.mark.parametrize("cost", [1.0, 1.2, 2.0, 3.0])
@pytest.mark.parametrize("rows", [1, 32])
def test_drafts_that_lose_by_the_clock_are_switched_off(acceptance, cost, rows):
    """Whatever the step times say: a round with drafts takes `cost` plain ones."""
    gained = _tokens_per_second({False: 2e-3, True: cost * 2e-3}, acceptance, 600, rows=rows)
    assert gained >= 0.98


@pytest.mark.parametrize("acceptance", [0.0, 0.15, 0.4])
@pytest.mark.parametrize("rows", [1, 32])
def test_what_is_kept_for_drafts_is_given_up_before_it_costs_much(acceptance, rows):
    """A plain round beside a copy of the cache takes 1.04 steps, one with a draft 1.43."""
    times = MeasuredTimes(
        draft={rows: ((0, 0.39), (9999, 0.39))},
        verify={(rows, 1): ((0, 1.04), (9999, 1.04)), (rows, 2): ((0, 1.04), (9999, 1.04))},
        plain={rows: ((0, 1.0), (9999, 1.0))},
    )
    now, steps, draw = [0.0], 0.0, random.Random(1)
    drafter = AutoDrafter("w4kv4", times, lengths=(1,), corners=times.corners, clock=lambda: now[0])
    while steps < 1000 and not drafter.in_vain:
        gamma = drafter.gamma(group(rows, 100))
        now[0] += (1.43 if gamma else 1.04) * draw.uniform(0.98, 1.02)
        for _ in range(rows):
            accepted = int(gamma > 0 and draw.random() < acceptance)
            drafter.observe(gamma, accepted)
            steps += (accepted + 1) / rows
    took = now[0] + max(0.0, 1000 - steps)
    assert drafter.in_vain
    assert 1000 / took >= 0.98


def test_drafts_that_pay_by_the_clock_go_on():
    assert _tokens_per_second({False: 2e-3, True: 2.2e-3}, 0.8, 600) > 2
    assert _tokens_per_second({False: 2e-3, True: 2.2e-3}, 0.8, 600, rows=8) > 2


def test_a_loss_is_tried_again_more_and_more_seldom():
    now, drafted = [0.0], []
    drafter = AutoDrafter("w4kv4", Free(), acceptance=0.9, clock=lambda: now[0])
    for _ in range(3000):
        gamma = drafter.gamma(group(1, 100))
        drafted.append(gamma > 0)
        now[0] += 5e-3 * (gamma + 1)
        drafter.estimate = 0.9
        drafter.observe(gamma, 0)
    assert 4 <= sum(drafted) < 40
    assert sum(drafted[:100]) >= 3 and not any(drafted[100:400])


def test_time_between_groups_of_other_sizes_is_not_theirs():
    now = [0.0]
    drafter = AutoDrafter("w4kv4", Free(), acceptance=0.9, clock=lambda: now[0])
    for round_ in range(400):
        rows = 1 if round_ % 2 else 64
        gamma = drafter.gamma(group(rows, 100))
        now[0] += (2e-3 if rows == 1 else 4e-2) * (1.1 if gamma else 1)
        for _ in range(rows):
            drafter.observe(gamma, gamma)
    assert all(clocked.gain() is None for clocked in drafter._clocked.values())
    assert drafter.rounds_by_gamma[0] < 20


def test_only_judged_drafts_count_in_the_estimate():
    drafter = AutoDrafter("w4kv4", Machine(), acceptance=0.5)
    for _ in range(3000):  # two accepted, one refused, four never looked at: 2/3
        drafter.observe(7, 2)
    assert drafter.estimate == pytest.approx(2 / 3, abs=0.03)


def test_what_came_of_the_drafts():
    drafter = FixedDrafter("qspec", 3)
    for accepted in (3, 1, 0, 3):
        drafter.observe(3, accepted)
    drafter.observe(0, 0)  # a plain step inside a verify
    report = speculation_report(drafter)
    assert report["acceptance_by_place"] == [0.75, 0.5, 0.5]
    assert report["tokens_per_verify"] == (4 + 2 + 1 + 4) / 4
    assert report["acceptance"] == pytest.approx(7 / 12)
    assert report["acceptance_per_token"] == pytest.approx(7 / 9), "three places were never judged"


def test_no_mode_is_chosen_that_does_not_pay():
    rows = {"rows": 4, "context": 100.0}
    slow, fast = Machine(draft_share=1.1), Machine(draft_share=0.2)
    assert choose_mode({"qspec": slow, "kv4": slow}, **rows) is None
    chosen = choose_mode({"qspec": slow, "w4kv4": fast}, **rows)
    assert chosen is not None and chosen[0] == "w4kv4" and chosen[2] > 1.5
    assert set(PRIOR_ACCEPTANCE) == {"qspec", "w4kv4", "kv4", "ngram", "mtp"}


def entry(precision: str, phase: Phase, seconds: float, kv: str = "kv16") -> LatencyEntry:
    return LatencyEntry(
        device_kind="CPU@1t",
        part="layer",
        phase=phase,
        precision=Precision.parse(precision),
        kv=KVPrecision.parse(kv),
        dtype="float32",
        regimes=(Regime(terms={"1": seconds}),),
        source="profile",
    )


@pytest.fixture
def costs(demo_model, make_plan):
    """Decode 10 ms a 16-bit layer, 4 ms at 4 bits, verify 11 ms."""
    plan = make_plan(demo_model, (3,))
    entries = (
        entry("w16a16", Phase.DECODE, 0.010),
        entry("w4a16", Phase.DECODE, 0.004),
        entry("w16a16", Phase.VERIFY, 0.011),
    )
    return CostModel(
        model=plan.model.name, model_fingerprint=plan.model.fingerprint, entries=entries
    )


def test_step_times_of_a_plan(costs, demo_model, make_plan):
    plan = make_plan(demo_model, (3,))
    times = PlanTimes(plan, costs, "w4kv4")
    assert times.decode_s(2, 50) == pytest.approx(8 * 0.010)
    assert times.draft_s(2, 50) == pytest.approx(8 * 0.004)
    assert times.verify_s(2, 50, 4) == pytest.approx(8 * 0.011)
    assert PlanTimes(plan, costs, "ngram").draft_s(2, 50) == 0
    unprofiled = PlanTimes(plan, costs, "kv4")
    assert unprofiled.draft_s(2, 50) == unprofiled.decode_s(2, 50), "never flattered"
    with pytest.raises(ValueError, match=r"no decode time of w8a16 .* llmpq-profile"):
        PlanTimes(make_plan(demo_model, bits="w8a16"), costs, "w4kv4").decode_s(1, 1)


PLAIN = (None, None, None)


def test_options_and_plan_decide(costs, demo_model, make_plan, tmp_path):
    path = tmp_path / "costs.json"
    costs.save_json(path)
    plan = make_plan(demo_model, (3,))
    assert decided(plan) == PLAIN
    assert decided(plan, "off") == PLAIN
    assert decided(plan, "ngram", 5) == ("ngram", 5, None)
    assert decided(plan, "auto", "auto", path) == ("w4kv4", None, str(path))
    assert decided(plan, "auto", 3, path) == ("w4kv4", 3, str(path)), "only the mode is chosen"
    data = make_plan(demo_model).model_dump()
    data["stages"][0].update(threads=None, kind="H200")  # a GPU times its own steps
    alone = plan.model_validate(data)
    assert decided(alone, "auto", "auto", path) == ("w4kv4", None, None)
    assert decided(alone, "kv4", "auto", path) == ("kv4", None, None)
    planned = plan.model_validate(
        plan.model_dump() | {"speculation": {"mode": "ngram", "gamma": 2, "acceptance": 0.4}}
    )
    assert decided(planned) == ("ngram", 2, None)
    assert decided(planned, None, 3)[1] == 3
    assert decided(planned, None, "auto", path)[1] is None
    with pytest.raises(ValueError, match="or costs='costs.json'"):
        decided(planned, None, "auto")
    assert decided(planned, "off") == PLAIN


@pytest.mark.parametrize(
    ("mode", "gamma", "message"),
    [
        ("qspek", 3, "unknown speculate 'qspek': did you mean 'qspec'"),
        ("ngram", 9, "gamma must be 1..7"),
        ("ngram", "auto", "--speculate ngram without --gamma 1..7 needs a cost model"),
        ("auto", "auto", "--speculate auto needs --costs costs.json"),
        (
            "qspec",
            3,
            "needs 4-bit layers .* the plan has w16a16; choose one of w4kv4, kv4, ngram",
        ),
    ],
)
def test_wishes_that_cannot_be_met(demo_model, make_plan, mode, gamma, message):
    with pytest.raises(ValueError) as refused:
        decided(make_plan(demo_model), mode, gamma)
    assert re.search(message, as_flags(str(refused.value)))


@pytest.mark.parametrize(
    ("mode", "gamma", "costs", "message"),
    [
        (None, 3, None, "--gamma 3 has no effect without drafts, and the plan has none"),
        (None, "auto", "c.json", "--gamma auto and --costs c.json have no effect without drafts"),
        ("off", 3, None, "--gamma 3 has no effect with --speculate off: give speculate a mode, or"),
        ("ngram", 3, "c.json", "costs has no effect with --gamma 3"),
    ],
)
def test_options_without_effect_are_refused(demo_model, make_plan, mode, gamma, costs, message):
    with pytest.raises(ValueError) as refused:
        decided(make_plan(demo_model), mode, gamma, costs)
    assert message in as_flags(str(refused.value))


def test_a_files_name_is_no_flag():
    said = as_flags("max_model_len is no field of generation_config.json; set generation_config.")
    assert said == "--max-model-len is no field of generation_config.json; set --generation-config."


def test_usable_modes_by_plan(demo_model, make_plan):
    assert usable_modes(make_plan(demo_model, bits="w8a16")) == ("w4kv4", "kv4", "ngram")
    assert usable_modes(make_plan(demo_model, bits="w4a16")) == ("qspec", "kv4", "ngram")
    assert usable_modes(make_plan(demo_model, kv="kv4")) == ("ngram",)


def test_the_kv_precision_of_a_plan_can_be_changed(demo_model, make_plan):
    spec = ModelSpec.from_directory(demo_model)
    plan = make_plan(demo_model, (3,), prompt_len=512)
    assert in_kv(plan, spec, "auto") == in_kv(plan, spec, "fp16")
    assert in_kv(plan, spec, "auto").stages == plan.stages
    memory = MemoryForm(
        weights_bytes=1000,
        embedding_bytes=0,
        kv_bytes=5 * 4 * 527 * 256 * 4,
        workspace_bytes=0,
        context_bytes=0,
        total_bytes=5 * 4 * 527 * 256 * 4 + 1000,
        limit_bytes=5 * 4 * 527 * 256 * 4 + (8 << 20),
    )
    stages = tuple(stage.model_copy(update={"memory": memory}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    small = in_kv(plan, spec, "int4")
    assert small.workload.kv is KVPrecision.KV4
    after = small.stages[1].memory
    assert after is not None and after.kv_bytes < memory.kv_bytes
    # A 4-bit cache is dequantised piece by piece: its workspace is another than of 16 bits.
    changed = plan.workload.model_copy(update={"kv": KVPrecision.KV4})
    stage = plan.stages[1]
    assert after.workspace_bytes == workspace_bytes(
        spec,
        changed,
        StageShape(
            precisions=stage.precisions,
            last=True,
            prefill_microbatch=plan.prefill_microbatch,
            decode_microbatch=plan.decode_microbatch,
        ),
    )
    assert after.total_bytes == after.kv_bytes + after.workspace_bytes + 1000
    with pytest.raises(DoesNotFitError, match=r"CPU-0 has no room for a kv16 cache: short by"):
        tight = small.stages[0].model_copy(
            update={"memory": after.model_copy(update={"limit_bytes": after.total_bytes})}
        )
        complete_plan(
            small.model_copy(update={"stages": (tight,)}),
            spec,
            EngineOptions(kv_cache_dtype="kv16"),
        )
    with pytest.raises(ValueError, match="known bits: 16, 8, 4, 2"):
        in_kv(plan, spec, "kv44")
