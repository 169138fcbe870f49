"""Several stages that run ahead of their tokens: processes over gloo, a token table as on a GPU."""

import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.stage_loop import FirstStage, run_following_stage
from llmpq.runtime.links.device_links import DeviceTransport, connect_devices
from llmpq.runtime.links.transport import MessageSizes, join_gloo
from llmpq.runtime.requests.request import Mailbox, Request, StepKind
from llmpq.runtime.steps.device_copies import HostCopy
from llmpq.runtime.steps.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize
from reference.pipeline import ReferencePipeline

pytestmark = pytest.mark.cluster
NEW = (9, 4, 9, 7, 9, 5)
POOL = PoolSize(num_blocks=3, slots=3, max_len=40)
LENGTHS = (8, 5, 9, 3, 7, 6)


class Table:
    """Reads the token -1 from a table of what each slot produced last, and counts such steps."""

    blind_steps, forgetful = 0, False

    def take_tokens(self, slots, tokens_B1):
        if not self.forgetful:
            self.table |= dict(zip(slots, tokens_B1[:, 0].tolist(), strict=True))

    def run(self, message, hidden_BQH):
        tokens_T = message.tokens_T.copy()  # unknown to stages but the first
        self.blind_steps += bool((tokens_T == -1).any())
        firsts = np.cumsum(message.num_new_B) - message.num_new_B
        for slot, first in zip(message.slots_B.tolist(), firsts.tolist(), strict=True):
            if len(tokens_T) and tokens_T[first] == -1:
                tokens_T[first] = self.table.get(slot, 0)
        return super().run(replace(message, tokens_T=tokens_T), hidden_BQH)


class TableStage(Table, StageRunner):
    """A stage with such a table."""


def stage(rank: int, folder: str, model: str, forgetful: bool) -> None:
    """Run one stage; the first one leaves the tokens in the folder."""
    torch.set_num_threads(1)
    plan = Plan.load(f"{folder}/plan.json")
    num_stages = len(plan.stages)
    join_gloo(dist.FileStore(f"{folder}/store", num_stages), rank, num_stages)
    links = connect_devices(torch.device("cpu"), None, kinds=["gloo"])
    spec = ModelSpec.from_directory(model)
    cpu = torch.device("cpu")
    source = CheckpointSource(model, spec)
    base, _ = build_stage(plan, rank, spec, source, cpu, POOL)
    compute = TableStage(base.model, base.kv, cpu, torch.float32)
    compute.table, compute.forgetful = {}, forgetful
    last = rank == num_stages - 1
    sizes = MessageSizes(
        hidden=spec.hidden,
        dtype=torch.float32,
        max_rows=4,
        max_tokens=64,
        max_pending=16,
        max_blocks=POOL.num_blocks,
    )
    transport = DeviceTransport(links, sizes, tokens_on_device=True)
    if rank:
        run_following_stage(compute, transport, Recorder(), last=last)
    else:
        lead(plan, compute, transport, folder)
    dist.barrier()
    dist.destroy_process_group()


def limits_of(plan: Plan, **changed: int) -> PoolLimits:
    values = dict(
        num_blocks=POOL.num_blocks,
        max_rows=POOL.slots,
        max_len=POOL.max_len,
        step_tokens=6,
        decode_rows=2,
        num_stages=len(plan.stages),
        tokens_ahead=2,
    )
    return PoolLimits(**values | changed)


def lead(plan: Plan, compute: Table, transport: DeviceTransport, folder: str) -> None:
    """Serve six requests, three at a time."""
    scheduler = Scheduler(limits_of(plan))
    mailbox = Mailbox()
    prompts = torch.load(f"{folder}/prompts.pt", weights_only=True)
    for index, prompt in enumerate(prompts):
        mailbox.requests.put(Request(id=index, prompt=tuple(prompt), max_new=NEW[index]))
    threading.Timer(0.05, mailbox.requests.put, [None]).start()
    first = FirstStage(
        scheduler, compute, transport, mailbox, Recorder(), num_stages=len(plan.stages)
    )
    first.run()
    rows = {done.id: done.tokens for done in mailbox.finished}
    assert compute.blind_steps > 0, "no step ran ahead of the host"
    torch.save([rows[index] for index in range(len(prompts))], f"{folder}/tokens.pt")


@pytest.fixture
def serve(in_processes):
    """Return what runs a plan's stages in processes."""

    def run(plan: Plan, model: Path, prompts, *, forgetful: bool = False) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as folder:
            plan.save_json(f"{folder}/plan.json")
            torch.save(prompts, f"{folder}/prompts.pt")
            in_processes(stage, (folder, str(model), forgetful), count=len(plan.stages))
            return torch.load(f"{folder}/tokens.pt", weights_only=True)

    return run


@pytest.mark.parametrize("splits", [(1,), (1, 2)])
def test_tokens_equal_one_process(serve, splits, tiny_models, random_prompts, make_plan):
    model = tiny_models.directory("llama")
    plan = make_plan(model, batch=3, prefill_microbatch=2, decode_microbatch=2, splits=splits)
    prompts = random_prompts(*LENGTHS)
    want = ReferencePipeline.from_directory(model).generate(prompts, max_new=max(NEW))
    want = [row[:new] for row, new in zip(want, NEW, strict=True)]
    assert serve(plan, model, prompts) == want


def test_tokens_that_are_not_brought_are_missed(serve, tiny_models, random_prompts, make_plan):
    model = tiny_models.directory("llama")
    plan = make_plan(model, batch=3, prefill_microbatch=2, decode_microbatch=2, splits=(1,))
    prompts = random_prompts(*LENGTHS)
    want = ReferencePipeline.from_directory(model).generate(prompts, max_new=max(NEW))
    want = [row[:new] for row, new in zip(want, NEW, strict=True)]
    assert serve(plan, model, prompts, forgetful=True) != want


def test_a_wait_for_tokens_is_watched_but_is_no_work():
    recorder = Recorder()
    with recorder.waiting(StepKind.DECODE):
        time.sleep(0.01)
        assert recorder.stuck_s() >= 0.01
    assert recorder.stuck_s() == 0 and not recorder.totals


def test_a_wait_through_many_stages_counts_once_a_stage():
    recorder = Recorder()
    with recorder.waiting(StepKind.PREFILL, num_stages=1000):
        time.sleep(0.01)
        assert 1e-5 <= recorder.stuck_s() < 0.01


@pytest.mark.parametrize("fused_rounds", [False, True])
def test_a_device_that_never_answers_is_noticed(fused_rounds):
    """One stage whose step was enqueued and never ends, with and without drafts."""
    never, recorder, mailbox = threading.Event(), Recorder(), Mailbox()

    class Copied:
        def synchronize(self) -> None:
            never.wait(60)

    class Stuck:
        runs_ahead = not fused_rounds

        def run(self, message, hidden_BQH):
            return HostCopy(torch.zeros(message.num_rows, 1, dtype=torch.long), Copied())

    Stuck.fused_rounds = fused_rounds
    limits = PoolLimits(num_blocks=1, max_rows=1, max_len=8, step_tokens=8, decode_rows=1)
    first = FirstStage(Scheduler(limits), Stuck(), None, mailbox, recorder, num_stages=1)
    mailbox.requests.put(Request(id=0, prompt=(1, 2), max_new=1))
    mailbox.requests.put(None)
    thread = threading.Thread(target=first.run, daemon=True)
    thread.start()
    end_s = time.monotonic() + 30
    while recorder.stuck_s() < 0.05 and time.monotonic() < end_s:
        time.sleep(0.01)
    stuck_s = recorder.stuck_s()
    never.set()
    thread.join(30)
    assert stuck_s >= 0.05 and not thread.is_alive()
