"""The pool of KV blocks of plans on GPUs, and what no kernel of theirs reads."""

from dataclasses import replace

import pytest

from llmpq.models.model_spec import ModelSpec
from llmpq.plans.capabilities import execution_modes, require
from llmpq.plans.plan import MemoryForm, PoolForm
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.complete_plan import complete_plan
from llmpq.runtime.launch.plans.manual_plan import manual_plan
from llmpq.runtime.launch.plans.pool_plan import PoolPlan, request_limits
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.sizes.kv_format import packed_blocks
from llmpq.sizes.pool_size import draft_pool
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
def test_a_gpu_goes_ahead_over_as_many_blocks_as_requests_fill(offline):
    pool = pool_plan(offline=offline)
    assert pool.limits.tokens_ahead == 2, "the host waits for tokens"
    assert pool.limits.num_blocks == 4 * 3
    assert request_limits(pool.plan, pool.spec, pool.options).max_len == pool.spec.max_positions


def test_a_job_known_beforehand_has_the_pool_that_its_plan_states():
    made = pool_plan()
    sizes = {"chunk": 512, "prefill_microbatch": 1}
    pool = PoolForm.planned(made.spec, made.plan.workload, made.plan.stages, **sizes)
    assert pool.tokens == 4 * 3 * 128
    stated = replace(made, plan=made.plan.model_copy(update={"pool": pool}))
    assert stated.limits.num_blocks == pool.num_blocks


@pytest.mark.parametrize("kv", [kv for kv in KVPrecision if kv is not KVPrecision.KV16])
def test_packed_precisions_have_a_pool_that_counts_what_is_ever_packed(kv):
    pool = pool_plan(kv, offline=False)
    assert pool.limits.kv is kv
    assert pool.limits.num_blocks == 4 * packed_blocks(300)


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("mode,gamma", [("ngram", 3), ("kv4", None), ("qspec", 2)])
def test_drafts_on_a_gpu_know_the_tokens(offline, mode, gamma):
    pool = pool_plan(offline=offline, speculate=mode, gamma=gamma)
    assert pool.limits_over(object()).tokens_ahead == 1


def completed(kv=KVPrecision.KV16, model="opt-2.7b", dtype="bfloat16", **settings):
    pool = pool_plan(kv, model, **settings)
    workload = pool.plan.workload.model_copy(update={"dtype": dtype})
    plan = pool.plan.model_copy(update={"workload": workload})
    return complete_plan(plan, pool.spec, pool.options)


def test_packed_blocks_take_heads_of_any_size():
    completed(KVPrecision.KV8)
    completed(speculate="kv4", gamma=2)
    completed(KVPrecision.KV4, "llama-3.1-8b", "float32")
    completed(KVPrecision.KV8V4, "llama-3.1-8b")
    completed(KVPrecision.KV16V4, "llama-3.1-8b")
    completed(KVPrecision.KV16V8)
    with pytest.raises(ValueError, match="has latents that are key and value at once, which"):
        completed(KVPrecision.KV8V4, "deepseek-v2-lite")


def test_packed_blocks_that_no_kernel_reads_are_refused():
    ways = execution_modes(gpu=True, kv=KVPrecision.KV8, drafts=False)

    def refused(spec):
        require(spec, ways, max_len=300)

    spec = ModelSpec.by_name("opt-2.7b")
    refused(replace(spec, head_dim=250))
    with pytest.raises(ValueError, match="heads of more than 256 channels, which .*; plan with"):
        refused(replace(spec, head_dim=264))
    with pytest.raises(ValueError, match="heads of more than 256 channels"):
        refused(replace(spec, global_head_dim=512))
    latents = ModelSpec.by_name("deepseek-v2-lite")
    ways = execution_modes(gpu=True, kv=KVPrecision.KV4, drafts=False, dtype="float32")
    with pytest.raises(ValueError, match="latents in float32, which"):
        require(latents, ways, max_len=300)


def test_a_copy_for_drafts_takes_its_room_from_the_pool():
    """Where the plan has not counted it, another pool is stated."""
    pool = pool_plan()
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
    stated = PoolForm.planned(
        pool.spec, pool.plan.workload, pool.plan.stages, chunk=512, prefill_microbatch=1
    )
    stages = (stage.model_copy(update={"memory": memory}),)
    plan = pool.plan.model_copy(update={"stages": stages, "pool": stated})
    for mode, fewer in ((None, False), ("ngram", False), ("kv4", True)):
        options = replace(pool.options, speculate=mode, gamma=mode and 2)
        made, options = complete_plan(plan, pool.spec, options)
        own = replace(pool, plan=made, options=options)
        assert (own.size.num_blocks < stated.num_blocks) == fewer
        assert own.size.num_blocks == made.pool.num_blocks
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
        options = replace(pool.options, **settings)
        return replace(pool, plan=plan, options=options).limits.host_blocks

    assert kept() == 4 * 3, "an H200's host copies 16 MiB sooner"
    assert kept({"prefill_s": 1e-4}) == 0 < kept({"prefill_s": 1.0})
    assert kept({"kind": "CPU", "threads": 1}) == 0
    assert kept(speculate="ngram", gamma=2) == 0
    assert pool_plan(KVPrecision.KV8, offline=False).limits.host_blocks == 0
    assert pool_plan(model="gemma-2-9b", offline=False).limits.host_blocks == 0


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
    pool = execution_modes(gpu=True, kv=kv, drafts=False)
    require(ModelSpec.by_name(model), pool, max_len=8000)
