"""Families over a pool as on a GPU, kernels interpreted: the tokens and scores of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from triton import knobs

from llmpq.kernels.kv import prompt_attend
from llmpq.kernels.kv.paged import packed_pages_plan, paged_plan
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.weights import dense_weight
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import lacks
from llmpq.precision import KVPrecision
from llmpq.runtime.backends import build_stage
from llmpq.runtime.backends.cuda import CudaBackend
from llmpq.runtime.backends.gpu import cuda_layers
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.cache import gpu_packed_kv, gpu_paged_kv, gpu_paged_latents, paged_by_precision
from llmpq.runtime.cache.gpu_forwarding_kv import GpuKVByShape
from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.models.experts import MixtureBeside
from llmpq.runtime.models.layers import Attention, LayerTail
from llmpq.runtime.models.rotary import Rotary
from llmpq.sizes.pool_size import PoolSize
from reference.family_runs import Served, served, stages_of
from reference.fused_twins import rope_append_pages_reference
from reference.interpreted_stage import pack_quickly

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
NEW, TOLERANCE = 4, 1e-4
LENGTHS = (14, 3)
POOL = PoolSize(num_blocks=4, slots=2, max_len=40)
KINDS = (
    "llama with dynamic rope",
    "llama with yarn",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4",
    "granite",
    "olmo3",
    "qwen3_moe with windows, every other layer dense",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "cohere",
    "cohere2",
    "falcon of one norm for each",
    "stablelm 12B",
    "hunyuan",
    "smollm3",
    "exaone4",
    "apertus",
    "ministral3",
    "llama4",
    "llama4 in its wrapper, without chunks",
    "gemma4",
    "gemma4 with shared caches",
    "gemma4 in its wrapper",
    "gemma3n",
    "gemma3n with shared caches of both kinds",
)
"""One for each path through the kernels; test_cuda_families_gpu.py has all."""
SELDOM = (
    "llama4 in its wrapper, without chunks",
    "gemma4 with shared caches",
    "gemma4 in its wrapper",
    "gemma3n with shared caches of both kinds",
)
"""Of those that others here have most of: in `make test-all`."""

Run = Callable[..., Served]


@pytest.fixture
def on_gpu(models: Any, make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return what serves prompts by a GPU's code; appending by its twin, a second for 30 tokens."""
    torch.set_num_threads(1)
    lock, run_step = Lock(), CudaStageRunner.run

    def one_at_a_time(*given: Any) -> Any:
        with lock:  # Triton's interpreter serves one thread
            return run_step(*given)

    def run(kind: str, prompts: list[list[int]], *, on_cpu: bool = False, **options: Any) -> Served:
        directory, size = models.directory(kind), options.pop("size", POOL)
        splits = models.cuts(kind, options.pop("splits", ()))
        shape = {"batch": 2, "prompt_len": len(prompts[0]), "gen_len": NEW}
        plan = make_plan(directory, splits, kv=options.pop("kv", "kv16"), **shape)
        with monkeypatch.context() as patch:
            if not on_cpu:
                patch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
                patch.setattr(build_stage, "backend_of", lambda device: CudaBackend())
                patch.setattr(paged_by_precision, "_is_gpu", lambda device: True)
                for module in (gpu_paged_kv, gpu_paged_latents, gpu_packed_kv):
                    patch.setattr(module, "rope_append_pages", rope_append_pages_reference)
                patch.setattr(CudaStageRunner, "run", one_at_a_time)
            stages = stages_of(directory, plan, size, speculate=options.pop("speculate", None))
            assert not stages.computes[0].model.asks_host or on_cpu, "experts run one by one"
            return served(stages, prompts, size, new=NEW, **options)

    PagedPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]
    yield run
    PagedPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.seldom] * (kind in SELDOM)) for kind in KINDS]
)
def test_tokens_and_scores_equal_a_cpu(kind: str, on_gpu: Run, random_prompts: Any) -> None:
    """Prompts beyond windows and chunks, in chunks beside a row that decodes."""
    prompts = random_prompts(*LENGTHS)
    want = on_gpu(kind, prompts, on_cpu=True, step_tokens=9)
    got = on_gpu(kind, prompts, step_tokens=9)
    assert got.tokens == want.tokens and got.furthest(want) < TOLERANCE


@pytest.mark.parametrize(
    "kind",
    [
        "gemma4 with shared caches",
        *(pytest.param(kind, marks=pytest.mark.seldom) for kind in ("gemma3n", "llama4")),
    ],
)
def test_stages_and_whole_prompts(
    kind: str, on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes from stage to stage; prompts alone, which attend to their own keys."""
    prompts = random_prompts(*LENGTHS)
    want = on_gpu(kind, prompts, on_cpu=True)
    monkeypatch.setattr(prompt_attend, "LEAST_TOKENS", 3)
    for splits in ((), (1,)):
        got = on_gpu(kind, prompts, splits=splits)
        assert got.tokens == want.tokens and got.furthest(want) < TOLERANCE


def test_pools_of_windows_beside_heads_of_another_shape(
    on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks behind a window are others' by the end of a prompt of two blocks."""
    monkeypatch.setattr(cuda_layers, "norm", lambda part, x, **_: part(x))  # the twin's
    monkeypatch.setattr(paged_plan, "_tile_keys", lambda *_: 128)
    monkeypatch.setattr(paged_plan, "_chunk_rows", lambda *_: 128)
    prompts, size = random_prompts(140, 3), replace(POOL, num_blocks=6, max_len=300)
    want = on_gpu("gemma4", prompts, on_cpu=True, size=size)
    got = on_gpu("gemma4", prompts, size=replace(size, window=6, window_blocks=4))
    assert got.tokens == want.tokens and got.furthest(want) < TOLERANCE


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.seldom) for kind in ("gemma3n", "gemma4")), "llama4"],
)
def test_packed_blocks(
    kind: str, on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks over a block's end: of a cache that layers share, of unlike heads, in windows."""
    monkeypatch.setattr(cuda_layers, "norm", lambda part, x, **_: part(x))  # the twin's
    pack_quickly(monkeypatch)
    prompts, size = random_prompts(190), replace(POOL, max_len=300, prefix_cache=False)
    options = {"size": size, "kv": "kv4", "step_tokens": 100}
    want = on_gpu(kind, prompts, on_cpu=True, **options)
    got = on_gpu(kind, prompts, **options)
    exact = on_gpu(kind, prompts, on_cpu=True, **options | {"kv": "kv16"})
    few_bits = exact.furthest(want)
    assert got.tokens == want.tokens and got.furthest(want) < few_bits / 50
    if kind == "gemma3n":  # planted: readers append to what the step left of the newest tokens
        monkeypatch.setattr(GpuPackedKV, "keep_for_readers", lambda *_: None)
        assert on_gpu(kind, prompts, **options).furthest(want) > few_bits / 10


@pytest.mark.parametrize(
    ("kind", "mode"),
    [pytest.param("gemma4", "kv4", marks=pytest.mark.seldom), ("gemma3n", "w4kv4")],
)
def test_drafts(
    kind: str, mode: Any, on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of four bits of every shape, and of a cache that layers share."""
    monkeypatch.setattr(packed_pages_plan, "programs_per_sm", lambda *_, **__: 1)
    PackedPlan.of.__func__.cache_clear()  # type: ignore[attr-defined]
    (word,) = random_prompts(4)
    prompts, drafter = [(word * 4)[:13], word], FixedDrafter(mode, 3)
    want = on_gpu(kind, prompts, on_cpu=True)
    got = on_gpu(kind, prompts, speculate=mode, drafter=drafter)
    assert got.tokens == want.tokens and sum(drafter.acceptance.accepted) > 0


def test_a_step_brings_a_table_for_every_shape(models: Any) -> None:
    spec = ModelSpec.from_directory(models.directory("gemma4"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_by_precision, "_is_gpu", lambda device: True)
        kv = paged_by_precision.make_paged_kv(
            *(spec, KVPrecision.KV16, POOL), layers=range(spec.num_layers), dtype=torch.float32
        )
    assert isinstance(kv, GpuKVByShape) and kv.pages is kv
    table = kv.table([1, 0], [5, 9], [1, 3], num_rows=3, num_places=6)
    assert len(table) == kv.num_fields == 14 and len(kv.work_split(table)) == kv.num_work_split
    assert (table[:4] == table[7:11]).all(), "slots, starts, counts and firsts are of rows"
    assert kv.nbytes == POOL.nbytes(
        spec, KVPrecision.KV16, layers=range(spec.num_layers), dtype_bytes=4
    )


def test_what_no_kernel_computes_is_refused(
    on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: lengths that decide in a way that nothing on a device makes."""
    monkeypatch.setattr(Rotary, "is_dynamic", False)
    with pytest.raises(ValueError, match="rotary positions"):
        on_gpu("llama with dynamic rope", random_prompts(*LENGTHS))


def _without(**left_out: Any) -> Callable[..., Any]:
    whole = gpu_paged_kv.paged_attend

    def attend(*given: Any, rule: Any, **options: Any) -> Any:
        return whole(*given, rule=replace(rule, **left_out), **options)

    return attend


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "window": ("olmo3", gpu_paged_kv, "paged_attend", _without(window=0)),
    "sinks": ("gpt_oss", gpu_paged_kv, "paged_attend", _without(sinks_H=None)),
    "chunks": ("llama4", gpu_paged_kv, "paged_attend", _without(chunked=False)),
    "growth": ("ministral3", Attention, "grown", lambda _, q, step: q),
    "shared": ("gemma3n", Attention, "share", lambda part, k, v, step: step.memo.update(
        {f"keys of {part.sharing.own}": (v, k)}
    )),
    "values": ("gemma4", Attention, "with_values", lambda part, qk: torch.cat(
        (qk, qk[:, :, : part.kv_heads]), dim=2
    )),
    "own inputs": ("gemma4 with shared caches", LayerTail, "own_part", lambda tail, x, *_, **__: x),
    "experts": ("gemma4", MixtureBeside, "forward", lambda mixture, x: mixture.shared(x)),
}  # fmt: skip
"""What a kind computes, and what stands in its place."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, marks=[pytest.mark.seldom] * (fault in ("sinks", "values", "own inputs"))
        )
        for fault in FAULTS
    ],
)
def test_what_is_left_out_is_seen(
    fault: str, on_gpu: Run, random_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, owner, name, planted = FAULTS[fault]
    prompts = random_prompts(*LENGTHS)
    want = on_gpu(kind, prompts, on_cpu=True)
    if fault == "shared":  # whole prompts alone take keys and values from where they are left
        monkeypatch.setattr(prompt_attend, "LEAST_TOKENS", 3)
    monkeypatch.setattr(owner, name, planted)
    assert on_gpu(kind, prompts).furthest(want) > 10 * TOLERANCE


def test_the_kinds_run_on_gpus(models: Any) -> None:
    for kind in KINDS:
        assert not lacks(ModelSpec.from_directory(models.directory(kind)), "gpu"), kind
