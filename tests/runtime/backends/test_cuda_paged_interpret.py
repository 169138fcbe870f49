"""A GPU's stage, its kernels interpreted: transformers' tokens under every schedule."""

import threading
from dataclasses import replace

import pytest
import torch
import transformers
from triton import knobs

from llmpq.kernels.kv import prompt_attend
from llmpq.kernels.kv.paged import paged_plan
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.reference import EVERYTHING
from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import execution_modes, require
from llmpq.precision import KVPrecision
from llmpq.runtime.backends import stage_runner
from llmpq.runtime.backends.build_stage import build_stage
from llmpq.runtime.backends.gpu import cuda_experts, cuda_graphs, cuda_layers
from llmpq.runtime.backends.gpu.cuda_graphs import rounded_rows
from llmpq.runtime.backends.gpu.cuda_stage_runner import CudaStageRunner
from llmpq.runtime.backends.gpu.paged_graphs import rungs
from llmpq.runtime.cache import gpu_paged_kv
from llmpq.runtime.cache.gpu_forwarding_kv import GpuDraftedKV
from llmpq.runtime.cache.gpu_packed_kv import GpuPackedKV
from llmpq.runtime.cache.gpu_packed_latents import GpuPackedLatents
from llmpq.runtime.cache.gpu_paged_latents import GpuPagedLatents
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.engine.stage_loop import FirstStage
from llmpq.runtime.models.layers import PlainLayers
from llmpq.runtime.models.sampling import SamplerConfig
from llmpq.runtime.requests.request import Mailbox, PagedRow, Request, StepKind
from llmpq.runtime.requests.token_rules import Guide, LogitsConstraints
from llmpq.runtime.steps.paged_step import PagedStep
from llmpq.runtime.steps.trace import Recorder
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.kv_format import RING_TOKENS, TAIL_TOKENS
from llmpq.sizes.pool_size import PoolSize
from llmpq.sizes.step_padding import CAPTURED_TOKENS, gpu_padded
from reference.interpreted_stage import gpu_pool, gpu_stage, pack_quickly, take_gpu_path
from reference.open_stages import OpenStages
from reference.pipeline import ReferencePipeline

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
CPU, NEW = torch.device("cpu"), 4
ONE_AT_A_TIME = threading.Lock()
"""Triton's interpreter serves one thread."""
POOL = PoolSize(num_blocks=8, slots=3, max_len=300)


@pytest.fixture
def on_gpu_path(monkeypatch, request):
    """Appending is the twin's unless the test says `whole`; tests/kernels/kv/ compare the two."""
    take_gpu_path(monkeypatch, append="whole" not in request.node.name, experts=False)


class Counting(CudaStageRunner):
    """Counts steps issued before their tokens were known, and chunks beside decoding rows."""

    blind_steps = mixed_steps = 0

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.kinds = []

    def run(self, message, hidden_BQH):
        self.kinds.append(message.kind)
        self.blind_steps += bool((message.tokens_T == -1).any())
        self.mixed_steps += bool(message.q_len > message.num_new_B.min() == 1)
        with ONE_AT_A_TIME:
            return super().run(message, hidden_BQH)


def paged(base, size=POOL, **options):
    return gpu_stage(base, size, make=Counting, **options)


def stage(plan, model, **options):
    spec = ModelSpec.from_directory(model)
    base, _ = build_stage(plan, 0, spec, CheckpointSource(model, spec), CPU, POOL)
    return paged(base, **options)


def limits(size=POOL, **changed):
    values = {
        "num_blocks": size.num_blocks,
        "max_rows": size.slots,
        "max_len": size.max_len,
        "step_tokens": 64,
        "decode_rows": size.slots,
        "tokens_ahead": 2,
    }
    return PoolLimits(**values | changed)


def serve(compute, requests, *, make=Scheduler, drafter=None, **changed):
    """Run requests through the first stage's loop; return tokens by request."""
    mailbox = Mailbox()
    for request in requests:
        mailbox.requests.put(request)
    mailbox.requests.put(None)
    scheduler = make(limits(**changed), drafter=drafter)
    FirstStage(scheduler, compute, None, mailbox, Recorder(), num_stages=1).run()
    scheduler.check()
    assert scheduler.idle and scheduler.tables.pool.num_held == 0
    tokens = {finished.id: finished.tokens for finished in mailbox.finished}
    return [tokens[request.id] for request in requests]


def asked(prompts, new=NEW, **options):
    return [Request(id=i, prompt=tuple(p), max_new=new, **options) for i, p in enumerate(prompts)]


KINDS = [
    "opt",
    "bloom",
    pytest.param("qwen3", marks=pytest.mark.seldom),
    "mixtral",
    pytest.param("llama", id="llama-whole"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(kind, tiny_models, random_prompts, make_plan, on_gpu_path):
    model, prompts = tiny_models.directory(kind), random_prompts(6, 14, 1, 5)
    compute = stage(make_plan(model, batch=3), model)
    got = serve(compute, asked(prompts), step_tokens=11)
    assert got == tiny_models.greedy(kind, prompts, NEW)
    assert compute.blind_steps > 0, "no step ran ahead of the host"
    assert compute.mixed_steps > 0, "no chunk ran beside decoding rows"


@pytest.mark.parametrize(
    "kind",
    [pytest.param("qwen3", marks=pytest.mark.seldom), pytest.param("llama", id="llama-whole")],
)
def test_whole_prompts_attend_to_themselves(
    kind, tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """Steps of prompts alone leave the pool's kernel out; what is decoded reads what they wrote."""
    ran = []

    def counting(*given, **options):
        ran.append(given[3])
        return prompt_attend.prompt_attend(*given, **options)

    monkeypatch.setattr(prompt_attend, "LEAST_TOKENS", 4)
    monkeypatch.setattr(gpu_paged_kv, "prompt_attend", counting)
    model, prompts = tiny_models.directory(kind), random_prompts(9, 9, 14)
    compute = stage(make_plan(model, batch=3), model)
    got = serve(compute, asked(prompts))
    assert got == tiny_models.greedy(kind, prompts, NEW)
    assert set(ran) == {((2, 9), (1, 14))} and len(ran) == len(compute.model.layers)


def test_what_requests_share_is_found_again(tiny_models, random_prompts, make_plan, on_gpu_path):
    model = tiny_models.directory("llama")
    trunk, *tails = random_prompts(128, 4, 30, seed=5)
    prompts = [trunk + tail for tail in tails]
    compute = stage(make_plan(model, batch=3), model, step_tokens=100)
    requests = asked(prompts, 2)
    got = serve(compute, requests, num_blocks=2, step_tokens=100)  # room for one at a time
    assert got == ReferencePipeline.from_directory(model).generate(prompts, max_new=2)
    assert requests[1].num_prefix_hits == 128


@pytest.mark.parametrize(
    "kv", ["kv8v4", *(pytest.param(kv, marks=pytest.mark.seldom) for kv in ("kv4", "kv16v2"))]
)
def test_packed_blocks_give_the_tokens_of_a_cpu(
    tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch, kv
):
    """One request after the other, for want of blocks: the second goes on from the first's."""
    kv = KVPrecision(kv)
    pack_quickly(monkeypatch)
    model, size = tiny_models.directory("qwen3"), PoolSize(num_blocks=1, slots=3, max_len=300)
    trunk, *tails = random_prompts(147, 9, 30, seed=5)
    prompts = [trunk + tail for tail in tails]
    plan, spec = make_plan(model, batch=3, kv=kv), ModelSpec.from_directory(model)
    own = {"size": size, "kv": kv, "num_blocks": 1, "step_tokens": 100}
    on_cpu = OpenStages(plan, spec, CheckpointSource(model, spec), pool=size)
    want = on_cpu.run(Scheduler(limits(**own, tokens_ahead=1)), asked(prompts, 3)).tokens
    compute, requests = stage(plan, model, size=size, kv=kv, step_tokens=100), asked(prompts, 3)
    assert compute.kv.nbytes == size.nbytes(spec, kv, layers=range(spec.num_layers), dtype_bytes=4)
    assert serve(compute, requests, **own) == [want[0], want[1]]
    assert requests[1].num_prefix_hits == 128 + TAIL_TOKENS
    assert compute.blind_steps > 0, "no step ran ahead of the host"


def test_refused_drafts_leave_nothing_in_packed_blocks(
    tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """A row is in the middle of its ring's packing when its drafts are refused: a CPU's tokens."""
    kv = KVPrecision.KV4
    pack_quickly(monkeypatch)
    model, size = tiny_models.directory("qwen3"), PoolSize(num_blocks=2, slots=3, max_len=300)
    (word,) = random_prompts(6)
    plan, spec = make_plan(model, batch=3, kv=kv), ModelSpec.from_directory(model)
    prompts = [(word * 30)[: 128 + TAIL_TOKENS - 3]]
    own = limits(size=size, kv=kv, num_blocks=2, step_tokens=200, tokens_ahead=1)

    class Wrong(FixedDrafter):
        """Drafts what the text has, the last token of them never right."""

        def propose(self, request, gamma):
            found = super().propose(request, gamma) or []
            return [*found[:-1], (found[-1] + 1) % spec.vocab] if found else found

    on_cpu = OpenStages(plan, spec, CheckpointSource(model, spec), pool=size)
    want = on_cpu.run(Scheduler(own), asked(prompts, 9)).tokens
    on_cpu.computes = [stage(plan, model, size=size, kv=kv, step_tokens=200)]
    drafter = Wrong("ngram", 3)
    got = on_cpu.run(Scheduler(own, drafter=drafter), asked(prompts, 9)).tokens
    assert got == want and drafter.acceptance.refusals > 0


def test_who_finds_a_packed_block_gets_the_tokens_behind_it(tiny_models):
    spec = ModelSpec.from_directory(tiny_models.directory("qwen3"))
    size = PoolSize(num_blocks=5, slots=3, max_len=600)
    kv = GpuPackedKV(
        spec, KVPrecision.KV8, layers=range(2), size=size, dtype=torch.float32, device=CPU
    )
    for behind in kv._behind:
        behind.normal_()
    start = 2 * 128 + TAIL_TOKENS
    rows = [PagedRow(slot=0, new_blocks=(1,)), PagedRow(slot=2, new_blocks=(3, 4), resumes=True)]
    kv.take_rows(rows, [0, start])
    at = torch.arange(start - TAIL_TOKENS, start) % RING_TOKENS
    for ring, behind in zip(kv._rings, kv._behind, strict=True):
        assert torch.equal(ring[:, 2][:, :, at], behind[:, 4])
        assert not ring[:, :2].any() and int(ring[:, 2].any(-1).any(0)[0].sum()) == TAIL_TOKENS
    assert kv._table_SM[2, :2].tolist() == [3, 4] and kv._table_SM[0, 0] == 1


@pytest.mark.parametrize("kv", [kv for kv in KVPrecision if kv is not KVPrecision.KV16])
@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112, 192, 256])
def test_packed_heads_of_any_size_take_the_bytes_of_plans(tiny_models, kv, dim):
    spec = replace(ModelSpec.from_directory(tiny_models.directory("qwen3")), head_dim=dim)
    size = PoolSize(num_blocks=3, slots=2, max_len=500, prefix_cache=True)
    pool = GpuPackedKV(
        spec, kv, layers=range(2), size=size, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert pool.nbytes == size.nbytes(spec, kv, layers=range(2), dtype_bytes=2)


def windowed(model, make_plan, *, blocks):
    """Return a stage and its pool's limits; `blocks`: of the pool of windows, 0: one pool."""
    window = model.window if blocks else 0
    size = PoolSize(num_blocks=8, slots=3, max_len=400, window=window, window_blocks=blocks)
    compute = stage(
        make_plan(model.directory, batch=3), model.directory, size=size, step_tokens=100
    )
    return compute, {"size": size, "window": window, "window_blocks": blocks, "step_tokens": 100}


@pytest.fixture
def for_windows(on_gpu_path, monkeypatch):
    """Experts go together; large tiles, and the twin's norms: the interpreter is slow."""
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    monkeypatch.setattr(paged_plan, "_tile_keys", lambda *_: 128)
    monkeypatch.setattr(paged_plan, "_chunk_rows", lambda *_: 128)
    monkeypatch.setattr(cuda_layers, "norm", lambda part, x, **_: part(x))
    PagedPlan.of.__func__.cache_clear()
    yield
    PagedPlan.of.__func__.cache_clear()


@pytest.mark.parametrize(
    "windowed_model,blocks",
    [pytest.param("gemma2", 6, marks=pytest.mark.seldom), ("gpt_oss", 6), ("mistral", 0)],
    indirect=["windowed_model"],
)
def test_windows_caps_and_sinks(blocks, windowed_model, random_prompts, make_plan, for_windows):
    prompts = random_prompts(270, 7)
    compute, options = windowed(windowed_model, make_plan, blocks=blocks)
    assert compute.kv.has_windows == bool(blocks)
    got = serve(compute, asked(prompts), **options)
    assert got == windowed_model.greedy(prompts, NEW)


def test_frequencies_that_change_with_the_length(models, random_prompts, make_plan, on_gpu_path):
    """Whole prompts of one step, then rows that decode at lengths of their own: a CPU's tokens."""
    directory, prompts = models.directory("llama with dynamic rope"), random_prompts(19, 3, 12)
    compute = stage(make_plan(directory, batch=3, prompt_len=19, gen_len=NEW), directory)
    want = ReferencePipeline.from_directory(directory)
    assert serve(compute, asked(prompts), step_tokens=40) == [
        want.generate([prompt], max_new=NEW)[0] for prompt in prompts
    ]
    rows = torch.tensor([[2, 0, 1, -1], [5, 9, 0, 0], [1, 3, 2, 2], [0, 1, 4, 6], *[[0] * 4] * 3])
    step = PagedStep.__new__(PagedStep)
    for name, value in (("rows_FR", rows.int()), ("q_len", 8)):
        object.__setattr__(step, name, value)
    assert step.ends[:6].tolist() == [6, 12, 12, 12, 2, 2]


@pytest.mark.parametrize(
    "kind", [pytest.param("deepseek_v2", marks=pytest.mark.seldom), "deepseek_v3"]
)
def test_latents(kind, models, random_prompts, make_plan, on_gpu_path, monkeypatch):
    """A prompt in chunks beside decoding rows, over a block's end; then prompts that share one."""
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    directory, prompts = models.directory(kind), random_prompts(133, 7)
    prompts.append(prompts[0][:130])
    plan = make_plan(directory, batch=3, prompt_len=133, gen_len=NEW)
    compute = stage(plan, directory)
    assert isinstance(compute.kv, GpuPagedLatents)
    assert compute.kv.nbytes == POOL.nbytes(
        compute.model.spec,
        KVPrecision.KV16,
        layers=range(compute.model.spec.num_layers),
        dtype_bytes=4,
    )
    got = serve(compute, asked(prompts))
    assert got == [row[:NEW] for row in models.greedy(kind, prompts)]
    assert compute.mixed_steps > 0


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    """A DeepSeek whose latents have 64 channels."""
    config = transformers.DeepseekV3Config(
        vocab_size=199, hidden_size=48, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=3,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
        num_key_value_heads=3, kv_lora_rank=48, q_lora_rank=24, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("latents")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_packed_latents_give_the_tokens_of_a_cpu(
    latent_model, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """One request after the other, for want of blocks: the second goes on from the first's."""
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    kv, size = KVPrecision.KV4, PoolSize(num_blocks=1, slots=3, max_len=300)
    trunk, *tails = random_prompts(147, 9, 30, seed=5)
    prompts = [trunk + tail for tail in tails]
    plan, spec = make_plan(latent_model, batch=3, kv=kv), ModelSpec.from_directory(latent_model)
    require(spec, execution_modes(gpu=True, kv=kv, drafts=False), max_len=200)
    own = {"size": size, "kv": kv, "num_blocks": 1, "step_tokens": 100}
    on_cpu = OpenStages(plan, spec, CheckpointSource(latent_model, spec), pool=size)
    want = on_cpu.run(Scheduler(limits(**own, tokens_ahead=1)), asked(prompts, 3)).tokens
    compute = stage(plan, latent_model, size=size, kv=kv, step_tokens=100)
    requests = asked(prompts, 3)
    assert isinstance(compute.kv, GpuPackedLatents)
    assert compute.kv.nbytes == size.nbytes(spec, kv, layers=range(2), dtype_bytes=4)
    assert serve(compute, requests, **own) == [want[0], want[1]]
    assert requests[1].num_prefix_hits == 128 + TAIL_TOKENS


@pytest.mark.parametrize("windowed_model", ["mistral"], indirect=True)
@pytest.mark.parametrize("fault", ["table", "rule"])
def test_what_a_window_lacks_is_seen(
    fault, windowed_model, random_prompts, make_plan, for_windows, monkeypatch
):
    """The planted faults: another's blocks, and scores as if there were no rule."""
    prompts = random_prompts(290)
    compute, options = windowed(windowed_model, make_plan, blocks=6)
    if fault == "table":
        monkeypatch.setattr(compute.kv.windowed.__class__, "take", lambda *_: None)
    else:
        monkeypatch.setattr(cuda_layers, "rule_of", lambda *_: EVERYTHING)
    assert serve(compute, asked(prompts), **options) != windowed_model.greedy(prompts, NEW)


class Preempting(Scheduler):
    """Preempts the youngest of several at every third step, its tokens known or not."""

    asked = 0

    def next_micro_batch(self):
        self.asked += 1
        if self.asked % 3 == 0 and len(self._running) > 1:
            self._preempt(max(self._running))
            self.check()
        return super().next_micro_batch()


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_preempted_requests_are_computed_again_or_kept_by_the_host(
    host_blocks, tiny_models, random_prompts, make_plan, on_gpu_path
):
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 4, 7)
    requests, compute = asked(prompts, 3), stage(make_plan(model, batch=3), model)
    loads, take = [], compute.kv.take_rows

    def noted(rows, starts):
        loads.extend(pair for row in rows for pair in row.loads)
        take(rows, starts)

    compute.kv.take_rows = noted
    got = serve(compute, requests, make=Preempting, host_blocks=host_blocks)
    assert got == tiny_models.greedy("llama", prompts, 3)
    assert any(request.num_preemptions for request in requests)
    assert bool(loads) == bool(host_blocks)


def test_hosts_keep_latents_of_preempted_requests(
    models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    monkeypatch.setattr(
        PlainLayers, "sparse_mlp", lambda _, *given: cuda_experts.sparse_mlp(*given)
    )
    directory, prompts = models.directory("deepseek_v2"), random_prompts(30, 24, 27)
    compute = stage(make_plan(directory, batch=3), directory)
    requests = asked(prompts, NEW)
    got = serve(compute, requests, make=Preempting, host_blocks=8, prefix_cache=False)
    assert any(request.num_preemptions for request in requests)
    assert got == [row[:NEW] for row in models.greedy("deepseek_v2", prompts)]


def test_what_a_host_does_not_give_back_is_seen(
    tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """The planted fault: blocks that go on with what others left in them."""
    model, prompts = tiny_models.directory("llama"), random_prompts(30, 24, 27)
    compute = stage(make_plan(model, batch=3), model)
    monkeypatch.setattr(compute.kv._on_host, "take_rows", lambda rows: None)
    got = serve(compute, asked(prompts, 6), make=Preempting, host_blocks=8, prefix_cache=False)
    assert got != tiny_models.greedy("llama", prompts, 6)


def test_another_block_table_gives_other_tokens(
    tiny_models, random_prompts, make_plan, on_gpu_path
):
    """The planted fault that the tests above would see."""
    model, prompts = tiny_models.directory("llama"), random_prompts(140)
    compute = stage(make_plan(model, batch=3), model, step_tokens=140)
    want = serve(compute, asked(prompts, 2), step_tokens=140)
    compute.kv.take_rows = lambda rows, starts: compute.kv.whole.table_SM.zero_()
    assert serve(compute, asked(prompts, 2), step_tokens=140) != want


@pytest.mark.parametrize("kept_rows", [0, 32])
def test_sampled_ruled_and_stopping_requests_beside_greedy_ones(
    kept_rows, tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    monkeypatch.setattr(cuda_graphs, "KEPT_ROWS", kept_rows)
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 12, 6, 9)
    sampled = SamplerConfig(temperature=0.8, top_p=0.9, seed=3)
    params = [SamplerConfig(), sampled, SamplerConfig(), SamplerConfig()]
    want = ReferencePipeline.from_directory(model).generate(prompts, max_new=NEW, params=params)
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
    banned = want[3][0]
    rules = LogitsConstraints(
        prompt=tuple(prompts[3]), logit_bias={banned: -100.0}, logprobs=1, prompt_logprobs=0
    )
    requests[3].rules = rules
    compute = stage(make_plan(model, batch=3), model)
    compute.sampler.take_rules(3, rules)
    got = serve(compute, requests)
    assert got[:3] == want[:3]
    assert banned not in got[3] and len(got[3]) == NEW
    noted = compute.sampler.noted(3)
    assert len(noted.output) == NEW and len(noted.prompt) == len(prompts[3]) - 1


class Following:
    """A guide whose next tokens hang on the last one: it has to be known, whatever ran ahead."""

    asked_ahead = 0

    def __init__(self, first):
        self.first = first

    def may_follow(self, tokens, vocab):
        last = tokens[-1] if tokens else self.first
        return {(3 * last + 1) % vocab, (5 * last + 2) % vocab}

    def allowed_of(self, answers, vocab, *, pinned=False, meanwhile=False):
        Following.asked_ahead += meanwhile
        bits = torch.zeros(len(answers), -(-vocab // 8), dtype=torch.uint8)
        for row, (one, tokens) in enumerate(answers):
            for token in one.may_follow(list(tokens), vocab):
                bits[row, token // 8] |= 1 << token % 8
        return lambda: bits


def test_guided_rows_beside_others_while_steps_run_ahead(
    tiny_models, random_prompts, make_plan, on_gpu_path
):
    """Answers end by stop tokens and by length; whoever is forgotten early breaks nothing."""
    model, prompts = tiny_models.directory("llama"), random_prompts(8, 12, 6, 9, 5)
    guide = Guide(kind="regex", text="a+")
    alone = tiny_models.greedy("llama", prompts, NEW)
    compute = stage(make_plan(model, batch=3), model)
    vocab = compute.model.spec.vocab
    requests = asked(prompts)
    guides = {number: Following(number + 7) for number in (0, 2, 3, 4)}
    for number, one in guides.items():
        biased = {9: 2.0} if number == 3 else {}
        rules = LogitsConstraints(prompt=tuple(prompts[number]), guide=guide, logit_bias=biased)
        requests[number].rules = rules
        compute.sampler.take_rules(number, rules, one)
    requests[2].sampling = SamplerConfig(temperature=1.0, seed=5)
    first = guides[4].may_follow([], vocab)
    requests[4].stop_ids = frozenset(first)
    appended = Scheduler._end

    class Forgetting(Scheduler):
        def _end(self, holder, reason):
            compute.sampler.forget(holder.request.id)
            appended(self, holder, reason)

    got = serve(compute, requests, make=Forgetting)
    assert got[1] == alone[1]
    assert len(got[4]) == 1 and got[4][0] in first
    for number in (0, 2, 3):
        assert len(got[number]) == NEW
        for place, token in enumerate(got[number]):
            assert token in guides[number].may_follow(got[number][:place], vocab)
    assert Following.asked_ahead > 0 and compute.blind_steps > 0


@pytest.mark.parametrize("splits", [pytest.param((), marks=pytest.mark.seldom), (1,)])
def test_drafts_found_in_the_text_change_no_token(
    splits, tiny_models, random_prompts, make_plan, on_gpu_path
):
    """Rows with drafts beside a ruled one without, chunks and a sampled one; some are kept."""
    model, (word,) = tiny_models.directory("qwen2"), random_prompts(4)
    prompts = [word * 5, (word * 4)[1:], *random_prompts(20, 6, seed=2)]
    spec, new = ModelSpec.from_directory(model), 12
    stages = OpenStages(
        make_plan(model, splits, batch=3), spec, CheckpointSource(model, spec), pool=POOL
    )
    firsts = (0, *splits)
    stages.computes = [
        paged(one, first=first) for one, first in zip(stages.computes, firsts, strict=True)
    ]
    requests = asked(prompts, new)
    requests[3].sampling = SamplerConfig(temperature=0.8, seed=3)
    requests[2].may_draft = False
    rules = LogitsConstraints(prompt=tuple(prompts[2]), logprobs=1, prompt_logprobs=0)
    requests[2].rules = rules
    stages.computes[-1].sampler.take_rules(2, rules)
    drafter = FixedDrafter("ngram", 3)
    own = limits(num_stages=len(firsts), tokens_ahead=1, step_tokens=24)
    tokens = stages.run(Scheduler(own, drafter=drafter), requests).tokens
    assert [tokens[i] for i in range(3)] == tiny_models.greedy("qwen2", prompts[:3], new)
    assert len(tokens[3]) == new
    assert sum(drafter.acceptance.accepted) > 0 and drafter.acceptance.refusals > 0
    noted = stages.computes[-1].sampler.noted(2)
    assert len(noted.output) == new and len(noted.prompt) == len(prompts[2]) - 1


@pytest.mark.parametrize(
    "mode,bits,splits",
    [
        pytest.param("kv4", "w16a16", (), marks=pytest.mark.seldom),
        pytest.param(
            "w4kv4", "w16a16", (1,), marks=pytest.mark.seldom
        ),  # test_cuda_families_interpret.py has one
        ("qspec", "w4a16", ()),
    ],
)
def test_drafts_by_the_model_change_no_token(
    mode, bits, splits, tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """Beside chunks, a row without drafts, a sampled one and one that finds another's blocks."""
    pack_quickly(monkeypatch)
    monkeypatch.setattr(stage_runner, "make_paged_kv", gpu_pool)
    model, new = tiny_models.directory("qwen3"), 7
    shared = 0 if mode == "qspec" else 128  # qspec has no blocks of its own to find
    (trunk,) = random_prompts(shared + 13, seed=4)
    prompts = [trunk, *random_prompts(6, 20, seed=2), [*trunk[:shared], 5, 7, 9]]
    spec, plan = ModelSpec.from_directory(model), make_plan(model, splits, bits=bits, batch=3)
    source, firsts = CheckpointSource(model, spec), (0, *splits)
    stages = OpenStages(plan, spec, source, pool=POOL)
    stages.computes = [
        paged(one, first=first) for one, first in zip(stages.computes, firsts, strict=True)
    ]
    own = limits(num_stages=len(firsts), tokens_ahead=1, num_blocks=3)

    def run(drafter):
        requests = asked(prompts, new)
        requests[1].may_draft = False
        requests[2].sampling = SamplerConfig(temperature=0.8, seed=3)
        tokens = stages.run(Scheduler(own, drafter=drafter), requests).tokens
        assert requests[3].num_prefix_hits == shared
        return [tokens[i] for i in range(4)]

    plain = run(None)
    for compute, layers in zip(
        stages.computes, ((0, 1), (1, 2)) if splits else ((0, 2),), strict=True
    ):
        compute.enable_speculation(mode, POOL, layers=range(*layers))
    drafter = FixedDrafter(mode, 3)
    drafted = run(drafter)
    assert drafted[:2] == plain[:2] and drafted[3] == plain[3] and len(drafted[2]) == new
    assert sum(drafter.acceptance.accepted) > 0
    compute = stages.computes[0]
    copied = isinstance(compute.kv, GpuDraftedKV)
    assert copied == (mode != "qspec") and len(compute.model.layers) == len(layers_of(compute))


class ShortLived(FixedDrafter):
    """Drafts in two rounds, then says that drafts are in vain."""

    rounds = 0

    @property
    def in_vain(self):
        return self.rounds >= 3

    def gamma(self, requests):
        self.rounds += 1
        return self._gamma if self.rounds <= 2 else 0


@pytest.mark.parametrize("mode", ["kv4", "ngram"])
def test_drafts_end_for_good_and_tokens_go_on(
    mode, tiny_models, random_prompts, make_plan, on_gpu_path, monkeypatch
):
    """Rounds under way end first; then steps run ahead over the pool without its copy."""
    pack_quickly(monkeypatch)
    monkeypatch.setattr(stage_runner, "make_paged_kv", gpu_pool)
    model, prompts = tiny_models.directory("qwen3"), random_prompts(9, 3)
    compute = stage(make_plan(model, batch=3), model)
    compute.enable_speculation(mode, POOL, layers=range(2))
    got = serve(compute, asked(prompts, 14), drafter=ShortLived(mode, 3), tokens_ahead=1)
    assert got == tiny_models.greedy("qwen3", prompts, 14)
    drafted = StepKind.ROUND if mode == "kv4" else StepKind.VERIFY
    last = len(compute.kinds) - compute.kinds[::-1].index(StepKind.DECODE)
    assert mode == "ngram" or drafted in compute.kinds
    assert drafted not in compute.kinds[last:] and compute.blind_steps > 0
    assert compute.draft is None and not isinstance(compute.kv, GpuDraftedKV)


def layers_of(compute):
    """Return the layers of a stage's pool, or of its copy."""
    kv = getattr(compute.kv, "copy", compute.kv)
    return kv._layers


def test_stages_pass_hidden_states_on(tiny_models, random_prompts, make_plan, on_gpu_path):
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 20, 1)
    spec = ModelSpec.from_directory(model)
    stages = OpenStages(
        make_plan(model, (1,), batch=3), spec, CheckpointSource(model, spec), pool=POOL
    )
    stages.computes = [paged(one, first=first) for first, one in enumerate(stages.computes)]
    assert not any(compute.runs_ahead for compute in stages.computes)
    scheduler = Scheduler(limits(num_stages=2, tokens_ahead=1, step_tokens=17))
    tokens = stages.run(scheduler, asked(prompts)).tokens
    assert [tokens[i] for i in range(3)] == tiny_models.greedy("llama", prompts, NEW)


def test_warm_up_leaves_nothing_that_a_request_sees(
    tiny_models, random_prompts, make_plan, on_gpu_path
):
    model, prompts = tiny_models.directory("llama"), random_prompts(9, 7)
    compute = stage(make_plan(model, batch=3), model)
    compute.warm_up(3, 16, gamma=2)
    assert serve(compute, asked(prompts)) == tiny_models.greedy("llama", prompts, NEW)


def test_rows_are_rounded_up_and_never_beyond_the_plan():
    assert [rounded_rows(n, 32) for n in (1, 2, 3, 5, 9, 31, 32)] == [1, 2, 4, 8, 16, 32, 32]
    assert [rounded_rows(n, 250) for n in (33, 49, 65, 128, 225)] == [48, 64, 96, 128, 250]
    assert rounded_rows(3, 3) == 3 and rounded_rows(5, 6) == 6 and rounded_rows(12, 12) == 12


def test_ladders_have_few_rungs():
    assert [gpu_padded(n) for n in (2, 9, 65, 512, 513, 5000)] == [8, 16, 128, 512, 768, 5120]
    assert rungs(512) == [512, 448, 384, 320, 256, 192, 128, 64, 32, 16, 8]
    assert max(rungs(10_000)) == CAPTURED_TOKENS
    for most in (2, 100, 700):
        assert max(rungs(most)) == gpu_padded(most) and all(
            gpu_padded(n) >= n for n in range(2, most)
        )
