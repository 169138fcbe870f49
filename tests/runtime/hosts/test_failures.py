"""Three hosts, four stages, and what is lost on the way: named in time, nothing left, resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmpq.plans.plan import NodePlan

pytestmark = pytest.mark.timeout(1200)
lost = pytest.mark.hosts_long
"""Minutes of hosts that are lost on purpose: make test-hosts."""

ROWS, TOKENS = 12, 48
LONG = 10
"""Times as many rows, where the loss is noticed half a minute later."""
GONE_S = 30
"""A stage that is cut off ends itself 24 s after it has last heard of the driver."""
RUN = ("run", "--plan", "plan.json", "-i", "in.jsonl", "-o", "out.jsonl")
JOB = (*RUN, "--on-loss", "stop")
NODES = {2: ("hosta", "hostb"), 3: ("hosta", "hostb", "hostc", "hosta")}


@pytest.fixture(scope="module")
def bed(make_bed) -> Iterator:
    with make_bed(["hosta", "hostb", "hostc"]) as three:
        for host in three.hosts:
            three.start_ray(host)
        yield three


@pytest.fixture(scope="module")
def make_folder(make_plan, demo_model, tmp_path_factory) -> Callable[..., Path]:
    """Return a maker of folders with a plan over two or three hosts, and its prompts."""

    def make(num_hosts: int, rows: int = ROWS) -> Path:
        folder = tmp_path_factory.mktemp("job")
        names = NODES[num_hosts]
        plan = make_plan(demo_model, splits=(2, 4, 6)[: len(names) - 1], gen_len=TOKENS)
        stages = zip(plan.stages, names, strict=True)
        change = {
            "stages": tuple(stage.model_copy(update={"node": name}) for stage, name in stages),
            "nodes": tuple(NodePlan(name=name, host=name) for name in dict.fromkeys(names)),
        }
        plan.model_copy(update=change).save_json(folder / "plan.json")
        write_rows(folder, rows)
        return folder

    return make


@pytest.fixture(scope="module")
def expected(make_plan, demo_model, tmp_path_factory) -> list:
    """What one host's stage answers."""
    folder = tmp_path_factory.mktemp("alone")
    make_plan(demo_model, gen_len=TOKENS).save_json(folder / "plan.json")
    write_rows(folder, ROWS)
    subprocess.run([sys.executable, "-m", "llmpq.runtime", *JOB], cwd=folder, check=True)
    return answers(folder)


def write_rows(folder: Path, rows: int) -> None:
    lines = [{"prompt": f"def f{row % ROWS}(", "ignore_eos": True} for row in range(rows)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(folder: Path) -> list:
    lines = (folder / "out.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"] for line in lines]


class Run:
    """A run on the head's host that has begun to answer."""

    def __init__(self, bed, folder: Path, *words: object, job: tuple[str, ...] = JOB) -> None:
        command = (sys.executable, "-m", "llmpq.runtime", *job, "--ray-address", bed.address)
        self._folder = folder
        self._process = bed.head.start(*command, *words, folder=folder)

    def answering(self) -> Run:
        """Wait for the first answers."""
        out = self._folder / "out.jsonl"
        end_s = time.monotonic() + 400
        while not out.exists() or not out.read_text().count("\n"):
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise AssertionError(self._process.communicate(timeout=30)[1])
            time.sleep(0.1)
        return self

    def end(self) -> tuple[int, str]:
        """Return its exit code and the last line that it said."""
        try:
            _, said = self._process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"did not end: {self._process.communicate()[1]}") from None
        return self._process.returncode, said.strip().splitlines()[-1]


def stages_on(host) -> list[psutil.Process]:
    found = []
    for process in host.processes():
        try:
            if any(word.startswith("ray::RemoteStageWorker") for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def require_nothing_left(bed) -> None:
    end_s = time.monotonic() + GONE_S
    while any(stages_on(host) for host in bed.hosts):
        assert time.monotonic() < end_s, [(h.name, stages_on(h)) for h in bed.hosts]
        time.sleep(0.5)


def require_resumed(bed, folder: Path, expected: list) -> None:
    code, said = Run(bed, folder, "--resume", "--deadlines", "wait_nodes=90").end()
    assert code == 0, said
    given = answers(folder)
    assert given == expected * (len(given) // ROWS) and len(given) % ROWS == 0
    require_nothing_left(bed)


@lost
def test_three_hosts_run_four_stages_and_a_cable_may_be_out_for_five_seconds(
    bed, make_folder, expected
):
    folder = make_folder(3)
    run = Run(bed, folder).answering()
    bed.pull(bed.hosts[2])
    time.sleep(5)
    bed.plug_in(bed.hosts[2])
    code, said = run.end()
    assert code == 0, said
    assert answers(folder) == expected
    require_nothing_left(bed)


@lost
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_stage_that_is_killed_is_named(bed, make_folder, expected, num_hosts):
    folder = make_folder(num_hosts)
    run = Run(bed, folder).answering()
    (stage,) = stages_on(bed.hosts[1])
    stage.kill()
    code, said = run.end()
    assert code == 6 and "stage 1 (CPU-1 on hostb" in said and "--resume" in said
    require_nothing_left(bed)
    require_resumed(bed, folder, expected)


@lost
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_ray_node_that_is_killed_is_named_and_one_that_joins_late_is_waited_for(
    bed, make_folder, expected, num_hosts
):
    folder, host = make_folder(num_hosts), bed.hosts[1]
    run = Run(bed, folder).answering()
    host.end_all()
    code, said = run.end()
    assert code == 6 and "stage 1 (CPU-1 on hostb" in said and "--resume" in said
    require_nothing_left(bed)
    late = Run(bed, folder, "--resume", "--deadlines", "wait_nodes=120")
    time.sleep(10)
    bed.start_ray(host)
    code, said = late.end()
    assert code == 0, said
    assert answers(folder) == expected


@lost
def test_a_host_that_reboots_is_waited_for(bed, make_folder, expected):
    """By default a lost stage is started again, once its host's Ray node is back."""
    folder, host = make_folder(2), bed.hosts[1]
    run = Run(bed, folder, "--deadlines", "wait_nodes=300", job=RUN).answering()
    host.end_all()
    time.sleep(40)
    bed.start_ray(host)
    code, said = run.end()
    assert code == 0, said
    assert answers(folder) == expected
    require_nothing_left(bed)


@lost
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_cable_that_stays_out_is_a_deadline(bed, make_folder, expected, num_hosts):
    folder, host = make_folder(num_hosts), bed.hosts[1]
    run = Run(bed, folder).answering()
    bed.pull(host)
    pulled_s = time.monotonic()
    code, said = run.end()
    assert code in (6, 7) and "hostb" in said and "--resume" in said
    assert time.monotonic() - pulled_s < 120
    require_nothing_left(bed)
    host.end_all()
    bed.plug_in(host)
    bed.start_ray(host)
    require_resumed(bed, folder, expected)


@lost
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_head_that_is_killed_is_named(bed, make_folder, expected, num_hosts):
    folder = make_folder(num_hosts, LONG * ROWS)
    run = Run(bed, folder).answering()
    for process in bed.hosts[0].processes():
        if process.name() == "gcs_server":
            process.kill()
    killed_s = time.monotonic()
    code, said = run.end()
    assert time.monotonic() - killed_s < 30
    assert code == 6 and f"Ray's head at {bed.address} has not answered" in said
    require_nothing_left(bed)
    for host in bed.hosts:
        host.end_all()
        bed.start_ray(host)
    require_resumed(bed, folder, expected)


@lost
def test_the_heads_host_is_lost_and_another_one_goes_on(bed, make_folder, expected):
    """The output and what is beside it are the driver's journal: on a disk that others see."""
    folder, lost_host = make_folder(2, LONG * ROWS), bed.hosts[0]
    Run(bed, folder).answering()
    lost_host.end_all()
    require_nothing_left(bed)
    kept = answers(folder)
    assert kept
    # The plan's node hosta is a name; its host is another one now.
    plan = json.loads((folder / "plan.json").read_text())
    plan["nodes"] = [{"name": "hosta", "host": "hostc"}, {"name": "hostb", "host": "hostb"}]
    (folder / "plan.json").write_text(json.dumps(plan))
    for host in bed.hosts[1:]:
        host.end_all()
    bed.head = bed.hosts[2]
    try:
        for host in (bed.hosts[2], bed.hosts[1]):
            bed.start_ray(host)
        code, said = Run(bed, folder, "--resume").end()
        assert code == 0, said
        given = answers(folder)
        assert given == expected * LONG and given[: len(kept)] == kept
        require_nothing_left(bed)
    finally:
        for host in bed.hosts:
            host.end_all()
        bed.head = lost_host
        for host in bed.hosts:
            bed.start_ray(host)
