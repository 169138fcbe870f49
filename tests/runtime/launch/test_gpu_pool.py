"""Which plans on GPUs are served from a pool of KV blocks: those that ask for it and can be."""

from dataclasses import replace

import pytest

from llmpq.capabilities import require, ways_of
from llmpq.kv_format import packed_blocks
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.hand_plan import hand_plan
from llmpq.runtime.launch.pool_plan import PoolPlan, request_limits
from llmpq.runtime.launch.stage_settings import StageSettings
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu


def pool_plan(kv=KVPrecision.KV16, model="llama-3.1-8b", **settings):
    spec = ModelSpec.by_name(model)
    plan = hand_plan(spec, Workload(batch=4, prompt_len=200, gen_len=100, kv=kv))
    (stage,) = plan.stages
    stage = stage.model_copy(update={"kind": "NVIDIA H200", "threads": None})
    plan = plan.model_copy(update={"stages": (stage,)})
    return PoolPlan(plan, spec, StageSettings(model_dir="", **settings))


@pytest.mark.parametrize("live", [True, False])
def test_a_gpu_has_slots_unless_it_is_to_have_a_pool(live):
    assert not pool_plan(live=live).serves
    pool = pool_plan(live=live, gpu_pool=True)
    assert pool.serves
    assert pool.limits.tokens_ahead == 2, "the host waits for tokens"
    assert pool.limits.num_blocks == 4 * 3
    slots = request_limits(pool_plan(live=live).plan, pool.spec, pool_plan(live=live).settings)
    assert slots.max_len == 299 and pool.limits.max_len == pool.spec.max_positions + 1


@pytest.mark.parametrize("kv", [KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2])
def test_packed_precisions_have_a_pool_that_counts_what_is_ever_packed(kv):
    pool = pool_plan(kv, live=True, gpu_pool=True)
    assert pool.serves and pool.limits.kv is kv
    assert pool.limits.num_blocks == 4 * packed_blocks(300)


@pytest.mark.parametrize(
    "kv,model,speculate,why",
    [
        (KVPrecision.KV8, "opt-2.7b", None, "a KV cache of 8 bits and heads of 80 channels"),
        (KVPrecision.KV4, "deepseek-v3", None, "a KV cache of 4 bits and heads of 576 channels"),
        (KVPrecision.KV16, "llama-3.1-8b", "ngram", "speculation"),
        (KVPrecision.KV4, "llama-3.1-8b", "ngram", "speculation"),
    ],
)
def test_what_a_gpu_does_not_page_is_refused_with_the_way_out(kv, model, speculate, why):
    with pytest.raises(ValueError, match=f"does not go with {why} yet; leave the pool out"):
        _ = pool_plan(kv, model, live=True, gpu_pool=True, speculate=speculate).serves
    assert not pool_plan(kv, model, live=True, speculate=speculate).serves


def test_packed_blocks_of_a_model_in_float32_are_refused():
    pool = pool_plan(KVPrecision.KV4, "llama-3.1-8b", live=True, gpu_pool=True)
    workload = pool.plan.workload.model_copy(update={"dtype": "float32"})
    pool = replace(pool, plan=pool.plan.model_copy(update={"workload": workload}))
    with pytest.raises(ValueError, match="a KV cache of 4 bits in a model of float32 yet"):
        _ = pool.serves


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-2-9b", "mistral-7b", "deepseek-v3"])
def test_windows_caps_sinks_and_latents_go_over_a_pool(model):
    pool = ways_of(gpu=True, kv=KVPrecision.KV16, drafts=False, pool=True)
    require(ModelSpec.by_name(model), pool, max_len=8000)
