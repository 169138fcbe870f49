"""Models with windows: blocks that left the window are given to others.

And their caches of few bits, which keep all blocks and see them through the window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import llmpq
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.kernels.kv.reference import EVERYTHING
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.runtime.requests.request import Request
from llmpq.runtime.steps.step import Step
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.pool_size import PoolSize, wanted_pool
from llmpq.workload import CHUNK_TOKENS, Workload
from reference.contiguous_kv import make_kv_cache
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline, pad

pytestmark = pytest.mark.cpu
NEW = 24
SPLITS = [((), 64), ((1, 3), 1000), ((1,), 200)]
"""Where stages are split, with the tokens of a step; the last in `make test-all`."""


class Interrupting(Scheduler):
    """Preempts the youngest request at every ninth step."""

    steps = 0

    def next_micro_batch(self) -> Any:
        self.steps += 1
        if self._running and self.steps % 9 == 0:
            self._preempt(max(self._running))
        return super().next_micro_batch()


def test_tokens_beyond_the_window_equal_transformers_over_stages_chunks_and_found_prefixes(
    windowed_model: Any, random_prompts: Any, make_plan: Any, seeds: Any
) -> None:
    directory = windowed_model.directory
    trunk, *tails = random_prompts(420, 4, 60, 130, seed=5)
    prompts = [trunk + tail for tail in tails] + random_prompts(20, 150, seed=8)
    expected = windowed_model.greedy(prompts, NEW)
    spec = ModelSpec.from_directory(directory)
    window = windowed_model.window
    size = PoolSize(num_blocks=8, slots=4, max_len=900, window=window, window_blocks=5)
    hits = preempted = 0
    for splits, step_tokens in SPLITS[: 1 + len(seeds(SPLITS))]:
        plan = make_plan(directory, splits, batch=4)
        limits = PoolLimits(
            num_blocks=size.num_blocks,
            window=size.window,
            window_blocks=size.window_blocks,
            max_rows=4,
            max_len=size.max_len,
            step_tokens=step_tokens,
            decode_rows=3,
            num_stages=len(splits) + 1,
        )
        stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=size)
        scheduler = Interrupting(limits)
        for _ in range(2):  # the second time with what the first has left
            requests = [
                Request(id=i, prompt=tuple(prompt), max_new=NEW) for i, prompt in enumerate(prompts)
            ]
            found = {end.id: end for end in stages.run(scheduler, requests).finished}
            scheduler.check()
            assert [found[i].tokens for i in range(len(prompts))] == expected
            hits += sum(end.num_prefix_hits for end in found.values())
            preempted += sum(end.num_preemptions for end in found.values())
    assert hits > 0 and preempted > 0


def test_a_plan_states_the_pools_that_its_stages_allocate_and_windows_bound_them(
    windowed_model: Any,
) -> None:
    directory = windowed_model.directory
    spec = ModelSpec.from_directory(directory)
    work = {"batch": 6, "prompt_len": 1000, "gen_len": 25, "kv": "16", "dtype": "float32"}
    made = llmpq.make_plan(directory, devices="cpu,cpu", **work)  # type: ignore[arg-type]
    size = PoolPlan(made, spec, EngineOptions()).size
    # 1024 cached tokens: 8 blocks each; a window of 140 spans 3, and a step's prompts 16.
    assert (size.num_blocks, size.window_blocks) == (48, 6 * 3 + 16)
    assert size.window == windowed_model.window
    stages = OpenStages(made, spec, CheckpointSource(directory, spec), pool=size)
    assert made.pool is not None
    assert [load.kv_bytes for load in stages.loads] == list(made.pool.stage_bytes)
    block = 128 * 2 * spec.kv_heads * spec.head_dim * 4
    windowed = sum(map(spec.is_windowed, range(4)))
    assert windowed in (1, 2, 4)
    assert sum(made.pool.stage_bytes) == block * (windowed * 34 + (4 - windowed) * 48)


def test_one_pool_serves_where_windows_would_save_nothing(windowed_model: Any) -> None:
    spec = ModelSpec.from_directory(windowed_model.directory)
    short = Workload(batch=2, prompt_len=300, gen_len=5)
    assert CHUNK_TOKENS > 300 and wanted_pool(spec, short, max_len=2048).window == 0
    long = wanted_pool(spec, Workload(batch=2, prompt_len=1500, gen_len=5), max_len=2048)
    assert long.window_blocks == 2 * 3 + 4
    assert long.of_blocks(12).window_blocks == 7 and long.of_blocks(7).window == 0
    bytes_of = [
        long.of_blocks(blocks).nbytes(spec, KVPrecision.KV16, layers=range(4), dtype_bytes=4)
        for blocks in range(24, 0, -1)
    ]
    assert bytes_of == sorted(bytes_of, reverse=True)
    pool = make_paged_kv(spec, KVPrecision.KV16, long, layers=range(1, 4), dtype=torch.float32)
    assert pool.nbytes == long.nbytes(spec, KVPrecision.KV16, layers=range(1, 4), dtype_bytes=4)


def last_logits(pipeline: ReferencePipeline, kv: KVPrecision, prompt: list[int]) -> torch.Tensor:
    """Return the logits behind a prompt, whose every token reads packed keys and values."""
    spec, first = pipeline.spec, len(prompt) - 1
    cache = make_kv_cache(spec, kv, num_layers=4, slots=1, max_len=len(prompt), dtype=torch.float32)
    pipeline.hidden(pad([prompt[:first]]), Step.of([0], [0], [first]), [cache])
    return pipeline.logits(pad([prompt[first:]]), Step.of([0], [first], [1]), [cache])


def test_packed_caches_see_through_the_window_with_caps_and_sinks(
    windowed_model: Any, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ReferencePipeline.from_directory(windowed_model.directory)
    (prompt,) = random_prompts(420, seed=3)
    exact = last_logits(pipeline, KVPrecision.KV16, prompt)

    def error(kv: KVPrecision) -> float:
        return float((last_logits(pipeline, kv, prompt) - exact).norm() / exact.norm())

    errors = [error(kv) for kv in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2)]
    assert 0 < errors[0] < 0.03 and errors[0] < min(errors[1:])
    run = QuantizedKVCache.run
    monkeypatch.setattr(
        QuantizedKVCache, "run", lambda *a: run(*a[:-1], replace(a[-1], rule=EVERYTHING))
    )
    assert error(KVPrecision.KV8) > 3 * errors[0], "a rule that is forgotten must be seen"


@pytest.mark.parametrize(
    "kv", [pytest.param(KVPrecision.KV8, marks=pytest.mark.seldom), KVPrecision.KV4]
)
def test_packed_pools_equal_their_unpaged_twin(
    windowed_model: Any, random_prompts: Any, make_plan: Any, kv: KVPrecision
) -> None:
    directory = windowed_model.directory
    pipeline = ReferencePipeline.from_directory(directory)
    prompts = random_prompts(420, 20, 200, seed=4)
    expected = [packed_greedy(pipeline, kv, prompt) for prompt in prompts]
    size = PoolSize(num_blocks=9, slots=3, max_len=900)
    limits = PoolLimits(
        num_blocks=9, kv=kv, max_rows=3, max_len=900, step_tokens=90, decode_rows=3, num_stages=2
    )
    plan = make_plan(directory, (1,), batch=3, kv=kv)
    spec = ModelSpec.from_directory(directory)
    stages = OpenStages(plan, spec, CheckpointSource(directory, spec), pool=size)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    found = stages.run(Scheduler(limits), requests).tokens
    assert [found[i] for i in range(3)] == expected


def packed_greedy(pipeline: ReferencePipeline, kv: KVPrecision, prompt: list[int]) -> list[int]:
    """Return the tokens of a prompt alone, every query over packed keys as far as it sees them."""
    cache = make_kv_cache(
        pipeline.spec,
        kv,
        num_layers=4,
        slots=1,
        max_len=len(prompt) + NEW,
        dtype=torch.float32,
    )
    tokens, start, new = [], 0, prompt
    for _ in range(NEW):
        step = Step.of([0], [start], [len(new)])
        logits = pipeline.logits(pad([new]), step, [cache])
        start += len(new)
        new = [int(logits.argmax())]
        tokens += new
    return tokens
