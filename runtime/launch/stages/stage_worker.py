"""The worker of one stage, in a thread, a process or a Ray actor.

It loads the stage's layers, joins the others' process group, runs the stage loop, and answers the
driver's calls; between stages nothing passes through the driver or Ray. The loop runs in one thread
while others answer `poll` and `health`.
"""

from __future__ import annotations

import datetime
import gc
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist

from llmpq.checkpoints.gguf_file import is_model
from llmpq.commands.output_paths import require_folder
from llmpq.costs.costs_cache import cache_folder
from llmpq.errors import StageLostError
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan, StagePlan
from llmpq.plans.speculation import MAX_GAMMA
from llmpq.precision import WeightScheme
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.drafts.drafters import speculation_report
from llmpq.runtime.engine.pool_limits import max_ahead
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.shared_stage import LeadingCompute, run_follower
from llmpq.runtime.engine.stage_loop import Compute, FirstStage, run_following_stage
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.emulate import Emulation
from llmpq.runtime.launch.stages.heartbeat import Heartbeat
from llmpq.runtime.launch.stages.held_stage import HeldStage
from llmpq.runtime.launch.stages.load_watch import LoadSigns
from llmpq.runtime.launch.stages.rendezvous import Rendezvous
from llmpq.runtime.launch.stages.stage_host import address_on, is_loopback, talk_over
from llmpq.runtime.launch.stages.stage_loading import (
    load_stage,
    make_drafter,
    timed_drafter,
    warm_up_together,
)
from llmpq.runtime.launch.stages.stage_place import StagePlace, place_of
from llmpq.runtime.links.device_links import (
    KINDS,
    DeviceTransport,
    StageLinks,
    connect_devices,
)
from llmpq.runtime.links.member_links import KINDS as SUM_KINDS
from llmpq.runtime.links.member_links import AllReduce, Followers, HostTotal
from llmpq.runtime.links.peer_links import BufferSizes
from llmpq.runtime.links.thread_links import ThreadRendezvous
from llmpq.runtime.links.transport import (
    GlooTransport,
    MessageSizes,
    Transport,
    join_gloo,
    more_connections,
)
from llmpq.runtime.models.layer_tensors import TensorSource
from llmpq.runtime.models.stage_model import DTYPES
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.requests.guides import GrammarCompiler
from llmpq.runtime.requests.request import (
    Abort,
    EngineOutputs,
    Halt,
    Mailbox,
    Request,
    ResetPrefixCache,
)
from llmpq.runtime.requests.token_rules import Guide, GuideKind, LogitsConstraints, LogprobOutput
from llmpq.runtime.steps.trace import (
    MAX_EVENTS,
    REPORTED_EVENTS,
    LoadReport,
    Recorder,
    StageRecord,
)
from llmpq.runtime.text.answer_text import StopTexts
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.layer_cache import KeptLayers
from llmpq.runtime.weights.quantized_checkpoint import open_checkpoint
from llmpq.runtime.weights.remote_slice import SliceSource, remote_slice
from llmpq.runtime.weights.sources import CheckpointSource, RandomSource

STORE_LIMIT = datetime.timedelta(seconds=60)
"""How long a stage may look for the first one's store; `join_gloo` then waits for all of them."""

_State = Literal["new", "loading", "loaded", "joining", "joined", "running", "ended", "left"]


class StageWorker:
    """Holds one stage; calls take and return values (`stage_wire.py`: as JSON data)."""

    def __init__(
        self,
        index: int,
        plan: Plan,
        settings: StageSettings,
        *,
        threads: ThreadRendezvous | None = None,
        weights: SliceSource | None = None,
        held: HeldStage | None = None,
    ) -> None:
        """`index`: of `plan.workers`, the devices of all stages.

        `threads`: the rendezvous of stages that are threads of one process; else by address.

        `weights`: who gives the stage's slice of the checkpoint, if it is not on this host.

        `held`: what this process has of the stage before, which has left.
        """
        # Streams that wait for a neighbour must not hold others up in a shared queue (default: 8).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._index, self._worker = index, plan.workers[index]
        self._reduce: AllReduce | None = None
        if self._worker.shares:  # the sum of layers that are held is the one that they know
            kept = None if held is None else held.reduce
            self._reduce = kept or AllReduce()
        self._plan, self._settings = plan, settings
        self._recorder = Recorder(
            max_events=REPORTED_EVENTS if self._settings.options.trace is None else MAX_EVENTS
        )
        self._mailbox = Mailbox()
        self._compute: StageRunner | None = None
        self._loaded: PoolPlan | None = None
        self._heartbeat = Heartbeat()
        self._signs: LoadSigns | None = None
        self._stopped = False
        self._rendezvous = Rendezvous(STORE_LIMIT)
        self._gpu: torch.device | None = None
        self._emulation: Emulation | None = None
        self._held = held
        self._stream: torch.cuda.Stream | None = None if held is None else held.stream
        self._state: _State = "new"
        self._ended = threading.Event()
        self._links: StageLinks | None = None
        self._more: list[dist.ProcessGroup] = []
        self._threads, self._weights = threads, weights
        self._drafter = make_drafter(self._plan, self._settings.options) if index == 0 else None

    @cached_property
    def _guides(self) -> GrammarCompiler:
        spec = ModelSpec.from_directory(self._settings.model_dir)
        given = self._settings.end_ids
        ends = spec.eos_token_ids if given is None else tuple(given)
        return GrammarCompiler(self._settings.model_dir, vocab=spec.vocab, end_ids=ends)

    @property
    def _stage(self) -> StagePlan:
        return self._worker.place

    def identity(self) -> StagePlace:
        """Return where this stage is; refuse a device of another kind."""
        own = address_on(self._settings.network_interface, self._settings.address)
        number = None if self._stage.is_cpu else self._gpu_number()
        return place_of(self._stage, number, own)

    def heartbeat(self, silence_s: float) -> None:
        """Hear that the driver lives; a silence of so many seconds ends this process."""
        self._heartbeat.heard(silence_s)

    def end(self) -> None:
        """End this process at once."""
        os._exit(1)

    def load(self) -> LoadReport:
        """Check the device, load the stage's slice, warm it up; returns what it allocated.

        Layers that the device holds already, at the plan's precision, are not loaded again.
        """
        if self._state != "new":
            raise StageLostError("the stage has left its plan")
        self._state = "loading"
        self._signs = LoadSigns()
        device = self._device()
        self._use_threads()
        spec, source = self._model(device)
        self._plan.require_model(spec)
        self._loaded = PoolPlan(self._plan, spec, self._settings.options)
        parts = None
        if self._held is not None:
            parts, self._held = self._held.parts_for(self._plan), None  # others are freed
        self._compute, report = load_stage(
            *(self._loaded, self._index, source, device),
            on_layer=self._on_layer,
            reduce=self._reduce,
            held=parts,
            capture=not self._settings.awaited,
        )
        if self._index == 0 and self._drafter is None:
            rows = self._max_rows
            self._drafter = timed_drafter(self._compute, self._settings.options, rows)
        self._signs = None
        self._state = "loaded"
        return replace(report, runner=type(self._compute).__name__)

    def _on_layer(self, index: int | None) -> None:
        """Count a layer that is loaded; None: a matrix of one. The last where the load is to end.

        A matrix is what a load that is interrupted waits for: a thread that computes while the
        interpreter ends would abort the process.
        """
        assert self._signs is not None
        if index is not None:
            self._signs.on_layer(index)
        if self._stopped:
            raise StageLostError("the stage was stopped while it loaded")

    def open_rendezvous(self, host: str, port: int) -> int:
        """Open the meeting point of the stages (first stage only) and return its port."""
        return self._rendezvous.open(host, port)

    def join(self, host: str, port: int) -> None:
        """Join the stages' process group."""
        self._state = "joining"
        talk_over(host, address_on(self._settings.network_interface, self._settings.address))
        store = self._rendezvous.store(host, port)
        workers = self._plan.workers
        join_gloo(dist.PrefixStore("stages", store), self._index, len(workers))
        self._connect_members()
        # Links between GPUs know stages of one device; others talk over their hosts.
        alone = len(workers) == len(self._plan.stages)
        on_gpus = not any(stage.is_cpu for stage in self._plan.stages)
        if alone and on_gpus and self._gpu is not None:
            self._use_threads()
            wanted = self._settings.options.links
            kinds = {"auto": KINDS, "gloo": ()}.get(wanted, (wanted,))
            self._links = connect_devices(self._gpu, self._buffer_sizes(), kinds=kinds)
        if not is_loopback(host) and self._links is None:
            self._more = more_connections()
        self._state = "joined"

    def _connect_members(self) -> None:
        """Connect the devices of shared stages; on GPUs, capture steps with their sums."""
        options = self._settings.options
        if self._gpu is not None:
            self._use_threads()
        reduce = self._reduce or AllReduce()
        kinds = {"auto": SUM_KINDS, "gloo": ()}.get(options.links, (options.links,))
        assert self._compute is not None
        reduce.join(
            *(self._plan.workers, self._index),
            device=self._gpu,
            dtype=DTYPES[self._plan.workload.dtype],
            columns=self._compute.model.spec.hidden,
            kinds=kinds,
        )
        cut_head = self._compute.model.cut_head
        if reduce.all_have(cut_head) and cut_head is not None:
            cut_head.is_everywhere = True
        if reduce.captures and not options.enforce_eager:
            warm_up_together(self._pool, self._compute)

    def run(self) -> None:
        """Run the stage's loop until the job ends.

        Where it fails the links to the other stages are cut, so that theirs fail, too.
        """
        self._state = "running"
        try:
            self._run()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which have the connections
            if self._threads is None:
                self._disconnect()
            raise
        finally:
            self._state = "ended"
            self._ended.set()
            self._mailbox.wake()

    def halt(self) -> None:
        """Let all loops end with the steps under way (first stage only).

        Requests stay as they are: their tokens were published, and other stages go on from them.
        """
        self._mailbox.requests.put(Halt())

    def leave(self, limit_s: float) -> bool:
        """End the loop, whatever it waits for, and the links; return whether that was done in time.

        The layers stay, for `successor`. Not of a stage that loads or is being connected.
        """
        if self._state in ("loading", "joining"):
            return False
        if self._state == "new":
            self._state = "left"
            return True
        self._mailbox.requests.put(Halt())
        if self._state == "running":
            if self._links is not None:
                self._links.break_off()
            if not self._ended.wait(limit_s):
                return False
        elif self._links is not None:
            self._links.break_off()
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)  # raises what the device has come to
        self._disconnect()
        return True

    def successor(self, index: int, plan: Plan, settings: StageSettings) -> StageWorker:
        """Return the next stage of this process, with the layers that this one, which left, has.

        Once all stages have left: until then others may write into this one's memory.
        """
        settings = replace(settings, address=self._settings.address)  # of the same host
        compute, self._compute = self._compute, None
        self._links = None
        held = self._held
        if compute is not None:  # it has loaded
            parts = compute.model.held
            del compute
            gc.collect()  # models, graphs and their modules refer to each other
            if self._gpu is not None:
                torch.cuda.empty_cache()
            same = plan.places[index].sms == self._stage.sms
            held = HeldStage(
                plan=self._plan,
                parts=parts,
                stream=self._stream if same else None,
                reduce=self._reduce,
            )
        successor = StageWorker(index, plan, settings, weights=self._weights, held=held)
        successor._heartbeat = self._heartbeat  # the driver's, to this process
        return successor

    def _disconnect(self) -> None:
        """Close the connections of this stage's host."""
        self._more = []
        if self._reduce is not None:
            self._reduce.disconnect()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._rendezvous = Rendezvous(STORE_LIMIT)

    def _run(self) -> None:
        self._use_threads()
        assert self._compute is not None
        if self._threads is not None and self._reduce is not None:
            self._reduce.connect(HostTotal(self._threads.sum_of(self._worker)), "threads")
        if self._stage.is_cpu:
            self._compute.warm_up(1, 1)  # what libraries keep per thread
        if not self._worker.leads:
            if self._gpu is not None:  # the first device sends what all of them made
                self._compute.leave_on_device()
            run_follower(self._compute, self._followed(self._index), self._recorder)
            return
        num_stages = len(self._plan.stages)
        transport = self._transport() if num_stages > 1 else None
        followers = Followers([self._followed(rank) for rank in self._following])
        compute: Compute = self._compute
        if self._following:
            compute = LeadingCompute(self._compute, followers)
        if self._index == 0:
            FirstStage(
                self._scheduler(),
                compute,
                transport,
                self._mailbox,
                self._recorder,
                num_stages=num_stages,
            ).run()
        else:
            assert transport is not None
            last = self._worker.stage == num_stages - 1
            run_following_stage(compute, transport, self._recorder, last=last)
        followers.close()

    @property
    def _following(self) -> range:
        """The numbers of the devices that this one leads."""
        count = max(1, len(self._worker.shares))
        return range(self._index + 1, self._index + count)

    def _followed(self, rank: int) -> Transport:
        """Return the link between the first device of this stage and another of it."""
        leader = self._index - self._worker.member
        if self._threads is not None:
            return self._threads.followed(
                self._worker.stage,
                rank - leader,
                leads=self._worker.leads,
                max_rows=self._max_rows,
            )
        return self._over_hosts(
            hidden=0 if self._worker.stage == 0 else None, ring=(leader, rank), one_way=True
        )

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            self._pool.limits_over(self._links),
            drafter=self._drafter,
            ends_in_stop_text=StopTexts(self._settings.model_dir),
            salt=self._plan.model.fingerprint,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests (first stage only); they stay the caller's, copies of them run."""
        for request in requests:
            self._mailbox.requests.put(request.fresh())
        if not self._mailbox.progress.running:
            self._mailbox.wake()  # a poll that waits long, since nothing was under way

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests as soon as their steps under way have (first stage only)."""
        for request_id in request_ids:
            self._mailbox.requests.put(Abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Let requests to come find no prefix of those before (first stage only)."""
        self._mailbox.requests.put(ResetPrefixCache())

    def stop(self) -> None:
        """End the loop as soon as the steps under way have, and a load after its current layer."""
        self._stopped = True
        self._mailbox.requests.put(Abort(None))
        self._mailbox.requests.put(None)

    def take_rules(self, rules_of: Sequence[tuple[int, LogitsConstraints]]) -> None:
        """Learn what requests ask of their tokens, before they begin (last stage only)."""
        assert self._compute is not None
        for number, rules in rules_of:
            automaton = (
                None
                if rules.guide is None
                else self._guides.compile(rules.guide, behind=rules.thinking)
            )
            self._compute.sampler.take_rules(number, rules, automaton)

    def guide_is_ready(self, kind: GuideKind, text: str) -> bool:
        """Begin to compile a guide; return whether that is done (last stage only)."""
        return self._guides.is_ready(Guide(kind=kind, text=text))

    def noted(self, request_ids: Sequence[int], ended: Sequence[int]) -> dict[int, LogprobOutput]:
        """Return requests' scores since the last call, and forget those that ended (last stage)."""
        assert self._compute is not None
        sampler = self._compute.sampler
        found = {number: sampler.noted(number) for number in request_ids}
        for number in ended:
            sampler.forget(number)
        return found

    def finish_submitting(self) -> None:
        """Let the loop end once all submitted requests have."""
        self._mailbox.requests.put(None)

    def poll(self, timeout_s: float) -> EngineOutputs:
        """Return requests that ended since the last poll, streamed tokens, and counters."""
        return self._mailbox.collect(timeout_s)

    def health(self) -> dict[str, Any]:
        """Return what the loop is doing and for how long; while it loads, signs of that."""
        current = self._recorder.current
        return {
            "kind": current[0] if current is not None else None,
            "num_begun": self._recorder.num_begun,
            "stuck_s": self._recorder.stuck_s(),
            "loading": self._signs.read() if self._signs is not None else None,
        }

    def work(self) -> dict[str, Any]:
        """Return how long the stage has computed since its loop began, and its steps by kind."""
        return self._recorder.work()

    def record(self) -> StageRecord:
        """Return what the stage recorded since the last call."""
        totals = self._compute.device_totals() if self._compute is not None else None
        sending_s = self._links.sending_s() if self._links is not None else 0.0
        return self._recorder.record(totals, sending_s=sending_s)

    def peak_memory(self) -> int:
        """Return the most bytes torch had on this stage's GPU at once; 0 on a CPU."""
        return 0 if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)

    def speculation(self) -> dict[str, Any] | None:
        """Return what came of the drafts, None without any (first stage only)."""
        return speculation_report(self._drafter) if self._drafter else None

    def _transport(self) -> Transport:
        """Return this stage's links: from device to device where that works for all stages."""
        assert self._compute is not None
        if self._threads is not None:
            return self._threads.transport(self._worker.stage, max_rows=self._max_rows)
        if self._links is not None:
            on_device = self._pool.tokens_over_links
            last = self._index == len(self._plan.stages) - 1
            self._compute.leave_on_device(tokens=on_device and last)
            return DeviceTransport(self._links, self._sizes(), tokens_on_device=on_device)
        leaders = [rank for rank, worker in enumerate(self._plan.workers) if worker.leads]
        return self._over_hosts(ring=leaders, more=self._more)

    def _over_hosts(self, *, hidden: int | None = None, **options: Any) -> GlooTransport:
        """Return a link over hosts' memory; `hidden`: numbers of a token, where not all go."""
        sizes = self._sizes()
        if hidden is not None:
            sizes = replace(sizes, hidden=hidden)
        return GlooTransport(sizes, **options)

    def _sizes(self) -> MessageSizes:
        """Return how large messages can be."""
        assert self._compute is not None
        return MessageSizes(
            hidden=self._compute.model.spec.hop_features,
            dtype=DTYPES[self._plan.workload.dtype],
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            max_pending=max_ahead(len(self._plan.stages)),
            max_blocks=self._pool.max_blocks,
        )

    @property
    def _pool(self) -> PoolPlan:
        assert self._loaded is not None, "the stage has not been loaded"
        return self._loaded

    @property
    def _max_rows(self) -> int:
        return self._pool.limits.max_rows

    @property
    def _max_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        limits = self._pool.limits
        return max(limits.step_tokens, limits.decode_rows * (MAX_GAMMA + 1) + 1)

    def _buffer_sizes(self) -> BufferSizes:
        """Return the largest messages of the plan."""
        assert self._compute is not None
        hidden_bytes = self._compute.model.spec.hop_features * self._plan.workload.dtype_bytes
        return BufferSizes(
            hidden_bytes=self._max_tokens * hidden_bytes,
            max_rows=self._max_rows,
            tickets=max_ahead(len(self._plan.stages)) + 2,
        )

    def _use_threads(self) -> None:
        """Prepare a thread: the plan's threads (OpenMP keeps them per thread), the GPU's stream."""
        if self._gpu is not None:
            assert self._emulation is not None
            torch.cuda.set_device(self._gpu)
            # Not the default stream, which others of the process wait for. One for all threads:
            # each stream keeps memory of its own.
            self._stream = self._stream or self._emulation.stream()
            torch.cuda.set_stream(self._stream)
        if self._stage.threads is not None and torch.get_num_threads() != self._stage.threads:
            torch.set_num_threads(self._stage.threads)

    def _model(self, device: torch.device) -> tuple[ModelSpec, TensorSource]:
        """Return the architecture and where its weights come from."""
        if self._weights is not None:
            folder = self._settings.options.layer_cache or str(cache_folder().parent / "layers")
            copied = remote_slice(self._weights, folder, self._stage.layers)
            self._settings = replace(self._settings, model_dir=str(copied))
        model = self._settings.model_dir
        if self._settings.options.load_format == "auto":
            spec = self._choosing(ModelSpec.from_directory(model))
            return spec, self._kept(open_checkpoint(model, spec), device)
        known = is_model(model)
        spec = ModelSpec.from_directory(model) if known else ModelSpec.by_name(model)
        spec = self._choosing(spec)
        source = RandomSource(spec, device=device)
        if self._settings.options.load_format == "dummy":
            return spec, source
        return spec, CopiedLayers(source, self._schemes(), device)

    def _choosing(self, spec: ModelSpec) -> ModelSpec:
        """Return a model that never chooses some tokens."""
        return replace(spec, suppressed=self._settings.suppressed)

    def _kept(self, source: CheckpointSource, device: torch.device) -> TensorSource:
        """Return the checkpoint behind a cache of its layers on disk, if that was asked for."""
        if self._settings.options.layer_cache is None or type(source) is not CheckpointSource:
            return source
        require_folder("--layer-cache", self._settings.options.layer_cache)
        return KeptLayers(source, self._settings.options.layer_cache, self._schemes(), device)

    def _schemes(self) -> dict[int, WeightScheme | None]:
        """Return how each layer of the stage is stored."""
        scheme, stage = self._plan.settings().scheme, self._stage
        numbers = range(*stage.layers)
        return {i: scheme(p) for i, p in zip(numbers, stage.precisions, strict=True)}

    def _device(self) -> torch.device:
        """Return the device this stage was given, or refuse a plan made for another kind."""
        stage = self._stage
        if stage.is_cpu:
            return torch.device("cpu")
        number = self._gpu_number()
        place_of(stage, number, None)
        self._gpu = torch.device("cuda", number)
        self._emulation = Emulation(stage, self._gpu)
        return self._gpu

    def _gpu_number(self) -> int:
        """Return the number of the stage's GPU among those that its process sees."""
        return 0 if self._threads is None else self._threads.devices[self._index].index
