"""Speculation loses nothing: greedy tokens, sampled distributions and the KV cache are those of
plain decoding, in every mode, over one to three stages."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.speculation import draft_bytes
from llmpq.runtime.backends.stage_runner import StageRunner
from llmpq.runtime.cache.forwarding_kv import DraftedKV
from llmpq.runtime.drafts import acceptance, ngram
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.engine.scheduler import Scheduler
from llmpq.runtime.models.sampling import probabilities, sample
from llmpq.runtime.requests.request import PagedRow, Request, StepKind
from llmpq.runtime.requests.sampling_params import SamplerConfig
from llmpq.runtime.steps.step import message_of_rows
from llmpq.runtime.weights.sources import CheckpointSource
from llmpq.sizes.kv_format import packed_end
from llmpq.sizes.pool_size import PoolSize, planned_pool
from reference.open_stages import OpenStages

pytestmark = pytest.mark.cpu
TARGET_BITS = {
    "qspec": "w4a16",
    "w4kv4": "w16a16",
    "kv4": "w16a16",
    "ngram": "w16a16",
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pool_of(plan, num_blocks: int = 12) -> PoolSize:
    return PoolSize(num_blocks=num_blocks, slots=plan.workload.batch, max_len=200)


@pytest.fixture(scope="module")
def engines(demo_model, make_plan):
    """Return a maker of engines of the demo model, each made once."""
    made = {}

    def engine(bits: str, splits=(), mode=None, **shape) -> OpenStages:
        key = (bits, splits, mode, *sorted(shape.items()))
        if key not in made:
            values = {"batch": 3, "prompt_len": 160, "gen_len": 24} | shape
            plan = make_plan(demo_model, splits, bits=bits, **values)
            spec = ModelSpec.from_directory(demo_model)
            source = CheckpointSource(demo_model, spec)
            made[key] = OpenStages(plan, spec, source, speculate=mode, pool=pool_of(plan))
        return made[key]

    return engine


@pytest.fixture(scope="module")
def texts(demo_model):
    """Return token prompts of unequal length, one beyond a KV block, that continue well."""
    from llmpq.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(demo_model)
    long = "def area(self):\n    return self.width * self.height\n\n" * 12
    prompts = [
        "import argparse\nimport os\nimport sys\n\n\ndef main():\n    parser = argparse.",
        "class Stack:\n    def __init__(self):\n",
        long,
        "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
        "NAME\n       ls - list",
    ]
    return [tuple(tokenizer.encode(text)[:160]) for text in prompts]


def requests(texts, **more) -> list[Request]:
    lengths = (24, 5, 20, 13, 2)
    return [Request(id=i, prompt=text, max_new=lengths[i], **more) for i, text in enumerate(texts)]


class Preempting(Scheduler):
    """Preempts running requests at random steps, drafted for or not."""

    rng = random.Random(2)

    def next_micro_batch(self):
        if self._running and self.rng.random() < 0.1:
            self._preempt(self.rng.choice(self._running))
            self.check()
        return super().next_micro_batch()


def scheduler_of(engine: OpenStages, drafter=None, *, make=Scheduler, **limits) -> Scheduler:
    slots = engine.plan.workload.batch
    allowed = PoolLimits(
        **{
            "num_blocks": 12,
            "kv": engine.plan.workload.kv,
            "max_rows": slots,
            "max_len": 200,
            "step_tokens": 200,
            "decode_rows": slots,
            "num_stages": len(engine.computes),
        }
        | limits
    )
    return make(allowed, drafter=drafter)


def serve_over(engine: OpenStages, scheduler: Scheduler, jobs: list[Request]) -> list[list[int]]:
    done = engine.run(scheduler, jobs)
    scheduler.check()
    return [done.tokens[job.id] for job in jobs]


def serve(engine: OpenStages, jobs: list[Request], drafter=None, **limits) -> list[list[int]]:
    return serve_over(engine, scheduler_of(engine, drafter, **limits), jobs)


@pytest.mark.thin
@pytest.mark.parametrize("mode", sorted(TARGET_BITS))
@pytest.mark.parametrize("splits", [(), (3,), (2, 5)], ids=["1 stage", "2 stages", "3 stages"])
def test_greedy_tokens_are_those_of_plain_decoding(engines, texts, mode, splits):
    """Ragged batch, slots reused (5 requests, 3 slots), limits inside drafts, chunks beside them.

    Again with what the prefix cache has by then; at last with few blocks, and preempted at random.
    """
    bits = TARGET_BITS[mode]
    plain = serve(engines(bits), requests(texts))
    engine, rates, hits = engines(bits, splits, mode), [], 0
    for limits in ({}, {"num_blocks": 3, "step_tokens": 40, "make": Preempting}):
        drafter = FixedDrafter(mode, 4)
        scheduler = scheduler_of(engine, drafter, **limits)
        for _ in range(1 if limits else 2):
            assert serve_over(engine, scheduler, requests(texts)) == plain
        rates.append(drafter.acceptance.rate)
        hits += scheduler.tables.prefix_hits
    assert min(rates) > 0.25, "a trained model's drafts must mostly be accepted"
    assert rates[1] > 0.75 * rates[0], "copies of shared and recomputed blocks draft as well"
    assert scheduler.num_preemptions > 0 < hits


class ShortLived(FixedDrafter):
    """Drafts in some rounds, then not, then says that drafts are in vain."""

    rounds = 0

    @property
    def in_vain(self):
        return self.rounds > 6

    def gamma(self, requests):
        self.rounds += 1
        return self._gamma if self.rounds <= 4 else 0


@pytest.mark.thin
@pytest.mark.parametrize("more", [{}, {"sampling": SamplerConfig(temperature=0.8, seed=3)}])
@pytest.mark.parametrize("mode", ["w4kv4", "ngram"])
def test_drafts_end_for_good_and_tokens_go_on(demo_model, make_plan, texts, mode, more):
    """Requests that were drafted for, and others that joined later, in an engine of its own."""
    plan = make_plan(demo_model, bits=TARGET_BITS[mode], batch=3, prompt_len=160, gen_len=24)
    spec = ModelSpec.from_directory(demo_model)
    engines = [
        OpenStages(
            plan, spec, CheckpointSource(demo_model, spec), speculate=kind, pool=pool_of(plan)
        )
        for kind in (None, mode)
    ]
    jobs = requests(texts, **more)
    drafter, compute = ShortLived(mode, 3), engines[1].computes[0]
    got, kept = serve(engines[1], jobs, drafter), compute.kv
    assert drafter.acceptance.verifies > 0
    assert compute.draft is None and not isinstance(kept, DraftedKV), "nothing is kept for drafts"
    if not more:
        assert got == serve(engines[0], requests(texts))
    assert [len(tokens) for tokens in got] == [job.max_new for job in jobs]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(m, marks=[pytest.mark.seldom] * (n % 2))
        for n, m in enumerate(sorted(TARGET_BITS))
    ],
)
def test_an_end_of_text_inside_a_draft_ends_the_request(engines, texts, mode):
    bits = TARGET_BITS[mode]
    plain = serve(engines(bits), requests(texts))
    stops = frozenset({plain[0][9], plain[2][6]})
    expected = serve(engines(bits), requests(texts, stop_ids=stops))
    assert len(expected[0]) < 24
    got = serve(engines(bits, (3,), mode), requests(texts, stop_ids=stops), FixedDrafter(mode, 7))
    assert got == expected


def test_sampled_tokens_do_not_depend_on_the_number_of_stages(engines, texts):
    params = SamplerConfig(temperature=0.8, top_p=0.95, seed=5)
    runs = [
        serve(
            engines("w16a16", splits, "w4kv4", batch=5, decode_microbatch=5),
            requests(texts, sampling=params),
            FixedDrafter("w4kv4", 3),
        )
        for splits in ((), (3,))
    ]
    assert runs[0] == runs[1]


def slot_kv(engine: OpenStages, slot: int, length: int) -> torch.Tensor:
    """Return keys and values [2, layers, tokens, G, D] of the request that had a slot last."""
    found = []
    for compute in engine.computes:
        kv = getattr(compute.kv, "inner", compute.kv)
        layers = range(len(compute.model.layers))
        found += [torch.cat(kv.stored_tokens(layer, slot, length)) for layer in layers]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("mode", sorted(TARGET_BITS))
def test_the_cache_after_speculation_is_that_of_plain_decoding(engines, texts, mode):
    bits = TARGET_BITS[mode]
    jobs = [Request(id=0, prompt=texts[2], max_new=20)]
    plain_engine, engine = engines(bits), engines(bits, (3,), mode)
    plain = serve(plain_engine, jobs)[0]
    length = len(texts[2]) + 19
    wanted = slot_kv(plain_engine, 0, length).clone()
    drafter = FixedDrafter(mode, 4)
    assert serve(engine, [Request(id=0, prompt=texts[2], max_new=20)], drafter) == [plain]
    got = slot_kv(engine, 0, length)
    assert relative(got, wanted) < 1e-5
    broken = got.clone()
    broken[:, -1, len(texts[2]) + 3] *= 1.01  # one position left as a draft wrote it
    assert relative(broken, wanted) > 1e-5


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6),
    st.sampled_from(["qspec", "w4kv4", "kv4"]),
)
@settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_drafts_and_verifies_leaves_the_plain_cache(engines, texts, rounds, mode):
    """Bit for bit after every verify against a run of the same positions and shapes, no drafts."""
    engine = engines(TARGET_BITS[mode], (), mode, batch=1)
    compute = engine.computes[0]
    history = list(texts[0])
    rng = random.Random(str(rounds))

    def step(kind: StepKind, start: int, tokens: list[int]) -> torch.Tensor:
        drafts = tuple(tokens[1:]) if kind is StepKind.DECODE else ()
        row = PagedRow(
            slot=0, drafts=drafts, new_blocks=(0, 1) if start == 0 else (), first_block=2
        )
        if start == 0:
            row.first_block = 0
        message = message_of_rows(kind, [0], [start], [len(tokens)], tokens=tokens, rows=[row])
        return compute.run(message, None)

    def play(*, drafting: bool) -> list[torch.Tensor]:
        rng.seed(str(rounds))
        text, after_each_verify = list(history), []
        step(StepKind.PREFILL, 0, text)
        text.append(7)
        for num_drafts, accepted in rounds:
            start = len(text) - 1
            drafts = [rng.randrange(3, 4000) for _ in range(num_drafts)]
            for place in range(num_drafts if drafting else 0):
                step(StepKind.DRAFT, start + place, [[text[-1], *drafts][place]])
            step(StepKind.DECODE, start, [text[-1], *drafts])
            text += [*drafts[: min(accepted, num_drafts)], rng.randrange(3, 4000)]
            after_each_verify.append(slot_kv(engine, 0, len(text) - 1).clone())
        return after_each_verify

    for drafted, plain in zip(play(drafting=True), play(drafting=False), strict=True):
        assert torch.equal(drafted, plain)


VOCAB, DRAWS = 6, 1200


def _verified_tokens(accept, q_logits, p_logits, gamma: int) -> torch.Tensor:
    """Return how often each first token came out over many seeds."""
    counts = torch.zeros(VOCAB)
    for seed in range(DRAWS):
        params = [SamplerConfig(temperature=1.0, seed=seed)]
        drafts, probs = [], []
        for place in range(gamma):
            token, kept = acceptance.draft_tokens(q_logits[None], params, [place])
            drafts.append(int(token))
            probs.append(kept[0])
        counts[
            accept(p_logits.expand(1, gamma + 1, VOCAB), [drafts], [probs], params, [0])[0][0]
        ] += 1
    return counts


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_sampling_follows_the_verifiers_distribution(gamma):
    generator = torch.Generator().manual_seed(1)
    q_logits, p_logits = torch.randn(2, VOCAB, generator=generator)
    p = probabilities(p_logits[None], [SamplerConfig(temperature=1.0)])[0]
    critical = 20.5  # chi-square, 5 degrees of freedom, p = 0.001
    assert chi_square(_verified_tokens(acceptance.accept, q_logits, p_logits, gamma), p) < critical


def test_an_acceptance_bug_fails_the_distribution_test(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    q_logits, p_logits = torch.randn(2, VOCAB, generator=generator)
    p = probabilities(p_logits[None], [SamplerConfig(temperature=1.0)])[0]
    # The bug: a refused draft is replaced by a draw from p instead of max(p - q, 0).
    monkeypatch.setattr(acceptance, "leftover", lambda p_RV, q_RV: p_RV)
    assert chi_square(_verified_tokens(acceptance.accept, q_logits, p_logits, 1), p) > 40


def test_certain_drafts_are_verified_like_drawn_ones():
    """N-gram drafts: kept with probability p(x), replaced from p without x."""
    p_logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.3])
    p = probabilities(p_logits[None], [SamplerConfig(temperature=1.0)])[0]
    counts = torch.zeros(VOCAB)
    for seed in range(DRAWS):
        params = [SamplerConfig(temperature=1.0, seed=seed)]
        logits = p_logits.expand(1, 2, VOCAB)
        counts[acceptance.accept(logits, [[2]], [None], params, [0])[0][0]] += 1
    assert chi_square(counts, p) < 20.5


@pytest.mark.parametrize("seed", range(40))
def test_with_certain_drafts_tokens_are_those_without(seed):
    """Whatever is proposed, and wherever a round begins: as an answer goes on elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 4, VOCAB, generator=generator)
    params = [SamplerConfig(temperature=0.7, top_p=0.95, seed=seed)]
    plain = [int(sample(logits[:, place], params, [5 + place])[0]) for place in range(4)]
    for first in range(4):
        for drafts in ([], plain[first:3], [(t + 1) % VOCAB for t in plain[first:3]],
                       [*plain[first : first + 1], 0, 0][: 3 - first]):  # fmt: skip
            kept = acceptance.accept(logits[:, first:], [drafts], [None], params, [5 + first])[0]
            agreed = next((i for i, t in enumerate(drafts) if t != plain[first + i]), len(drafts))
            assert kept == plain[first : first + agreed + 1]


def test_rows_are_decided_as_each_would_be_alone():
    """Sampled rows of unequal drafts, drawn and certain ones, decided together."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(24, 4, VOCAB, generator=generator) / 4
    drafts = [[int(t) for t in torch.randint(VOCAB, (n % 4,), generator=generator)]
              for n in range(24)]  # fmt: skip
    probs = [
        None if n % 3 == 0 else [torch.full((VOCAB,), 1 / VOCAB) for _ in drafts[n]]
        for n in range(24)
    ]
    params = [SamplerConfig(temperature=0.0 if n % 5 == 4 else 0.9, seed=n) for n in range(24)]
    steps = list(range(24))
    together = acceptance.accept(logits, drafts, probs, params, steps)
    alone = [
        acceptance.accept(logits[n : n + 1], [drafts[n]], [probs[n]], [params[n]], [steps[n]])[0]
        for n in range(24)
    ]
    assert together == alone
    assert {len(row) for row in together} >= {1, 2, 3}


def test_greedy_acceptance_keeps_the_longest_agreeing_prefix():
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1, 5]]), 9).float()
    greedy = [SamplerConfig()]
    for drafts, tokens in (
        ([3, 1, 4, 1], [3, 1, 4, 1, 5]),
        ([3, 1, 5, 1], [3, 1, 4]),
        ([2, 1, 4, 1], [3]),
        ([], [3]),
    ):
        assert acceptance.accept(logits, [drafts], [None], greedy, [0]) == [tokens]


def test_prompt_lookup_continues_the_latest_copy():
    assert ngram.propose([1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3], 3) == [7, 5, 1]
    assert ngram.propose([8, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    assert ngram.propose([1, 2, 3], 3) == [] == ngram.propose([5, 5, 5], 0)
    assert ngram.propose([9, 2, 3, 4, 1, 2, 3, 8, 7, 2, 3, 6, 1, 2, 3], 1) == [8], "three beat two"
    assert ngram.propose([5, 5, 5, 5], 2) == [5], "a copy may overlap the end"
    rng = random.Random(0)
    for _ in range(200):
        history = [rng.randrange(4) for _ in range(rng.randrange(3, 40))]
        drafts = ngram.propose(history, 3)
        copies = [i for i in range(3, len(history)) if history[i - 3 : i] == history[-3:]] or [
            i for i in range(2, len(history)) if history[i - 2 : i] == history[-2:]
        ]
        assert drafts == (history[copies[-1] : copies[-1] + 3] if copies else [])


def test_prompt_lookup_sees_prompt_and_output_as_far_back_as_it_looks(monkeypatch):
    monkeypatch.setattr(ngram, "LOOK_BACK", 6)
    drafter = FixedDrafter("ngram", 2)
    for prompt, output, want in (
        ([1, 2, 3], [9, 1, 2], [3, 9]),
        ([1, 2, 3, 4], [9, 1, 2], []),  # the copy begins before the last six
        ([1, 2, 3], [8, 2, 3, 4, 7, 2, 3], [4, 7]),  # more output than is looked at
        ([7, 1, 2], [], []),
    ):
        request = Request(id=0, prompt=tuple(prompt), max_new=20, output=list(output))
        assert drafter.propose(request, 2) == want, (prompt, output)


def test_steps_are_timed_with_a_half_full_ring():
    from llmpq.runtime.backends.gpu.cuda_step_times import typical_context

    for context in (0, 30, 80, 81, 207, 208, 1024, 32896):
        length = typical_context(context)
        assert context - 128 < length <= context
        if context >= 80:
            assert length - packed_end(length) == 80, "16 held back and half a block"


def test_steps_are_timed_within_their_slots():
    from llmpq.runtime.backends.gpu.cuda_step_times import POSITIONS, contexts_of

    for max_len in range(1, 300):
        contexts = contexts_of(max_len)
        assert contexts == sorted(set(contexts)) and contexts[0] >= 0
        assert contexts[-1] + min(max(POSITIONS), max_len) <= max_len
    assert contexts_of(2048) == [208, 2000]


@pytest.mark.parametrize(
    "bits", ["w16a16", pytest.param("w8a16", marks=pytest.mark.seldom), "w4a16"]
)
def test_a_draft_holds_the_bytes_the_planner_counts(engines, bits):
    for mode in [mode for mode in TARGET_BITS if mode != "ngram"]:
        engine = engines(bits, (3,))
        for index, compute in enumerate(engine.computes):
            fresh = StageRunner(compute.model, compute.kv, torch.device("cpu"), torch.float32)
            plan, layers = engine.plan, range(*engine.plan.stages[index].layers)
            eta = plan.prefill_microbatch
            size = planned_pool(
                compute.model.spec, plan.workload, plan.prefill_chunk, prefill_microbatch=eta
            )
            held = fresh.enable_speculation(mode, size, layers=layers)
            counted = draft_bytes(engine.plan, compute.model.spec, index, mode)
            assert held == counted, (mode, index)


def test_speculation_over_a_low_bit_cache_loses_nothing(engines, texts):
    """What is packed depends on positions alone, so a verify sees what plain decoding sees."""
    rng = random.Random(3)
    noise = [tuple(rng.randrange(3, 4000) for _ in range(160)) for _ in range(3)]
    plain = serve(engines("w4a16", kv="kv2"), requests(noise))
    assert plain != serve(engines("w4a16"), requests(noise)), "2-bit keys must change tokens"
    engine = engines("w4a16", (3,), "qspec", kv="kv2")
    assert serve(engine, requests(noise), FixedDrafter("qspec", 4)) == plain
