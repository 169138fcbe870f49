"""A stage that several GPUs share, their kernels interpreted: one order of sums, one's tokens."""

import contextlib
import threading
from functools import partial

import pytest
import torch
from triton import knobs

from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.backends import build_stage as stage_building
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.shared_stage import LeadingCompute, run_follower
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.links.member_links import AllReduce, Followers, HostTotal
from llmpq.runtime.links.thread_links import ThreadRendezvous
from llmpq.runtime.models.sampling import SamplerConfig
from llmpq.runtime.requests.request import Mailbox, Request
from llmpq.runtime.requests.token_rules import LogitsConstraints
from llmpq.runtime.steps.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.fused_twins import rms_norm_reference
from reference.interpreted_stage import gpu_stage, take_gpu_path

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 5
POOL = PoolSize(num_blocks=8, slots=4, max_len=300)


@pytest.fixture(autouse=True)
def _gpu_path(monkeypatch):
    take_gpu_path(monkeypatch)


class Norming(HostTotal):
    """Norms what it sums, as sums over peer memory do, which graphs can hold."""

    captures = True

    def normed(self, part, residual, weight, eps):
        total = self(part, residual)
        return total, rms_norm_reference(total, weight, eps)


class InTurns:
    """Sums over threads of which one computes at a time: the interpreter serves one thread.

    Notes the shapes that each device's sums have, in their order.
    """

    def __init__(self, count):
        self.shapes = [[] for _ in range(count)]
        self._parts = [None] * count
        self._barrier, self.turn = threading.Barrier(count, timeout=60), threading.Lock()

    def of(self, member):
        reduce = AllReduce()
        reduce.connect(Norming(partial(self._total, member)))
        return reduce

    def _total(self, member, part):
        self.shapes[member].append(tuple(part.shape))
        self._parts[member] = part
        self._meet()
        total = sum(self._parts[1:], self._parts[0].clone())
        self._meet()
        return part.copy_(total)

    def _meet(self):
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()


class OutOfTurn:
    """A link whose waits are no one's turn."""

    def __init__(self, link, turn):
        self._link, self._turn = link, turn

    def receive_step(self):
        self._turn.release()
        try:
            return self._link.receive_step()
        finally:
            self._turn.acquire()

    def close(self):
        self._link.close()


def served(plan, directory, requests, *, drafter=None, speculate=None, spoil=None):
    """Return requests' tokens by a stage of several devices, their sums' shapes, the computes."""
    spec, count = ModelSpec.from_directory(directory), len(plan.workers)
    sums, links = InTurns(count), ThreadRendezvous(["cpu"] * count, plan.workers)
    computes, failures = [], []
    for index in range(count):
        source = CheckpointSource(directory, spec)
        reduce = sums.of(index) if count > 1 else None
        base, _ = build_stage(plan, index, spec, source, CPU, POOL, reduce=reduce)
        compute = gpu_stage(base, POOL)
        if speculate is not None:
            compute.enable_speculation(speculate, POOL, layers=range(spec.num_layers))
        if spoil is not None and index:
            spoil(compute.model)
        if compute.model.cut_head is not None:
            compute.model.cut_head.is_everywhere = True
        computes.append(compute)
    ends, leaders = (
        [links.followed(0, rank, leads=leads, max_rows=POOL.slots) for rank in range(1, count)]
        for leads in (False, True)
    )

    def follow(rank):
        with sums.turn:
            try:
                run_follower(computes[rank], OutOfTurn(ends[rank - 1], sums.turn), Recorder())
            except BaseException as error:
                failures.append(error)
                sums._barrier.abort()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, count)]
    for thread in threads:
        thread.start()
    mailbox = Mailbox()
    for request in requests:
        if request.rules is not None:
            computes[0].sampler.take_rules(request.id, request.rules, None)
        mailbox.requests.put(request)
    mailbox.requests.put(None)
    limits = PoolLimits(
        num_blocks=POOL.num_blocks,
        max_rows=POOL.slots,
        max_len=POOL.max_len,
        step_tokens=64,
        decode_rows=POOL.slots,
        tokens_ahead=2 if drafter is None else 1,
    )
    followers = Followers(leaders)
    with sums.turn:
        leading = LeadingCompute(computes[0], followers) if count > 1 else computes[0]
        scheduler = Scheduler(limits, drafter=drafter)
        with contextlib.suppress(threading.BrokenBarrierError):
            FirstStage(scheduler, leading, None, mailbox, Recorder(), num_stages=1).run()
        followers.close()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    tokens = {finished.id: finished.tokens for finished in mailbox.finished}
    return [tokens[request.id] for request in requests], sums.shapes, computes


def asked(prompts, new=NEW, **options):
    return [Request(id=i, prompt=tuple(p), max_new=new, **options) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("opt", (2, 1, 1)),
        *(pytest.param(k, (1, 1), marks=pytest.mark.seldom) for k in ("llama", "mixtral")),
    ],
)
def test_tokens_are_those_of_one_device(kind, shares, tiny_models, random_prompts, make_plan):
    directory, prompts = tiny_models.directory(kind), random_prompts(70, 24, 1, 7)
    plan = make_plan(directory, batch=4, shares=[shares])
    tokens, shapes, computes = served(plan, directory, asked(prompts))
    assert tokens == tiny_models.greedy(kind, prompts, NEW)
    assert len(shapes[0]) > 0 and all(own == shapes[0] for own in shapes)
    shared = [bool(compute._decode.last_token_S.any()) for compute in computes]
    assert all(shared), "no step named tokens that the first device alone had drawn"


def test_what_the_first_device_alone_knows_changes_no_sum(tiny_models, random_prompts, make_plan):
    """Scores of prompts want all places of the last layer, samples are drawn by one device."""
    directory, prompts = tiny_models.directory("llama"), random_prompts(40, 9)
    rules = LogitsConstraints(prompt=tuple(prompts[0]), logprobs=1, prompt_logprobs=0)
    found, scores = [], []
    for shares in ([], [(1, 1)]):
        requests = asked(prompts, sampling=SamplerConfig(temperature=0.8, seed=3))
        requests[0].rules = rules
        plan = make_plan(directory, batch=4, shares=shares)
        tokens, shapes, computes = served(plan, directory, requests)
        assert all(own == shapes[0] for own in shapes)
        found.append(tokens)
        noted = computes[0].sampler.noted(0)
        scores.append([position[0].logprob for position in noted.prompt[1:]])
    assert found[0] == found[1]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


def test_drafts_are_verified_by_all_devices(tiny_models, random_prompts, make_plan):
    directory, (word,) = tiny_models.directory("llama"), random_prompts(6)
    prompts = [word * 6]
    plan, drafter = make_plan(directory, batch=4, shares=[(1, 1)]), FixedDrafter("ngram", 3)
    requests = asked(prompts, 12)
    tokens, shapes, _ = served(plan, directory, requests, drafter=drafter, speculate="ngram")
    assert tokens == tiny_models.greedy("llama", prompts, 12)
    assert shapes[0] == shapes[1]
    assert drafter.acceptance.refusals + sum(drafter.acceptance.accepted) > 0


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.seldom), "qwen2"])
def test_the_vocabulary_is_cut(kind, tiny_models, random_prompts, make_plan, monkeypatch):
    """Devices compute logits of few rows together; prompts' scores are the first one's."""
    monkeypatch.setattr(stage_building, "_cuts_head", lambda *_: True)
    directory, prompts = tiny_models.directory(kind), random_prompts(40, 9)
    plan, requests = make_plan(directory, batch=4, shares=[(2, 1)]), asked(prompts)
    requests[0].rules = LogitsConstraints(prompt=tuple(prompts[0]), prompt_logprobs=0)
    tokens, shapes, computes = served(plan, directory, requests)
    assert tokens == tiny_models.greedy(kind, prompts, NEW)
    vocab = computes[0].model.whole_spec.vocab
    logits = [shape for shape in shapes[0] if shape[-1] == vocab]
    assert len(logits) >= NEW and all(own == shapes[0] for own in shapes)
    found = [compute.model.cut_head for compute in computes]
    assert all(part is not None for part in found) and computes[1].model.head is None
    hidden = torch.randn(3, computes[0].model.spec.hidden)
    for part in found:
        part._reduce = lambda part: part
    with torch.inference_mode():
        total = sum(part.logits(hidden) for part in found)
        torch.testing.assert_close(total, computes[0].model.head(hidden))


def test_another_order_of_sums_is_seen(tiny_models, random_prompts, make_plan):
    """The planted fault: a device that computes more places than the first one."""
    directory, prompts = tiny_models.directory("llama"), random_prompts(40, 9)
    plan = make_plan(directory, batch=4, shares=[(1, 1)])
    with pytest.raises((RuntimeError, AssertionError)):
        served(
            plan, directory, asked(prompts), spoil=lambda model: setattr(model, "is_last", False)
        )
