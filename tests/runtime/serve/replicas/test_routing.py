"""Requests go where they should end first: by work, speed and what a prefix cache has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.plans.topology import EngineShare, Topology
from llmpq.runtime.cli.replica_launches import launches_of
from llmpq.runtime.cli.serve import main
from llmpq.runtime.cli.serve_flags import ServeOptions, serve_parser
from llmpq.runtime.serve.replicas.replica_front import ReplicaFront, ReplicaHandle
from llmpq.runtime.serve.replicas.routing import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    ReplicaLoad,
    RequestWork,
)
from llmpq.runtime.serve.settings import ServeSettings

pytestmark = pytest.mark.quick


def _body(text: str, tokens: int | None = None) -> bytes:
    asked = {} if tokens is None else {"max_tokens": tokens}
    return json.dumps({"messages": [{"role": "user", "content": text}], **asked}).encode()


@pytest.fixture
def front() -> ReplicaFront:
    """Three replicas, ready, of speeds 1, 1 and 3."""
    process: Any = None
    handles = [ReplicaHandle(n, process, speed) for n, speed in enumerate((1.0, 1.0, 3.0))]
    for handle in handles:
        handle.ready, handle._heard_s = True, float("inf")
    return ReplicaFront(ServeSettings(model_names=("m",)), handles)


def test_work_is_read_off_the_body() -> None:
    assert RequestWork.of(_body("x", 17)).tokens == 17
    assert RequestWork.of(b'{"max_completion_tokens": 5}').tokens == 5
    assert RequestWork.of(b'{"max_tokens": 999999999}').tokens == 4096
    assert RequestWork.of(b"").tokens == 256 and RequestWork.of(b"\xff\x00").blocks == ()
    long, short = RequestWork.of(_body("a" * 9000)), RequestWork.of(_body("a" * 90))
    assert long.prompt > short.prompt


def test_unequal_replicas_get_requests_by_their_speed(front: ReplicaFront) -> None:
    counts = [0, 0, 0]
    for n in range(50):
        work = RequestWork.of(_body(f"{n} question", 100))
        replica = front.choose((), work)
        replica.load.begin(work)
        counts[replica.number] += 1
    assert counts == [10, 10, 30]


def test_long_answers_count_for_more_than_short_ones(front: ReplicaFront) -> None:
    front.replicas[2].ready = False
    long, short = RequestWork.of(_body("a", 1000)), RequestWork.of(_body("b", 10))
    first = front.choose((), long)
    first.load.begin(long)
    for _ in range(20):
        other = front.choose((), short)
        assert other is not first
        other.load.begin(short)


def test_the_next_turn_of_a_chat_goes_where_the_first_was(front: ReplicaFront) -> None:
    front.replicas[2].ready = False
    chats = [f"chat {n} " + "word " * 2000 for n in range(6)]
    where = {}
    for chat in chats:
        work = RequestWork.of(_body(chat, 16))
        replica = front.choose((), work)
        replica.load.end(replica.load.begin(work))
        where[chat] = replica
    assert len({replica.number for replica in where.values()}) == 2
    for chat in chats[::-1]:
        work = RequestWork.of(_body(chat + "and more", 16))
        assert front.choose((), work) is where[chat]


def test_a_busy_replica_loses_even_what_it_knows(front: ReplicaFront) -> None:
    front.replicas[2].ready = False
    work = RequestWork.of(_body("word " * 400, 16))
    home = front.choose((), work)
    home.load.end(home.load.begin(work))
    assert front.choose((), work) is home
    for _ in range(8):
        home.load.begin(RequestWork.of(_body("other", 256)))
    assert front.choose((), work) is not home


def test_what_is_remembered_is_bounded_and_forgotten() -> None:
    load = ReplicaLoad()
    for n in range(40):
        load.begin(RequestWork.of(bytes([n]) * BLOCK_BYTES * 1000))
    assert len(load._seen) <= MOST_BLOCKS
    last = RequestWork.of(bytes([39]) * BLOCK_BYTES * 1000)
    assert load.of(last) < last.tokens + 1
    load.forget()
    assert load.of(last) == last.tokens + last.prompt


def _served(path: Path, *words: str) -> ServeOptions:
    options: ServeOptions = serve_parser().read_as(ServeOptions, ["--plan", str(path), *words])
    return options


def test_each_engine_of_a_plan_is_a_replica(
    demo_model: Path, make_plan: Any, tmp_path: Path
) -> None:
    whole, pair = make_plan(demo_model), make_plan(demo_model, (4,))
    stages = tuple(s.model_copy(update={"device": f"{s.device}-b"}) for s in pair.stages)
    pair = pair.model_copy(update={"stages": stages})
    work = whole.workload.model_copy(update={"batch": 7})
    shares = (EngineShare(rows=4, plan=whole), EngineShare(rows=3, plan=pair))
    path = tmp_path / "plan.json"
    Topology(engines=shares, workload=work).save_json(path)
    launches = launches_of(_served(path))
    found = [json.loads(launch.engine["plan"])["stages"] for launch in launches]
    assert [len(stages) for stages in found] == [1, 2]
    assert [launch.gpus for launch in launches] == [(), ()]
    with pytest.raises(ValueError, match="the plan has 2 engines of its own; leave --replicas out"):
        main(_served(path, "--replicas", "3"))
    gpus = tuple(
        s.model_copy(update={"device_index": 2 + n, "kind": "RTX-3090", "threads": None})
        for n, s in enumerate(stages)
    )
    shares = (shares[0], EngineShare(rows=3, plan=pair.model_copy(update={"stages": gpus})))
    Topology(engines=shares, workload=work).save_json(path)
    with pytest.raises(ValueError, match="engines are on 4 GPUs, this machine has 0"):
        launches_of(_served(path))


def test_engines_on_several_nodes_need_a_ray_and_each_joins_it(
    demo_model: Path, make_plan: Any, tmp_path: Path
) -> None:
    plans = [make_plan(demo_model), make_plan(demo_model)]
    stage = plans[1].stages[0].model_copy(update={"device": "other", "node": "elsewhere"})
    plans[1] = plans[1].model_copy(update={"stages": (stage,)})
    shares = tuple(EngineShare(rows=4, plan=plan) for plan in plans)
    work = plans[0].workload.model_copy(update={"batch": 8})
    path = tmp_path / "plan.json"
    Topology(engines=shares, workload=work).save_json(path)
    with pytest.raises(ValueError, match=r"on 2 nodes \(elsewhere, .*: give the Ray that joins"):
        launches_of(_served(path))
    launches = launches_of(_served(path, "--ray-address", "10.0.0.1:6379"))
    assert [json.loads(own.engine["plan"])["stages"][0]["node"] for own in launches] == [
        plans[0].stages[0].node,
        "elsewhere",
    ]
    assert {own.engine["options"]["ray_address"] for own in launches} == {"10.0.0.1:6379"}
    with pytest.raises(ValueError, match="--replicas are processes on this machine"):
        main(_served(path, "--ray-address", "10.0.0.1:6379", "--replicas", "2"))
