"""The estimate beside times of layers measured on an H200, and what small steps cost in it."""

import json
import statistics
from pathlib import Path

import pytest

from llmpq.cluster import Cluster
from llmpq.cost_model import LatencyEntry, Phase
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.planner.costs.roofline import ENQUEUE_S, estimate_costs
from llmpq.precision import WEIGHT_ONLY, Precision

pytestmark = pytest.mark.pure
ROOT = Path(__file__).parents[3]


def estimated(model: str, phase: Phase) -> dict[Precision, LatencyEntry]:
    costs = estimate_costs(
        ModelSpec.by_name(model),
        Cluster.load(ROOT / "clusters/h200x1.yaml").devices,
        dtype="bfloat16",
        precisions=WEIGHT_ONLY,
        quantization=Quantization(),
    )
    found = {p: costs.find("H200", phase=phase, precision=p, dtype="bfloat16") for p in WEIGHT_ONLY}
    return {precision: entry for precision, entry in found.items() if entry is not None}


@pytest.mark.parametrize("phase, least, most", [("prefill", 360, 0.07), ("decode", 240, 0.09)])
def test_layers_of_an_h200_are_near_the_measured_ones(phase: str, least: int, most: float) -> None:
    entries = estimated("llama-3.1-8b", Phase(phase))
    errors = []
    for line in (ROOT / "benchmarks/data/h200-llama-3.1-8b.samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        case, target = sample["case"], sample["case"]["target"]
        if (target["device_kind"], target["part"], target["phase"]) != ("H200", "layer", phase):
            continue
        if not case.get("launch"):
            entry = entries[Precision.parse(target["precision"])]
            seconds = entry.seconds(v=case["v"], length=case["length"])
            errors.append(abs(seconds / sample["timing"]["seconds"] - 1))
    assert len(errors) >= least
    assert statistics.mean(errors) < most


def test_small_steps_of_prompts_cost_more_a_token() -> None:
    entry = estimated("llama-3.1-8b", Phase.PREFILL)[Precision.W4A16]
    per_token = [entry.seconds(v=v, length=512) / (512 * v) for v in (1, 2, 4, 16)]
    assert per_token == sorted(per_token, reverse=True)
    assert per_token[0] > 1.05 * per_token[-1], "every step unpacks the weights"
    padded = entry.seconds(v=1, length=768)
    assert 0.98 * padded < entry.seconds(v=1, length=513) < padded, "but for attention"


def test_steps_that_no_graph_holds_take_what_the_host_needs() -> None:
    entry = estimated("opt-125m", Phase.PREFILL)[Precision.W16A16]
    assert entry.seconds(v=4, length=512) < ENQUEUE_S / 2
    assert entry.seconds(v=5, length=512) == pytest.approx(ENQUEUE_S)
