"""Recurrent layers on a GPU in float32: the tokens of a CPU's stage whatever the schedule is.

That those are Transformers' is tested on CPUs, where its version is pinned.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch, Request
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.open_stages import OpenStages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEW = 12
POOL = PoolSize(num_blocks=12, slots=3, max_len=420, snapshots=2)
KINDS = (
    "qwen3_next",
    "qwen3_next with biases, every other layer dense",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "bamba",
    "falcon_h1",
    "falcon_h1 without its norm",
    "nemotron_h",
    "nemotron_h with experts on few features",
    "granitemoehybrid",
    "granitemoehybrid with positions, dense",
    "olmo_hybrid",
    "olmo_hybrid without positions",
    "minimax",
    "kimi_linear",
)
FORMS = ("qwen3_next", "lfm2", "bamba", "kimi_linear", "minimax")
"""Kinds whose recurrent layers are of each form."""


class Preempting(Scheduler):
    """Preempts the youngest of several at every third step, its tokens known or not."""

    asked = 0

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step."""
        self.asked += 1
        if self.asked % 3 == 0 and len(self._running) > 1:
            self._preempt(max(self._running))
        return super().next_micro_batch()


def stages_of(
    directory: Any, make_plan: Any, splits: Any = (), *, device: str = "cuda", **options: Any
) -> OpenStages:
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, splits, batch=3, prompt_len=200, gen_len=NEW)
    source = CheckpointSource(directory, spec)
    return OpenStages(plan, spec, source, device=device, pool=POOL, **options)


def served(
    stages: OpenStages,
    prompts: list[list[int]],
    *,
    make: Any = Scheduler,
    drafter: FixedDrafter | None = None,
    **changed: Any,
) -> tuple[list[list[int]], list[Request]]:
    """Return each prompt's tokens, and the requests; `drafter`: what drafts for them."""
    values = {
        "num_blocks": POOL.num_blocks,
        "max_rows": POOL.slots,
        "max_len": POOL.max_len,
        "step_tokens": 64,
        "decode_rows": POOL.slots,
        "tokens_ahead": 2 if len(stages.computes) == 1 else 1,
        "num_stages": len(stages.computes),
        "snapshots": POOL.snapshots,
    }
    scheduler = make(PoolLimits(**values | changed), drafter=drafter)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    tokens = stages.run(scheduler, requests).tokens
    scheduler.check()
    return [tokens[i] for i in range(len(prompts))], requests


@pytest.fixture
def greedy(models: Any, make_plan: Any) -> Callable[[str, list[list[int]]], list[list[int]]]:
    """Return what a CPU's stage of a whole model answers to prompts."""

    def of(kind: str, prompts: list[list[int]]) -> list[list[int]]:
        stages = stages_of(models.directory(kind), make_plan, device="cpu")
        return served(stages, prompts, tokens_ahead=1)[0]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_a_cpu(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str
) -> None:
    """Chunks of one token, of odd sizes and of whole prompts beside decoding rows."""
    prompts = random_prompts(70, 33, 2, 9, 1)
    stages = stages_of(models.directory(kind), make_plan)
    wanted = greedy(kind, prompts)
    for step_tokens in (1, 33, 64):
        assert served(stages, prompts, step_tokens=step_tokens)[0] == wanted
    (compute,) = stages.computes
    assert compute.captured[0], "decode steps ran without a graph"


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_no_graph_holds(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str
) -> None:
    prompts = random_prompts(41, 7, 20, 64)
    stages = stages_of(models.directory(kind), make_plan, graphs=False)
    assert served(stages, prompts, step_tokens=50)[0] == greedy(kind, prompts)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("splits", [(), (2,)])
def test_found_prefixes_and_preempted_requests(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str, splits: Any
) -> None:
    """The next turn of a chat goes on from the state of the last, over one and two stages."""
    stages = stages_of(models.directory(kind), make_plan, splits)
    (first,) = random_prompts(150)
    answered = [*first, *greedy(kind, [first])[0]]
    more = random_prompts(9, 140, 3)
    prompts = [first, [*answered, *more[0]], [*first[:128], *more[2]], more[1]]
    wanted = greedy(kind, prompts)
    one, _ = served(stages, prompts, max_rows=1, decode_rows=1)
    assert one == wanted
    got, requests = served(stages, prompts, make=Preempting)
    assert got == wanted
    assert any(request.num_preemptions for request in requests)
    got, requests = served(stages, prompts, num_blocks=3)
    assert got == wanted and sum(request.num_prefix_hits for request in requests) >= 128


@pytest.mark.parametrize("kind", FORMS)
def test_what_is_counted_is_allocated(models: Any, make_plan: Any, kind: str) -> None:
    stages = stages_of(models.directory(kind), make_plan, (2,))
    for compute, stage in zip(stages.computes, stages.plan.stages, strict=True):
        layers = range(*stage.layers)
        counted = POOL.nbytes(stages.spec, KVPrecision.KV16, layers=layers, dtype_bytes=4)
        assert compute.kv.all_nbytes == counted


class Guesses(FixedDrafter):
    """Drafts what a request goes on with, at places that a seed chooses something else."""

    def __init__(self, expected: list[list[int]]) -> None:
        super().__init__("ngram", 5)
        self._expected, self._rng = expected, random.Random(7)

    def propose(self, request: Request, gamma: int) -> list[int]:
        """Return drafts of which some are wrong."""
        at = len(request.output)
        right = self._expected[request.id][at : at + gamma]
        return [token if self._rng.random() < 0.7 else 0 for token in right]


DRAFTED: dict[str, Any] = {"tokens_ahead": 1, "snapshots": 0, "prefix_cache": False}


@pytest.mark.parametrize("kind", KINDS)
def test_refused_drafts_leave_no_state(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str
) -> None:
    """From graphs and without: beside chunks, and when rows change hands."""
    prompts = random_prompts(70, 33, 2, 9, 1)
    wanted, directory = greedy(kind, prompts), models.directory(kind)
    for graphs in (True, False):
        stages = stages_of(directory, make_plan, speculate="ngram", graphs=graphs)
        for step_tokens, make in ((1, Scheduler), (33, Preempting), (64, Scheduler)):
            drafter = Guesses(wanted)
            options: dict[str, Any] = {"step_tokens": step_tokens, "make": make, "drafter": drafter}
            assert served(stages, prompts, **options, **DRAFTED)[0] == wanted
            assert drafter.acceptance.refusals > 0 < sum(drafter.acceptance.accepted)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("splits", [(1,), (1, 3)])
def test_stages_take_drafts_back_together(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str, splits: Any
) -> None:
    prompts, directory = random_prompts(70, 33, 2, 9, 1), models.directory(kind)
    if splits[-1] >= ModelSpec.from_directory(directory).num_layers:
        return
    wanted, drafter = greedy(kind, prompts), None
    stages = stages_of(directory, make_plan, splits, speculate="ngram")
    for make in (Scheduler, Preempting):
        drafter = Guesses(wanted)
        assert served(stages, prompts, make=make, drafter=drafter, **DRAFTED)[0] == wanted
        assert sum(drafter.acceptance.accepted) > 0


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind != "kimi_linear"])
@pytest.mark.parametrize("splits", [(), (1,)])
def test_drafts_by_the_model_leave_no_state(
    models: Any, make_plan: Any, random_prompts: Any, greedy: Any, kind: str, splits: Any
) -> None:
    """In rounds of one captured step, and step by step over stages."""
    prompts, directory = random_prompts(41, 7, 2, 9), models.directory(kind)
    wanted = greedy(kind, prompts)
    stages = stages_of(directory, make_plan, splits, speculate="kv4")
    for make in (Scheduler, Preempting):
        drafter = FixedDrafter("kv4", 3)
        assert served(stages, prompts, make=make, drafter=drafter, **DRAFTED)[0] == wanted
        assert sum(drafter.acceptance.accepted) > 0
