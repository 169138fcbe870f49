"""A pool on a GPU bounds blocks by memory, and not how many requests there are."""

from dataclasses import replace

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans.manual_plan import device_plan, with_pool_room
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.workload import Workload

pytestmark = pytest.mark.cpu
GIB = 1 << 30
SPEC = ModelSpec.by_name("llama-3.1-8b")


def plan_of(device, rows, *, max_len=4400, kv=KVPrecision.KV16, may_shrink=False):
    job = Workload(batch=rows, prompt_len=max_len, gen_len=1, kv=kv, dtype="bfloat16")
    return device_plan(SPEC, device, job, model_dir="", may_shrink=may_shrink)


@pytest.fixture(scope="module")
def h200():
    (device,) = Cluster.parse_data(
        {"name": "one", "nodes": [{"name": "a", "devices": [{"kind": "H200"}]}]}, where="here"
    ).devices
    return device


@pytest.mark.parametrize("kv", [KVPrecision.KV16, KVPrecision.KV4])
def test_256_long_requests_have_what_memory_there_is(h200, kv):
    plan = plan_of(h200, 256, kv=kv)
    (memory,) = (stage.memory for stage in plan.stages)
    size = PoolPlan(plan, SPEC, EngineOptions()).size
    nbytes = size.nbytes(SPEC, kv, layers=range(SPEC.num_layers), dtype_bytes=2)
    assert size.slots == 256 and memory.total_bytes <= memory.limit_bytes
    assert memory.limit_bytes + memory.reserve_bytes == h200.limit_bytes
    others = memory.total_bytes - memory.kv_bytes
    assert nbytes + others <= memory.limit_bytes
    if kv is KVPrecision.KV16:
        assert nbytes > 0.9 * memory.kv_bytes > 90 * GIB, "memory is left unused"


def test_chunks_are_as_long_as_costs_few_blocks(h200):
    """Memory that is stated counts them; a card that weights fill has shorter ones."""
    plan = plan_of(h200, 256, max_len=9000)
    assert plan.prefill_chunk == plan.prefill_step_tokens == 8192
    (memory,) = (stage.memory for stage in plan.stages)
    short = with_pool_room(
        plan.model_copy(update={"prefill_chunk": 512}), SPEC, h200.limit_bytes, share=0.9
    )
    (least,) = (stage.memory for stage in short.stages)
    assert memory.workspace_bytes > least.workspace_bytes
    assert 0.98 * least.kv_bytes < memory.kv_bytes < least.kv_bytes
    tight = replace(h200, memory_bytes=22 * GIB)
    assert plan_of(tight, 256, max_len=9000).prefill_chunk == 1024
    assert plan_of(h200, 256, max_len=900).prefill_chunk == 512


@pytest.mark.parametrize("may_shrink", [False, True])
def test_a_gpus_plan_has_all_requests_whatever_fits_at_their_longest(h200, may_shrink):
    assert plan_of(h200, 256, may_shrink=may_shrink).workload.batch == 256


def test_a_request_that_never_fits_is_refused_in_a_sentence(h200):
    plan = plan_of(h200, 1)
    with pytest.raises(DoesNotFitError, match="a request of 4400 tokens needs .*; take fewer"):
        with_pool_room(plan, SPEC, 16 * GIB, share=0.9)
