"""The GPU's way through a stage, its kernels interpreted: the CPU's tokens, for every family."""

import pytest
import torch
from triton import knobs

from llmpq.kernels.fused import rope_append
from llmpq.kernels.weights import dense_weight
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.build_stage import load_slots
from llmpq.runtime.backends.gpu import cuda_graphs, cuda_layers
from llmpq.runtime.backends.gpu.cuda_graphs import rounded_rows
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.engine.mailbox import Mailbox
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.models.layers import DecoderLayer
from llmpq.runtime.models.sampling import SamplerConfig
from llmpq.runtime.request import Request
from llmpq.runtime.step import Step
from llmpq.runtime.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
NEW = 4


@pytest.fixture
def on_gpu_path(monkeypatch, request):
    """Send decoder layers through the GPU's code, their weights plain as on a GPU.

    Appending is half of the interpreter's work: its twin does it in tests of one model's steps.
    """
    torch.set_num_threads(1)
    if "transformers" not in request.node.name:
        monkeypatch.setattr(rope_append, "rope_append", rope_append.rope_append_reference)
    monkeypatch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
    monkeypatch.setattr(
        DecoderLayer,
        "forward",
        lambda layer, *given, **options: cuda_layers.decoder_layer(layer, *given, **options),
    )


class CountingStage(CudaSlotStageRunner):
    """Counts the steps that were issued before their tokens were known."""

    blind_steps = 0

    def run(self, message, hidden_BQH):
        self.blind_steps += any(row == [-1] for row in message.tokens)
        return super().run(message, hidden_BQH)


def stage(plan, model, **options):
    spec = ModelSpec.from_directory(model)
    source = CheckpointSource(model, spec)
    loaded, kv = load_slots(plan, 0, spec, source, torch.device("cpu"))
    return CountingStage(
        loaded,
        kv,
        torch.device("cpu"),
        torch.float32,
        workload=plan.workload,
        decode_microbatch=plan.decode_microbatch,
        **options,
    )


def serve(plan, compute, requests):
    """Run requests through the first stage's loop; return tokens by request."""
    mailbox = Mailbox()
    for request in requests:
        mailbox.requests.put(request)
    mailbox.requests.put(None)
    limits = SlotLimits(
        num_slots=plan.workload.batch,
        prompt_len=plan.workload.prompt_len,
        max_len=plan.workload.max_len,
        prefill_microbatch=plan.prefill_microbatch,
        decode_microbatch=plan.decode_microbatch,
    )
    FirstStage(SlotScheduler(limits), compute, None, mailbox, Recorder(), num_stages=1).run()
    return {finished.id: finished.tokens for finished in mailbox.finished}


@pytest.mark.parametrize("kind", ["opt", "bloom", "llama", "qwen3"])
def test_tokens_equal_transformers(kind, tiny_models, random_prompts, make_plan, on_gpu_path):
    model, prompts = tiny_models.directory(kind), random_prompts(9, 3, 9, 7, 5)
    plan = make_plan(model, batch=3, decode_microbatch=3, prefill_microbatch=2)
    compute = stage(plan, model)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    tokens = serve(plan, compute, requests)
    assert list(dict(sorted(tokens.items())).values()) == tiny_models.greedy(kind, prompts, NEW)
    assert compute.blind_steps > 0, "no step ran ahead of the host"


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_prompts_of_a_width_that_came_before(
    kind, tiny_models, random_prompts, make_plan, on_gpu_path
):
    model, prompts = tiny_models.directory(kind), random_prompts(9, 9, 5, 9, 5)
    plan = make_plan(model, batch=3, decode_microbatch=3, prefill_microbatch=1)
    compute = stage(plan, model)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    tokens = serve(plan, compute, requests)
    assert list(dict(sorted(tokens.items())).values()) == tiny_models.greedy(kind, prompts, NEW)
    assert sorted(compute._prompts._widths) == [5, 9]


@pytest.mark.parametrize("kept_rows", [0, 32])
def test_sampled_and_stopping_requests_beside_greedy_ones(
    kept_rows, tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    monkeypatch.setattr(cuda_graphs, "KEPT_ROWS", kept_rows)
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 8, 6, seed=2)
    plan = make_plan(model, batch=3, decode_microbatch=3, prefill_microbatch=3)
    sampled = SamplerConfig(temperature=0.8, top_p=0.9, seed=3)
    params = [SamplerConfig(), sampled, SamplerConfig()]
    pipeline = ReferencePipeline.from_directory(model)
    want = pipeline.generate(prompts, max_new=NEW, params=params)
    stop = frozenset(want[2][1:2])
    assert want[2][0] not in stop
    want[2] = want[2][:2]
    requests = [
        Request(
            id=i,
            prompt=tuple(prompt),
            max_new=NEW,
            sampling=params[i],
            stop_ids=stop if i == 2 else frozenset(),
        )
        for i, prompt in enumerate(prompts)
    ]
    tokens = serve(plan, stage(plan, model), requests)
    assert [tokens[i] for i in range(3)] == want


def test_low_bit_cache(tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch):
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 6)
    plan = make_plan(model, batch=2, kv=KVPrecision.KV8, decode_microbatch=2)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    got = serve(plan, stage(plan, model), requests)
    monkeypatch.undo()
    spec, cpu = ModelSpec.from_directory(model), torch.device("cpu")
    loaded = load_slots(plan, 0, spec, CheckpointSource(model, spec), cpu)
    plain = SlotStageRunner(*loaded, cpu, torch.float32)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    assert serve(plan, plain, requests) == got


def test_rows_are_rounded_up_and_never_beyond_the_plan():
    assert [rounded_rows(n, 32) for n in (1, 2, 3, 5, 9, 31, 32)] == [1, 2, 4, 8, 16, 32, 32]
    assert rounded_rows(3, 3) == 3 and rounded_rows(5, 6) == 6 and rounded_rows(12, 12) == 12


def test_a_prompts_last_layer_goes_on_with_its_last_token(on_gpu_path, tiny_models, make_plan):
    model = tiny_models.directory("llama")
    compute = stage(make_plan(model, batch=2, decode_microbatch=2), model)
    step = Step.of([0, 1], [0, 0], [5, 3])
    tokens_BQ = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    whole, last = (
        compute.model(tokens_BQ, step, compute.kv, last_only=only) for only in (False, True)
    )
    assert whole.shape[1] == 5 and last.shape[1] == 1
    want, got = (compute.model.logits(hidden, step) for hidden in (whole, last))
    assert torch.allclose(got, want, atol=1e-5) and not torch.allclose(want[0], want[1], atol=1e-2)
