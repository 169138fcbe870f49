"""Recurrent layers: state is carried exactly from chunk to chunk, dropped and found by no one else.

The families themselves are compared with Transformers by the tests of all families.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import llmpq
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import MAX_GAMMA, MemoryForm
from llmpq.plans.speculation import SpeculationMode, draft_bytes
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.block_pool import StateSnapshots
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.models.recurrence import convolve, convolve_step, scan, scan_step
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import MicroBatch, Request
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import LEAST_SNAPSHOTS, PoolSize, planned_kv_bytes, planned_pool
from llmpq.sizes.state_size import NOTED_TOKENS, state_bytes
from llmpq.workload import Workload
from reference.open_stages import OpenStages

pytestmark = pytest.mark.cpu
NEW = 12
"""As in tests/runtime/conftest.py."""
FORMS = ("qwen3_next", "lfm2", "lfm3", "bamba", "kimi_linear", "minimax")
"""Kinds whose recurrent layers are of each form."""
COUNTS = (1, 2, 63, 64, 65, 7)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("with_beta", [False, True])
def test_a_prompt_cut_anywhere_leaves_the_state_of_its_tokens_one_by_one(
    with_beta: bool, by_channel: bool
) -> None:
    """In float64 only the order of sums differs: by chunks of every size and by steps."""
    torch.manual_seed(3)
    tokens, heads, key, value = sum(COUNTS), 3, 5, 7
    q, k = torch.randn(2, tokens, heads, key, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(tokens, heads, value, dtype=torch.float64)
    decays = (tokens, heads, key) if by_channel else (tokens, heads)
    log_decay = -torch.rand(decays, dtype=torch.float64)
    beta = torch.rand(tokens, heads, dtype=torch.float64) if with_beta else None
    state = torch.randn(heads, key, value, dtype=torch.float64)
    stepped = state.clone()
    wanted = []
    for t in range(tokens):
        one = slice(t, t + 1)
        given = (q[one], k[one], v[one], log_decay[one], stepped[None])
        wanted.append(scan_step(*given, None if beta is None else beta[one]))
    found, at = [], 0
    for count in COUNTS:
        part = slice(at, at + count)
        given = (q[part], k[part], v[part], log_decay[part], state)
        out, state = scan(*given, None if beta is None else beta[part])
        found.append(out)
        at += count
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted))
    torch.testing.assert_close(state, stepped)
    wrong, _ = scan(q, k, v, log_decay * 0.9, torch.zeros_like(state), beta)
    assert not torch.allclose(wrong, torch.cat(wanted)), "the comparison sees a wrong decay"


@pytest.mark.parametrize("taps", [2, 4])
def test_a_convolution_goes_on_from_its_tail(taps: int) -> None:
    torch.manual_seed(taps)
    x, weight, bias = torch.randn(9, 6), torch.randn(6, 1, taps), torch.randn(6)
    tail = torch.zeros(taps - 1, 6)
    whole, _ = convolve(x, tail, weight, bias)
    parts = []
    for part in (x[:1], x[1:3], x[3:8]):
        out, tail = convolve(part, tail, weight, bias)
        parts.append(out)
    last, tails = convolve_step(x[8:], tail[None], weight, bias)
    torch.testing.assert_close(torch.cat([*parts, last]), whole)
    torch.testing.assert_close(tails[0], x[9 - taps + 1 :])


def _limits(pool: PoolSize, **changed: Any) -> PoolLimits:
    values = {"step_tokens": 7, "decode_rows": 3, "num_stages": 2, "prefix_cache": False}
    return PoolLimits(
        num_blocks=pool.num_blocks,
        kv=KVPrecision.KV16,
        max_rows=pool.slots,
        max_len=pool.max_len,
        **(values | changed),
    )


class EndsOne(Scheduler):
    """Ends a request while a step of it is under way."""

    def __init__(self, limits: PoolLimits, doomed: Request) -> None:
        super().__init__(limits)
        self.doomed = doomed

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step; the request ends behind its second token."""
        batch = super().next_micro_batch()
        if len(self.doomed.output) == 2 and not self.doomed.aborted:
            assert self.abort(self.doomed)
        return batch


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.seldom] * (n % 3 > 0)) for n, k in enumerate(FORMS)]
)
def test_preempted_requests_leave_others_their_state(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    """Three blocks for requests that grow into their second: rows change hands."""
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    pool = PoolSize(num_blocks=3, slots=3, max_len=256, prefix_cache=False)
    plan = make_plan(directory, (2,), batch=pool.slots)
    stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=pool)
    prompts = random_prompts(124, 126, 3, 120, 5)
    expected = dict(enumerate(models.greedy(kind, prompts)))

    def requests() -> list[Request]:
        return [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]

    scheduler = Scheduler(_limits(pool, step_tokens=61))
    assert stages.run(scheduler, requests()).tokens == expected
    assert scheduler.num_preemptions > 0
    given = requests()
    found = stages.run(EndsOne(_limits(pool, step_tokens=61), given[1]), given).tokens
    assert given[1].aborted
    assert {i: found[i] for i in expected if i != 1} == {
        i: tokens for i, tokens in expected.items() if i != 1
    }


class Guesses(FixedDrafter):
    """Drafts what a request goes on with, at places that a seed chooses something else."""

    def __init__(self, expected: Mapping[int, Sequence[int]]) -> None:
        super().__init__("ngram", 5)
        self._expected, self._rng = expected, random.Random(7)

    def propose(self, request: Request, gamma: int) -> list[int]:
        """Return drafts of which some are wrong."""
        at = len(request.output)
        right = self._expected[request.id][at : at + gamma]
        return [token if self._rng.random() < 0.7 else 0 for token in right]


class Preempting(Scheduler):
    """Preempts running requests at random steps, drafted for or not."""

    rng = random.Random(2)

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step."""
        if self._running and self.rng.random() < 0.1:
            self._preempt(self.rng.choice(self._running))
        return super().next_micro_batch()


@pytest.mark.thin
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(
    ("mode", "splits"),
    [
        pytest.param("ngram", (), marks=pytest.mark.seldom),
        pytest.param("ngram", (2,), marks=pytest.mark.seldom),
        ("ngram", (1, 3)),
        ("w4kv4", (2,)),
        ("qspec", ()),
    ],
)
def test_refused_drafts_leave_no_state(
    models: Any, make_plan: Any, random_prompts: Any, kind: str, mode: str, splits: Any
) -> None:
    """Greedy tokens with drafts are those without, chunks and preempted requests beside them."""
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    pool = PoolSize(num_blocks=8, slots=3, max_len=256, prefix_cache=False)
    plan = make_plan(directory, splits, bits={"qspec": "w4a16"}.get(mode, "w16a16"), batch=3)
    source = CheckpointSource(directory, spec)
    prompts = random_prompts(33, 70, 3, 1, 5)

    def requests(some: Sequence[int]) -> list[Request]:
        return [Request(id=i, prompt=tuple(prompts[i]), max_new=NEW) for i in some]

    expected = dict(enumerate(models.greedy(kind, prompts)))
    if mode == "qspec":
        one = make_plan(directory, (), bits="w4a16", batch=3)
        plain = OpenStages(one, spec, source, pool=pool)
        scheduler = Scheduler(_limits(pool, num_stages=1))
        expected = plain.run(scheduler, requests(range(5))).tokens
    stages = OpenStages(plan, spec, source, pool=pool, speculate=cast("SpeculationMode", mode))
    for step_tokens, make, some in ((1, Scheduler, (0, 2, 3)), (64, Preempting, range(5))):
        drafter = Guesses(expected) if mode == "ngram" else FixedDrafter(cast("Any", mode), 3)
        limits = _limits(pool, step_tokens=step_tokens, num_stages=len(splits) + 1)
        scheduler = make(limits, drafter=drafter)
        found = stages.run(scheduler, requests(some)).tokens
        assert found == {i: expected[i] for i in some}
        seen = drafter.acceptance
        assert seen.refusals > 0 < sum(seen.accepted), "drafts of both ends"


@pytest.mark.thin
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("mode", "splits"), [(None, (2,)), ("ngram", ()), ("w4kv4", (1, 3))])
def test_the_next_turn_of_a_chat_goes_on_from_the_state_of_the_last(
    models: Any, make_plan: Any, random_prompts: Any, kind: str, mode: Any, splits: Any
) -> None:
    """Prompts found again behind their last full block, by others, too, and when preempted."""
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    pool = PoolSize(num_blocks=9, slots=3, max_len=400, snapshots=2)
    plan = make_plan(directory, splits, batch=3)
    source = CheckpointSource(directory, spec)
    stages = OpenStages(plan, spec, source, pool=pool, speculate=mode)
    (first,) = random_prompts(150)
    answered = [*first, *models.greedy(kind, [first])[0]]
    more = random_prompts(9, 140, 3)
    prompts = [[*answered, *more[0]], [*first[:128], *more[2]], more[1], first]
    expected = dict(enumerate(models.greedy(kind, prompts)))
    drafter = None if mode is None else FixedDrafter(mode, 3)
    limits = _limits(pool, step_tokens=64, num_stages=len(splits) + 1, prefix_cache=True)
    limits = replace(limits, snapshots=pool.snapshots)
    for make in (Scheduler, Preempting):
        scheduler = make(limits, drafter=drafter)
        given = [Request(id=9, prompt=tuple(first), max_new=1)]
        stages.run(scheduler, given)
        requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
        assert stages.run(scheduler, requests).tokens == expected
        scheduler.check()
        hits = [request.num_prefix_hits for request in requests]
        assert hits[0] == hits[1] == 128 or make is Preempting
        assert scheduler.tables.prefix_hits >= 256 or make is Preempting


@pytest.mark.parametrize("spare", [0, 1])
def test_states_of_prefixes_are_kept_where_a_device_has_room_beside_the_plan(
    models: Any, make_plan: Any, spare: int
) -> None:
    directory = models.directory("qwen3_next")
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, (), batch=3)
    kv = planned_pool(spec, plan.workload, plan.prefill_chunk, prefill_microbatch=1).nbytes(
        spec, plan.workload.kv, layers=range(spec.num_layers), dtype_bytes=4
    )
    extra = state_bytes(spec, range(spec.num_layers), slots=LEAST_SNAPSHOTS, dtype_bytes=4)
    memory = MemoryForm(
        weights_bytes=0,
        embedding_bytes=0,
        kv_bytes=kv,
        workspace_bytes=0,
        context_bytes=0,
        total_bytes=kv,
        limit_bytes=kv + spare * extra,
    )
    (stage,) = plan.stages
    plan = plan.model_copy(update={"stages": (stage.model_copy(update={"memory": memory}),)})
    pool = PoolPlan(plan, spec, EngineOptions())
    assert pool.size.snapshots == spare * LEAST_SNAPSHOTS == pool.limits.snapshots
    layers, dtype_bytes = range(spec.num_layers), 4
    beside = pool.size.prefix_bytes(spec, plan.workload.kv, layers=layers, dtype_bytes=dtype_bytes)
    assert beside == spare * extra
    assert pool.limits.prefix_cache is bool(spare)
    assert pool.stated.stage_bytes == (kv,)


@pytest.mark.parametrize("kind", FORMS)
def test_a_plan_counts_the_states_that_a_run_keeps_of_prefixes(models: Any, kind: str) -> None:
    directory = models.directory(kind)
    plan = llmpq.make_plan(
        model=directory, devices="cpu=1GB+1threads", batch=2, prompt_len=100, gen_len=8,
        bits="16", dtype="float32",
    )  # fmt: skip
    with llmpq.LLM(directory, plan=plan, load_format="dummy", backend="threads") as llm:
        answers = llm.generate([[5, 6, 7]], llmpq.SamplingParams(max_tokens=3, ignore_eos=True))
        (stage,) = llm.job_report(answers)["stages"]
    memory = stage["memory"]
    planned = plan.stages[0].memory
    assert planned is not None and planned.prefix_bytes == memory["prefix_bytes"]
    assert memory["measured_bytes"] == memory["predicted_bytes"], "what the plan counts"
    assert memory["weights_bytes"] + memory["kv_bytes"] == memory["predicted_bytes"]
    assert memory["beside_plan_bytes"] == 0
    assert memory["prefix_bytes"] == state_bytes(
        ModelSpec.from_directory(directory),
        range(plan.model.num_layers),
        slots=LEAST_SNAPSHOTS,
        dtype_bytes=4,
    )


def test_snapshots_go_with_their_blocks_then_by_age() -> None:
    snapshots = StateSnapshots(2)
    cached = {b"a", b"b", b"c", b"d"}
    assert {snapshots.take(key, is_cached=cached.__contains__) for key in (b"a", b"b")} == {0, 1}
    assert snapshots.take(b"a", is_cached=cached.__contains__) == -1, "it is there"
    first = snapshots.pin(b"b")
    third = snapshots.take(b"c", is_cached=cached.__contains__)
    assert third != first and b"a" not in snapshots, "whoever begins from b has it still"
    snapshots.unpin(first)
    cached.remove(b"c")
    assert snapshots.take(b"d", is_cached=cached.__contains__) == third, "c's block was evicted"
    snapshots.check()


def test_notes_hold_as_many_tokens_as_may_be_drafted() -> None:
    assert NOTED_TOKENS == MAX_GAMMA


@pytest.mark.parametrize("mode", ["ngram", "w4kv4"])
def test_a_plan_counts_what_drafts_keep(models: Any, make_plan: Any, mode: Any) -> None:
    """Notes of recurrent layers, and the states once, though the pool has a copy."""
    directory = models.directory("qwen3_next")
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, (2,), batch=3)
    pool = planned_pool(spec, plan.workload, plan.prefill_chunk, prefill_microbatch=1)
    for index, stage in enumerate(plan.stages):
        source = CheckpointSource(directory, spec)
        compute, _ = build_stage(plan, index, spec, source, torch.device("cpu"), pool)
        layers = range(*stage.layers)
        extra = compute.enable_speculation(mode, pool, layers=layers)
        assert extra == draft_bytes(plan, spec, index, mode) > 0


@pytest.mark.parametrize("kind", FORMS)
def test_a_users_prompts_have_transformers_logprobs(
    models: Any, make_plan: Any, random_prompts: Any, kind: str
) -> None:
    """`LLM` over two stages: greedy tokens, and log-probabilities within 1e-3."""
    prompts = random_prompts(5, 70, 1)
    expected = models.greedy(kind, prompts)
    params = llmpq.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logprobs=1)
    plan = make_plan(models.directory(kind), (2,), batch=3, prompt_len=70, gen_len=NEW)
    with llmpq.LLM(plan=plan, backend="threads") as llm:
        answers = llm.generate(prompts, params)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
    reference = models.reference(kind)
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = answer.outputs[0].logprobs
        assert found is not None
        got = [place[token].logprob for place, token in zip(found, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_what_a_plan_counts_is_what_a_stage_allocates(
    models: Any, make_plan: Any, kind: str, batch: int
) -> None:
    directory = models.directory(kind)
    spec = ModelSpec.from_directory(directory)
    plan = make_plan(directory, (1,), batch=batch)
    pool = PoolSize(num_blocks=2 * batch, slots=batch, max_len=256, snapshots=3)
    stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=pool)
    for load, stage in zip(stages.loads, plan.stages, strict=True):
        layers = range(*stage.layers)
        assert load.kv_bytes == pool.nbytes(
            spec, plan.workload.kv, layers=layers, dtype_bytes=plan.workload.dtype_bytes
        )
    assert spec.recurrent is not None
    states = sum(spec.has_state(i) for i in range(spec.num_layers))
    state = batch * states * spec.recurrent.state_bytes(4)
    whole = [
        planned_kv_bytes(
            spec,
            Workload(batch=batch, prompt_len=length, gen_len=1, dtype="float32"),
            range(spec.num_layers),
            chunk=None,
            prefill_microbatch=1,
        )
        for length in (128, 256)
    ]
    assert whole[1] - whole[0] == whole[0] - state, "keys grow with the length, states do not"
