"""What happens to a host rather than to a stage: it stops, its clock is set, a cable is out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from llmpq import LLM, SamplingParams
from llmpq.errors import StageLostError
from llmpq.runtime.launch.on_ray.ray_watch import Raylet
from llmpq.runtime.options.engine_options import Deadlines

PROMPTS = [f"def function_{number}(self, x):\n    return" for number in range(3)]
PARAMS = [
    SamplingParams(temperature=t, seed=3, max_tokens=80, ignore_eos=True) for t in (0, 0.9, 0.8)
]
STEPPED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

/* The time of day goes 400 days ahead and 30 back, ten times a second. */
static int real(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  return next(clock, now);
}
extern "C" int clock_gettime(clockid_t clock, struct timespec *now) noexcept {
  int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    struct timespec steady;
    real(CLOCK_MONOTONIC, &steady);
    now->tv_sec += (steady.tv_nsec / 100000000) % 2 ? 86400L * 400 : -86400L * 30;
  }
  return failed;
}
extern "C" int gettimeofday(struct timeval *now, void *) noexcept {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
extern "C" time_t time(time_t *now) noexcept {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


@pytest.fixture(scope="module")
def undisturbed(demo_model, make_plan):
    """Return a plan, and what it gives where nothing happens."""
    plan = make_plan(demo_model, (2, 5), batch=4, prompt_len=64, gen_len=96)
    with LLM(demo_model, plan=plan, backend="threads") as llm:
        return plan, tokens_of(llm.generate(PROMPTS, PARAMS))


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def disturbed(llm: LLM, trouble) -> list[list[int]]:
    """Return the tokens of a job that is under way when the trouble comes."""

    def wait() -> None:
        while llm.stats()["generated_tokens"] < 30:
            time.sleep(0.002)
        trouble(llm.stages_started.stage_pids())

    threading.Thread(target=wait, daemon=True).start()
    return tokens_of(llm.generate(PROMPTS, PARAMS))


@pytest.mark.cluster
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.seldom), 1])
def test_a_stage_that_stands_still_is_replaced(demo_model, undisturbed, stage):
    plan, expected = undisturbed
    limits = Deadlines(step_s=3)
    stopped: list[int] = []

    def stop(pids: list[int]) -> None:
        stopped.append(pids[stage])
        os.kill(pids[stage], signal.SIGSTOP)

    with LLM(demo_model, plan=plan, backend="processes", deadlines=limits) as llm:
        assert disturbed(llm, stop) == expected
        reasons = [recovery.reason for recovery in llm.recoveries]
    assert any(f"stage {stage} (CPU-{stage}" in one and "for 3 s" in one for one in reasons)
    assert not psutil.pid_exists(stopped[0]), "a stopped process is ended, too"


@pytest.mark.cluster
def test_a_connection_that_is_cut_is_made_again(demo_model, undisturbed):
    plan, expected = undisturbed
    cut: list[int] = []

    def cut_links(pids: list[int]) -> None:
        for link in psutil.Process(pids[1]).net_connections("tcp"):
            if link.raddr and ":" not in link.laddr.ip:
                words = ["ss", "-K", "src", link.laddr.ip, "sport", "=", str(link.laddr.port)]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                cut.append("ESTAB" in done.stdout)

    if shutil.which("ss") is None or os.geteuid() != 0 or not may_cut():
        pytest.skip("cutting connections needs root, ss, and a kernel that lets it")
    with LLM(demo_model, plan=plan, backend="processes") as llm:
        assert disturbed(llm, cut_links) == expected
        assert any(cut)
        (recovery,) = llm.recoveries
    assert "its connection to another stage broke" in recovery.reason
    assert "/pytorch/" not in recovery.reason


def may_cut() -> bool:
    """Whether this kernel closes a connection for `ss -K`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            words = ["ss", "-K", "src", "127.0.0.1", "dport", "=", str(port)]
            subprocess.run(words, capture_output=True, check=False)
            client.settimeout(1)
            try:
                client.send(b"a")
                client.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
    return True


@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a clock")
def test_a_clock_that_is_set_changes_nothing(tmp_path, demo_model, undisturbed):
    plan, expected = undisturbed
    (tmp_path / "clock.cpp").write_text(STEPPED)
    clock, file = tmp_path / "clock.so", tmp_path / "plan.json"
    made = ["g++", "-shared", "-fPIC", "-o", str(clock), str(tmp_path / "clock.cpp"), "-ldl"]
    subprocess.run(made, check=True)
    file.write_text(plan.dump_json())
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": prompt, "temperature": own.temperature, "seed": own.seed,
         "max_tokens": own.max_tokens, "ignore_eos": True}
        for prompt, own in zip(PROMPTS, PARAMS, strict=True)
    ]  # fmt: skip
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "llmpq.runtime", "run", "--plan", str(file), "--model",
               str(demo_model), "-i", str(given), "-o", str(output)]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": str(clock)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["tokens"] for line in output.read_text().splitlines()] == expected
    assert "recovered" not in done.stderr


@pytest.mark.pure
def test_a_raylet_that_has_ended_is_noticed_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        raylet = Raylet(*server.getsockname())
        assert raylet.lost() is None
        for said in (b"", b"greeting"):  # it hangs up on who says nothing for minutes
            connection, _ = server.accept()
            connection.sendall(said)
            assert raylet.lost() is None
            connection.close()
            while raylet._is_connected():
                pass
            assert raylet.lost() is None
        server.accept()[0].close()
    while raylet._is_connected():
        pass
    lost = raylet.lost()
    assert isinstance(lost, StageLostError) and "raylet" in str(lost)
    assert raylet.lost() is lost


@pytest.mark.cluster
def test_a_stage_behind_a_server_has_the_lowest_priority_once_it_runs(demo_model):
    """Not while it loads: on a busy host a recovery would take many times as long."""
    with LLM(demo_model, stages_apart=True, dtype="float32", max_num_seqs=2) as llm:
        llm.generate(PROMPTS[0], PARAMS[0])
        (pid,) = llm.stages_started.stage_pids()
        threads = [thread.id for thread in psutil.Process(pid).threads()]
        nice = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert nice == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19, "the driver keeps its own"
