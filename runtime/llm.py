"""LLM: a model directory in, text out, on whatever devices there are.

    with LLM("DIR") as llm:                       # this machine's devices; planned if several
        llm.generate(["A prompt"], SamplingParams(max_tokens=32))[0].text
    LLM("DIR", plan="plan.json"), LLM("DIR", cluster="c.yaml")

Knows nothing of devices or of what a stage is: a plan is chosen (plan_choice.py), an engine started
(launch/), text read and written (text/). Names and defaults are vLLM's where they mean the same.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from llmpq.checkpoints.generation_config import (
    IGNORE,
    GenerationConfig,
    read_generation_config,
)
from llmpq.checkpoints.stored_codes import stored_codes
from llmpq.cluster import Cluster
from llmpq.plan import MAX_GAMMA, Plan, Prefer
from llmpq.runtime.answers import ResponseStream
from llmpq.runtime.entrance import AsyncSubmitter, OutputQueue
from llmpq.runtime.launch.engine import Engine
from llmpq.runtime.launch.engine_thread import EngineThread, RequestOutputDelta
from llmpq.runtime.launch.launcher import Backend, Deadlines, Launch
from llmpq.runtime.launch.plans.planned_kv import AUTO, with_kv
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.launch.stages.stage_settings import LinkChoice, StageSettings, limits_of
from llmpq.runtime.plan_choice import Chosen, Wishes, choose_plan
from llmpq.runtime.report.progress import LoadBar, ProgressReporter
from llmpq.runtime.request_output import CompletionOutput, RequestOutput
from llmpq.runtime.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.runtime.text.prompts import Messages, PreparedPrompt, Prompt, RequestFactory, listed
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.token_rules import LogprobOutput
from llmpq.runtime.trace import MAX_EVENTS, write_chrome_trace
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.speculation import SpeculationMode, usable_modes

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

_log = logging.getLogger("llmpq.runtime")


class LLM:
    """A model that is loaded and answers prompts; `with`, `close` or `del` ends it."""

    _inbox: OutputQueue | None = None
    _entrance: AsyncSubmitter

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        plan: Plan | str | Path | None = None,
        revision: str | None = None,
        cluster: str | Path | None = None,
        backend: Backend = "auto",
        ray_address: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        dtype: str = AUTO,
        kv_cache_dtype: str = AUTO,
        prefer: Prefer | None = None,
        speculate: SpeculationMode | Literal["off"] | None = None,
        gamma: int | None = None,
        links: LinkChoice = "auto",
        generation_config: str = "auto",
        layer_cache: str | Path | None = None,
        kv_pool: bool | None = None,
        packed_prompts: bool = False,
        deadlines: Deadlines | None = None,
        trace: str | Path | None = None,
        stages_apart: bool = False,
        use_tqdm: bool = True,
    ) -> None:
        """Plan where there is no plan, start the stages, load the weights.

        `model`: a directory, a GGUF file, or a name on Hugging Face's hub (with `revision`: of a
        branch, tag or commit), which is downloaded unless its cache has it. It may be left out
        where the plan names its directory. `max_num_seqs` (requests at once) is for plans made
        here, and so is `max_model_len` (tokens of a prompt and its answer)
        where KV is no pool of blocks: for drafts by the model, on GPUs for any and for what
        `capabilities.gpu_pool_lack` names, and there with `kv_pool=False` (True refuses those, but
        drafts found in the text). `max_num_batched_tokens` bounds a step over a pool (512: long
        prompts hold no answers up), `enable_prefix_caching` has shared beginnings computed once.
        `packed_prompts`: on GPUs, too, prompts attend to low-bit keys and values as they are kept.
        `gpu_memory_utilization`: the share of each GPU's memory that is used at most.
        `prefer`: of plans made here, `quality` (bits as stored where they fit; the default),
        `balanced` or `speed`.
        `speculate` and `gamma` (tokens drafted per verify) are the plan's unless they are given.
        `generation_config`: whose generation_config.json says which tokens end answers and how they
        are sampled by default: the model's ("auto"), none ("vllm"), or that of a directory.
        `trace`: a file for what every stage did when and for which requests, written by `close`.
        `stages_apart`: a single stage, too, is a process, at nice 19 on a CPU, as servers have it.
        `use_tqdm`: loading has a progress bar where stderr is a terminal; else a line every 5 s.
        """
        wishes = Wishes(
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, revision=revision, dtype=dtype,
            kv_cache_dtype=kv_cache_dtype, kv_pool=kv_pool, speculate=speculate, prefer=prefer,
            gpu_memory_utilization=gpu_memory_utilization,
        )  # fmt: skip
        chosen = choose_plan(model, plan, cluster, wishes)
        self.generation_config = read_generation_config(chosen.directory, generation_config)
        self._default_sampling = _default_sampling(self.generation_config)
        chosen = replace(chosen, spec=self.generation_config.with_ends(chosen.spec))
        self._plan = with_kv(chosen.plan, chosen.spec, kv_cache_dtype)
        self._traces = trace is not None
        mode, length = _drafts(self._plan, speculate, gamma, str(chosen.directory))
        settings = StageSettings(
            model_dir=str(chosen.directory),
            speculate=mode, gamma=length, links=links, end_ids=chosen.spec.eos_token_ids,
            layer_cache=None if layer_cache is None else str(Path(layer_cache).resolve()),
            trace=trace is not None,
            live=True,
            max_model_len=max_model_len,
            step_tokens=_at_least_one("max_num_batched_tokens", max_num_batched_tokens),
            prefix_cache=enable_prefix_caching, gpu_pool=kv_pool, packed_prompts=packed_prompts,
        )  # fmt: skip
        self._settings = settings
        self._prompts = _prompts(chosen, self._plan, settings)
        self._asked: dict[str, tuple[int, ...]] = {}  # prompts under way: their requests
        self._traced: dict[int, str] = {}  # requests that the trace may tell of: their names
        launch = Launch(backend=backend, ray_address=ray_address, stages_apart=stages_apart)
        with LoadBar(quiet=not use_tqdm) as bar:
            launch = replace(launch, on_load=bar.on_load)
            self._engine = self._started(settings, chosen.cluster, deadlines, launch)
        self._prompts.wait_for_guide = self._engine.engine.wait_for_guide
        # Ended by `close`, by `del`, or when the interpreter ends: nothing of it refers to the LLM.
        write = None if trace is None else partial(_write_trace, Path(trace), self._traced)
        self._end_engine = weakref.finalize(self, self._engine.close, write)

    def _started(
        self,
        settings: StageSettings,
        cluster: Cluster | None,
        deadlines: Deadlines | None,
        launch: Launch,
    ) -> EngineThread:
        start = Engine.start(
            self._plan, settings, cluster=cluster, deadlines=deadlines, launch=launch
        )
        with ExitStack() as stack:
            engine = stack.enter_context(start)
            self._prompts.wait_until_read()
            return EngineThread(engine, stack.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way and take the stages down; again does nothing.

        `del llm` does the same once nothing else refers to it, and so does the script's end.
        """
        self._end_engine()

    @property
    def plan(self) -> Plan:
        """Who holds which layers at which bits, and what was predicted."""
        return self._plan

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `ValueError` where there is none."""
        return self._prompts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how answers are sampled where nothing else is said: as generation_config.json."""
        return self._default_sampling

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self._prompts.max_model_len

    def check_alive(self) -> None:
        """Raise what ended the engine, if it has ended."""
        self._engine.check_alive()

    def stage_work(self) -> list[dict[str, Any]]:
        """Return how long each stage has computed, and its steps by kind; asks the stages."""
        self._engine.check_alive()
        return self._engine.engine.work()

    def stats(self) -> dict[str, Any]:
        """Return counters of the run so far and what every stage holds."""
        engine = self._engine.engine
        parts = zip(self._plan.stages, engine.stage_pids(), engine.load_reports, strict=True)
        stages = [
            {
                "device": stage.device,
                "node": stage.node,
                "layers": list(stage.layers),
                "pid": pid,
                "weights_bytes": load.weights_bytes,
                "kv_bytes": load.kv_bytes,
                "predicted": self._plan.promised_steps(stage),
            }
            for stage, pid, load in parts
        ]
        told = self._engine.stats()
        cache = {
            "block_size": BLOCK_TOKENS,
            "cache_dtype": self._plan.workload.kv.value,
            "enable_prefix_caching": self._settings.prefix_cache,
            "num_gpu_blocks": told["gauges"].get("blocks", 0),
        }
        return {**told, "requests": list(self._asked), "stages": stages, "cache": cache}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers to prompts, in their order; `ValueError` if one can never run.

        `use_tqdm`: several prompts have a progress bar where stderr is a terminal.
        """
        several = listed(prompts)
        params = self._default_sampling if sampling_params is None else sampling_params
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise ValueError(
                f"got {len(each)} sampling_params for {len(several)} prompts; give one, or one each"
            )
        return self._serve([
            self._prompts.ask(prompt, own) for prompt, own in zip(several, each, strict=True)
        ], use_tqdm=use_tqdm)  # fmt: skip

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answer to a conversation, or to each of several, by the model's template.

        `use_tqdm`: as for `generate`.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        alone = isinstance(messages[0], Mapping)
        several = cast(Sequence[Messages], [messages] if alone else messages)
        params = sampling_params or self._default_sampling
        prompts = [self._prompts.conversation(one) for one in several]
        asks = [self._prompts.ask(prompt, params) for prompt in prompts]
        return self._serve(asks, use_tqdm=use_tqdm)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[str]:
        """Yield the answer's text as it comes; joined, the pieces are the text of `generate`.

        Leaving the loop early aborts the request, and so does `abort(request_id)`.
        """
        params = sampling_params or self._default_sampling
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
        params = sampling_params or self._default_sampling
        ask = await self._prompts.ask_beside(
            prompt, params, name=request_id, stream=True, priority=priority, cache_salt=cache_salt
        )
        made = asyncio.ensure_future(self._submit(ask))
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_give_up)  # it may still become one that nobody reads
            raise

    async def _submit(self, ask: PreparedPrompt) -> ResponseStream:
        """Begin the answers to what is asked."""
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox, self._entrance = OutputQueue(loop), AsyncSubmitter(loop, self._engine)
        self._begin([ask])
        answers = ResponseStream(
            ask, self._prompts, self._engine, self._inbox, ended=lambda: self._end([ask])
        )
        try:
            await answers.begin(self._entrance)
        except BaseException:
            self._end([ask])
            raise
        return answers

    def abort(self, request_id: str) -> None:
        """End a prompt's answers between two steps; what there is of them is the result.

        A name that is not under way is no error: it may just have ended.
        """
        self._engine.abort(self._asked.get(request_id, ()))

    def _serve(self, asks: Sequence[PreparedPrompt], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run all requests to their end; an interruption ends them."""
        news: queue.SimpleQueue[RequestOutputDelta] = queue.SimpleQueue()
        requests = [request for ask in asks for request in ask.requests]
        finished: dict[int, RequestOutputDelta] = {}
        self._begin(asks)
        try:
            if requests:
                self._engine.submit(requests, news.put)
            with ProgressReporter(len(requests), quiet=not use_tqdm or len(requests) < 2) as bar:
                while len(finished) < len(requests):
                    heard = news.get()
                    if heard.error is not None:
                        raise heard.error
                    if heard.finished is not None:
                        finished[heard.id] = heard
                        bar.update(self._engine.progress, len(finished))
        except BaseException:
            self._engine.abort([r.id for r in requests if r.id not in finished])
            raise
        finally:
            self._end(asks)
        return [self._output(ask, finished) for ask in asks]

    def _output(
        self, ask: PreparedPrompt, finished: Mapping[int, RequestOutputDelta]
    ) -> RequestOutput:
        ends = [finished[request.id] for request in ask.requests]
        noted = ends[0].noted
        scores = None
        if ask.params.prompt_logprobs is not None and noted is not None:
            scores = [None, *self._prompts.logprobs(noted.prompt)]
        return RequestOutput(
            request_id=ask.name,
            prompt=ask.prompt,
            prompt_token_ids=ask.tokens,
            outputs=[
                self._prompts.output(ask, index, end.finished, end.noted or LogprobOutput())
                for index, end in enumerate(ends)
                if end.finished is not None
            ],
            prompt_logprobs=scores,
            num_cached_tokens=ends[0].finished.num_prefix_hits if ends[0].finished else 0,
        )

    def _begin(self, asks: Sequence[PreparedPrompt]) -> None:
        for ask in asks:
            if ask.name in self._asked:
                raise ValueError(f"request_id '{ask.name}' is under way; take another one")
            self._asked[ask.name] = tuple(request.id for request in ask.requests)
            if self._traces and len(self._traced) < MAX_EVENTS:
                self._traced |= dict.fromkeys(self._asked[ask.name], ask.name)

    def _end(self, asks: Sequence[PreparedPrompt]) -> None:
        for ask in asks:
            self._asked.pop(ask.name, None)


def _prompts(chosen: Chosen, plan: Plan, settings: StageSettings) -> RequestFactory:
    """Return who makes requests of prompts and refuses those that can never run."""
    directory, spec = chosen.directory, chosen.spec
    live = PoolPlan(plan, spec, settings)
    if live.use_paged_engine:
        pool = live.limits
        return RequestFactory(directory, spec, max_len=pool.room - 1, check=pool.check)
    slots = limits_of(plan)
    return RequestFactory(directory, spec, max_len=slots.max_len, check=slots.check)


def _default_sampling(generation: GenerationConfig) -> SamplingParams:
    try:
        return SamplingParams(**generation.sampling)
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{generation.path}': {error}; {IGNORE}") from None


def _write_trace(path: Path, asked: Mapping[int, str], engine: Engine) -> None:
    """Write what every stage did; `asked`: the names of requests."""
    names = [f"stage {i} {stage.device}" for i, stage in enumerate(engine.plan.stages)]
    try:
        write_chrome_trace(path, names, engine.records(), asked)
    except OSError as error:
        _log.warning("the trace '%s' could not be written: %s", path, error)


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    return value


def _give_up(made: asyncio.Future[ResponseStream]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().give_up()


def _drafts(
    plan: Plan, mode: SpeculationMode | Literal["off"] | None, gamma: int | None, path: str
) -> tuple[SpeculationMode | None, int | None]:
    """Return who drafts and how many tokens; `ValueError` for a wish that cannot be met."""
    planned = plan.speculation
    if mode == "off" or (mode is None and planned is None):
        if gamma is not None:
            raise ValueError(f"gamma={gamma} has no effect without drafts; give speculate, too")
        return None, None
    if mode is None:
        assert planned is not None
        return planned.mode, planned.gamma if gamma is None else gamma
    modes = usable_modes(plan, stored_codes(path))
    if mode not in modes:
        usable = ", ".join(modes)
        raise ValueError(f"speculate='{mode}' cannot draft for this plan; choose one of {usable}")
    alone_on_gpu = len(plan.stages) == 1 and not plan.stages[0].is_cpu
    if gamma is None and not alone_on_gpu:
        raise ValueError(f"speculate='{mode}' needs gamma=1..{MAX_GAMMA}, tokens drafted at once")
    if gamma is not None and not 1 <= gamma <= MAX_GAMMA:
        raise ValueError(f"gamma must be 1..{MAX_GAMMA}, got {gamma}")
    return mode, gamma
