"""Layers with experts are priced by the experts that their tokens are expected to hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.devices.cluster import Cluster
from llmpq.errors import BadPlanError
from llmpq.models.model_spec import ModelSpec
from llmpq.planner.__main__ import main
from llmpq.planner.check.check import check_plan
from llmpq.planner.cli.arguments import plan_request
from llmpq.planner.costs.cost_book import CostBook
from llmpq.planner.costs.roofline import GPU_FLOOR_S, bandwidth, estimate_costs, experts_hit
from llmpq.planner.evaluate.objective import job_time
from llmpq.planner.evaluate.simulator import replay
from llmpq.planner.problem.make_problem import make_problem
from llmpq.planner.problem.outcome import Assignment, Stage
from llmpq.plans.plan import Plan
from llmpq.precision import Precision
from llmpq.sizes.memory import Quantization, expert_weight_bytes, layer_weight_bytes

pytestmark = pytest.mark.pure
QUANTIZATION = Quantization()
SHAPES = {"mixtral": (8, 2, 14336), "qwen3-30b-a3b": (128, 8, 768), "deepseek": (256, 8, 2048)}


def _spec(shape: str) -> ModelSpec:
    experts, per_token, ffn = SHAPES[shape]
    config = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    return ModelSpec.from_config(config, name=shape)


def _entry(shape: str, phase: Phase, precision: Precision) -> LatencyEntry:
    cluster = Cluster.from_counts(["H100"], [1])
    costs = estimate_costs(
        _spec(shape),
        cluster.devices,
        dtype="bfloat16",
        precisions=(precision,),
        quantization=QUANTIZATION,
    )
    entry = costs.find("H100-SXM", phase=phase, precision=precision, dtype="bfloat16")
    assert entry is not None
    return entry


@pytest.mark.parametrize("precision", [Precision.W16A16, Precision.W4A16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_read_are_those_of_the_experts_hit(shape: str, precision: Precision) -> None:
    spec, entry = _spec(shape), _entry(shape, Phase.DECODE, precision)
    speed = bandwidth(Cluster.from_counts(["H100"], [1]).devices[0])
    expert = expert_weight_bytes(spec, precision, QUANTIZATION, 2)
    all_of_it = layer_weight_bytes(spec, precision, QUANTIZATION, 2)
    for v in range(1, 513):
        hit = experts_hit(spec.experts, spec.experts_per_token, v)
        wanted = (all_of_it - (spec.experts - hit) * expert) / speed
        memory = entry.regimes[0]
        got = memory.terms["1"] + memory.curve_s(v) - GPU_FLOOR_S
        assert got == pytest.approx(wanted, rel=0.01), v
    one = 1 - (spec.experts - spec.experts_per_token) * expert / all_of_it
    first = (entry.regimes[0].terms["1"] + entry.regimes[0].curve_s(1) - GPU_FLOOR_S) * speed
    assert first / all_of_it == pytest.approx(one)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_more_tokens_is_never_quicker(shape: str) -> None:
    for phase in (Phase.PREFILL, Phase.DECODE):
        entry = _entry(shape, phase, Precision.W8A16)
        times = [entry.seconds(v=v, length=1) for v in range(1, 1025)]
        assert all(a <= b for a, b in zip(times, times[1:], strict=False))


def test_prefill_of_few_tokens_reads_few_experts() -> None:
    entry = _entry("deepseek", Phase.PREFILL, Precision.W16A16)
    all_of_them = entry.seconds(v=1, length=400)
    assert entry.seconds(v=1, length=1) < 0.2 * all_of_them
    assert entry.seconds(v=1, length=16) < 0.6 * all_of_them


def test_expected_hits_match_a_count() -> None:
    """Of 4 experts each token takes 2 by itself: two tokens hit 4 - 4 (1/2)^2 = 3."""
    assert experts_hit(4, 2, 1) == 2
    assert experts_hit(4, 2, 2) == 3
    assert experts_hit(8, 8, 1) == 8


def test_closed_form_replay_and_check_read_the_same_times() -> None:
    words = "--device-names H100 L40S --device-numbers 1 2 --model mixtral-8x7b --bits 4"
    job = "--global_bz 12 --s 64 --n 40"
    p = make_problem(plan_request([*words.split(), *job.split()]))[0]
    stages = (
        Stage(cls=0, start=0, end=16, choices=(0,) * 16),
        Stage(cls=1, start=16, end=24, choices=(0,) * 8),
        Stage(cls=1, start=24, end=32, choices=(0,) * 8),
    )
    a = Assignment(prefill_microbatch=2, decode_microbatch=4, stages=stages)
    assert replay(p, a).total_s == pytest.approx(job_time(p, a).total_s, rel=5e-3)


def test_check_recomputes_the_time_of_a_plan_with_experts(tmp_path: Path) -> None:
    words = "--device-names H100 --device-numbers 1 --model mixtral-8x7b --global_bz 4 --n 8"
    assert main([*words.split(), "-o", str(tmp_path / "plan.json")]) == 0
    plan, p = (
        Plan.load(tmp_path / "plan.json"),
        make_problem(plan_request(words.split()))[0],
    )
    check_plan(plan, spec=p.spec, cluster=p.cluster, costs=p.costs)
    dense = [
        entry.model_copy(
            update={"regimes": tuple(r.model_copy(update={"curve": ()}) for r in entry.regimes)}
        )
        for entry in p.costs.estimate.entries
    ]
    other = CostModel(
        model=p.spec.name, model_fingerprint=p.spec.fingerprint(), entries=tuple(dense)
    )
    with pytest.raises(BadPlanError, match="its own stages take"):
        check_plan(plan, spec=p.spec, cluster=p.cluster, costs=CostBook(estimate=other))
