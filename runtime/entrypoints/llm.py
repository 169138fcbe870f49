"""LLM: a model directory in, text out, on whatever devices there are.

    with LLM("DIR") as llm:                       # this machine's devices; planned if several
        llm.generate(["A prompt"], SamplingParams(max_tokens=32))[0].text
    LLM("DIR", plan="plan.json"), LLM("DIR", cluster="c.yaml", max_model_len=4096)

Every command of `llmpq-dist` that runs a model stands on it. Knows nothing of devices or of what a
stage is: a plan is chosen (plan_choice.py), an engine started (launch/), text read and written
(text/). Names and defaults are vLLM's where they mean the same; options are those of
`EngineOptions` (options/engine_options.py).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from llmpq.devices.cluster import Cluster
from llmpq.errors import LlmpqError, nearest
from llmpq.models.generation_config import (
    IGNORE,
    GenerationConfig,
    read_generation_config,
)
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Plan
from llmpq.runtime.elastic.elastic import HORIZON_S, DeviceChange, Elastic
from llmpq.runtime.elastic.replan import Replanner
from llmpq.runtime.elastic.slow_watch import SlowWatch, may_watch
from llmpq.runtime.entrypoints.prompt_answerer import PromptAnswerer, all_answers
from llmpq.runtime.entrypoints.response_stream import AsyncSubmitter, OutputQueue, ResponseStream
from llmpq.runtime.entrypoints.run_trace import RunTrace
from llmpq.runtime.launch.choose_launcher import choose_backend
from llmpq.runtime.launch.engine_starter import EngineStarter
from llmpq.runtime.launch.engine_thread import EngineThread
from llmpq.runtime.launch.pipeline_client import PipelineClient
from llmpq.runtime.launch.plans.plan_choice import choose_plan
from llmpq.runtime.launch.plans.pool_plan import request_limits
from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.launch.stages.stage_place import StagePlace
from llmpq.runtime.options.engine_options import Deadlines, EngineOptions
from llmpq.runtime.options.stage_settings import StageSettings
from llmpq.runtime.options.vllm_options import (
    OTHER_OPTIONS,
    VLLM_CALLS,
    VLLM_METHODS,
    VLLM_SAMPLING,
    without_neutral,
)
from llmpq.runtime.report.engine_metrics import Metric, metrics_of, token_counters
from llmpq.runtime.report.job_report import JobReport, JobResult, build_report
from llmpq.runtime.report.live_numbers import JobSamples
from llmpq.runtime.report.progress import LoadBar
from llmpq.runtime.requests.request import Progress, RequestOutputDelta
from llmpq.runtime.requests.request_output import (
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from llmpq.runtime.requests.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.runtime.text.conversation import Messages
from llmpq.runtime.text.request_factory import (
    PreparedPrompt,
    Prompt,
    RequestFactory,
    RequestNames,
    listed,
)
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.weights.ram_folder import ram_folder
from llmpq.sizes.kv_format import BLOCK_TOKENS

__all__ = [
    "LLM", "CompletionOutput", "Deadlines", "EngineOptions", "Logprob", "RequestOutput",
    "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip

_log = logging.getLogger("llmpq.runtime")
_Last = Callable[[PipelineClient], None]
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_PROGRESS_S = 0.25
"""How often a caller that waits for answers hears how far they are."""


class LLM(PromptAnswerer):
    """A model that is loaded and answers prompts; `with`, `close` or `del` ends it."""

    _closed = False
    _outputs: OutputQueue | None = None
    _submitter: AsyncSubmitter

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        plan: Plan | str | Path | None = None,
        options: EngineOptions | None = None,
        start: bool = True,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> None:
        """Plan where there is no plan, start the stages, load the weights.

        `model`: a directory, a GGUF file, or a name on Hugging Face's hub, which is downloaded
        unless its cache has it. It may be left out where the plan names its directory. `fields`:
        those of `EngineOptions` by name, such as max_model_len=4096 or backend="processes", on top
        of `options`. Those that only say how to plan are refused with a plan. `start=False` only
        plans: prompts can be prepared, and `start` loads the model. `use_tqdm`: loading has a
        progress bar where stderr is a terminal; else a line every 5 s.
        """
        chosen = choose_plan(model, plan, _options(options, fields, model))
        self.generation_config = read_generation_config(
            chosen.directory, chosen.options.generation_config
        )
        self._default_sampling = _default_sampling(self.generation_config)
        if others := self.generation_config.not_obeyed:
            _log.warning(
                "'%s': %s: not obeyed; what requests may ask for is in SamplingParams",
                self.generation_config.path,
                ", ".join(f"{key}={value!r:.60}" for key, value in others.items()),
            )
        self._spec = spec = self.generation_config.applied_to(chosen.spec)
        self._plan = chosen.plan
        self._options = chosen.options
        self._directory = chosen.directory
        self._limits = request_limits(self._plan, spec, self._options)
        self._prompts = RequestFactory(chosen.directory, spec, self._limits)
        self._names = RequestNames()
        self._process = os.getpid()
        self.trace = RunTrace(self._options.trace)
        """What the stages recorded of their steps, for reports and the file of the option."""
        self._samples = JobSamples()  # of the job of `as_completed`
        if self._options.keep_layers_in and choose_backend(self._plan, self._options) == "ray":
            raise ValueError(
                "keep_layers_in='ram' is for stages of this host: with Ray give layer_cache=DIR, a "
                "folder of each node"
            )
        folder = self._options.layer_cache
        self._settings = StageSettings(
            model_dir=str(chosen.directory),
            options=replace(
                self._options, layer_cache=None if folder is None else str(Path(folder).resolve())
            ),
            end_ids=spec.eos_token_ids,
            suppressed=spec.suppressed,
        )
        self._use_tqdm = use_tqdm
        self.startup_s = 0.0
        """Seconds that the stages took to start and load."""
        self._running: EngineThread | None = None
        self._starter: EngineStarter | None = None
        self._elastic: Elastic | None = None
        self._end_engine: Callable[[], object] = _nothing
        if start:
            self.start()

    def start(self) -> None:
        """Start the stages and load the weights, unless they are; a closed LLM stays closed."""
        if self._closed or (self._running is not None and not self._is_up):
            raise RuntimeError("this LLM is closed; make another one")
        if self._running is not None:
            return
        started_s, cluster = time.perf_counter(), self._options.cluster
        with LoadBar(quiet=not self._use_tqdm) as bar, ExitStack() as stack:
            known = cluster if isinstance(cluster, Cluster) else None
            settings = self._settings
            if self._options.keep_layers_in == "ram":
                kept = stack.enter_context(ram_folder(_kept_bytes(self._plan)))
                options = replace(settings.options, keep_layers_in=None, layer_cache=str(kept))
                settings = replace(settings, options=options)
            replanner = Replanner(
                self._directory,
                self._spec,
                self._plan,
                self._options,
                on_limits=self._prompts.use_limits,
            )
            replan = replanner if self._options.on_loss == "replan" else None
            starter = EngineStarter(self._plan, settings, cluster=known, replan=replan)
            self._starter = starter
            self._elastic = Elastic(replanner, starter, partial(_engine_of, weakref.ref(self)))
            client = stack.enter_context(starter).start(bar.on_load)
            self._prompts.wait_until_read()
            if self._options.on_loss != "stop" and may_watch(self._plan):
                watch = SlowWatch(self._elastic, partial(_engine_of, weakref.ref(self)))
                stack.callback(watch.close)
            self._running = EngineThread(
                client,
                stack.pop_all(),
                None if self._options.on_loss == "stop" else starter,
                max_rows=self._limits.max_rows,
            )
        self._prompts.wait_for_guide = self._running.wait_for_guide
        self.startup_s = time.perf_counter() - started_s
        # Ended by `close`, by `del`, or when the interpreter ends: nothing of it refers to the LLM.
        self._end_engine = weakref.finalize(
            self, _end_in, self._process, self._running.close, self.trace.close
        )

    def _require_process(self) -> None:
        """Refuse in a forked child: the threads and sockets of an engine are its process's own."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this LLM belongs to process {self._process}, and a forked child has none of its "
                "threads; make an LLM here, in a process that multiprocessing starts by 'spawn'"
            )

    @property
    def engine(self) -> EngineThread:
        """What serves the requests; `engine.client` reaches the stages. Raises if it is not up."""
        self._require_process()
        if self._running is None:
            raise RuntimeError(
                "this LLM is closed; make another one"
                if self._closed
                else "this LLM has not been started; call start()"
            )
        return self._running

    @property
    def _is_up(self) -> bool:
        return bool(getattr(self._end_engine, "alive", False))

    def __repr__(self) -> str:
        state = "not started"
        if self._running is not None:
            state = "running" if self._is_up else "closed"
        elif self._closed:
            state = "closed"
        stages = ", ".join(stage.device for stage in self._plan.places)
        return f"<LLM {self._spec.name} on {stages}, {self.max_model_len} tokens, {state}>"

    def __getattr__(self, name: str) -> NoReturn:
        """Say what stands for a method of vLLM's that there is not."""
        known = VLLM_METHODS.get(name)
        more = "" if known is None else f": {known}"
        raise AttributeError(f"'LLM' has no attribute '{name}'{more}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled: its weights and threads belong to its process; make one in "
            "each process, or send prompts to one server (llmpq-dist serve)"
        )

    def close(self) -> None:
        """End what is under way and take the stages down; again does nothing.

        `del llm` does the same once nothing else refers to it, and so does the script's end.
        """
        self._closed = True
        self._end_engine()
        if os.getpid() == self._process:
            self._prompts.close()

    @property
    def plan(self) -> Plan:
        """Who holds which layers at which bits, and what was predicted: the plan that runs."""
        return self._plan if self._running is None else self._running.client.plan

    def plan_of(self, output: RequestOutput) -> Plan:
        """Return the plan under which an answer ended: of `Engines` each has its own."""
        return self.plan

    @property
    def model_spec(self) -> ModelSpec:
        """The model's architecture and its end-of-text tokens."""
        return self._spec

    @property
    def options(self) -> EngineOptions:
        """How it runs, with what was left open decided (speculate, gamma)."""
        return self._options

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `ValueError` where there is none."""
        return self._prompts.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as Transformers', with `apply_chat_template`."""
        return self.tokenizer.transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how answers are sampled where nothing else is said: as generation_config.json."""
        return self._default_sampling

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self._prompts.max_model_len

    def check_alive(self) -> None:
        """Raise what ended the engine, if it has ended."""
        self.engine.check_alive()

    @property
    def stages_started(self) -> PipelineClient | None:
        """The stages that were started last; they may be loading still, or be lost."""
        return None if self._starter is None else self._starter.client

    @property
    def recovering(self) -> Recovery | None:
        """What is being recovered since a stage was lost; None while the stages work."""
        return None if self._running is None else self._running.recovery

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """What was recovered since the start, and what is, the newest last."""
        return () if self._starter is None else self._starter.recoveries

    def add_devices(
        self,
        name: str,
        *,
        cluster: Cluster | str | Path | None = None,
        horizon_s: float = HORIZON_S,
    ) -> DeviceChange:
        """Use a node's devices, or one device, too, if that pays; requests go on after a pause.

        `cluster`: a file that describes them beside the devices in use; without it they were given
        up, drained or left out before. It pays where the job, which goes on for `horizon_s`, comes
        further in spite of the pause, or where layers get bits back.
        """
        self._require_elastic()
        known = Cluster.load(cluster) if isinstance(cluster, (str, Path)) else cluster
        assert self._elastic is not None
        return self._elastic.add(name, cluster=known, horizon_s=horizon_s)

    def drain_devices(self, name: str) -> DeviceChange:
        """Leave a node's devices, or one device, free; requests go on after a pause.

        Layers lose bits, down to `min_quality`, where they have to; `DoesNotFitError` says what is
        short where that is not enough.
        """
        self._require_elastic()
        assert self._elastic is not None
        return self._elastic.drain(name)

    def _require_elastic(self) -> None:
        """Refuse other devices where nothing moves to them."""
        self.engine.check_alive()
        if any(worker.shares for worker in self.plan.workers):
            raise ValueError(
                "stages of several devices (tensor parallel) are not moved while they serve: end "
                "the command, plan again and start it"
            )

    @property
    def stage_places(self) -> Sequence[StagePlace]:
        """Where each stage runs: host, process, device."""
        return self.engine.client.places

    def job_report(
        self,
        outputs: Sequence[RequestOutput],
        *,
        plain: Sequence[RequestOutput] | None = None,
        num_failed: int = 0,
        took_s: float | None = None,
    ) -> JobReport:
        """Return what a job came to, predicted beside measured, as JSON data that draws itself.

        `outputs`: of the prompts since the last report; `plain`: of the same prompts served again
        without drafts; `num_failed`: prompts that could not be served; `took_s`: seconds of the
        job, where prompts were not all submitted at once.
        """
        self.engine.check_alive()
        client = self.engine.client
        return build_report(
            JobResult(
                plan=client.plan,
                loads=client.load_reports,
                records=self.trace.take(client),
                outputs=outputs,
                num_failed=num_failed,
                startup_s=self.startup_s,
                speculation=client.speculation(),
                places=[place.as_report() for place in client.places],
                plain=plain,
                recoveries=[recovery.as_report() for recovery in self.recoveries],
                samples=self._samples.as_report(),
                took_s=took_s,
            )
        )

    @property
    def request_factory(self) -> RequestFactory:
        """What makes requests of prompts and answers of tokens, and knows the engine's limits."""
        return self._prompts

    def write_trace(self) -> None:
        """Write the file of the option `trace` with all so far; `close` does it if this did not."""
        self.trace.write(self.engine.client)

    def stats(self) -> dict[str, Any]:
        """Return counters of the run so far and what every stage holds."""
        client = self.engine.client
        parts = zip(client.plan.places, client.stage_pids(), client.load_reports, strict=True)
        stages = [
            {
                "device": stage.device,
                "node": stage.node,
                "layers": list(stage.layers),
                "pid": pid,
                "weights_bytes": load.weights_bytes,
                "kv_bytes": load.kv_bytes,
                "runner": load.runner,
                "predicted": client.plan.promised_steps(stage),
            }
            for stage, pid, load in parts
        ]
        counters = self.engine.stats()
        cache = {
            "block_size": BLOCK_TOKENS,
            "cache_dtype": client.plan.workload.kv.value,
            "enable_prefix_caching": self._options.enable_prefix_caching,
            "num_gpu_blocks": counters["gauges"].get("blocks", 0),
        }
        recoveries = [recovery.as_report() for recovery in self.recoveries]
        return {
            **counters,
            "requests": self._names.under_way(),
            "stages": stages,
            "cache": cache,
            "recoveries": recoveries,
        }

    def live_stats(self) -> dict[str, Any]:
        """Return `stats` with how long each stage has computed, and its steps; asks the stages.

        Without the stages' part while lost ones are replaced.
        """
        self.engine.check_alive()
        work: list[dict[str, Any]] = []
        try:
            work = [] if self.recovering else self.engine.client.work()
        except (LlmpqError, RuntimeError, OSError):
            self.engine.check_alive()  # what is lost may be replaced
        found = self.stats()
        same = len(work) == len(found["stages"])
        pairs = zip(found["stages"], work, strict=True) if same else ()
        return {**found, "stages": [{**stage, **own} for stage, own in pairs]}

    def get_metrics(self) -> list[Metric]:
        """Return what the engine counts under vLLM's names, as `/metrics` of a server has it.

        Gauges, counters and histograms: `name`, `labels`, `value`, or `count`, `sum`, `buckets`.
        """
        labels = {"model_name": self._spec.name, "engine": "0"}
        stats = self.live_stats()
        return [*metrics_of(stats, labels), *token_counters(stats, labels)]

    def reset_prefix_cache(self) -> bool:
        """Let prompts to come find nothing that was computed up to now; True, as it always is.

        Requests under way go on. For timing, or where earlier prompts must not be found.
        """
        self.engine.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the answers to prompts, in their order; `ValueError` if one can never run.

        `use_tqdm`: several prompts have a live picture of rows and stages where stderr is a
        terminal, else a line every 5 s. `priority`: of each prompt; lower ones are scheduled first.
        """
        _no_others(LLM.generate, others)
        several = listed(cast(Prompt, prompts))  # None is refused with its place
        return self._all_of(several, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the answer to a conversation, or to each of several, by the model's template.

        `use_tqdm`: as for `generate`. `chat_template`: Jinja, instead of the model's.
        `continue_final_message` (with `add_generation_prompt=False`): the last message is
        continued. `tools`: what the model may call, as OpenAI's API has them.
        `chat_template_kwargs`: what the template may ask for, such as
        `{"enable_thinking": False}`.
        """
        self._require_process()
        _no_others(LLM.chat, others)
        several = _conversations(cast(Messages, messages))  # None is refused
        own_params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params]
        cut = any(getattr(own, "truncate_prompt_tokens", None) is not None for own in own_params)
        prompts = []
        for place, own in enumerate(several):
            with _named("conversation", place, several):
                prompts.append(
                    self._prompts.conversation(
                        own,
                        whole=not cut,
                        tools=tools,
                        template=chat_template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        options=chat_template_kwargs,
                    )
                )
        return self._all_of(prompts, sampling_params, use_tqdm=use_tqdm)

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PreparedPrompt:
        """Return a prompt as tokens and requests, for `as_completed`; nothing runs yet.

        `ValueError` if it can never run.
        """
        self._require_process()
        params = self._params_or_default(sampling_params)
        return self._prompts.prepare(
            prompt, params, name=request_id, priority=priority, cache_salt=cache_salt
        )

    def as_completed(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield index and answers of prepared prompts as each has ended, all running together.

        `on_progress` gets the engine's counters a few times a second. Leaving the loop early aborts
        what has not ended.
        """
        deltas: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
        for prompt in prompts:
            if not isinstance(prompt, PreparedPrompt):
                raise ValueError(f"prompts must come from LLM.prepare, got {prompt!r:.100}")
        requests = [request for prompt in prompts for request in prompt.requests]
        index_of = {r.id: i for i, prompt in enumerate(prompts) for r in prompt.requests}
        left = {i: len(prompt.requests) for i, prompt in enumerate(prompts)}
        finished: dict[int, RequestOutputDelta] = {}
        self._begin(prompts)
        samples = self._samples = JobSamples()
        try:
            if requests:
                samples.add(self.engine.progress)
                self.engine.submit(requests, deltas.put)
            while len(finished) < len(requests):
                try:
                    delta = deltas.get(timeout=_PROGRESS_S)
                except queue.Empty:
                    delta = None
                if delta is not None and delta.error is not None and delta.finished is None:
                    raise delta.error
                if delta is not None and delta.finished is not None:
                    finished[delta.id] = delta
                    index = index_of[delta.id]
                    left[index] -= 1
                    if not left[index]:
                        self._names.end(prompts[index].named)
                        yield index, self._prompts.output_of(prompts[index], finished)
                samples.add(self.engine.progress, last=len(finished) == len(requests))
                if on_progress is not None:
                    on_progress(self.engine.progress)
        except BaseException:
            if os.getpid() == self._process:  # not where a forked child drops the generator
                self.engine.abort([r.id for r in requests if r.id not in finished])
            raise
        finally:
            for prompt in prompts:
                self._names.end(prompt.named)

    def begun(self, prompt: PreparedPrompt) -> tuple[int, Sequence[int]]:
        """Return the tokens of a prompt's first answer so far, behind the engine's number: 0."""
        return 0, self.engine.tokens_of(prompt.requests[0].id)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield the answer's text as it comes; joined, the pieces are the text of `generate`.

        Leaving the loop early aborts the request, and so does `abort(request_id)`.
        """
        params = self._params_or_default(sampling_params)
        if params.n != 1:
            raise ValueError(f"a stream has one answer, got n={params.n}; leave n out")
        answers = await self.submit(prompt, params, request_id=request_id)
        async with aclosing(answers.deltas()) as deltas:
            async for delta in deltas:
                if delta.text:
                    yield delta.text

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ResponseStream:
        """Begin the answers to a prompt and return them, to be read by `deltas` as they come.

        `ValueError` if they can never run. Lower `priority` goes first. The prefix cache finds
        again only what came with the same `cache_salt`.
        """
        self._require_process()
        params = self._params_or_default(sampling_params)
        prepared = await self._prompts.prepare_async(
            prompt, params, name=request_id, stream=True, priority=priority, cache_salt=cache_salt
        )
        made = asyncio.ensure_future(self._submit(prepared))
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_give_up)  # its answers are not read
            raise

    async def _submit(self, prompt: PreparedPrompt) -> ResponseStream:
        """Begin the answers to a prepared prompt, in the running event loop."""
        loop, engine = asyncio.get_running_loop(), self.engine
        if self._outputs is None or self._outputs.loop is not loop:
            self._outputs, self._submitter = OutputQueue(loop), AsyncSubmitter(loop, engine)
        self._begin([prompt])
        ended = partial(self._names.end, prompt.named)
        answers = ResponseStream(
            prompt, self._prompts, engine, self._outputs, owner=self, ended=ended
        )
        await answers.begin(self._submitter)
        return answers

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End the answers of a prompt, or of several, between two steps; what there is of them is
        the result.

        A name that is not under way is no error: it may just have ended.
        """
        names = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
            raise ValueError(
                f"request_id must be a text or a list of them, got {request_id!r:.100}"
            )
        engine = self.engine
        engine.abort([number for name in names for number in self._names.ids_of(name)])

    def _all_of(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Return the answers to all prompts, in their order."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [self._params_or_default(sampling_params)] * len(prompts)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            each = [self._params_or_default(own) for own in sampling_params]
        else:
            each = [self._params_or_default(sampling_params)]
        if len(each) != len(prompts):
            raise ValueError(
                f"got {len(each)} sampling_params for {len(prompts)} prompts; give one, or one each"
            )
        if not isinstance(priority, Iterable | None) or isinstance(priority, str):
            raise ValueError(f"priority must be a list, one for each prompt, got {priority!r:.100}")
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if len(ranks) != len(prompts):
            raise ValueError(
                f"got {len(ranks)} priorities for {len(prompts)} prompts; give one for each"
            )
        prepared = []
        for place, (prompt, own, rank) in enumerate(zip(prompts, each, ranks, strict=True)):
            with _named("prompt", place, prompts):
                prepared.append(self.prepare(prompt, own, priority=rank))
        return all_answers(self, prepared, use_tqdm=use_tqdm)

    def _params_or_default(self, given: object) -> SamplingParams:
        """Return what was given, the model's where nothing was; `ValueError` for another type."""
        if given is None:
            return self._default_sampling
        if not isinstance(given, SamplingParams):
            raise ValueError(
                "sampling_params must be a SamplingParams, such as SamplingParams(max_tokens=32), "
                f"got {given!r:.100}"
            )
        return given

    def _begin(self, prompts: Sequence[PreparedPrompt]) -> None:
        self._names.begin([prompt.named for prompt in prompts])
        for prompt in prompts:
            name, ids = prompt.named
            self.trace.name(ids, name)


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Return conversations, of which there may be one; what is none is refused when it is read."""
    first = messages[0] if isinstance(messages, Sequence) and messages else None
    several = isinstance(first, Sequence) and not isinstance(first, str)
    return cast(Sequence[Messages], messages if several else [messages])


@contextmanager
def _named(what: str, place: int, among: Sequence[object]) -> Iterator[None]:
    """Have an error say which of several it is about."""
    try:
        yield
    except ValueError as error:
        if len(among) > 1:
            error.args = (f"{what} {place}: {error}", *error.args[1:])
        raise


def _kept_bytes(plan: Plan) -> int:
    """Return what a plan's quantised layers take, as far as the plan says it."""
    return sum(
        0 if stage.memory is None else stage.memory.weights_bytes
        for stage in plan.stages
        if any(precision.weight_bits < 16 for precision in stage.precisions)
    )


def _nothing() -> None:
    """End no engine: none was started."""


def _end_in(process: int, close: Callable[[_Last], None], last: _Last) -> None:
    """End an engine in the process that has it: a forked child would end its parent's."""
    if os.getpid() == process:
        close(last)


def _options(
    options: EngineOptions | None, given: Mapping[str, Any], model: str | Path | None
) -> EngineOptions:
    """Return options with some fields replaced; `TypeError` for what is no field.

    Arguments of vLLM's are taken where their value changes nothing, as a tokenizer's directory that
    is the model's.
    """
    if not isinstance(options, EngineOptions | None):
        raise TypeError(
            "options must be EngineOptions, such as EngineOptions(max_model_len=4096), got "
            f"{options!r:.100}; by name they are LLM's own arguments"
        )
    known = [f.name for f in fields(EngineOptions)]
    tokenizer = given.get("tokenizer")
    if model is not None and tokenizer is not None and _is_same(tokenizer, model):
        given = {**given, "tokenizer": None}
    own = without_neutral(without_neutral(given), OTHER_OPTIONS)
    for name in own:
        if name not in known:
            raise TypeError(f"LLM has no option '{name}': {nearest(name, known)}see EngineOptions")
    return replace(options or EngineOptions(), **own)


def _is_same(tokenizer: object, model: str | Path) -> bool:
    """Whether both are one directory or file, or one name on the hub."""
    if not isinstance(tokenizer, (str, os.PathLike)):
        return False
    given, own = Path(os.fspath(tokenizer)), Path(model)
    return given == own or given.resolve() == own.resolve()


def _no_others(method: Callable[..., object], given: Mapping[str, Any]) -> None:
    """Raise `TypeError` for an argument that a method does not have; vLLM's may change nothing."""
    called = method.__qualname__
    for name in without_neutral(given, VLLM_CALLS, whose=f"{called} has no argument"):
        instead = f"it is SamplingParams({name}=...)" if name in _SAMPLING else ""
        if name in VLLM_SAMPLING:
            instead = f"in SamplingParams, {VLLM_SAMPLING[name].instead}"
        if not instead:
            named = [p for p in inspect.signature(method).parameters if p not in ("self", "others")]
            instead = f"{nearest(name, named)}see help({called})"
        raise TypeError(f"{called} has no argument '{name}': {instead}")


def _default_sampling(generation: GenerationConfig) -> SamplingParams:
    try:
        return SamplingParams(**generation.sampling)
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{generation.path}': {error}; {IGNORE}") from None


def _give_up(made: asyncio.Future[ResponseStream]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().give_up()


def _signature() -> inspect.Signature:
    """Return the parameters of `LLM`, its options by name, for `help` and for error texts."""
    own = inspect.signature(LLM.__init__).parameters.values()
    given = [p for p in own if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    default = EngineOptions()
    named = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(default, f.name))
        for f in fields(EngineOptions)
    ]
    return inspect.Signature([*given, *named])


setattr(LLM, "__signature__", _signature())  # noqa: B010 (no attribute of a class to type checkers)


def _engine_of(llm: weakref.ref[LLM]) -> EngineThread:
    """Return what serves an LLM that is there still."""
    found = llm()
    if found is None:
        raise RuntimeError("the LLM is gone")
    return found.engine
