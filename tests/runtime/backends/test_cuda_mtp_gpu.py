"""The model's own head (MTP) drafts on a GPU, in float32: its drafts change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.speculation import draft_bytes
from llmpq.runtime.backends.build_stage import build_head, build_stage
from llmpq.runtime.backends.gpu.mtp_graphs import CudaMtpDrafts
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch, Request
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize, planned_pool
from reference.mtp_models import MtpModel, make_mtp_model
from reference.open_stages import OpenStages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW = 14
POOL = PoolSize(num_blocks=8, slots=3, max_len=256, prefix_cache=False)
KINDS = ("qwen3_next", "qwen3_5", "deepseek_v3", "glm4_moe")


class Preempting(Scheduler):
    """Preempts the youngest of several at every third step, drafted for or not."""

    asked = 0

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step."""
        self.asked += 1
        if self.asked % 3 == 0 and len(self._running) > 1:
            self._preempt(max(self._running))
        return super().next_micro_batch()


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, models: Any, tmp_path_factory: Any) -> MtpModel:
    name, options = models.options(request.param)
    return make_mtp_model(tmp_path_factory.mktemp("mtp"), request.param, name, options)


def opened(model: MtpModel, make_plan: Any, splits: Any, **options: Any) -> OpenStages:
    spec = ModelSpec.from_directory(model.directory)
    plan = make_plan(model.directory, splits, batch=POOL.slots)
    source = CheckpointSource(model.directory, spec)
    return OpenStages(plan, spec, source, **{"device": "cuda", "pool": POOL, **options})


def served(
    stages: OpenStages,
    prompts: list[list[int]],
    *,
    make: Any = Scheduler,
    drafter: FixedDrafter | None = None,
    step_tokens: int = 64,
    **more: Any,
) -> dict[int, list[int]]:
    """Return the tokens of requests, by their numbers."""
    limits = PoolLimits(
        num_blocks=POOL.num_blocks,
        max_rows=POOL.slots,
        max_len=POOL.max_len,
        step_tokens=step_tokens,
        decode_rows=POOL.slots,
        num_stages=len(stages.computes),
        tokens_ahead=1,
        prefix_cache=False,
    )
    given = [Request(id=i, prompt=tuple(p), max_new=NEW, **more) for i, p in enumerate(prompts)]
    return stages.run(make(limits, drafter=drafter), given).tokens


@pytest.mark.parametrize("splits", [(), (1,)])
def test_drafts_of_the_head_change_no_token(
    model: MtpModel, make_plan: Any, random_prompts: Any, splits: Any
) -> None:
    """Chunks of every size beside rows that draft, and requests that are preempted."""
    prompts = random_prompts(33, 130, 3, 1)
    wanted = served(opened(model, make_plan, (), device="cpu"), prompts)
    kept: dict[bool, list[float | None]] = {}
    for graphs in (True, False):
        stages = opened(model, make_plan, splits, speculate="mtp", graphs=graphs)
        for compute in stages.computes:
            compute.warm_up(POOL.slots, 64, gamma=3)
        for step_tokens, gamma, make in (
            (1, 1, Scheduler),
            (33, 7, Scheduler),
            (64, 3, Preempting),
        ):
            drafter = FixedDrafter("mtp", gamma)
            given: dict[str, Any] = {"make": make, "drafter": drafter, "step_tokens": step_tokens}
            assert served(stages, prompts, **given) == wanted
            assert drafter.acceptance.verifies > 0
            kept.setdefault(graphs, []).append(drafter.acceptance.rate)
    assert kept[True] == kept[False], "graphs draft something else"
    head = stages.computes[-1].mtp
    assert isinstance(head, CudaMtpDrafts)


def test_it_drafts_what_a_cpu_drafts(model: MtpModel, make_plan: Any, random_prompts: Any) -> None:
    """As many drafts are kept, greedy ones and drawn."""
    prompts = random_prompts(40, 20, 5)
    drawn: dict[str, Any] = {"sampling": SamplerConfig(temperature=0.9, seed=4)}
    for more in ({}, drawn):
        kept = []
        for device in ("cpu", "cuda"):
            stages = opened(model, make_plan, (), speculate="mtp", device=device)
            drafter = FixedDrafter("mtp", 3)
            served(stages, prompts[: 1 if more else 3], drafter=drafter, **more)
            kept.append((drafter.acceptance.drafted, drafter.acceptance.accepted))
        assert kept[0] == kept[1]


def test_a_plan_counts_what_the_head_takes(model: MtpModel, make_plan: Any) -> None:
    spec, device = ModelSpec.from_directory(model.directory), torch.device("cuda")
    plan = make_plan(model.directory, (1,), batch=3)
    pool = planned_pool(spec, plan.workload, plan.prefill_chunk, prefill_microbatch=1)
    source = CheckpointSource(model.directory, spec)
    for index, stage in enumerate(plan.stages):
        compute, _ = build_stage(plan, index, spec, source, device, pool)
        head = build_head(plan, index, source, compute, device)
        taken = compute.enable_speculation("mtp", pool, layers=range(*stage.layers), head=head)
        assert taken == draft_bytes(plan, spec, index, "mtp")
