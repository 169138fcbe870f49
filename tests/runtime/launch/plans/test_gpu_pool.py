"""Which plans on GPUs are served from a pool of KV blocks: all whose pool lacks nothing."""

from dataclasses import replace

import pytest

from llmpq.capabilities import require, ways_of
from llmpq.model_spec import ModelSpec
from llmpq.plan import MemoryForm
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.launch.plans.pool_plan import PoolPlan, request_limits
from llmpq.runtime.options import EngineOptions
from llmpq.sizes.kv_format import packed_blocks
from llmpq.sizes.pool_size import draft_pool
from llmpq.sizes.stated_pool import stated_pool
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu


def pool_plan(kv=KVPrecision.KV16, model="llama-3.1-8b", **settings):
    spec = ModelSpec.by_name(model)
    plan = manual_plan(spec, Workload(batch=4, prompt_len=200, gen_len=100, kv=kv))
    (stage,) = plan.stages
    stage = stage.model_copy(update={"kind": "NVIDIA H200", "threads": None})
    plan = plan.model_copy(update={"stages": (stage,)})
    return PoolPlan(plan, spec, EngineOptions(**{"offline": True, **settings}))


@pytest.mark.parametrize("offline", [True, False])
def test_a_gpu_has_a_pool_unless_it_is_refused_one(offline):
    assert pool_plan(offline=offline).use_paged_engine
    assert not pool_plan(offline=offline, kv_pool=False).use_paged_engine
    pool = pool_plan(offline=offline, kv_pool=True)
    assert pool.use_paged_engine
    assert pool.limits.tokens_ahead == 2, "the host waits for tokens"
    assert pool.limits.num_blocks == 4 * 3
    told = EngineOptions(kv_pool=False, offline=offline)
    slots = request_limits(pool.plan, pool.spec, told)
    assert slots.max_len == 299 and pool.limits.max_len == pool.spec.max_positions


def test_a_job_known_beforehand_has_the_pool_that_its_plan_states():
    made = pool_plan()
    sizes = {"chunk": 512, "prefill_microbatch": 1}
    pool = stated_pool(made.spec, made.plan.workload, made.plan.stages, **sizes)
    assert pool.tokens == 4 * 3 * 128
    stated = replace(made, plan=made.plan.model_copy(update={"pool": pool}))
    assert stated.use_paged_engine and stated.limits.num_blocks == pool.num_blocks
    for settings in ({"kv_pool": False}, {"speculate": "ngram"}):
        assert not replace(stated, options=replace(stated.options, **settings)).use_paged_engine


@pytest.mark.parametrize("kv", [KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2])
def test_packed_precisions_have_a_pool_that_counts_what_is_ever_packed(kv):
    pool = pool_plan(kv, offline=False, kv_pool=True)
    assert pool.use_paged_engine and pool.limits.kv is kv
    assert pool.limits.num_blocks == 4 * packed_blocks(300)


def test_what_a_gpu_does_not_page_has_slots_and_is_refused_a_pool():
    odd = KVPrecision.KV8, "opt-2.7b"
    why = "a KV cache of 8 bits and heads of 80 channels"
    with pytest.raises(ValueError, match=f"does not go with {why} yet; leave kv_pool out"):
        _ = pool_plan(*odd, kv_pool=True).use_paged_engine
    assert not pool_plan(*odd).use_paged_engine


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("mode,gamma", [("ngram", 3), ("kv4", None), ("qspec", 2)])
def test_drafts_on_a_gpu_have_slots_unless_a_pool_is_asked_for(offline, mode, gamma):
    drafts = {"offline": offline, "speculate": mode, "gamma": gamma}
    assert not pool_plan(**drafts).use_paged_engine
    pool = pool_plan(**drafts, kv_pool=True)
    assert pool.use_paged_engine
    assert pool.limits_over(object()).tokens_ahead == 1, "drafts need to know the tokens"


def test_a_copy_that_a_gpus_pool_does_not_pack_is_refused():
    asked = {"kv_pool": True, "gamma": 2}
    assert pool_plan(model="opt-2.7b", speculate="qspec", **asked).use_paged_engine
    with pytest.raises(ValueError, match="a KV cache of 4 bits and heads of 80 channels"):
        _ = pool_plan(model="opt-2.7b", speculate="kv4", **asked).use_paged_engine


def test_cpus_have_a_pool_whatever_is_asked():
    on_cpu = pool_plan()
    (stage,) = on_cpu.plan.stages
    stage = stage.model_copy(update={"kind": "CPU", "threads": 1})
    plan = on_cpu.plan.model_copy(update={"stages": (stage,)})
    for settings in ({}, {"kv_pool": False}, {"speculate": "kv4", "gamma": 2}):
        told = EngineOptions(**settings)
        assert replace(on_cpu, plan=plan, options=told).use_paged_engine


def test_a_copy_for_drafts_takes_its_room_from_the_pool():
    """Where the plan has not counted it; what the plan states it still has to have."""
    pool = pool_plan(kv_pool=True)
    (stage,) = pool.plan.stages
    layers = range(*stage.layers)
    kv_bytes = pool.size.nbytes(pool.spec, KVPrecision.KV16, layers=layers, dtype_bytes=2)
    sizes = dict.fromkeys(("weights_bytes", "embedding_bytes", "workspace_bytes"), 0)
    memory = MemoryForm(
        **sizes,
        kv_bytes=kv_bytes,
        context_bytes=0,
        total_bytes=kv_bytes,
        limit_bytes=kv_bytes,
        reserve_bytes=0,
    )
    stated = stated_pool(
        pool.spec, pool.plan.workload, pool.plan.stages, chunk=512, prefill_microbatch=1
    )
    stages = (stage.model_copy(update={"memory": memory}),)
    plan = pool.plan.model_copy(update={"stages": stages, "pool": stated})
    for mode, fewer in ((None, False), ("qspec", False), ("kv4", True)):
        told = replace(pool.options, speculate=mode, gamma=2)
        own = replace(pool, plan=plan, options=told)
        assert (own.size.num_blocks < stated.num_blocks) == fewer
        if mode == "kv4":
            copy = draft_pool(own.size)
            parts = ((own.size, KVPrecision.KV16), (copy, KVPrecision.KV4))
            nbytes = [
                size.nbytes(pool.spec, kv, layers=layers, dtype_bytes=2) for size, kv in parts
            ]
            assert sum(nbytes) <= kv_bytes < 1.3 * sum(nbytes)


def test_hosts_keep_preempted_requests_where_copying_is_quicker_than_computing():
    pool = pool_plan(offline=False)
    (stage,) = pool.plan.stages
    assert pool.limits.host_blocks == 0, "nobody knows how long the card computes"

    def kept(change=None, **settings):
        stages = (stage.model_copy(update={"kind": "H200", **(change or {})}),)
        plan = pool.plan.model_copy(update={"stages": stages})
        told = replace(pool.options, **settings)
        return replace(pool, plan=plan, options=told).limits.host_blocks

    assert kept() == 4 * 3, "an H200's host copies 16 MiB sooner"
    assert kept({"prefill_s": 1e-4}) == 0 < kept({"prefill_s": 1.0})
    assert kept({"kind": "CPU", "threads": 1}) == 0
    assert kept(speculate="ngram", gamma=2, kv_pool=True) == 0
    assert pool_plan(KVPrecision.KV8, offline=False).limits.host_blocks == 0
    assert pool_plan(model="gemma-2-9b", offline=False).limits.host_blocks == 0


def test_packed_blocks_of_a_model_in_float32_are_refused():
    pool = pool_plan(KVPrecision.KV4, "llama-3.1-8b", offline=False, kv_pool=True)
    workload = pool.plan.workload.model_copy(update={"dtype": "float32"})
    pool = replace(pool, plan=pool.plan.model_copy(update={"workload": workload}))
    with pytest.raises(ValueError, match="a KV cache of 4 bits in a model of float32 yet"):
        _ = pool.use_paged_engine


@pytest.mark.parametrize(
    "model,kv",
    [
        ("gpt-oss-20b", KVPrecision.KV16),
        ("gemma-2-9b", KVPrecision.KV16),
        ("mistral-7b", KVPrecision.KV16),
        ("deepseek-v3", KVPrecision.KV16),
        ("deepseek-v3", KVPrecision.KV8),
        ("deepseek-v3", KVPrecision.KV4),
    ],
)
def test_windows_caps_sinks_and_latents_go_over_a_pool(model, kv):
    pool = ways_of(gpu=True, kv=kv, drafts=False, pool=True)
    require(ModelSpec.by_name(model), pool, max_len=8000)
