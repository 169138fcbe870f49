"""A CPU's layers as one call: bit for bit what their parts give one by one, and which are taken."""

import pytest
import torch

from llmpq.kernels.native import library
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends.cpu import NativeLayers
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.cache.recurrent_states import with_states
from llmpq.runtime.models.layers import PlainLayers
from llmpq.runtime.models.linear import round_activations
from llmpq.runtime.requests.request import PagedRow
from llmpq.runtime.steps.step import RaggedStep, Step
from llmpq.sizes.kv_format import packed_blocks
from llmpq.sizes.pool_size import PoolSize
from reference.pipeline import ReferencePipeline

pytestmark = [pytest.mark.cpu, pytest.mark.native]
LEVELS = [level.name for level in library.usable_levels()]


@pytest.fixture(params=sorted({*LEVELS[:1], *LEVELS[-1:]}))
def level(request, monkeypatch):
    monkeypatch.setattr(library, "best_level", lambda: library.LEVELS[request.param])


class Counted(NativeLayers):
    """Counts the layers that the one call served, whole, in halves or all of a stage."""

    def __init__(self, stacks=True):
        super().__init__()
        self.whole = self.recurrent = self.halves = self.stacked = 0
        self.stacks = stacks

    def all_layers(self, layers, x, step, kv):
        y = super().all_layers(layers, x, step, kv) if self.stacks else None
        self.stacked += len(layers) * (y is not None)
        return y

    def _native(self, layer):
        native = super()._native(layer)
        if native is not None:
            whole, recur, before = native.whole, native.recur, native.before

            def count_whole(*given):
                self.whole += 1
                whole(*given)

            def count_recurrent(*given):
                self.recurrent += 1
                recur(*given)

            def count_before(*given):
                self.halves += 1
                return before(*given)

            native.whole, native.recur = count_whole, count_recurrent
            native.before = count_before
            self._known.pop(layer)
        return native


def model_of(directory, bits, dtype):
    pipeline = ReferencePipeline.from_directory(
        directory, precisions=[Precision.parse(bits)] * _layers(directory), dtype=dtype
    )
    return pipeline, pipeline.stages[0]


def _layers(directory):
    from llmpq.models.model_spec import ModelSpec

    return ModelSpec.from_directory(directory).num_layers


def set_runner(stage, runner):
    for layer in stage.layers:
        layer.runner = runner


def pool_steps(pipeline, stage, kv, rows):
    """Return the logits of three steps of one token a row behind prompts of 3, 4, ... tokens."""
    spec = pipeline.spec
    size = PoolSize(num_blocks=rows, slots=rows, max_len=100, prefix_cache=False)
    attending = [layer for layer in range(spec.num_layers) if spec.has_kv(layer)]
    pool = make_paged_kv(spec, kv, size, layers=attending, dtype=pipeline.dtype)
    pool = with_states(
        pool,
        spec,
        num_layers=spec.num_layers,
        slots=rows,
        snapshots=0,
        dtype=pipeline.dtype,
        device="cpu",
    )
    given = 1 if kv is KVPrecision.KV16 else packed_blocks(size.max_len)
    pool.take_rows(
        [PagedRow(slot=row, new_blocks=(row,) * min(1, given)) for row in range(rows)], [0] * rows
    )
    slots, starts, counts = list(range(rows)), [0] * rows, [3 + row for row in range(rows)]
    out = []
    for _ in range(4):
        step = RaggedStep.of_rows(slots, starts, counts, wanted=[1] * rows)
        tokens = torch.arange(7, 7 + sum(counts))[None] % spec.vocab
        out.append(stage.logits(stage(tokens, step, pool), step))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        counts = [1] * rows
    return torch.stack(out[1:])


def slot_steps(pipeline, stage, rows):
    caches = pipeline.caches(rows, 40)
    tokens = torch.arange(5, 5 + 6 * rows).view(rows, 6)
    slots, out = list(range(rows)), []
    pipeline.logits(tokens, Step.of(slots, [0] * rows, [6] * rows), caches)
    for place in range(3):
        step = Step.of(slots, [6 + place] * rows, [1] * rows)
        out.append(pipeline.logits(tokens[:, place : place + 1], step, caches))
    return torch.stack(out)


@pytest.mark.thin(2)
@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 13])
@pytest.mark.parametrize(
    "bits, dtype",
    [("4", torch.bfloat16), ("8", torch.float32), ("16", torch.float16), ("16", torch.bfloat16)],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_one_call_gives_what_the_parts_give(level, tiny_models, kind, bits, dtype, rows):
    pipeline, stage = model_of(tiny_models.directory(kind), bits, dtype)
    counted, alone = Counted(), Counted(stacks=False)
    for way in (
        lambda: pool_steps(pipeline, stage, KVPrecision.KV16, rows),
        lambda: slot_steps(pipeline, stage, rows),
    ):
        set_runner(stage, PlainLayers())
        wanted = way()
        for runner in (counted, alone):
            set_runner(stage, runner)
            assert torch.equal(way(), wanted)
    num = pipeline.spec.num_layers
    assert counted.stacked == 3 * num and counted.whole == 0 and counted.halves >= 3 * num
    assert alone.whole == 3 * num and alone.stacked == 0


@torch.inference_mode()
@pytest.mark.parametrize("bits, dtype", [("4", torch.bfloat16), ("16", torch.float32)])
@pytest.mark.parametrize("kind", ["qwen3_5", "lfm2", "bamba", "olmo_hybrid"])
def test_recurrent_layers_are_in_the_one_call(level, models, kind, bits, dtype):
    """Gated attention of partly rotated heads (Qwen3.5), delta rules, Mamba-2, convolutions."""
    pipeline, stage = model_of(models.directory(kind), bits, dtype)
    set_runner(stage, PlainLayers())
    wanted = pool_steps(pipeline, stage, KVPrecision.KV16, 3)
    counted, alone = Counted(), Counted(stacks=False)
    near = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for runner in (counted, alone):
        set_runner(stage, runner)
        found = pool_steps(pipeline, stage, KVPrecision.KV16, 3)
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    half = pipeline.spec.num_layers // 2
    if kind == "olmo_hybrid":  # norms behind its attention: layers run one by one
        assert counted.stacked == 0 and counted.recurrent == 3 * half
    else:
        assert counted.stacked == 6 * half and counted.whole == counted.recurrent == 0
        assert alone.whole == alone.recurrent == 3 * half and alone.stacked == 0


@torch.inference_mode()
def test_low_bit_caches_take_the_two_halves(level, demo_model):
    pipeline, stage = model_of(demo_model, "4", torch.bfloat16)
    set_runner(stage, PlainLayers())
    wanted = pool_steps(pipeline, stage, KVPrecision.KV4, 2)
    counted = Counted()
    set_runner(stage, counted)
    assert torch.equal(pool_steps(pipeline, stage, KVPrecision.KV4, 2), wanted)
    assert counted.whole == counted.stacked == 0 and counted.halves


@torch.inference_mode()
def test_weights_that_change_are_noticed(demo_model):
    pipeline, stage = model_of(demo_model, "4", torch.bfloat16)
    runner = NativeLayers()
    set_runner(stage, runner)
    exact = pool_steps(pipeline, stage, KVPrecision.KV16, 2)
    round_activations(stage)
    rounded = pool_steps(pipeline, stage, KVPrecision.KV16, 2)
    set_runner(stage, PlainLayers())
    assert torch.equal(pool_steps(pipeline, stage, KVPrecision.KV16, 2), rounded)
    assert not torch.equal(exact, rounded)
    held = stage.layers[0].attn_norm
    held.weight = held.weight * 1.02  # a fault in one part shows
    assert not torch.equal(pool_steps(pipeline, stage, KVPrecision.KV16, 2), rounded)


@torch.inference_mode()
def test_a_draft_rounds_its_inputs_here_too(demo_model):
    pipeline, stage = model_of(demo_model, "4", torch.bfloat16)
    set_runner(stage, PlainLayers())
    exact = pool_steps(pipeline, stage, KVPrecision.KV16, 2)
    for layer in stage.layers:
        layer.mlp.down.weight = layer.mlp.down.weight.as_draft("qspec")
    rounded = pool_steps(pipeline, stage, KVPrecision.KV16, 2)
    assert not torch.equal(exact, rounded)
    set_runner(stage, NativeLayers())
    assert torch.equal(pool_steps(pipeline, stage, KVPrecision.KV16, 2), rounded)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["opt", "bloom", "mixtral"])
def test_other_layers_run_by_their_parts(tiny_models, kind):
    pipeline, stage = model_of(tiny_models.directory(kind), "16", torch.float32)
    counted = Counted()
    set_runner(stage, counted)
    slot_steps(pipeline, stage, 2)
    assert counted.whole == counted.stacked == counted.halves == 0
