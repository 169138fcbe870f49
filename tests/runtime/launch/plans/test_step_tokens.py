"""How many tokens a step of live requests has: as many as no stage takes too long for."""

from dataclasses import replace

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.plan import Predicted
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.launch.plans.pool_plan import LEAST_TOKENS, MIXED_TOKENS, PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.workload import CHUNK_TOKENS, Workload

pytestmark = pytest.mark.cpu
SPEC = ModelSpec.by_name("llama-3.1-8b")


def limits_of(times, *, gpu=False, estimated=False, prompt_len=200, chunk=512, **settings):
    """Return the limits of a plan whose stages take (prefill_s, decode_s) a micro-batch of two."""
    work = Workload(batch=4, prompt_len=prompt_len, gen_len=100)
    plan = manual_plan(
        SPEC, work, splits=(9,)[: len(times) - 1], prefill_microbatch=2, prefill_chunk=chunk
    )
    card = {"kind": "H200", "threads": None} if gpu else {}
    stages = tuple(
        stage.model_copy(update={"prefill_s": prefill_s, "decode_s": decode_s, **card})
        for stage, (prefill_s, decode_s) in zip(plan.stages, times, strict=True)
    )
    predicted = Predicted(
        total_s=1.0,
        prefill_s=1.0,
        decode_s=1.0,
        output_tokens_per_s=1.0,
        sum_omega=0.0,
        bottleneck=stages[0].device,
        estimated=estimated,
    )
    plan = plan.model_copy(update={"stages": stages, "predicted": predicted})
    return PoolPlan(plan, SPEC, EngineOptions(**settings)).limits


def step_tokens(times, **settings):
    """Return the tokens of a step beside requests that decode."""
    limits = limits_of(times, **settings)
    return limits.prompt_tokens_of_step(waiting=1 << 20, decoding=1)


def alone_tokens(times, *, waiting=1 << 20, **settings):
    """Return the tokens of a step while no request decodes."""
    return limits_of(times, **settings).prompt_tokens_of_step(waiting=waiting, decoding=0)


def test_a_job_runs_the_chunks_that_its_plan_states():
    work = Workload(batch=4, prompt_len=3000, gen_len=100)
    settings = EngineOptions(offline=True)
    for chunk, tokens, of_one in ((512, 1024, 512), (2048, 4096, 2048), (None, 6000, 6000)):
        plan = manual_plan(SPEC, work, prefill_microbatch=2, prefill_chunk=chunk)
        limits = PoolPlan(plan, SPEC, settings).limits
        assert (limits.step_tokens, limits.row_tokens) == (tokens, of_one)
        live = PoolPlan(plan, SPEC, replace(settings, offline=False)).limits
        assert live.step_tokens == live.row_tokens == CHUNK_TOKENS  # times are not known
    own = replace(settings, max_num_batched_tokens=300)
    limits = PoolPlan(manual_plan(SPEC, work), SPEC, own).limits
    assert (limits.step_tokens, limits.row_tokens) == (300, 300)


def test_a_job_over_several_stages_runs_steps_as_large_as_planned():
    """400 tokens of two prompts; no fewer than what fills a step behind its decoding rows."""

    def tokens(times, **settings):
        return limits_of(times, offline=True, **settings).step_tokens

    assert tokens([(0.4, 0.01), (0.2, 0.01)]) == 400
    assert tokens([(0.4, 0.01)]) == CHUNK_TOKENS  # nothing waits for a single stage
    assert tokens([(0.4, 0.01), (None, None)]) == CHUNK_TOKENS  # times are not known
    few = {"prompt_len": 8}  # 16 tokens of two prompts in 0.4 s
    assert tokens([(0.4, 0.01), (0.4, 0.01)], **few) == 1 + LEAST_TOKENS
    assert tokens([(0.4, 2.0), (0.4, 2.0)], **few) == 1 + 80
    assert tokens([(0.4, 40.0), (0.4, 40.0)], **few) == CHUNK_TOKENS


def test_quick_devices_take_as_many_as_there_are():
    assert step_tokens([(0.01, 0.004)]) == CHUNK_TOKENS
    assert step_tokens([(None, None)]) == CHUNK_TOKENS


def test_a_step_takes_a_tenth_of_a_second_or_two_plain_steps():
    assert step_tokens([(0.4, 0.01)]) == 96  # 400 tokens in 0.4 s
    assert step_tokens([(0.4, 0.1)]) == 192
    assert step_tokens([(40.0, 0.1)]) == LEAST_TOKENS


def test_the_slowest_stage_counts():
    assert step_tokens([(0.01, 0.004), (0.2, 0.01)]) == 192


def test_placeholders_of_cpus_say_nothing_and_cards_in_the_table_do():
    assert step_tokens([(0.4, 0.01)], estimated=True) == CHUNK_TOKENS
    assert step_tokens([(0.4, 0.01)], estimated=True, gpu=True) == 96


def test_who_says_a_number_has_it():
    assert step_tokens([(0.4, 0.01)], max_num_batched_tokens=300) == 300
    assert alone_tokens([(0.4, 0.01)], max_num_batched_tokens=300) == 300


def test_a_prompt_alone_takes_what_memory_is_counted_for_and_half_a_second():
    long = {"prompt_len": 4000, "chunk": 2048}  # 4,096 tokens a step are counted
    assert alone_tokens([(0.004, 0.002)], **long) == 4096
    assert step_tokens([(0.004, 0.002)], **long) == MIXED_TOKENS
    assert alone_tokens([(1.0, 0.01)], **long) == 1984  # 2,000 tokens in 0.5 s
    assert step_tokens([(1.0, 0.01)], **long) == 384
    assert alone_tokens([(None, None)], **long) == CHUNK_TOKENS  # of a CPU of unknown times
    card = {"gpu": True, "estimated": True}
    assert alone_tokens([(None, None)], **card, **long) == 4096  # by the table's rates


@pytest.mark.parametrize("together", [sum, max])
def test_stages_share_a_prompt_out_so_that_they_compute_at_once(together):
    """Near the best number of shares, whether a step's floor and its tokens add up or overlap."""
    long = {"prompt_len": 4000, "chunk": 4096}
    times = [(0.4, 0.005), (0.4, 0.005)]
    fill = limits_of(times, **long).fill_tokens
    assert fill == pytest.approx(0.005 / (0.4 / 8000))

    def cost(shares, waiting):
        return (shares + 1) * together((fill, waiting / shares))

    for waiting in (1000, 2000, 4000):
        best = min(cost(shares, waiting) for shares in range(1, 50))
        got = -(-waiting // alone_tokens(times, waiting=waiting, **long))
        assert cost(got, waiting) <= 1.2 * best < cost(1, waiting)
    assert limits_of(times, offline=True).fill_tokens == 0
    assert limits_of([(None, None), (0.4, 0.02)]).fill_tokens == 0
