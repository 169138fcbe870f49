"""The engine with threads for stages: tokens equal transformers' under every schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import llmpq
from llmpq.errors import DoesNotFitError
from llmpq.families.common.spec_values import RopeScaling
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.stage_wire import read_request, write_request
from llmpq.runtime.links.message import pack_paging, unpack_paging
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import Finished, PagedRow, Request, StepKind, StepMessage
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.kv_format import TAIL_TOKENS, kv_pool_bytes
from llmpq.sizes.pool_size import PoolSize
from reference.contiguous_kv import make_kv_cache
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cpu
KINDS = ("opt", "bloom", "llama", "qwen2", "qwen3", "mixtral")
P = KVPrecision
POOL = PoolSize(num_blocks=12, slots=4, max_len=1000)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Bench:
    """A model's stages with a pool, and schedulers over it."""

    def __init__(self, make_plan, model, splits=(), *, pool=POOL, kv=KVPrecision.KV16) -> None:
        spec = ModelSpec.from_directory(model)
        plan = make_plan(model, splits, kv=kv, batch=pool.slots)
        self.pool, self.kv, self.num_stages = pool, kv, len(splits) + 1
        self.stages = OpenStages(plan, spec, CheckpointSource(model, spec), pool=pool)

    def scheduler(self, *, step_tokens: int = 64, **changed: object) -> Scheduler:
        values = {
            "num_blocks": self.pool.num_blocks,
            "kv": self.kv,
            "max_rows": self.pool.slots,
            "max_len": self.pool.max_len,
            "step_tokens": step_tokens,
            "decode_rows": 3,
            "num_stages": self.num_stages,
            "prefix_cache": self.pool.prefix_cache,
            **changed,
        }
        return Scheduler(PoolLimits(**values))  # type: ignore[arg-type]

    def serve(self, requests: list[Request], **changed: object) -> list[list[int]]:
        return self.run(self.scheduler(**changed), requests)

    def run(self, scheduler: Scheduler, requests: list[Request]) -> list[list[int]]:
        self.finished: dict[int, Finished] = {
            end.id: end for end in self.stages.run(scheduler, requests).finished
        }
        scheduler.check()
        assert scheduler.idle and scheduler.tables.pool.num_held == 0
        return [self.finished[request.id].tokens for request in requests]


class Preempting(Scheduler):
    """Preempts running requests at random steps, beside those that it must."""

    def __init__(self, like: Scheduler) -> None:
        super().__init__(like.limits)
        self._rng = random.Random(2)

    def next_micro_batch(self):
        if self._running and self._rng.random() < 0.05:
            self._preempt(self._rng.choice(self._running))
            self.check()
        return super().next_micro_batch()


def asked(prompts: list[list[int]], max_new: int, **options: object) -> list[Request]:
    return [
        Request(id=i, prompt=tuple(p), max_new=max_new, **options)  # type: ignore[arg-type]
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.seldom] * (kind in ("qwen2", "qwen3")))
        for kind in KINDS
    ],
)  # Llama's with biases, and with norms of heads
def test_tokens_equal_transformers_over_stages_and_chunks(
    tiny_models, random_prompts, make_plan, kind
):
    prompts = random_prompts(5, 90, 1, 33, 3, 64)
    expected = tiny_models.greedy(kind, prompts, 10)
    for splits, step_tokens in (((), 1), ((), 64), ((1,), 7), ((1, 2), 33), ((1,), 512)):
        bench = Bench(make_plan, tiny_models.directory(kind), splits)
        assert bench.serve(asked(prompts, 10), step_tokens=step_tokens) == expected


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_long_requests_are_preempted_and_find_what_they_share(
    tiny_models, random_prompts, make_plan, kind
):
    """Rotary and ALiBi positions have no end: 600 tokens of a model of 128."""
    trunk, *tails = random_prompts(300, 4, 60, 1, 130, 200, seed=5)
    prompts = [trunk + tail for tail in tails]
    roomy = PoolSize(num_blocks=40, slots=4, max_len=1000)
    alone = Bench(make_plan, tiny_models.directory(kind), (), pool=roomy)
    expected = alone.run(alone.scheduler(step_tokens=1000, prefix_cache=False), asked(prompts, 16))
    assert not any(end.num_preemptions for end in alone.finished.values())
    pool = PoolSize(num_blocks=7, slots=4, max_len=1000)
    preempted = hits = 0
    for splits, prefix_cache in (((), True), ((1,), True), ((), False)):
        bench = Bench(make_plan, tiny_models.directory(kind), splits, pool=pool)
        scheduler = Preempting(bench.scheduler(step_tokens=100, prefix_cache=prefix_cache))
        for _ in range(2):  # the second time with what the first has left
            assert bench.run(scheduler, asked(prompts, 16)) == expected
            preempted += sum(end.num_preemptions for end in bench.finished.values())
            hits += sum(end.num_prefix_hits for end in bench.finished.values())
            assert prefix_cache or not any(e.num_prefix_hits for e in bench.finished.values())
    assert preempted > 0 and hits > 0


def packed_greedy(pipeline: ReferencePipeline, kv: KVPrecision, prompt, max_new: int) -> list[int]:
    """Generate with a cache of few bits that nobody shares: what a query sees is by position."""
    cache = make_kv_cache(
        pipeline.spec,
        kv,
        num_layers=pipeline.spec.num_layers,
        slots=1,
        max_len=len(prompt) + max_new,
        dtype=torch.float32,
    )
    new, start, tokens = list(prompt), 0, []
    while len(tokens) < max_new:
        step = Step.of([0], [start], [len(new)])
        logits_BV = pipeline.logits(torch.tensor([new]), step, [cache])
        start += len(new)
        new = [int(logits_BV.argmax())]
        tokens += new
    return tokens


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(P.KV8, marks=pytest.mark.seldom),
        P.KV4,
        pytest.param(P.KV2, marks=pytest.mark.seldom),
        P.KV8V4,
        P.KV16V2,
    ],
    ids=lambda kv: kv.value,
)
def test_packed_caches_equal_their_unpaged_twin_under_every_schedule(
    tiny_models, random_prompts, make_plan, kv, seeds
):
    trunk, *tails = random_prompts(300, 4, 60, 1, 200, seed=6)
    prompts = [trunk + tail for tail in tails] + random_prompts(20, 143, seed=8)
    model = tiny_models.directory("qwen3")
    pipeline = ReferencePipeline.from_directory(model)
    expected = [packed_greedy(pipeline, kv, prompt, 20) for prompt in prompts]
    pool = PoolSize(num_blocks=6, slots=4, max_len=1000)
    hits = 0
    schedules = [((), 64), ((1, 2), 1000), ((1,), 129)]
    for splits, step_tokens in schedules[: 1 + len(seeds(schedules))]:
        bench = Bench(make_plan, model, splits, pool=pool, kv=kv)
        scheduler = Preempting(bench.scheduler(step_tokens=step_tokens))
        for _ in range(2):
            assert bench.run(scheduler, asked(prompts, 20)) == expected
            hits += sum(end.num_prefix_hits for end in bench.finished.values())
    assert hits > 0


def test_sampled_tokens_do_not_depend_on_the_schedule(tiny_models, random_prompts, make_plan):
    prompts = random_prompts(5, 80, 3, 33)
    model = tiny_models.directory("llama")

    def requests() -> list[Request]:
        found = asked(prompts, 10)
        for request in found:
            request.sampling = SamplerConfig(temperature=1.5, top_k=50, top_p=0.9, seed=request.id)
        return found

    whole = Bench(make_plan, model).serve(requests(), step_tokens=512)
    chunked = Bench(make_plan, model, (1, 2)).serve(requests(), step_tokens=3)
    assert whole == chunked and len({tuple(row) for row in whole}) == len(prompts)


def test_aborts_free_blocks_and_leave_the_others_alone(tiny_models, random_prompts, make_plan):
    prompts = random_prompts(5, 12, 60, 9)
    expected = tiny_models.greedy("llama", prompts, 20)
    bench = Bench(make_plan, tiny_models.directory("llama"), (1,))
    scheduler, rng = bench.scheduler(step_tokens=16), random.Random(1)
    requests = asked(prompts, 20)
    issue, begun = scheduler.next_micro_batch, set()

    def issue_and_abort():
        micro_batch = issue()
        if micro_batch is not None:
            begun.update(request.id for request in micro_batch.requests)
        if 2 in begun and rng.random() < 0.3 and not requests[2].finish_reason:
            assert scheduler.abort(requests[2])
            scheduler.check()
        return micro_batch

    scheduler.next_micro_batch = issue_and_abort  # type: ignore[method-assign]
    for request in requests:
        scheduler.submit(request)
    from_stages = drive(bench, scheduler)
    assert requests[2].finish_reason == "abort"
    assert requests[2].output == expected[2][: len(requests[2].output)]
    for index in (0, 1, 3):
        assert requests[index].output == expected[index]
    assert from_stages == {0, 1, 3}


def drive(bench: Bench, scheduler: Scheduler) -> set[int]:
    """Run what was submitted through the stages, one step at a time; return who ended."""

    ended = set()
    while not scheduler.idle:
        micro_batch = scheduler.next_micro_batch()
        assert micro_batch is not None
        x = None
        for compute in bench.stages.computes:
            x = compute.run(micro_batch, x)
        assert x is not None
        ended |= {request.id for request in scheduler.update_from_output(micro_batch, x.tolist())}
    return ended


@pytest.mark.parametrize("kv", list(KVPrecision))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_pool_takes_the_bytes_the_formula_says(demo_model, kv, prefix_cache):
    spec = ModelSpec.from_directory(demo_model)
    size = PoolSize(num_blocks=3, slots=2, max_len=400, prefix_cache=prefix_cache)
    cache = make_paged_kv(spec, kv, size, layers=range(2), dtype=torch.float32)
    assert cache.nbytes == size.nbytes(spec, kv, layers=range(2), dtype_bytes=4)
    one = kv_pool_bytes(
        kv,
        num_blocks=3,
        slots=2,
        kv_heads=spec.kv_heads,
        vectors=spec.kv_vectors,
        head_dim=spec.head_dim,
        dtype_bytes=4,
        prefix_cache=prefix_cache,
    )
    assert cache.nbytes == 2 * one


def test_rows_survive_the_way_to_the_next_stage():
    news = {
        0: PagedRow(slot=3, samples=False, first_block=2, new_blocks=(9, 7)),
        1: PagedRow(slot=0, resumes=True, drafts=(4, 5, 6), new_blocks=(1,)),
        4: PagedRow(slot=1),
        5: PagedRow(slot=2, first_window_block=3, new_window_blocks=(8, 6), new_blocks=(1, 2, 3)),
        9: PagedRow(slot=3, saves=((7, 0), (5, 1)), loads=((4, 9),), new_blocks=(9,), drafts=(2,)),
        7: PagedRow(slot=4, drafts_wanted=3, loads_state=1, saves_state=2),
    }
    message = StepMessage(kind=StepKind.MIXED)
    assert unpack_paging(message, pack_paging(news)).news == news
    assert unpack_paging(message, pack_paging({})).news == {}


def test_priorities_survive_the_way_to_the_first_stage():
    request = Request(id=1, prompt=(1,), max_new=1, priority=-3)
    assert read_request(write_request(request)).priority == -3


@pytest.mark.parametrize("sampling", [SamplerConfig(), SamplerConfig(temperature=0.7, seed=3)])
def test_ngram_drafts_change_no_greedy_token_and_run_over_stages(demo_model, make_plan, sampling):
    """Text repeats itself: drafts are found, and some are kept."""
    text = [40 + n % 7 for n in range(150)]
    prompts = [text, text[3:60], [9, 8, 7] * 5]
    found, kept = [], 0
    for splits, drafted in (((), False), ((), True), ((3,), True)):
        bench = Bench(make_plan, demo_model, splits)
        drafter = FixedDrafter("ngram", 4) if drafted else None
        scheduler = Scheduler(bench.scheduler(step_tokens=40).limits, drafter=drafter)
        found.append(bench.run(scheduler, asked(prompts, 30, sampling=sampling)))
        if drafter is not None:
            kept += sum(drafter.acceptance.accepted)
    assert found[1] == found[2] and kept > 0
    assert found[0] == found[1] or not sampling.greedy


def test_requests_may_be_as_long_as_the_model_unless_it_then_computes_otherwise(
    demo_model, make_plan
):
    """A rope of longer texts keeps to the plan."""
    spec = ModelSpec.from_directory(demo_model)
    settings = EngineOptions()
    windowed = replace(spec, windows=(64,) * spec.num_layers)
    long_rope = RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_positions=256,
        short_factors=(1.0,) * (spec.head_dim // 2),
        long_factors=(2.0,) * (spec.head_dim // 2),
    )
    longer = replace(spec, rope_scaling=long_rope)
    for model, kv, wanted in (
        (spec, KVPrecision.KV4, spec.max_positions),
        (windowed, KVPrecision.KV16, spec.max_positions),
        (windowed, KVPrecision.KV4, spec.max_positions),
        (longer, KVPrecision.KV16, 48),
    ):
        plan = make_plan(demo_model, kv=kv, prompt_len=32, gen_len=16)
        assert PoolPlan(plan, model, settings).size.max_len == wanted
        fields = replace(settings, max_model_len=40)
        assert PoolPlan(plan, model, fields).size.max_len == 40


@pytest.mark.parametrize("live", [True, False])
def test_a_plan_that_states_no_pool_has_the_blocks_its_device_has_room_for(
    demo_model, make_plan, live
):
    """Of 47 tokens a request blocks make 128."""
    spec = ModelSpec.from_directory(demo_model)
    plan = make_plan(demo_model, (), batch=8)
    token = 2 * spec.num_layers * spec.kv_heads * spec.head_dim * 4

    def with_room(tokens: int):
        sizes = dict.fromkeys(
            ("embedding_bytes", "workspace_bytes", "context_bytes", "weights_bytes"), 0
        )
        kv = {"kv_bytes": 8 * 47 * token, "total_bytes": 8 * 47 * token}
        memory = sizes | kv | {"limit_bytes": tokens * token}
        stage = plan.stages[0].model_dump(mode="json") | {"memory": memory}
        whole = plan.model_dump(mode="json", by_alias=True) | {"stages": [stage]}
        return plan.parse_data(whole, where="test")

    def pool(tokens: int, **fields):
        return PoolPlan(with_room(tokens), spec, EngineOptions(**fields))

    for tokens, blocks in ((8 * 128, 8), (8 * 128 - 1, 7), (8 * 47, 2)):
        assert pool(tokens, offline=not live).size.num_blocks == blocks


@pytest.mark.parametrize("kv", ["kv16", "kv4"])
def test_a_plan_states_the_pool_that_its_stages_allocate(demo_model, kv):
    """And one that states another is refused at the start."""
    spec = ModelSpec.from_directory(demo_model)
    work = {
        "batch": 3,
        "prompt_len": 200,
        "gen_len": 90,
        "kv": kv.removeprefix("kv"),
        "dtype": "float32",
    }
    made = llmpq.make_plan(demo_model, devices="cpu,cpu", **work)
    stated = made.pool
    assert stated is not None and len(made.stages) == len(stated.stage_bytes)
    token = 2 * spec.kv_heads * spec.head_dim * 4
    tails = 0 if kv == "kv16" else stated.num_blocks * 4 * TAIL_TOKENS * token
    for prefixes in (True, False):  # packed blocks have tails for prefixes, which no plan counts
        settings = EngineOptions(enable_prefix_caching=prefixes)
        size = PoolPlan(made, spec, settings).size
        stages = OpenStages(made, spec, CheckpointSource(demo_model, spec), pool=size)
        wanted = [nbytes + prefixes * tails for nbytes in stated.stage_bytes]
        assert [load.kv_bytes for load in stages.loads] == wanted
        assert stated.tokens == size.num_blocks * 128
    for live in (True, False):
        wrong = made.model_copy(update={"pool": stated.model_copy(update={"num_blocks": 99})})
        with pytest.raises(DoesNotFitError, match="states a pool of 99 blocks .* re-plan"):
            _ = PoolPlan(wrong, spec, EngineOptions(offline=not live)).limits
