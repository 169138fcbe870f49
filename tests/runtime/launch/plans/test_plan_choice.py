"""Which plan a GPU runs a model by where none was given."""

import json
from dataclasses import replace

import pytest

from llmpq.devices.cluster import Cluster
from llmpq.errors import BadPlanError
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.launch.plans import manual_plan
from llmpq.runtime.launch.plans.plan_choice import POOL_ROWS, ROWS, choose_plan
from llmpq.runtime.launch.plans.pool_plan import PoolPlan
from llmpq.runtime.options.engine_options import EngineOptions

pytestmark = pytest.mark.cpu


@pytest.fixture
def h200():
    node = {"name": "a", "devices": [{"kind": "H200"}]}
    return Cluster.parse_data({"name": "one", "nodes": [node]}, where="here")


@pytest.mark.parametrize("kv", ["auto", "kv4"])
def test_a_gpu_has_a_pool_and_as_many_requests_as_its_blocks_hold(kv, demo_model, h200):
    chosen = choose_plan(
        demo_model, None, EngineOptions(cluster=h200, kv_cache_dtype=kv, dtype="bfloat16")
    )
    assert chosen.plan.workload.batch == POOL_ROWS and chosen.plan.pool is not None
    (stage,) = chosen.plan.stages
    assert stage.memory is not None, "nothing bounds the pool"
    few = choose_plan(
        demo_model, None, EngineOptions(cluster=h200, kv_cache_dtype=kv, max_num_seqs=3)
    )
    assert few.plan.workload.batch == 3


@pytest.mark.parametrize(
    "drafting", [{"speculate": "ngram", "gamma": 2}, {"speculate": "kv4", "dtype": "bfloat16"}]
)
def test_drafts_have_the_pool_of_other_runs_their_copy_taken_off(drafting, demo_model, h200):
    how = {"cluster": h200, "dtype": "bfloat16", **drafting}
    chosen = choose_plan(demo_model, None, EngineOptions(**how))
    plain = choose_plan(
        demo_model, None, EngineOptions(**how | {"speculate": "off", "gamma": None})
    )
    assert chosen.plan.workload.batch == plain.plan.workload.batch == POOL_ROWS
    assert chosen.plan.pool.num_blocks <= plain.plan.pool.num_blocks
    pool = PoolPlan(chosen.plan, chosen.spec, chosen.options)
    assert pool.size.num_blocks == chosen.plan.pool.num_blocks


def test_a_plan_that_was_given_takes_a_length(demo_model, h200):
    made = choose_plan(demo_model, None, EngineOptions(cluster=h200)).plan
    chosen = choose_plan(None, made, EngineOptions(max_model_len=100))
    assert PoolPlan(chosen.plan, chosen.spec, chosen.options).limits.max_len == 100


def test_what_has_no_room_beside_its_workspace_is_planned_at_fewer_bits(
    demo_model, h200, monkeypatch
):
    monkeypatch.setattr(manual_plan, "CONTEXT_BYTES", 1 << 50)
    chosen = choose_plan(demo_model, None, EngineOptions(cluster=h200))
    assert chosen.plan.workload.batch == ROWS[False] and chosen.plan.solver is not None


def test_several_gpus_state_the_pool_of_a_run_that_plans_itself(demo_model, h200):
    (node,) = h200.nodes
    two = replace_devices(h200, node.model_copy(update={"devices": node.devices * 2}))
    chosen = choose_plan(
        demo_model, None, EngineOptions(cluster=two, max_num_seqs=2, max_model_len=500)
    )
    spec = ModelSpec.from_directory(demo_model)
    assert chosen.plan.pool is not None
    job = PoolPlan(chosen.plan, spec, EngineOptions(offline=True))
    assert job.limits.num_blocks == chosen.plan.pool.num_blocks
    assert chosen.plan.workload.kv is KVPrecision.KV16
    older = replace(job, plan=job.plan.model_copy(update={"pool": None}))
    assert older.size == job.size


def replace_devices(cluster, node):
    return Cluster(name=cluster.name, nodes=(node,), links=cluster.links)


@pytest.mark.parametrize(("asked", "bits"), [(None, 8), (8, 8), (16, 16)])
def test_the_output_matrix_has_the_bits_that_are_asked_for(demo_model, caplog, asked, bits):
    """A CPU rounds it beside rounded layers, and says so unless somebody asked."""
    node = {"name": "a", "devices": [{"kind": "CPU", "memory": "18 MiB"}]}
    cpu = Cluster.parse_data({"name": "one", "nodes": [node]}, where="here")
    how = EngineOptions(cluster=cpu, head_bits=asked, max_model_len=64)
    plan = choose_plan(demo_model, None, how).plan
    assert any(precision.weight_bits <= 8 for precision in plan.precisions)
    assert plan.settings().head_bits == bits
    assert ("output matrix is rounded to 8 bits" in caplog.text) == (asked is None)


def test_random_weights_of_a_built_in_model_are_planned_for_several_devices():
    nodes = [{"name": "a", "devices": [{"kind": "CPU", "memory": "3 GiB"}] * 2}]
    cluster = Cluster.parse_data({"name": "two", "nodes": nodes}, where="here")
    how = EngineOptions(cluster=cluster, load_format="dummy", max_model_len=64, dtype="float16")
    chosen = choose_plan("opt-1.3b", None, how)
    assert chosen.spec.name == "opt-1.3b" and chosen.plan.model.num_layers == 24


def test_bits_of_the_output_matrix_that_cannot_be_are_refused(demo_model, make_plan):
    with pytest.raises(ValueError, match="head_bits must be 8 or 16, got 4"):
        EngineOptions(head_bits=4)


@pytest.mark.parametrize(
    ("same", "other", "said"),
    [
        ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}, "2 is not what plan= says, 1;"),
        ({"head_bits": 16}, {"head_bits": 8}, "head_bits=8 is not what plan= says, 16;"),
        ({"dtype": "float32"}, {"dtype": "float16"}, "'float16' is not what plan= says, float32"),
    ],
)
def test_what_a_plan_says_may_be_said_again(demo_model, make_plan, same, other, said):
    plan = make_plan(demo_model)
    known = choose_plan(None, plan, EngineOptions())
    assert choose_plan(None, plan, EngineOptions(**same)) == known
    with pytest.raises(ValueError, match=said):
        choose_plan(None, plan, EngineOptions(**other))


def test_a_number_of_devices_beside_a_plan_is_that_of_its_stages(demo_model, make_plan):
    plan = make_plan(demo_model, (4,), shares=((1, 1), (1,)))
    for size in (1, 2):
        with pytest.raises(ValueError, match=f"={size} is not what plan= says, 1 and 2;"):
            choose_plan(None, plan, EngineOptions(tensor_parallel_size=size))
    both = make_plan(demo_model, (4,), shares=((1, 1), (1, 1)))
    choose_plan(None, both, EngineOptions(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="=1 is not what plan= says, 2;"):
        choose_plan(None, both, EngineOptions(tensor_parallel_size=1))


def test_a_whole_model_has_an_output_matrix_of_8_bits_where_that_is_asked(demo_model):
    plan = choose_plan(demo_model, None, EngineOptions(head_bits=8, max_model_len=64)).plan
    assert plan.settings().head_bits == 8


def test_a_plan_is_taken_as_itself_as_a_file_and_as_its_data(demo_model, tmp_path):
    plan = choose_plan(demo_model, None, EngineOptions()).plan
    plan.save_json(tmp_path / "plan.json")
    text = plan.dump_json()
    forms = (plan, tmp_path / "plan.json", text, json.loads(text), plan.model_dump())
    found = [choose_plan(demo_model, form, EngineOptions()).plan for form in forms]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "the plan: 'model': Field required"),
        ("{", "the plan is not JSON"),
        ('{"engines": []}', "is a plan of 0 engines"),
        ({"engines": []}, "is a plan of 0 engines"),
    ],
)
def test_data_that_is_no_plan_is_refused(demo_model, plan, said):
    with pytest.raises(BadPlanError, match=said):
        choose_plan(demo_model, plan, EngineOptions())
    with pytest.raises(ValueError, match="plan must be a Plan, a file's path or its data, got 5"):
        choose_plan(demo_model, 5, EngineOptions())
