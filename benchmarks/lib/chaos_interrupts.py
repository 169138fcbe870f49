"""Interrupts commands at random moments: each must end in time, leave nothing, and lose no row.

    python benchmarks/chaos.py interrupts --signals 300 [--only run,serve] [--write]

Ctrl-C (SIGINT to all of a terminal's processes) or SIGTERM (to the command alone) comes at a random
moment of the command's usual time: while it imports, loads, computes, is given other devices, has
lost a stage, or closes. One time in six a second signal follows. A command must end with code 130,
or as one that had ended before (a server: 0), within `LIMIT_S`; no process, socket or folder of it
may be left; `run --resume` goes on with the same output until it is whole, which must then be an
undisturbed run's, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from lib.kills import DEMO, quantile, stage_pids, strike, unequal_plan
from lib.rows import write_row
from lib.servers import free_port

from llmpq.runtime.elastic import control_socket

MARK = "LLMPQ_INTERRUPTED"
"""Variable by which the processes of one command are found, whatever their parent is by then."""
LIMIT_S = 60.0
LEFT_S = 10.0
"""How long what a command has started may be there after it: children end with its pipes."""
CODES = {130, -signal.SIGINT, -signal.SIGTERM}
"""Negative: while Python itself starts."""


@dataclass
class Seen:
    """What became of all commands."""

    signals: int = 0
    ends_s: list[float] = field(default_factory=list)
    """From the first signal to the end."""
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    whole: int = 0
    """Outputs that were resumed to their end."""
    rows: Counter[str] = field(default_factory=Counter)
    """Finished rows of each job's output."""


@dataclass(frozen=True)
class Job:
    """A command, and how long it takes from its start."""

    name: str
    words: list[str]
    usual_s: float
    meanwhile: Callable[[subprocess.Popen[bytes], threading.Event, random.Random], None] | None = (
        None
    )
    """Begins what is done to it while it runs."""
    output: Path | None = None
    compared: bool = True
    """Whether its plan is that of the undisturbed run, so that its rows must be the same."""


def main(words: list[str], program: str) -> int:
    """Interrupt commands; 1 if one hung, left something, or lost a row."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="times as long as on an idle machine"
    )
    parser.add_argument("--only", help="jobs, with commas between them")
    parser.add_argument("--write", action="store_true", help="add a row to results/chaos.jsonl")
    given = parser.parse_args(words)
    rng, seen = random.Random(given.seed), Seen()
    end_s = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        jobs = [job for job in jobs_in(folder) if given.only is None or job.name in given.only]
        expected = whole_output(folder) if any(job.output for job in jobs) else []
        while seen.signals < given.signals and time.monotonic() < end_s:
            interrupt(rng.choice(jobs), folder, rng, seen, expected, given.slower)
    ends_s = sorted(seen.ends_s)
    print(*seen.wrong, sep="\n")
    said = {
        "signals": seen.signals, "wrong": len(seen.wrong), "whole": seen.whole,
        "codes": dict(sorted(seen.codes.items())), "p50_s": quantile(ends_s, 0.5),
        "p99_s": quantile(ends_s, 0.99), "load_average": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(said, indent=1))
    if given.write:
        write_row("chaos.jsonl", bench="interrupts", case=said, unit="s", samples=ends_s,
                  noisy=os.getloadavg()[0] > 2 * (os.cpu_count() or 1))  # fmt: skip
    return int(bool(seen.wrong))


def jobs_in(folder: Path) -> list[Job]:
    """Write what the commands read, and return them."""
    plan, rows, cluster = folder / "plan.json", folder / "in.jsonl", folder / "cluster.yaml"
    plan.write_text(unequal_plan(DEMO, batch=8, prompt_len=16, gen_len=64).dump_json())
    write_rows(rows)
    kind = {"kind": "CPU", "threads": 1, "reserve": 0}
    devices = [kind | {"memory": f"{m} MiB"} for m in (26, 24, 24)]
    nodes = [{"name": "here", "devices": devices}]
    cluster.write_text(json.dumps({"name": "c", "nodes": nodes}))
    dist, by_plan = ["-m", "llmpq.runtime"], ["--plan", str(plan)]

    def run(name: str, *more: str, **own: object) -> Job:
        output = folder / f"{name}.jsonl"
        where = ["-i", str(rows), "-o", str(output), "--resume", "--json", *more]
        return Job(name, [*dist, "run", *where], output=output, **own)  # type: ignore[arg-type]

    serve = [*dist, "serve", *by_plan, "--port", str(free_port()), "--drain-timeout", "2"]
    bench = [*dist, "bench", *by_plan, "--backend", "processes", "--chaos", "1"]
    fitting = ["--model", str(DEMO), "--cluster", str(cluster)]
    search = ["--devices", "P100*3,V100", "--model", "opt-30b", "--theta", "1"]
    return [
        run("run", *by_plan, "--backend", "processes", usual_s=10.0),
        run("run-threads", *by_plan, "--backend", "threads", usual_s=8.0),
        run("run-ray", *by_plan, "--backend", "ray", usual_s=20.0),
        run("run-killed", *by_plan, "--backend", "processes", usual_s=12.0, meanwhile=kill_stages),
        run("run-devices", *fitting, usual_s=14.0, meanwhile=change_devices, compared=False),
        Job("serve", serve, 9.0),
        Job("bench", bench, 12.0),
        Job("check", [*dist, "check", str(plan)], 4.0),
        Job("profile", ["-m", "llmpq.profiler", *fitting, "-o", str(folder / "costs.json")], 8.0),
        Job("quantize", ["-m", "llmpq.profiler.cli.quantize", str(DEMO), str(folder / "quantized"),
                         "--scheme", "w4a16", "--text", str(DEMO.parent / "heldout.txt")], 6.0),
        Job("algo", ["-m", "llmpq.planner", *search, "-o", str(folder / "found.json")], 4.0),
    ]  # fmt: skip


def write_rows(path: Path) -> None:
    """Write rows of different lengths, greedy and sampled."""
    rng = random.Random(11)
    with path.open("w") as file:
        for number in range(200):
            row = {
                "prompt": [rng.randrange(3, 4000) for _ in range(rng.randint(1, 16))],
                "temperature": 0 if number % 2 else 0.8,
                "seed": number,
                "max_tokens": rng.randint(16, 64),
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


def whole_output(folder: Path) -> list[list[int]]:
    """Return the tokens of an undisturbed run, row by row."""
    job = next(job for job in jobs_in(folder) if job.name == "run-threads")
    subprocess.run([sys.executable, *job.words], check=True, stdout=subprocess.DEVNULL)
    assert job.output is not None
    found = tokens_of(job.output)
    job.output.unlink()
    return found


def tokens_of(output: Path) -> list[list[int]]:
    """Return the tokens of the rows of an output; `ValueError` for a broken line."""
    return [json.loads(line)["tokens"] for line in output.read_text().splitlines()]


def interrupt(
    job: Job,
    folder: Path,
    rng: random.Random,
    seen: Seen,
    expected: list[list[int]],
    slower: float,
) -> None:
    """Run a command, interrupt it, and look at what is left."""
    mark = secrets.token_hex(8)
    how = rng.choice((signal.SIGINT, signal.SIGTERM))
    delay_s = rng.uniform(0.0, slower * job.usual_s)
    again_s = rng.uniform(0.0, 2.0) if rng.random() < 1 / 6 else None
    said = folder / "stderr"
    with said.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *job.words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # a group of its own, as a shell at a terminal gives
            env={**os.environ, MARK: mark},
        )
    over = threading.Event()
    if job.meanwhile is not None:
        job.meanwhile(process, over, random.Random(rng.random()))
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    signalled_s = time.monotonic()
    send(process, how)
    if again_s is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(again_s)
        send(process, how)
    what = f"{job.name}, {how.name} after {delay_s:.2f} s"
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        seen.wrong.append(f"{what}: hung")
        process.kill()
    over.set()
    seen.signals += 1
    seen.ends_s.append(time.monotonic() - signalled_s)
    code, errors_text = process.wait(), said.read_text()
    seen.codes[f"{code}"] += 1
    if "ended as it is" in errors_text:
        seen.wrong.append(f"{what}: {errors_text.strip().splitlines()[-1]}")
    if code not in CODES and code != 0:
        seen.wrong.append(f"{what}: code {code}: {errors_text[-600:]}")
    end_s = time.monotonic() + LEFT_S
    while (left := left_of(mark)) and time.monotonic() < end_s:
        time.sleep(0.05)
    if left:
        seen.wrong.append(f"{what}: left {left}")
        for pid in left:
            strike(pid)
    sockets = [path.name for path in control_socket.folder().glob(f"{process.pid}.sock")]
    if sockets:
        seen.wrong.append(f"{what}: left {sockets}")
    look_at_rows(job, what, code, seen, expected)
    last = (errors_text.strip().splitlines() or [""])[-1]
    print(f"{seen.signals} {what}: code {code} in {seen.ends_s[-1]:.2f} s: {last[:80]}", flush=True)


def send(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send SIGINT as a terminal does, to all processes; another signal to the command."""
    with suppress(ProcessLookupError):
        if how is signal.SIGINT:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)


def left_of(mark: str) -> dict[int, str]:
    """Return the processes of a command that are there, with what they run."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = words[:100]
    return found


def look_at_rows(job: Job, what: str, code: int, seen: Seen, expected: list[list[int]]) -> None:
    """Compare the rows that an output has; a whole one begins anew."""
    if job.output is None:
        return
    rows = 0
    if job.output.exists():
        try:
            rows = len(tokens_of(job.output))
        except ValueError as error:
            seen.wrong.append(f"{what}: a broken line: {error}")
    if code == 0:
        found = tokens_of(job.output)
        same = found == expected if job.compared else [*map(len, found)] == [*map(len, expected)]
        if not same:
            seen.wrong.append(f"{what}: {rows} rows, which are not those of an undisturbed run")
        seen.whole += 1
        rows = 0
        job.output.unlink()
    if rows < seen.rows[job.name]:
        seen.wrong.append(f"{what}: {rows} rows, {seen.rows[job.name]} were there before")
    seen.rows[job.name] = rows


def kill_stages(
    process: subprocess.Popen[bytes], over: threading.Event, rng: random.Random
) -> None:
    """Kill a random stage of a command every second."""
    command = psutil.Process(process.pid)

    def kill() -> None:
        while not over.wait(1.0):
            if pids := stage_pids(command):
                strike(rng.choice(pids))

    threading.Thread(target=kill, daemon=True).start()


def change_devices(
    process: subprocess.Popen[bytes], over: threading.Event, rng: random.Random
) -> None:
    """Drain a device of a command and add it again, for as long as it takes requests."""
    path = control_socket.folder() / f"{process.pid}.sock"

    def change() -> None:
        while not over.wait(0.2):
            more = {"cluster": None, "horizon_s": 1e6}
            for wish in ({"devices": "drain"}, {"devices": "add", **more}):
                with suppress(Exception):  # it may fit on no fewer, or be gone
                    control_socket.ask(path, {"name": f"CPU-{rng.randrange(3)}", **wish})

    threading.Thread(target=change, daemon=True).start()
