"""The model's own head (MTP) drafts: it is the published one, and its drafts change no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq import LLM, SamplingParams
from llmpq.models.model_spec import ModelSpec
from llmpq.models.stored_head import has_mtp_head
from llmpq.plans.speculation import draft_bytes, expected_tokens, usable_modes
from llmpq.runtime.backends.build_stage import build_head, build_stage
from llmpq.runtime.drafts.drafters import AutoDrafter, FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.complete_plan import complete_plan, decide_drafts
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import MicroBatch, PagedRow, Request
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.step import RaggedStep
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize, planned_pool
from reference.mtp_models import MtpModel, make_mtp_model
from reference.open_stages import OpenStages

pytestmark = pytest.mark.cpu
NEW = 14
KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5")
POOL = PoolSize(num_blocks=8, slots=3, max_len=256)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, models: Any, tmp_path_factory: Any) -> MtpModel:
    return made(request.param, models, tmp_path_factory)


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_next"])
def either(request: Any, models: Any, tmp_path_factory: Any) -> MtpModel:
    """One whose head is a layer, one whose head is a module beside recurrent layers."""
    return made(request.param, models, tmp_path_factory)


def made(family: str, models: Any, tmp_path_factory: Any) -> MtpModel:
    name, options = models.options(family)
    return make_mtp_model(tmp_path_factory.mktemp(family), family, name, options)


def opened(
    model: MtpModel, make_plan: Any, splits: Any, *, speculate: Any = "mtp", **shape: Any
) -> OpenStages:
    plan = make_plan(model.directory, splits, **{"batch": POOL.slots, **shape})
    spec = ModelSpec.from_directory(model.directory)
    prefix = POOL if spec.recurrent is None else PoolSize(**{**vars(POOL), "prefix_cache": False})
    source = CheckpointSource(model.directory, spec)
    return OpenStages(plan, spec, source, speculate=speculate, pool=prefix)


def limits(stages: OpenStages, **changed: Any) -> PoolLimits:
    pool = stages._pool
    assert pool is not None
    values = {"step_tokens": 64, "decode_rows": 3, "num_stages": len(stages.computes)}
    return PoolLimits(
        num_blocks=pool.num_blocks,
        kv=stages.plan.workload.kv,
        max_rows=pool.slots,
        max_len=pool.max_len,
        prefix_cache=pool.prefix_cache,
        **{**values, **changed},
    )


class Preempting(Scheduler):
    """Preempts running requests at random steps, drafted for or not, and ends one early."""

    rng = random.Random(3)

    def next_micro_batch(self) -> MicroBatch | None:
        if self._running and self.rng.random() < 0.1:
            self._preempt(self.rng.choice(self._running))
            self.check()
        return super().next_micro_batch()


def test_the_head_is_the_published_one(model: MtpModel, make_plan: Any) -> None:
    """Logits of every position, and of a second token that is drafted behind the first."""
    spec = ModelSpec.from_directory(model.directory)
    plan = make_plan(model.directory, (), batch=POOL.slots)
    source = CheckpointSource(model.directory, spec)
    cpu = torch.device("cpu")
    compute, _ = build_stage(plan, 0, spec, source, cpu, POOL)
    head = build_head(plan, 0, source, compute, cpu)
    assert head is not None
    compute.enable_speculation("mtp", POOL, layers=range(spec.num_layers), head=head)
    assert compute.mtp is not None
    cache = compute.mtp.kv
    tokens = torch.randint(0, spec.vocab, (23,), generator=torch.Generator().manual_seed(1))
    seen, behind = tokens[:-1].tolist(), tokens[1:].tolist()
    hidden = model.hidden(seen)
    wanted, goes_on = model.head(hidden, behind)
    found = []
    with torch.inference_mode():
        cache.take_rows([PagedRow(slot=0, new_blocks=(0,))], [0])
        for start, end in ((0, 1), (1, 9), (9, 22)):
            step = RaggedStep.of_rows([0], [start], [end - start], wanted=[0])
            given = torch.tensor([behind[start:end]]), hidden[None, start:end]
            out = head(*given, step, cache)
            found.append(head.logits(out[0]))
        again = RaggedStep.of_rows([0], [22], [1], wanted=[0])
        second = head(torch.tensor([[7]]), head.goes_on(out[:, -1:]), again, cache)
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-3, atol=1e-3)
    further, _ = model.head(torch.cat((hidden, goes_on[-1:])), [*behind, 7])
    torch.testing.assert_close(head.logits(second[0]), further[-1:], rtol=1e-3, atol=1e-3)
    swapped, _ = model.head(hidden.flip(-1), behind)
    assert not torch.allclose(torch.cat(found), swapped, atol=1e-2), "another equation is seen"


LENGTHS = (33, 130, 3, 1)


@pytest.fixture(scope="module")
def jobs(either: MtpModel) -> tuple[list[list[int]], dict[int, list[int]]]:
    """Prompts, and what the model goes on with, computed whole each time."""
    draw = random.Random(1)
    prompts = [[draw.randrange(199) for _ in range(length)] for length in LENGTHS]
    return prompts, {i: either.greedy(prompt, NEW) for i, prompt in enumerate(prompts)}


def requests(prompts: list[list[int]], **more: Any) -> list[Request]:
    return [Request(id=i, prompt=tuple(p), max_new=NEW, **more) for i, p in enumerate(prompts)]


@pytest.mark.thin
@pytest.mark.parametrize(
    ("splits", "step_tokens", "gamma", "make"),
    [
        ((), 1, 1, Scheduler),
        pytest.param((), 64, 3, Preempting, marks=pytest.mark.seldom),
        ((1, 3), 64, 2, Preempting),
        ((2,), 33, 7, Scheduler),
    ],
)
def test_drafts_of_the_head_change_no_token(
    either: MtpModel,
    jobs: Any,
    make_plan: Any,
    splits: Any,
    step_tokens: int,
    gamma: int,
    make: Any,
) -> None:
    """Chunks of every size, prompts found again, requests preempted at random."""
    prompts, expected = jobs
    stages = opened(either, make_plan, splits)
    drafter = FixedDrafter("mtp", gamma)
    scheduler = make(limits(stages, step_tokens=step_tokens), drafter=drafter)
    for _ in range(1 if step_tokens == 1 else 2):  # again with what the prefix cache has
        assert stages.run(scheduler, requests(prompts)).tokens == expected
        scheduler.check()
    assert drafter.acceptance.verifies > 0
    hits = scheduler.tables.prefix_hits
    assert hits == 0 or stages.spec.recurrent is None
    assert hits > 0 or step_tokens == 1 or stages.spec.recurrent is not None


@pytest.mark.thin
@pytest.mark.parametrize(("splits", "shares"), [((), [(2, 1)]), ((2,), [(1, 1), (3, 1)])])
def test_devices_that_share_stages_draft_with_the_head(
    either: MtpModel, jobs: Any, make_plan: Any, splits: Any, shares: Any
) -> None:
    """The head is the last stage's first device's; the others compute its verifies."""
    prompts, expected = jobs
    short = [number for number, prompt in enumerate(prompts) if len(prompt) < 100]
    plan = make_plan(either.directory, splits, batch=4, prompt_len=40, gen_len=NEW, shares=shares)
    asked = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    with LLM(plan=plan, backend="threads", speculate="mtp", gamma=3) as llm:
        answers = llm.generate([{"prompt_token_ids": prompts[i]} for i in short], asked)
        counted = llm.engine.client.speculation()
    assert [a.outputs[0].token_ids for a in answers] == [expected[i] for i in short]
    assert counted is not None and counted["verifies"] > 0


class EndsOne(Scheduler):
    """Ends a request while a step of it is under way."""

    doomed: Request

    def next_micro_batch(self) -> MicroBatch | None:
        """Return the next step; the request ends behind its third token."""
        batch = super().next_micro_batch()
        if len(self.doomed.output) >= 3 and not self.doomed.aborted:
            assert self.abort(self.doomed)
        return batch


def test_a_request_that_ends_leaves_others_their_tokens(
    either: MtpModel, jobs: Any, make_plan: Any
) -> None:
    prompts, expected = jobs
    stages = opened(either, make_plan, (2,))
    given = requests(prompts)
    scheduler = EndsOne(limits(stages), drafter=FixedDrafter("mtp", 3))
    scheduler.doomed = given[1]
    found = stages.run(scheduler, given).tokens
    assert given[1].aborted
    assert {i: found[i] for i in found if i != 1} == {i: expected[i] for i in found if i != 1}


@pytest.mark.thin
@pytest.mark.parametrize("kv", ["kv16", "kv8", "kv4"])
def test_packed_caches_draft_too(either: MtpModel, jobs: Any, make_plan: Any, kv: str) -> None:
    """A prompt beyond a block: the head's cache is packed as the model's."""
    prompts, _ = jobs
    plain = opened(either, make_plan, (), speculate=None, kv=kv)
    expected = plain.run(Scheduler(limits(plain)), requests(prompts)).tokens
    stages = opened(either, make_plan, (), kv=kv)
    drafter = FixedDrafter("mtp", 3)
    assert stages.run(Scheduler(limits(stages), drafter=drafter), requests(prompts)).tokens == (
        expected
    )
    assert drafter.acceptance.verifies > 0


@pytest.mark.parametrize("splits", [(), pytest.param((2,), marks=pytest.mark.seldom), (1, 3)])
def test_requests_that_are_not_drafted_for_run_beside_and_alone(
    either: MtpModel, jobs: Any, make_plan: Any, splits: Any
) -> None:
    """A step of such rows alone sends no tokens to the stages behind the first."""
    prompts, expected = jobs
    stages = opened(either, make_plan, splits)
    for plain in ({0, 1, 2, 3}, {1, 3}):
        given = requests(prompts)
        for i in plain:
            given[i].may_draft = False
        drafter = FixedDrafter("mtp", 2)
        assert stages.run(Scheduler(limits(stages), drafter=drafter), given).tokens == expected
        assert (drafter.acceptance.verifies > 0) == (len(plain) < len(prompts))


def test_sampled_tokens_do_not_depend_on_the_number_of_stages(
    either: MtpModel, jobs: Any, make_plan: Any
) -> None:
    """Drafts are drawn and judged on the last stage, by numbers of the request's own."""
    prompts, _ = jobs
    found = []
    for splits in ((), (2,)):
        stages = opened(either, make_plan, splits)
        drafter = FixedDrafter("mtp", 2)
        scheduler = Scheduler(limits(stages, decode_rows=3), drafter=drafter)
        one = requests(prompts, sampling=SamplerConfig(temperature=0.9, seed=4))[:1]
        found.append(stages.run(scheduler, one).tokens)
        assert drafter.acceptance.verifies > 0
    assert found[0] == found[1]


@pytest.mark.thin
@pytest.mark.parametrize("bits", ["w16a16", "w8a16", "w4a16"])
def test_a_plan_counts_what_the_head_takes(either: MtpModel, make_plan: Any, bits: str) -> None:
    """On the last stage: its layer at the plan's bits, the embedding it needs, its cache."""
    spec = ModelSpec.from_directory(either.directory)
    for splits in ((), (2,)):
        plan = make_plan(either.directory, splits, bits=bits, batch=3)
        pool = planned_pool(spec, plan.workload, plan.prefill_chunk, prefill_microbatch=1)
        source, cpu = CheckpointSource(either.directory, spec), torch.device("cpu")
        for index, stage in enumerate(plan.stages):
            compute, _ = build_stage(plan, index, spec, source, cpu, pool)
            head = build_head(plan, index, source, compute, cpu)
            assert (head is None) == (index < len(plan.stages) - 1)
            layers = range(*stage.layers)
            taken = compute.enable_speculation("mtp", pool, layers=layers, head=head)
            assert taken == draft_bytes(plan, spec, index, "mtp")


def test_a_checkpoint_without_the_head_runs_and_says_so(
    either: MtpModel, make_plan: Any, tmp_path: Any
) -> None:
    """Though config.json has it."""
    stored = load_file(either.directory / "model.safetensors")
    depth = ModelSpec.from_directory(either.directory).num_layers
    gone = ("mtp.", f"model.layers.{depth}.")
    save_file(
        {k: v for k, v in stored.items() if not k.startswith(gone)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((either.directory / "config.json").read_text())
    spec = ModelSpec.from_directory(tmp_path)
    assert has_mtp_head(either.directory, spec) and not has_mtp_head(tmp_path, spec)
    plan = make_plan(tmp_path, (2,), batch=3)
    options = EngineOptions(speculate="mtp", gamma=2)
    with pytest.raises(ValueError, match="speculate='mtp' needs a head that predicts .* ngram"):
        complete_plan(plan, spec, options, mtp=has_mtp_head(tmp_path, spec))
    (answer,) = LLM(plan=plan, backend="threads").generate(
        [[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    )
    assert len(answer.outputs[0].token_ids) == 3


def test_gpus_take_it(either: MtpModel, make_plan: Any) -> None:
    plan = make_plan(either.directory, (2,), batch=3)
    stages = [
        stage.model_copy(update={"kind": "NVIDIA H200", "threads": None}) for stage in plan.stages
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    options = EngineOptions(speculate="mtp", gamma=2)
    assert decide_drafts(plan, options, mtp=True).speculate == "mtp"
    assert "mtp" in usable_modes(plan, mtp=True) and "mtp" not in usable_modes(plan)


class Free:
    """By these step times drafts and their positions cost nothing: all of them seem to pay."""

    def decode_s(self, rows: int, context: float) -> float:
        return 1e-3

    def draft_s(self, rows: int, context: float) -> float:
        return 0.0

    def verify_s(self, rows: int, context: float, q_len: int) -> float:
        return 1e-3


@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("cost", [1.0, 1.3, 2.0, 3.0])
def test_a_head_that_loses_by_the_clock_is_left_out(acceptance: float, cost: float) -> None:
    """Drafts that a round asks for are verified by the next one; never below 0.98 of plain."""
    now, draw, tokens, waiting = 0.0, random.Random(1), 0, 0
    drafter = AutoDrafter("mtp", Free(), clock=lambda: now)
    one = [Request(id=0, prompt=(1,) * 9, max_new=9)]
    for _ in range(600):
        wanted = drafter.gamma(one)
        now += (cost if waiting or wanted else 1.0) * 2e-3 * draw.uniform(0.97, 1.03)
        accepted = 0
        while accepted < waiting and draw.random() < acceptance:
            accepted += 1
        if waiting:
            drafter.observe(waiting, accepted)
        tokens += accepted + 1
        waiting = wanted
    assert tokens * 2e-3 / now >= 0.98
    assert drafter.rests or cost <= expected_tokens(acceptance, 7)
