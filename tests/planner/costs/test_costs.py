"""Measured costs win over estimates; what is estimated or extrapolated is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry, LinkCost, Phase, Regime
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.baselines.adabits import solve_adabits
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.costs.cost_book import mean_decode_s
from llmpq.planner.costs.roofline import (
    ENQUEUE_S,
    EXPERT_ENQUEUE_S,
    estimate_costs,
    experts_hit,
)
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.problem import Problem
from llmpq.planner.problem.requests import PlanRequest
from llmpq.planner.problem.stage_memory import DENSE, MIXED, NEVER, PACKED
from llmpq.plans.plan import Plan
from llmpq.precision import KVPrecision, Precision
from llmpq.sizes.memory import stage_memory
from llmpq.sizes.stage_shape import StageShape
from llmpq.workload import Workload

pytestmark = pytest.mark.pure
SMALL = "--device-names T4 V100 --device-numbers 1 1 --model opt-1.3b --global_bz 8 --s 64 --n 32"


def _problem(words: str = SMALL) -> Problem:
    return make_problem(plan_request(words.split()))[0]


def _profile(kind: str = "T4", scale: float = 0.5, drop: Precision | None = None) -> CostModel:
    """A profile of one kind: the estimate, scaled, marked as measured."""
    p = _problem()
    entries = []
    for entry in p.costs.estimate.entries:
        if entry.device_kind != kind or entry.precision is drop:
            continue
        regimes = tuple(
            Regime(terms={k: v * scale for k, v in r.terms.items()}) for r in entry.regimes
        )
        update = {
            "regimes": regimes,
            "source": "profile",
            "sampled_v": (1, 4),
            "sampled_length": (16, 64),
        }
        entries.append(entry.model_copy(update=update))
    spec = ModelSpec.by_name("opt-1.3b")
    link = LinkCost(
        source_kind="T4", target_kind="V100-32GB", same_node=False, alpha_s=0.5, beta_s_per_byte=0.0
    )
    return CostModel(
        model="opt-1.3b",
        model_fingerprint=spec.fingerprint(),
        entries=tuple(entries),
        links=(link,),
    )


def test_profile_wins_and_the_rest_is_marked_estimated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs, out = tmp_path / "costs.json", tmp_path / "plan.json"
    _profile().save_json(costs)
    p = _problem(f"{SMALL} --costs {costs}")
    plain = _problem()
    x, y = p.numbers(1, 1), plain.numbers(1, 1)
    assert x.prefill_s[0, 0] == pytest.approx(y.prefill_s[0, 0] * 0.5)
    assert x.prefill_s[0, 1] == pytest.approx(y.prefill_s[0, 1])
    assert x.hop_prefill.total_s[0, 1] == 0.5 and x.hop_prefill.total_s[1, 0] == 0.5
    assert main([*SMALL.split(), "--costs", str(costs), "--engines", "1", "-o", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "note: the profile has no 'V100-32GB': its times are estimated" in text
    assert (
        "note: T4: batch 8 x 96 tokens lies outside the profile's samples; times are extrapolated"
    ) in text
    plan = Plan.load(out)
    used = {stage.kind for stage in plan.stages}
    assert plan.predicted is not None and plan.predicted.estimated == (used != {"T4"})


def test_precisions_the_profile_lacks_are_not_guessed(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    _profile(drop=Precision.W3A16).save_json(costs)
    assert Precision.W3A16 not in _problem(f"{SMALL} --costs {costs}").choices
    assert Precision.W3A16 in _problem(f"{SMALL} --costs {costs} --bits 3,4").choices


def test_profile_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    _profile().save_json(costs)
    words = SMALL.replace("opt-1.3b", "opt-125m").split()
    assert main([*words, "--costs", str(costs)]) == 2
    err = capsys.readouterr().err
    made, asked = (ModelSpec.by_name(name).fingerprint() for name in ("opt-1.3b", "opt-125m"))
    assert err == (
        f"llmpq-algo: '{costs}' was profiled for model opt-1.3b ({made}), got opt-125m ({asked}); "
        "profile it with llmpq-profile --model\n"
    )


def test_decode_time_is_the_mean_over_true_lengths() -> None:
    regimes = (Regime(terms={"1": 2.0}), Regime(terms={"v*(t+s)": 0.01, "v": 0.1}))
    entry = LatencyEntry(
        device_kind="T4",
        part="layer",
        phase=Phase.DECODE,
        precision=Precision.W16A16,
        dtype="float16",
        regimes=regimes,
        source="profile",
    )
    work = Workload(batch=4, prompt_len=10, gen_len=200)
    slow = sum(entry.seconds(v=3, length=10 + t) for t in range(1, 200)) / 199
    assert mean_decode_s(entry, work, 3) == pytest.approx(slow)
    assert mean_decode_s(entry, work.model_copy(update={"gen_len": 1}), 3) == 0.0
    launched = entry.model_copy(update={"launch_s": 3.0})
    slow = sum(launched.seconds(v=3, length=10 + t) for t in range(1, 200)) / 199
    assert launched.seconds(v=3, length=11) == 3.0 < launched.seconds(v=3, length=209)
    assert mean_decode_s(launched, work, 3) == pytest.approx(slow)


def test_estimate_orders_devices_bits_and_lengths_sensibly() -> None:
    p = _problem()
    costs = estimate_costs(
        p.spec,
        p.cluster.devices,
        dtype="float16",
        precisions=(Precision.W16A16, Precision.W4A16),
        kvs=(KVPrecision.KV16, KVPrecision.KV8),
        quantization=p.quantization,
    )

    def seconds(kind: str, phase: Phase, b: str, kv: str = "kv16", v: int = 1) -> float:
        entry = costs.find(
            kind, phase=phase, precision=Precision(b), kv=KVPrecision(kv), dtype="float16"
        )
        assert entry is not None and entry.source == "estimated"
        return entry.seconds(v=v, length=512)

    decode, prefill = Phase.DECODE, Phase.PREFILL
    assert seconds("T4", decode, "w4a16") < seconds("T4", decode, "w16a16")
    assert seconds("T4", decode, "w4a16", v=65) > seconds("T4", decode, "w16a16", v=65)
    assert seconds("T4", prefill, "w4a16", v=8) > seconds("T4", prefill, "w16a16", v=8)
    assert seconds("V100-32GB", decode, "w16a16") < seconds("T4", decode, "w16a16")
    assert seconds("T4", decode, "w4a16", "kv8", 8) < seconds("T4", decode, "w4a16", "kv16", 8)


LAYER = 4 * 2048**2 + 2 * 2048 * 8192
"""Weights of a layer of opt-1.3b."""


@pytest.mark.parametrize(
    ("kind", "gbps", "most", "moved"),
    [("T4", 320 * 0.65, 64, 4), ("V100-32GB", 900 * 0.55, 16, 4), ("P40", 346 * 0.7, 0, 34),
     ("RTX-3090", 936 * 0.7, 4096, 0)],
)  # fmt: skip
def test_older_cards_make_weights_dense_for_more_than_few_rows(
    kind: str, gbps: float, most: int, moved: int
) -> None:
    """Beside the packed bytes: 2 bytes written, 2 read; by torch's operators some thirty more."""
    p = _problem(f"--device-names {kind} --device-numbers 1 --model opt-1.3b --global_bz 1 --s 8")
    for phase in (Phase.DECODE, Phase.PREFILL):
        entry = p.costs.estimate.find(
            kind, phase=phase, precision=Precision.W4A16, dtype=p.workload.dtype
        )
        assert entry is not None
        made_s = LAYER * moved / (gbps * 1e9)
        assert entry.regimes[0].curve_s(most + 1) == pytest.approx(made_s)
        assert entry.regimes[0].curve_s(max(1, most)) == pytest.approx(0 if most else made_s)


def test_float32_meets_dense_weights_on_every_gpu() -> None:
    words = "--device-names A100 --device-numbers 2 --model gemma-3-12b --global_bz 1 --dtype"
    four = [
        p.costs.estimate.find(
            "A100-80GB", phase=Phase.DECODE, precision=Precision.W4A16, dtype=p.workload.dtype
        )
        for p in (_problem(f"{words} float32"), _problem(f"{words} bfloat16"))
    ]
    dense, packed = (entry.seconds(v=1, length=64) for entry in four if entry is not None)
    assert dense > 10 * packed


def test_experts_run_one_by_one_on_older_cards() -> None:
    """As many are enqueued by the host as 8 tokens are expected to be sent to."""

    def seconds(kind: str) -> float:
        words = f"--device-names {kind} --device-numbers 2 --model qwen3-30b-a3b --global_bz 8"
        p = _problem(words)
        entry = p.costs.estimate.find(
            kind, phase=Phase.DECODE, precision=Precision.W16A16, dtype=p.workload.dtype
        )
        assert entry is not None
        return entry.seconds(v=8, length=100)

    hit = experts_hit(128, 8, 8)
    assert seconds("V100-32GB") == pytest.approx(ENQUEUE_S + hit * EXPERT_ENQUEUE_S, rel=0.01)
    assert seconds("RTX-3090") < 2 * ENQUEUE_S


@pytest.mark.parametrize(
    "kind, phase, measured_ms",
    [("T4", Phase.PREFILL, 262.6), ("V100-32GB", Phase.PREFILL, 75.6),
     ("T4", Phase.DECODE, 7.77), ("V100-32GB", Phase.DECODE, 3.18),
     ("P100-12GB", Phase.PREFILL, 1130.7)],
)  # fmt: skip
def test_estimate_is_near_measured_layers(kind: str, phase: Phase, measured_ms: float) -> None:
    """One OPT-30b layer, batch 8, 512 tokens, fp16 (measured by the LLM-PQ authors)."""
    words = f"--device-names {kind} --device-numbers 9 --model opt-30b --global_bz 8"
    p = _problem(words)
    entry = p.costs.estimate.find(kind, phase=phase, dtype="float16")
    assert entry is not None
    assert entry.seconds(v=8, length=512) * 1e3 == pytest.approx(measured_ms, rel=0.25)


def test_a_stage_of_two_precisions_has_room_for_the_workspaces_of_both() -> None:
    p = _problem("--device-names H200 --device-numbers 2 --model opt-13b --global_bz 4 --s 512")
    device = p.classes[0].first
    needed = []
    for choices in ((Precision.W16A16,), (Precision.W4A16,), (Precision.W16A16, Precision.W4A16)):
        stage = StageShape(
            precisions=choices, first=True, decode_microbatch=4, on_gpu=True, unpacks=False
        )
        context = device.spec.context
        memory = stage_memory(
            p.spec, p.workload, stage, quantization=p.quantization, context_bytes=context
        )
        needed.append(memory.total_bytes - memory.weights_bytes - memory.kv_bytes)
    assert needed[2] > max(needed[:2])
    left = p.numbers(1, 4).capacity[0, 1, 0]
    assert [device.limit_bytes - int(left[sort]) for sort in (DENSE, PACKED, MIXED)] == needed


@pytest.mark.parametrize("devices", ["3090", "3090:2", "3090,4090", "3090:3"])
def test_memory_is_never_only_of_sorts_that_the_choices_do_not_allow(devices: str) -> None:
    """Also between others where there are two stages at most: searches look there for sorts."""
    for bits, sorts in (("16,4", {DENSE, PACKED, MIXED}), ("16", {DENSE}), ("4", {PACKED})):
        request = PlanRequest(model="opt-1.3b", devices=devices, batch=4, bits=bits)
        p, _, _ = make_problem(request)
        table = p.capacity(*p.pairs[0])
        for sort in (DENSE, PACKED, MIXED):
            held = table[..., sort] != NEVER
            assert held.all() if sort in sorts else not held.any()
        assert solve_adabits(p).assignment.stages
