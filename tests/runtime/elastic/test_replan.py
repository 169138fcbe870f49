"""Another plan once a device is gone: on what is left, with as many bits as fit there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmpq import LLM, SamplingParams
from llmpq.devices.cluster import Cluster
from llmpq.errors import DoesNotFitError, StageLostError
from llmpq.models.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.elastic import replan
from llmpq.runtime.elastic.replan import Replanner, cluster_of, with_less_memory, without_devices
from llmpq.runtime.launch import engine_starter, thread_launcher
from llmpq.runtime.launch.plans.auto_plan import plan_job
from llmpq.runtime.launch.stages.stage_worker import StageWorker
from llmpq.runtime.options.engine_options import EngineOptions
from llmpq.workload import Workload

PROMPTS = [f"def function_{number}(self, x):\n    return" for number in range(5)]
PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True)
    for t in (0, 0.9, 0, 0.8, 0)
]


def cluster(*memory: str) -> Cluster:
    """Return CPU devices of so much memory on one node, and a GPU node beside it."""
    devices = [{"kind": "CPU", "threads": 1, "memory": each, "reserve": 0} for each in memory]
    return Cluster.parse_data(
        {"name": "three", "nodes": [{"name": "here", "devices": devices}]}, where="test"
    )


UNLIKE = Cluster.parse_data(
    {
        "name": "unlike",
        "nodes": [
            {"name": "a", "devices": [{"kind": "T4", "count": 3}, {"kind": "V100-32GB"}]},
            {"name": "b", "devices": [{"kind": "T4", "count": 2}]},
        ],
        "links": {
            "pairs": [
                {"between": ["T4-0", "T4-2"], "gbps": 300, "latency_us": 5},
                {"between": ["T4-1", "V100-32GB-0"], "gbps": 200, "latency_us": 5},
                {"between": ["a", "b"], "gbps": 1, "latency_us": 100},
            ]
        },
    },
    where="test",
)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ({("a", 1)}, ["T4-0", "T4-2", "V100-32GB-0", "T4-3", "T4-4"]),
        ({("a", 3), ("b", 0)}, ["T4-0", "T4-1", "T4-2", "T4-4"]),
        ({("a", 0), ("a", 1), ("a", 2), ("a", 3)}, ["T4-3", "T4-4"]),
    ],
)
def test_devices_left_keep_their_places_and_links(gone, left):
    found = without_devices(UNLIKE, gone)
    assert [device.name for device in found.devices.values()] == left
    assert all((d.node, d.index) not in gone for d in found.devices.values())
    for name, was in found.devices.items():
        now = found.cluster.device(name)
        assert (now.kind, now.node, now.limit_bytes) == (was.kind, was.node, was.limit_bytes)
        for other, was_other in found.devices.items():
            if other != name:
                link = found.cluster.link(now, found.cluster.device(other))
                assert link == UNLIKE.link(was, was_other)


@pytest.mark.pure
def test_nothing_left_is_said():
    with pytest.raises(DoesNotFitError, match="no device is left"):
        without_devices(cluster("26 MiB"), {("here", 0)})


@pytest.mark.pure
def test_a_plan_tells_of_its_devices(demo_model, make_plan):
    plan = make_plan(demo_model, (2, 5))
    devices = cluster_of(plan).devices
    assert [(d.node, d.index, d.threads) for d in devices] == [
        (s.node, s.device_index, s.threads) for s in plan.stages
    ]


@pytest.mark.parametrize(("floor", "fits"), [(3, True), (8, False)])
def test_bits_are_lowered_to_the_floor_and_no_further(demo_model, floor, fits):
    """A device of 14 MiB holds the model with 8 and 4 bits; the larger one is lost."""
    options = EngineOptions(
        cluster=cluster("26 MiB", "14 MiB", "2 MiB"),
        max_model_len=64,
        max_num_seqs=2,
        dtype="float32",
        min_quality=floor,
    )
    llm = LLM(demo_model, options=options, start=False)
    heard = []
    replanner = Replanner(demo_model, llm.model_spec, llm.plan, llm.options, on_limits=heard.append)
    index = next(i for i, s in enumerate(llm.plan.stages) if s.device == "CPU-0")
    if not fits:
        with pytest.raises(DoesNotFitError, match=r"CPU-1.* with 8 bits or more \(--min-quality\)"):
            replanner(llm.plan, index, whole_node=False)
        return
    made = replanner(llm.plan, index, whole_node=False)
    assert all(stage.device != "CPU-0" for stage in made.plan.stages)
    bits = [precision.weight_bits for precision in made.plan.precisions]
    assert min(bits) >= floor and max(bits) < 16
    assert made.change["now"]["weights"] != made.change["before"]["weights"]
    assert heard == [made.limits]
    with pytest.raises(DoesNotFitError, match="no device is left"):
        replanner(llm.plan, index, whole_node=True)


def test_layers_get_back_the_bits_they_had_and_no_more(demo_model, make_plan, monkeypatch):
    """A plan of unlike layers, one device drained and added again: as it began, at both times."""
    monkeypatch.setattr(replan, "TIME_LIMIT_S", 60.0)  # however busy the machine is
    had = [Precision.W16A16, Precision.W8A16] * 2 + [Precision.W8A16] * 4
    plan = make_plan(demo_model, (3,), dtype="float32", batch=4, prompt_len=32, gen_len=32)
    stages = [
        stage.model_copy(update={"precisions": tuple(had[slice(*stage.layers)])})
        for stage in plan.stages
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    spec, options = ModelSpec.from_directory(demo_model), EngineOptions(dtype="float32")
    replanner = Replanner(demo_model, spec, plan, options)
    alone = replanner(plan, 0, whole_node=False).plan
    assert list(alone.precisions) == had and len(alone.stages) == 1
    again = replanner.with_devices(alone, plan.stages[0].device).made.plan
    assert list(again.precisions) == had


def test_a_plan_of_one_device_goes_on_over_two_with_all_requests_in_a_step(demo_model):
    """Its own job has prompts alone: plans for that one decoded request by request."""
    both, shape = cluster("2 GiB", "2 GiB"), {"max_model_len": 64, "max_num_seqs": 8}
    options = EngineOptions(cluster=cluster("2 GiB"), dtype="float32", **shape)
    llm = LLM(demo_model, options=options, start=False)
    assert llm.plan.workload.gen_len == 1
    replanner = Replanner(demo_model, llm.model_spec, llm.plan, llm.options)
    plan = replanner.with_devices(llm.plan, "CPU-1", both).made.plan
    fresh = LLM(
        demo_model, options=EngineOptions(cluster=both, dtype="float32", **shape), start=False
    ).plan
    assert plan.workload == fresh.workload and plan.decode_microbatch == fresh.decode_microbatch > 1
    assert plan.predicted.decode_s > 0


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "model"),
    [(3, "opt-30b"), pytest.param(6, "opt-66b", marks=pytest.mark.seldom), (8, "bloom-176b")],
)
def test_the_papers_clusters_are_planned_again_in_time(number, model):
    """A second of CPU is meant (benchmarks/elastic.py replan); tests allow for slow machines."""
    spec = ModelSpec.by_name(model)
    known = Cluster.load(Path(__file__).parents[3] / f"clusters/paper/{number:02d}.yaml")
    options = EngineOptions(cluster=known, load_format="dummy")
    job = Workload(batch=32, prompt_len=512, gen_len=100)
    plan = plan_job(model, known, job, options, spec=spec).plan
    busy_s = sum(os.times()[:4])
    made = Replanner(Path(model), spec, plan, options)(plan, 0, whole_node=False)
    assert sum(os.times()[:4]) - busy_s < 10
    lost = plan.stages[0]
    assert (lost.node, lost.device_index) not in {
        (stage.node, stage.device_index) for stage in made.plan.stages
    }
    assert sum(stage.num_layers for stage in made.plan.stages) == spec.num_layers


class Broken(StageWorker):
    """A stage whose device fails for good once somebody says so."""

    fails = threading.Event()
    pause_s = 0.0
    """In front of each of its steps: answers last until the test has said so."""
    device = "CPU-1"

    def run(self) -> None:
        if self._stage.device == self.device:
            step = self._compute.run

            def run(*given):
                time.sleep(self.pause_s)
                if self.fails.is_set():
                    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
                return step(*given)

            self._compute.run = run
        super().run()

    def load(self):
        if self.fails.is_set() and self._stage.device == self.device:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return super().load()


@pytest.fixture
def breaking(monkeypatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(thread_launcher, "StageWorker", Broken)
    Broken.fails.clear()
    yield Broken.fails
    Broken.fails.clear()


def seen(outputs) -> list:
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]


@pytest.mark.cpu
def test_requests_go_on_where_the_others_have_room(demo_model, make_plan, breaking, caplog):
    plan = make_plan(demo_model, (2, 5), prompt_len=64, gen_len=64)
    with LLM(demo_model, plan=plan, backend="threads", on_loss="replan") as llm:
        expected = seen(llm.generate(PROMPTS, PARAMS))
        asked, outputs = [llm.prepare(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)], {}
        for index, output in llm.as_completed(
            asked,
            on_progress=lambda progress: progress.generated_tokens > 330 and breaking.set(),
        ):
            outputs[index] = output
        assert breaking.is_set()
        assert seen([outputs[i] for i in range(len(PROMPTS))]) == expected
        (recovery,) = llm.recoveries
        assert recovery.action == "replan" and recovery.num_attempts >= engine_starter.MOST_REFUSALS
        assert [stage.device for stage in llm.plan.stages] != [s.device for s in plan.stages]
        assert all(stage.device != "CPU-1" for stage in llm.plan.stages)
        assert llm.job_report(list(outputs.values()))["recoveries"][0]["plan"]["now"]["stages"]
        assert "planned again" in caplog.text
        assert seen(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.cpu
@pytest.mark.parametrize("on_loss", ["restart", "stop"])
def test_without_it_the_loss_is_the_end(demo_model, make_plan, breaking, on_loss):
    plan = make_plan(demo_model, (2, 5), prompt_len=64, gen_len=64)
    with LLM(demo_model, plan=plan, backend="threads", on_loss=on_loss) as llm:
        breaking.set()
        with pytest.raises(StageLostError, match=r"stage 1 \(CPU-1 .* uncorrectable ECC"):
            llm.generate(PROMPTS, PARAMS)
        with pytest.raises(StageLostError):
            llm.check_alive()


@pytest.mark.cpu
def test_lower_bits_go_on_from_the_tokens_so_far(demo_model, breaking, monkeypatch):
    """From the change on an answer is what the new plan gives to what was there."""
    how = {"max_model_len": 160, "max_num_seqs": 2, "dtype": "float32", "backend": "threads"}
    devices = cluster("26 MiB", "24 MiB")
    greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    with LLM(demo_model, cluster=devices, on_loss="replan", **how) as llm:
        before = llm.plan
        assert {stage.device for stage in before.stages} == {"CPU-0", "CPU-1"}
        monkeypatch.setattr(Broken, "pause_s", 0.05)
        asked = [llm.prepare(PROMPTS[0], greedy)]
        ((_, output),) = llm.as_completed(
            asked, on_progress=lambda progress: progress.generated_tokens > 5 and breaking.set()
        )
        now = llm.plan
        (recovery,) = llm.recoveries
    assert len(now.stages) == 1 and now.precisions != before.precisions
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 80 and recovery.num_kept > 0
    breaking.clear()
    with LLM(demo_model, plan=now, backend="threads") as fresh:
        start = [*output.prompt_token_ids, *tokens[: recovery.num_kept]]
        rest = SamplingParams(temperature=0, max_tokens=80 - recovery.num_kept, ignore_eos=True)
        (again,) = fresh.generate([start], rest)
    assert list(again.outputs[0].token_ids) == tokens[recovery.num_kept :]
    assert ModelSpec.from_directory(demo_model).num_layers == len(now.precisions)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("deaths", "refusals", "seconds", "hopeless"),
    [(9, 0, 5.0, False), (4, 0, 500.0, False), (5, 0, 61.0, True), (2, 2, 0.1, True)],
)
def test_a_stage_that_is_killed_often_still_has_its_device(deaths, refusals, seconds, hopeless):
    assert engine_starter.EngineStarter._is_hopeless(deaths, refusals, seconds) is hopeless


def test_a_recovery_plans_in_its_own_process_with_the_chunk_as_it_was(demo_model, monkeypatch):
    """A process takes half a second to start, and each chunk is a search of its own."""
    options = EngineOptions(cluster=cluster("26 MiB", "24 MiB"), dtype="float32", max_num_seqs=2)
    llm = LLM(demo_model, options=options, start=False)
    chunk = 64
    before = llm.plan.model_copy(update={"prefill_chunk": chunk})
    assert llm.plan.prefill_chunk != chunk

    def no_child(*given: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr("llmpq.planner.solving.answer.plan_in_child", no_child)
    made = Replanner(demo_model, llm.model_spec, before, llm.options)(before, 1, whole_node=False)
    assert made.plan.prefill_chunk == chunk
    assert [stage.device for stage in made.plan.stages] == ["CPU-0"]


@pytest.mark.cpu
def test_a_device_without_memory_is_planned_with_less_twice_and_then_given_up(demo_model):
    options = EngineOptions(cluster=cluster("60 MiB", "60 MiB"), dtype="float32", max_num_seqs=2)
    llm = LLM(demo_model, options=options, start=False)
    replanner = Replanner(demo_model, llm.model_spec, llm.plan, llm.options)
    index = next(i for i, stage in enumerate(llm.plan.stages))
    key = llm.plan.stages[index].device_index
    plan = llm.plan
    for eighths in (1, 2):
        plan = replanner(plan, index, less_memory=True).plan
        left = [one for one in plan.stages if one.device_index == key]
        for stage in left:
            assert stage.memory.limit_bytes == (60 << 20) - eighths * ((60 << 20) // 8)
    plan = replanner(llm.plan, index, less_memory=True).plan
    assert key not in {stage.device_index for stage in plan.stages}


def test_less_memory_of_one_device_leaves_the_others_as_they_are():
    devices = [{"kind": "T4", "count": 3}, {"kind": "CPU", "threads": 2, "memory": "8 GiB"}]
    nodes = [{"name": "a", "devices": devices}, {"name": "b", "devices": [{"kind": "T4"}]}]
    before = Cluster.parse_data({"name": "some", "nodes": nodes}, where="test")
    after = with_less_memory(before, ("a", 1))
    assert [d.name for d in after.devices] == [d.name for d in before.devices]
    for was, now in zip(before.devices, after.devices, strict=True):
        less = was.memory_bytes // 8 if (was.node, was.index) == ("a", 1) else 0
        assert (now.memory_bytes, now.reserve_bytes) == (was.memory_bytes, was.reserve_bytes + less)
