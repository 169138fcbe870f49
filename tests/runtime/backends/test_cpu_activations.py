"""A stage of a plan with `cpu_activations: int8` rounds what meets its weights of few bits."""

from pathlib import Path

import pytest
import torch

from llmpq.kernels.weights.quantized_weight import QuantizedWeight
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import QuantizationForm
from llmpq.precision import Precision
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.models.linear import Linear
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from llmpq.workload import Workload

DEMO = Path(__file__).resolve().parents[3] / "examples/demo-7m"


def stage_of(rounding):
    spec = ModelSpec.from_directory(DEMO)
    plan = manual_plan(
        spec,
        Workload(batch=1, prompt_len=64, gen_len=32, dtype="float32"),
        precision=[Precision.W4A16] * 4 + [Precision.W16A16] * (spec.num_layers - 4),
        quantization=QuantizationForm(cpu_activations=rounding),
    )
    pool = PoolSize(num_blocks=1, slots=1, max_len=97)
    source = CheckpointSource(DEMO, spec)
    compute, _ = build_stage(plan, 0, spec, source, torch.device("cpu"), pool)
    return compute


def logits_of(compute, count):
    compute.kv.take_rows([PagedRow(slot=0, new_blocks=(0,))], [0])
    step = RaggedStep.of_rows([0], [0], [count], wanted=[1], width=count)
    tokens = torch.arange(40, 40 + count)[None]
    return compute.model.logits(compute.model(tokens, step, compute.kv), step)


@pytest.mark.parametrize("count", [7, 60])
def test_rounding_is_the_plans_and_moves_answers_a_little(count):
    exact, rounded = stage_of("exact"), stage_of("int8")
    held = [m.weight for m in rounded.model.modules() if isinstance(m, Linear)]
    few = [weight for weight in held if isinstance(weight, QuantizedWeight)]
    assert few and all(weight.activation_bits == 8 for weight in few)
    with torch.inference_mode():
        wanted, got = logits_of(exact, count), logits_of(rounded, count)
    off = ((got - wanted).norm() / wanted.norm()).item()
    assert 1e-4 < off < 5e-2
