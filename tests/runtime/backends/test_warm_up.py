"""Shapes run ahead of a job on a CPU: prompts are padded to them, and nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends import paged_compute, stage_compute
from llmpq.runtime.backends.paged_compute import PagedStageCompute
from llmpq.runtime.backends.stage_compute import StageCompute
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.weights.sources import RandomSource
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu
ROWS, PROMPT, NEW = 3, 40, 4


@pytest.fixture(autouse=True)
def whole_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give it the time that it has outside tests."""
    monkeypatch.setattr(stage_compute, "WARM_UP_S", 2.0)
    monkeypatch.setattr(paged_compute, "WARM_UP_S", 2.0)


@dataclasses.dataclass
class PlanLike:
    """The part of a plan that a warm-up reads."""

    workload: Workload
    prefill_microbatch: int = 2
    decode_microbatch: int = 3


def build(name: str, kv: KVPrecision, *, first: bool = True, last: bool = True) -> StageCompute:
    spec = dataclasses.replace(
        ModelSpec.by_name(name),
        num_layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=100,
    )  # fmt: skip
    model = StageModel.build(
        spec,
        range(2),
        [Precision.parse("w16a16")] * 2,
        first=first,
        last=last,
        dtype=torch.float32,
        device=torch.device("cpu"),
        scheme=lambda precision: None,
        source=RandomSource(spec),
    )
    cache = make_kv_cache(
        spec, kv, num_layers=2, slots=ROWS, max_len=PROMPT + NEW - 1, dtype=torch.float32
    )
    return StageCompute(model, cache, torch.device("cpu"), torch.float32)


def plan() -> PlanLike:
    return PlanLike(Workload(batch=ROWS, prompt_len=PROMPT, gen_len=NEW, dtype="float32"))


def message(kind: StepKind, starts: list[int], tokens: list[list[int]]) -> StepMessage:
    rows = len(tokens)
    return StepMessage(
        kind=kind,
        slots=range(rows),
        starts=starts,
        num_new=[len(row) for row in tokens],
        sample_steps=[0] * rows,
        sampling=[TokenChoice()] * rows,
        tokens=tokens,
    )


def logits(compute: StageCompute, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list]:
    """Return the widths of a ragged prefill and two decode steps, and their logits."""
    widths, found = [], []
    forward, head = StageModel.forward, StageModel.logits

    def watched(self, x, step, kv):
        widths.append(step.q_len)
        return forward(self, x, step, kv)

    def kept(self, hidden, step, **options):
        found.append(head(self, hidden, step, **options))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(StageModel, "forward", watched)
        patch.setattr(StageModel, "logits", kept)
        prompts = [[(7 * i + j) % 100 for j in range(length)] for i, length in enumerate((21, 13))]
        compute.run(message(StepKind.PREFILL, [0, 0], prompts), None)
        for ahead in range(2):
            starts = [21 + ahead, 13 + ahead]
            compute.run(message(StepKind.DECODE, starts, [[5], [6]]), None)
    return widths, found


@pytest.mark.parametrize("kv", ["kv16", "kv4"])
@pytest.mark.parametrize("name", ["opt-125m", "bloom-560m", "llama-2-7b", "qwen3-8b"])
def test_prompts_are_padded_to_a_width_of_the_plan_and_logits_stay(name, kv, monkeypatch):
    cold, warm = build(name, KVPrecision(kv)), build(name, KVPrecision(kv))
    warm.warm_up_shapes(plan())
    cold_widths, expected = logits(cold, monkeypatch)
    warm_widths, got = logits(warm, monkeypatch)
    assert (cold_widths, warm_widths) == ([21, 1, 1], [24, 1, 1])
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Planted: a padded row read at its last place instead of its last token would show.
    assert not torch.allclose(expected[0][0], expected[0][1], rtol=1e-2)


def test_a_stage_between_others_returns_the_width_it_was_given():
    compute = build("llama-2-7b", KVPrecision.KV16, first=False, last=False)
    compute.warm_up_shapes(plan())
    x = torch.randn(2, 21, 64)
    output = compute.run(message(StepKind.PREFILL, [0, 0], [[0] * 21, [0] * 13]), x)
    assert output.shape == x.shape and output.is_contiguous()


def test_time_is_bounded_and_does_not_decide_how_prompts_are_padded(monkeypatch):
    """No second shape is started without time for it; tokens must not depend on a host's load."""
    monkeypatch.setattr(stage_compute, "WARM_UP_S", 0.0)
    compute = build("llama-2-7b", KVPrecision.KV16)
    run = []
    step = compute._run_zeros
    monkeypatch.setattr(compute, "_run_zeros", lambda *a: run.append(a[1:3]) or step(*a))
    compute.warm_up_shapes(plan())
    assert len(run) == 1
    widths, _ = logits(compute, pytest.MonkeyPatch())
    assert widths[0] == 24


@pytest.mark.parametrize(("limit_s", "counts"), [(2.0, [3, 2, 1, 20, 18]), (0.0, [3])])
def test_steps_of_a_pool_are_run_ahead_as_far_as_there_is_time(monkeypatch, limit_s, counts):
    """Every count of rows, then the ladder's places, the largest first."""
    monkeypatch.setattr(paged_compute, "WARM_UP_S", limit_s)
    compute, run = object.__new__(PagedStageCompute), []
    monkeypatch.setattr(compute, "_run_zeros", lambda kind, n: run.append((kind, n)) or 1e-3)
    compute.warm_up(3, 19)
    assert [count for _, count in run] == counts
    assert all((kind is StepKind.DECODE) == (count <= 3) for kind, count in run)
