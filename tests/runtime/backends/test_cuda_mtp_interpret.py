"""The model's own head (MTP) through a GPU's stage, its kernels interpreted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends import stage_runner
from llmpq.runtime.backends.build_stage import build_head, build_stage
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.backends.gpu.mtp_graphs import MOST_LOGITS_BYTES, CudaMtpDrafts
from llmpq.runtime.backends.gpu.mtp_rounds import MtpRoundGraphs
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import PagedRow, Request, StepKind, StepMessage
from llmpq.runtime.steps.step import message_of_rows
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.interpreted_stage import gpu_pool, take_gpu_path
from reference.mtp_models import make_mtp_model
from reference.open_stages import OpenStages

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 5
POOL = PoolSize(num_blocks=6, slots=2, max_len=80, prefix_cache=False)
ONE_AT_A_TIME = threading.Lock()
"""Triton's interpreter serves one thread."""


class OneAtATime(CudaStageRunner):
    """A stage that computes while no other does."""

    def run(self, message: StepMessage, hidden_BQH: Any) -> Any:
        """As of `CudaStageRunner`."""
        with ONE_AT_A_TIME:
            return super().run(message, hidden_BQH)


def pool_of(
    spec: ModelSpec, kv: KVPrecision, size: PoolSize, *, layers: Any, **_: Any
) -> GpuPagedKVBase:
    """Return the pool that a GPU has, with states, on a CPU."""
    pool = gpu_pool(spec, kv, size, layers=[n for n in layers if spec.has_kv(n)])
    count = sum(map(spec.has_state, layers))
    given: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "snapshots": 0}
    return with_states(pool, spec, num_layers=count, slots=size.slots, **given)


@pytest.mark.parametrize(
    ("kind", "splits"), [pytest.param("qwen3_5", (), marks=pytest.mark.seldom), ("glm4_moe", (1,))]
)
def test_drafts_of_the_head_change_no_token(
    kind: str,
    splits: tuple[int, ...],
    models: Any,
    make_plan: Any,
    random_prompts: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are those of a CPU's stage: as many are kept."""
    torch.set_num_threads(1)
    model = make_mtp_model(tmp_path, kind, *models.options(kind))
    spec, prompts = ModelSpec.from_directory(tmp_path), random_prompts(9, 3)
    plan, source = make_plan(tmp_path, splits, batch=2), CheckpointSource(tmp_path, spec)
    limits = PoolLimits(
        num_blocks=POOL.num_blocks,
        max_rows=POOL.slots,
        max_len=POOL.max_len,
        step_tokens=7,
        decode_rows=POOL.slots,
        num_stages=len(plan.stages),
        tokens_ahead=1,
        prefix_cache=False,
    )

    def run(stages: OpenStages) -> tuple[dict[int, list[int]], list[int]]:
        drafter = FixedDrafter("mtp", 3)
        requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
        tokens = stages.run(Scheduler(limits, drafter=drafter), requests).tokens
        assert drafter.acceptance.verifies > 0
        return tokens, drafter.acceptance.accepted

    stages = OpenStages(plan, spec, source, pool=POOL, speculate="mtp")
    wanted = run(stages)
    assert wanted[0] == {i: model.greedy(prompt, NEW) for i, prompt in enumerate(prompts)}
    take_gpu_path(monkeypatch)
    monkeypatch.setattr(stage_runner, "make_paged_kv", pool_of)
    stages.computes = []
    for index, stage in enumerate(plan.stages):
        base, _ = build_stage(plan, index, spec, source, CPU, POOL)
        layers = range(*stage.layers)
        pool = pool_of(spec, KVPrecision.KV16, POOL, layers=layers)
        compute = OneAtATime(base.model, pool, CPU, torch.float32, size=POOL, step_tokens=7)
        head = build_head(plan, index, source, compute, CPU)
        compute.enable_speculation("mtp", POOL, layers=layers, head=head)
        stages.computes.append(compute)
    with torch.inference_mode():
        stages.computes[-1].warm_up(2, 7, gamma=3)
    head = stages.computes[-1].mtp
    assert isinstance(head, CudaMtpDrafts) and head.rounds(2, 3)
    places = MOST_LOGITS_BYTES // (4 * spec.vocab)
    assert head.rounds(1, places - 1) and not head.rounds(1, places)
    rounds, run_round = [], MtpRoundGraphs.run

    def noted(self: MtpRoundGraphs, message: StepMessage, hidden: Any) -> Any:
        rounds.append(max(row.drafts_wanted for row in message.rows_with_news))
        return run_round(self, message, hidden)

    monkeypatch.setattr(MtpRoundGraphs, "run", noted)
    assert run(stages) == wanted
    assert max(rounds) > 1, "drafts behind drafts, in one step"

    last, asked = stages.computes[-1], []
    last.leave_on_device(tokens=True)
    monkeypatch.setattr(CudaMtpDrafts, "draft", lambda _, step, *__: asked.append(step.kind))
    row = PagedRow(slot=0, new_blocks=(0,))
    for kind, count in ((StepKind.DECODE, 1), (StepKind.PREFILL, 3)):
        step = message_of_rows(kind, [0], [0], [count], tokens=[3] * count, rows=[row])
        hidden = None if not splits else torch.ones(1, count, spec.hidden)
        assert last.run(step, hidden).shape == (1, 1)
    assert asked == [StepKind.PREFILL], "a row that decodes is none of the head's"
