"""Recurrent layers through a GPU's stage, its kernels interpreted: the tokens of Transformers."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.speculation import SpeculationMode
from llmpq.precision import KVPrecision
from llmpq.runtime.backends import stage_runner
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache.gpu_paged_kv_base import GpuPagedKVBase
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.requests.request import MicroBatch, Request, StepKind, StepMessage
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.interpreted_stage import gpu_pool, pack_quickly, take_gpu_path
from reference.open_stages import OpenStages

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 3
POOL = PoolSize(num_blocks=6, slots=3, max_len=300, snapshots=2)
KINDS = (
    "qwen3_next",
    "qwen3_5",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "bamba",
    "falcon_h1",
    "falcon_h1 without its norm",
    "nemotron_h",
    "granitemoehybrid",
    "olmo_hybrid",
    "minimax",
    "kimi_linear",
)
SELDOM = (
    "qwen3_5",
    "lfm2",
    "bamba",
    "falcon_h1 without its norm",
    "granitemoehybrid",
    "olmo_hybrid",
    "minimax",
)
"""Of those that others here, or the drafts below, have all of: in `make test-all`."""


@pytest.fixture(autouse=True)
def _on_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu_path(monkeypatch)


ONE_AT_A_TIME = threading.Lock()
"""Triton's interpreter serves one thread."""


class OneAtATime(CudaStageRunner):
    """A stage that computes while no other does."""

    kinds: tuple[StepKind, ...] = ()

    def run(self, message: StepMessage, hidden_BQH: Any) -> Any:
        """As of `CudaStageRunner`."""
        self.kinds = (*self.kinds, message.kind)
        with ONE_AT_A_TIME:
            return super().run(message, hidden_BQH)


def stages_of(
    directory: Any,
    make_plan: Any,
    *,
    step_tokens: int,
    splits: tuple[int, ...] = (),
    speculate: SpeculationMode | None = None,
    bits: str = "w16a16",
) -> OpenStages:
    """Return the stages of a model as on GPUs."""
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, splits, batch=3, bits=bits)
    source = CheckpointSource(directory, spec)
    stages = OpenStages(plan, spec, source, pool=POOL)
    stages.computes = []
    for index, stage in enumerate(plan.stages):
        base, _ = build_stage(plan, index, spec, source, CPU, POOL)
        layers = range(*stage.layers)
        pool = make_pool(spec, KVPrecision.KV16, POOL, layers=layers)
        given = base.model, pool, CPU, torch.float32
        stages.computes.append(OneAtATime(*given, size=POOL, step_tokens=step_tokens))
        if speculate is not None:
            stages.computes[-1].enable_speculation(speculate, POOL, layers=layers)
    return stages


def make_pool(
    spec: ModelSpec, kv: KVPrecision, size: PoolSize, *, layers: Any, **_: Any
) -> GpuPagedKVBase:
    """Return the pool that a GPU has, with states, on a CPU."""
    own = [n for n in layers if spec.has_kv(n)]
    pool = gpu_pool(spec, kv, size, layers=own)
    if size.is_copy:
        return pool
    return with_states(
        pool,
        spec,
        num_layers=sum(map(spec.has_state, layers)),
        slots=size.slots,
        snapshots=size.snapshots,
        dtype=torch.float32,
        device=CPU,
    )


def limits(step_tokens: int, **changed: Any) -> PoolLimits:
    values = {
        "num_blocks": POOL.num_blocks,
        "max_rows": POOL.slots,
        "max_len": POOL.max_len,
        "step_tokens": step_tokens,
        "decode_rows": POOL.slots,
        "tokens_ahead": 2,
        "snapshots": POOL.snapshots,
    }
    return PoolLimits(**values | changed)


def asked(prompts: list[list[int]]) -> list[Request]:
    return [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.seldom] * (kind in SELDOM)) for kind in KINDS]
)
def test_tokens_equal_transformers(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    """Chunks beside decoding rows, more requests than rows."""
    prompts = random_prompts(9, 17, 1, 4)
    stages = stages_of(models.directory(kind), make_plan, step_tokens=11)
    found = stages.run(Scheduler(limits(11)), asked(prompts)).tokens
    assert [found[i] for i in range(4)] == [row[:NEW] for row in models.greedy(kind, prompts)]


def test_a_prompt_goes_on_from_the_state_of_another(
    models: Any, make_plan: Any, random_prompts: Any
) -> None:
    directory = models.directory("bamba")
    trunk, *tails = random_prompts(128, 4, 7, seed=5)
    prompts = [trunk + tail for tail in tails]
    stages = stages_of(directory, make_plan, step_tokens=100)
    requests = asked(prompts)
    given = limits(100, num_blocks=2)  # room for one at a time
    found = stages.run(Scheduler(given), requests).tokens
    assert [found[i] for i in range(2)] == [row[:NEW] for row in models.greedy("bamba", prompts)]
    assert requests[1].num_prefix_hits == 128


class Guesses(FixedDrafter):
    """Drafts what a request goes on with, at places that a seed chooses something else."""

    def __init__(self, expected: dict[int, list[int]]) -> None:
        super().__init__("ngram", 3)
        self._expected, self._rng = expected, random.Random(7)

    def propose(self, request: Request, gamma: int) -> list[int]:
        """Return drafts of which some are wrong."""
        at = len(request.output)
        right = self._expected[request.id][at : at + gamma]
        return [token if self._rng.random() < 0.6 else 0 for token in right]


class Preempting(Scheduler):
    """Preempts running requests at random steps, drafted for or not."""

    rng = random.Random(2)

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step."""
        if self._running and self.rng.random() < 0.1:
            self._preempt(self.rng.choice(self._running))
        return super().next_micro_batch()


MORE = 6
FORMS = ("olmo_hybrid", "lfm2", "bamba", "kimi_linear", "minimax")
"""Kinds whose recurrent layers are of each form."""


def drafting(prompts: list[list[int]]) -> list[Request]:
    return [Request(id=i, prompt=tuple(p), max_new=MORE) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("lfm2", "minimax") else [pytest.mark.seldom])
        for kind in FORMS
    ],
)
def test_refused_drafts_leave_no_state(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    """Beside chunks; requests are preempted, and rows change hands."""
    prompts, splits = random_prompts(9, 3, 1, 4), (1,) if kind == "bamba" else ()
    directory = models.directory(kind)
    expected = {i: row[:MORE] for i, row in enumerate(models.greedy(kind, prompts))}
    stages = stages_of(directory, make_plan, step_tokens=11, splits=splits, speculate="ngram")
    drafter, own = Guesses(expected), limits(11, tokens_ahead=1, num_stages=len(splits) + 1)
    scheduler = Preempting(own, drafter=drafter)
    assert stages.run(scheduler, drafting(prompts)).tokens == expected
    scheduler.check()
    assert drafter.acceptance.refusals > 0 < sum(drafter.acceptance.accepted)


@pytest.mark.parametrize(
    ("kind", "mode", "splits"),
    [
        pytest.param("olmo_hybrid", "qspec", (), marks=pytest.mark.seldom),
        pytest.param("bamba", "kv4", (), marks=pytest.mark.seldom),
        ("lfm2", "w4kv4", (1,)),
    ],
)
def test_drafts_by_the_model_leave_no_state(
    models: Any,
    make_plan: Any,
    random_prompts: Any,
    kind: str,
    mode: SpeculationMode,
    splits: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In rounds of one step, and step by step over stages."""
    pack_quickly(monkeypatch)
    monkeypatch.setattr(stage_runner, "make_paged_kv", make_pool)
    prompts, directory = random_prompts(9, 2), models.directory(kind)
    given: dict[str, Any] = {"step_tokens": 11, "splits": splits}
    if mode == "qspec":
        given["bits"] = "w4a16"
    own = limits(11, tokens_ahead=1, num_stages=len(splits) + 1)
    plain = stages_of(directory, make_plan, **given)
    expected = plain.run(Scheduler(own), drafting(prompts)).tokens
    stages = stages_of(directory, make_plan, speculate=mode, **given)
    drafter = FixedDrafter(mode, 3)
    assert stages.run(Scheduler(own, drafter=drafter), drafting(prompts)).tokens == expected
    assert sum(drafter.acceptance.accepted) > 0
    assert (StepKind.DRAFT if splits else StepKind.ROUND) in stages.computes[0].kinds
