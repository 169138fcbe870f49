"""The end of an LLM: whatever ends it frees weights, threads and processes; scripts end cleanly."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from llmpq import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3)
ROUNDS = 3
SCRIPT = """
import os, signal, sys, threading
from llmpq import LLM, SamplingParams

model, plan, backend, end = sys.argv[1:]
llm = LLM(model, plan=plan or None, backend=backend, on_loss="stop")
llm.generate("import os", SamplingParams(temperature=0, max_tokens=3))
print(*[stage["pid"] for stage in llm.stats()["stages"]], flush=True)
if end == "lost":
    os.kill(llm.stats()["stages"][-1]["pid"], signal.SIGKILL)
    llm.generate(["import os"] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
if end == "raises":
    raise KeyError("of the user's own")
if end == "busy":
    long = SamplingParams(max_tokens=900, ignore_eos=True)
    threading.Thread(target=llm.generate, args=(["import os"] * 8, long), daemon=True).start()
    sys.exit(5)
"""


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def left_of(before: set[threading.Thread]) -> list[str]:
    """Return the names of threads that are new, once those that are ending have ended."""
    until_s = time.monotonic() + 5
    while (new := set(threading.enumerate()) - before) and time.monotonic() < until_s:
        time.sleep(0.01)
    return sorted(thread.name for thread in new)


@pytest.fixture
def plan(demo_model, make_plan, tmp_path):
    """Return the path of a plan of two stages."""
    (tmp_path / "two.json").write_text(make_plan(demo_model, splits=(3,)).dump_json())
    return tmp_path / "two.json"


@pytest.mark.parametrize(
    ("stages", "backend"),
    [
        pytest.param(1, "threads", marks=pytest.mark.cpu),
        pytest.param(2, "threads", marks=pytest.mark.cpu),
        pytest.param(1, "processes", marks=[pytest.mark.cluster, pytest.mark.seldom]),
        pytest.param(2, "processes", marks=pytest.mark.cluster),
    ],
)
def test_del_frees_weights_threads_and_processes(demo_model, plan, stages, backend):
    """No round leaves a tensor (with Python's collector off), a thread, a process or a file.

    Other tests' threads that have yet to end, and their processes (multiprocessing keeps a fork
    server and a resource tracker), don't count.
    """
    process, held, others = psutil.Process(), [], children()
    threads = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            llm = LLM(demo_model, plan=plan if stages == 2 else None, backend=backend)
            llm.generate("import os", GREEDY)
            weak = llm._end_engine
            del llm
            assert not weak.alive
            held.append((
                num_tensors(), left_of(threads), len(children() - others), process.num_fds(),
            ))  # fmt: skip
    finally:
        gc.enable()
    assert held[1:] == [held[0]] * (ROUNDS - 1)
    assert held[0][1:3] == ([], 0)


@pytest.mark.cpu
def test_a_closed_llm_that_is_still_referred_to_holds_no_weights(demo_model):
    before = num_tensors()
    with LLM(demo_model, backend="threads") as llm:
        llm.generate("import os", GREEDY)
        loaded = num_tensors()
    llm.close()  # again does nothing
    assert loaded > before + 20 and num_tensors() <= before + 2
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("import os", GREEDY)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("stages", "backend", "end", "code", "said"),
    [
        (2, "processes", "lost", 1, "StageLostError"),
        pytest.param(1, "processes", "lost", 1, "StageLostError", marks=pytest.mark.seldom),
        (2, "threads", "raises", 1, "KeyError"),
        (2, "processes", "busy", 5, ""),
        (1, "threads", "busy", 5, ""),
        (1, "threads", "none", 0, ""),
    ],
)
def test_a_script_without_with_ends_cleanly(demo_model, plan, stages, backend, end, code, said):
    words = [str(demo_model), str(plan) if stages == 2 else "", backend, end]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr
    assert said in (done.stderr.strip().splitlines() or [""])[-1]
    for pid in done.stdout.split():
        assert not psutil.pid_exists(int(pid)) or not _is_stage(int(pid))


def _is_stage(pid: int) -> bool:
    try:
        return "stage_process" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
