"""Speculation's way through a GPU stage, its kernels interpreted: the tokens of plain decoding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from llmpq.kernels.formats.atom_scheme import AtomScheme
from llmpq.kernels.fused import rope_append, round_inputs
from llmpq.kernels.fused.ngram_lookup import look_up
from llmpq.kernels.kv.low_bit.low_bit_cache import QuantizedKVCache
from llmpq.kernels.weights import dense_weight
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.backends.build_stage import load_slots
from llmpq.runtime.backends.gpu import cuda_experts, cuda_layers
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.cache.dual_kv import DualKV
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.drafts import ngram
from llmpq.runtime.drafts.drafters import Acceptance, FixedDrafter
from llmpq.runtime.engine.mailbox import Mailbox
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.engine.stage_loop import FirstStage, result_tokens
from llmpq.runtime.launch.stages.stage_settings import limits_of
from llmpq.runtime.models.layers import DecoderLayer, PlainLayers
from llmpq.runtime.models.sampling import SamplerConfig
from llmpq.runtime.pending import arrived
from llmpq.runtime.request import Request, StepKind
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import describe
from llmpq.runtime.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes import gpu_workspace
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
NEW = 6


@pytest.fixture(autouse=True)
def on_gpu_path(monkeypatch, request):
    """Send decoder layers through the GPU's code.

    Appending to a plain cache is half of the interpreter's work, so its twin appends unless the
    test says `whole` in its name; tests/kernels/fused/ compare the two.
    """
    torch.set_num_threads(1)
    if "whole" not in request.node.name:
        monkeypatch.setattr(rope_append, "rope_append", rope_append.rope_append_reference)
    monkeypatch.setattr(
        DecoderLayer,
        "forward",
        lambda layer, *given, **options: cuda_layers.decoder_layer(layer, *given, **options),
    )


class CountingStage(CudaSlotStageRunner):
    """Counts steps by kind, and rounds that were issued before the last one's end was known."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kinds, self.blind_rounds = [], 0

    def run(self, message, hidden_BQH):
        self.kinds.append(message.kind)
        self.blind_rounds += -1 in message.starts
        return super().run(message, hidden_BQH)


def stage(plan, model, mode, index=0):
    spec = ModelSpec.from_directory(model)
    loaded, kv = load_slots(plan, index, spec, CheckpointSource(model, spec), torch.device("cpu"))
    compute = CountingStage(
        loaded, kv, torch.device("cpu"), torch.float32,
        workload=plan.workload, decode_microbatch=plan.decode_microbatch,
    )  # fmt: skip
    compute.enable_speculation(mode, plan.workload)
    return compute


def serve(plan, compute, requests, drafter):
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
    scheduler = SlotScheduler(limits, drafter=drafter)
    FirstStage(scheduler, compute, None, mailbox, Recorder(), num_stages=1).run()
    assert scheduler.idle
    return [tokens for _, tokens in sorted((done.id, done.tokens) for done in mailbox.finished)]


@pytest.mark.parametrize(
    "kind,mode",
    [("llama", "w4kv4"), ("bloom", "kv4"), pytest.param("llama", "ngram", id="llama-ngram-whole")],
)
def test_greedy_tokens_are_those_of_plain_decoding(
    mode, kind, tiny_models, random_prompts, make_plan, monkeypatch
):
    """Ragged batch, slots reused (4 requests, 2 slots), limits inside drafts, padded prompts."""
    monkeypatch.setattr(gpu_workspace, "PROMPT_WIDTH", 4)
    model, prompts = tiny_models.directory(kind), random_prompts(9, 3, 7, 5)
    lengths = [NEW, 1, 4, 2]
    want = [row[:n] for row, n in zip(tiny_models.greedy(kind, prompts, NEW), lengths, strict=True)]
    plan = make_plan(model, batch=2, decode_microbatch=2, prefill_microbatch=2)
    compute = stage(plan, model, mode)
    requests = [
        Request(id=i, prompt=tuple(p), max_new=n)
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    drafter = FixedDrafter(mode, 3)
    assert serve(plan, compute, requests, drafter) == want
    assert mode == "ngram" or drafter.acceptance.rate > 0
    assert compute.blind_rounds > 0, "no round ran ahead of the host"
    assert set(compute.kinds) == {StepKind.PREFILL, StepKind.ROUND}


@pytest.mark.parametrize(
    "kind,mode",
    [("gemma2", "kv4"), ("gpt_oss", "w4kv4"), ("deepseek_v2", "kv4"), ("deepseek_v3", "ngram")],
)
def test_families_with_rules_and_latents_draft_as_well(
    mode, kind, models, random_prompts, make_plan, monkeypatch
):
    """Windows, caps, sinks and latents: the model's cache by their kernels, the copy's beside."""
    monkeypatch.setattr(gpu_workspace, "PROMPT_WIDTH", 4)
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    monkeypatch.setattr(dense_weight, "pack_dense", lambda weight_NK: weight_NK)
    model, prompts = models.directory(kind), random_prompts(9, 3)
    want = [row[:NEW] for row in models.greedy(kind, prompts)]
    plan = make_plan(model, batch=2, decode_microbatch=2, prefill_microbatch=2)
    compute = stage(plan, model, mode)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    drafter = FixedDrafter(mode, 3)
    assert serve(plan, compute, requests, drafter) == want
    assert mode == "ngram" or drafter.acceptance.rate > 0


class ShortLived(FixedDrafter):
    """Drafts in two rounds, then says that drafts are in vain."""

    rounds = 0

    @property
    def in_vain(self):
        return self.rounds >= 3

    def gamma(self, requests):
        self.rounds += 1
        return self._gamma if self.rounds <= 2 else 0


@pytest.mark.parametrize("mode", ["w4kv4", "ngram"])
def test_drafts_end_for_good_and_tokens_go_on(mode, tiny_models, random_prompts, make_plan):
    """Rounds under way end first; then steps run ahead over the cache without its copy."""
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 3, 7, 5)
    plan = make_plan(model, batch=2, decode_microbatch=2, prefill_microbatch=2, gen_len=12)
    compute = stage(plan, model, mode)
    requests = [Request(id=i, prompt=tuple(p), max_new=12) for i, p in enumerate(prompts)]
    got = serve(plan, compute, requests, ShortLived(mode, 3))
    assert got == tiny_models.greedy("llama", prompts, 12)
    first = compute.kinds.index(StepKind.DECODE)
    assert StepKind.ROUND in compute.kinds[:first] and StepKind.ROUND not in compute.kinds[first:]
    assert compute.speculation is None and isinstance(compute.kv, PlainKVCache)
    assert compute.runs_ahead


def test_stages_draft_and_verify_step_by_step(tiny_models, random_prompts, make_plan):
    """Two stages, chained here: hidden states of ragged drafts, tokens of both groups."""
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 3, 7)
    plan = make_plan(model, (1,), batch=3, decode_microbatch=2, prefill_microbatch=2)
    stages = [stage(plan, model, "w4kv4", index) for index in range(2)]
    assert not any(compute.fused_rounds for compute in stages)
    scheduler = SlotScheduler(limits_of(plan), drafter=FixedDrafter("w4kv4", 3))
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.submit(request)
    while not scheduler.idle:
        micro_batch = scheduler.next_micro_batch()
        message = describe(micro_batch)
        table = stages[1].run(message, stages[0].run(message, None))
        scheduler.update_from_output(micro_batch, result_tokens(micro_batch.kind, arrived(table)))
    want = tiny_models.greedy("llama", prompts, NEW)
    assert [request.output for request in requests] == want
    assert StepKind.VERIFY in stages[1].kinds


@pytest.mark.parametrize("mode", ["kv4", pytest.param("ngram", id="ngram-whole")])
def test_requests_end_at_the_end_of_their_slot(mode, tiny_models, random_prompts, make_plan):
    """A round issued ahead for a request that has filled its slot writes nowhere else."""
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 8)
    plan = make_plan(model, batch=2, decode_microbatch=2, prompt_len=8, gen_len=6)
    compute = stage(plan, model, mode)
    want = tiny_models.greedy("llama", prompts, 6)
    for may_draft in (True, False):  # False: rounds of no drafts
        requests = [
            Request(id=i, prompt=tuple(p), max_new=6, may_draft=may_draft)
            for i, p in enumerate(prompts)
        ]
        assert serve(plan, compute, requests, FixedDrafter(mode, 4)) == want


@pytest.mark.parametrize("mode", ["kv4", "ngram"])
def test_sampled_and_stopping_requests_beside_greedy_ones(
    mode, tiny_models, random_prompts, make_plan
):
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 8, 6, seed=2)
    plan = make_plan(model, batch=3, decode_microbatch=3, prefill_microbatch=3)
    sampled = SamplerConfig(temperature=0.8, top_p=0.9, seed=3)
    params = [SamplerConfig(), sampled, SamplerConfig()]
    want = ReferencePipeline.from_directory(model).generate(prompts, max_new=NEW, params=params)
    stop = frozenset(want[2][1:2])
    assert want[2][0] not in stop
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
    compute = stage(plan, model, mode)
    tokens = serve(plan, compute, requests, FixedDrafter(mode, 2))
    assert (tokens[0], tokens[2]) == (want[0], want[2][:2])
    assert len(tokens[1]) == NEW
    assert mode == "ngram" or StepKind.VERIFY in compute.kinds


@pytest.mark.parametrize("columns", [128, 1152])
def test_inputs_rounded_in_one_pass(columns):
    """The twin's numbers, a group of zeros and halves between two codes included."""
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    x[1, :128] = 0
    x[2, :128] = torch.arange(128) % 16 - 7.5
    scheme = AtomScheme(activation_clip=1.0)
    got = round_inputs.round_restore(x, scheme)
    assert torch.equal(got, round_inputs.round_restore_reference(x, scheme))
    assert not torch.equal(got, round_inputs.round_restore_reference(x, AtomScheme()))


def test_a_judge_that_keeps_too_much_is_noticed(tiny_models, random_prompts, make_plan):
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 7)
    plan = make_plan(model, batch=2, decode_microbatch=2)
    compute = stage(plan, model, "w4kv4")
    compute.speculation.judge = lambda drafts, choices, slots: torch.full_like(slots, 3)
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    got = serve(plan, compute, requests, FixedDrafter("w4kv4", 3))
    assert got != tiny_models.greedy("llama", prompts, NEW)


STEPS = [
    ([2, 0], [0, 0], [143, 20]),
    ([0, 2], [20, 143], [2, 4]),  # slot 2 completes a block
    ([2, 0], [145, 22], [1, 3]),  # its last two tokens were refused
]


def test_all_layers_of_the_copy_catch_up_in_one_launch(tiny_models, monkeypatch):
    """Ragged rows, slots in any order, a block completed: as each layer's own append."""
    spec = replace(ModelSpec.from_directory(tiny_models.directory("llama")), head_dim=32)
    shape = {"num_layers": 3, "slots": 3, "max_len": 300, "dtype": torch.float16}
    copies = [LowBitKV(spec, KVPrecision.KV4, **shape) for _ in range(2)]
    dual = DualKV(PlainKVCache(spec, **shape), copies[0])
    torch.manual_seed(0)
    for slots, starts, counts in STEPS:
        step = Step.of(slots, starts, counts)
        news = torch.randn(2, 3, 2, max(counts), spec.kv_heads, 32).half()
        for layer, (k, v) in enumerate(zip(*news, strict=True)):
            copies[1].append(layer, k, v, step)
            for cache, new in ((dual.inner.k, k), (dual.inner.v, v)):
                for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
                    cache[layer, slot, :, start : start + count] = new[row, :count].transpose(0, 1)
            if max(counts) > 16:
                copies[0].append(layer, k, v, step)
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedKVCache, "uses_kernels", property(lambda self: True))
            assert dual.catches_up(step) == (max(counts) <= 16)
            if dual.catches_up(step):
                dual.catch_up(step)
        for mine, theirs in zip(*(copy.cache.layers for copy in copies), strict=True):
            for name, tensor in vars(mine).items():
                assert torch.equal(tensor, getattr(theirs, name)), name
    assert copies[0].cache.layers[2].k_words_PGW.any(), "no block was packed"


def test_drafts_read_a_copy_that_catches_up(tiny_models, random_prompts, make_plan, monkeypatch):
    """As on a GPU, where the copy's kernels run: the same tokens, and few drafts are refused."""
    monkeypatch.setattr(QuantizedKVCache, "uses_kernels", property(lambda self: True))
    caught_up = []
    catch_up = DualKV.catch_up
    monkeypatch.setattr(
        DualKV, "catch_up", lambda kv, step: (caught_up.append(step), catch_up(kv, step))
    )
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 3)
    plan = make_plan(model, batch=2, decode_microbatch=2, prefill_microbatch=2)
    compute = stage(plan, model, "kv4")
    requests = [Request(id=i, prompt=tuple(p), max_new=NEW) for i, p in enumerate(prompts)]
    drafter = FixedDrafter("kv4", 2)
    want = tiny_models.greedy("llama", prompts, NEW)
    assert serve(plan, compute, requests, drafter) == want
    assert len(caught_up) == compute.kinds.count(StepKind.ROUND)
    assert drafter.acceptance.rate == 1, "all tokens are in the ring: nothing is rounded"


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3)


@settings(max_examples=150)
@given(texts=TEXTS, gamma=st.integers(0, 7), look_back=st.sampled_from([5, 16, 1024]))
def test_n_grams_found_on_the_device_are_those_of_the_host(texts, gamma, look_back):
    """Rows in any slot, whose history beyond the newest token is of another request."""
    slots = list(range(len(texts)))[::-1]
    history = torch.randint(0, 4, (len(texts), 40), dtype=torch.int32)
    for slot, text in zip(slots, texts, strict=True):
        history[slot, : len(text) - 1] = torch.tensor(text[:-1], dtype=torch.int32)
    rows = [
        torch.tensor(row) for row in (slots, [len(t) - 1 for t in texts], [t[-1] for t in texts])
    ]
    sizes = {"longest": ngram.LONGEST, "shortest": ngram.SHORTEST, "look_back": look_back}
    got = look_up(history, *rows, gamma, **sizes).tolist()
    for slot, text, tokens in zip(slots, texts, got, strict=True):
        found = ngram.propose(text[-look_back:], gamma)
        assert tokens == [text[-1], *found, *[text[-1]] * (gamma - len(found))]
        assert history[slot, : len(text)].tolist() == text


def test_drafts_are_looked_up_in_prompt_and_output(tiny_models, make_plan):
    """A greedy text that falls into loops: drafts are kept as the host would find them."""
    model, prompt = tiny_models.directory("qwen2"), [5, 9, 2, 7]
    plan = make_plan(model, batch=1, decode_microbatch=1, prompt_len=4, gen_len=24)
    want = tiny_models.greedy("qwen2", [prompt], 24)[0]
    compute = stage(plan, model, "ngram")
    drafter = FixedDrafter("ngram", 3)
    request = Request(id=0, prompt=tuple(prompt), max_new=24)
    assert serve(plan, compute, [request], drafter) == [want]
    text = [*prompt, *want]
    assert compute.speculation.history_ST[0, : len(text)].tolist() == text
    seen, known = Acceptance(), len(prompt) + 1
    while known < len(text):
        found = ngram.propose(text[:known], 3)
        drafts, left = [*found, *[text[known - 1]] * (3 - len(found))], text[known:]
        kept = next(
            (i for i, (a, b) in enumerate(zip(drafts, left, strict=False)) if a != b),
            min(3, len(left)),
        )
        drafted = min(3, len(left) - 1)
        seen.add(drafted, min(kept, drafted))
        known += kept + 1
    assert drafter.acceptance == seen and 0.3 < seen.rate < 1
