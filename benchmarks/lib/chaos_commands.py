"""Kills stages of `llmpq-dist run` and of `serve` by the clock, and says what became of them.

    python benchmarks/chaos.py batch --rows 500 --every 20 [--write]
    python benchmarks/chaos.py serve --seconds 300 --every 30 [--write]

Both run the demo model in float32 over three CPU stages, each a process. `batch` runs a file of
rows twice, undisturbed and with a random stage killed every so many seconds: the exit code must be
0, and the two output files must be equal, row for row. Its row lists every recovery, predicted and
measured.

`serve` replays Azure's trace of conversations (lengths divided by 8, arrivals spread to `--rate`).
No request may see another error than 503 with Retry-After before its stream has begun, after which
it comes again as a client would; every stream that has begun must end whole, with the text that an
engine of this process has made before, or makes from one of its tokens on. Beside that: goodput,
the tokens that came between two faults (from the end of a recovery to the next kill) by those of
the requests that came in these times; requests within MLPerf's limits; and the driver's memory.

    llmpq-profile --model examples/demo-7m --cluster benchmarks/chaos.yaml --bits 16 \\
        --dtype float32 --max-batch 16 --max-len 768 --quick -o costs.json
    python benchmarks/chaos.py serve --costs costs.json [--write]

With costs the planner makes the plan, and goodput is beside what it predicts: the tokens that come
between two faults by those that the simulated server gives in the same times, without a fault, and
of the requests that no fault touched the share that is within the limits, measured and predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from lib.kills import DEMO, quantile, stage_pids, unequal_plan
from lib.rows import write_row
from lib.servers import free_port
from lib.traces import Arrival, read_trace

from llmpq import LLM, SamplingParams
from llmpq.planner.__main__ import main as plan_main
from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
from llmpq.plans.plan import Plan
from llmpq.plans.topology import read_plan
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.tools.chaos import Chaos
from llmpq.service_measures import ServedRequest, ServiceLimits

COMMAND = [sys.executable, "-m", "llmpq.runtime"]
SHRINK = 8
LIMITS = ServiceLimits(ttft_s=2.0, tpot_s=0.1)
"""MLPerf inference, Llama-3.1-8B, server."""
MOST_TRIES = 60
SAMPLE_S = 2.0


def batch(words: list[str], program: str) -> int:
    """Kill stages of `llmpq-dist run`; 1 if a row was lost or differs."""
    parser = _parser(program, every_s=20.0)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        return batch_job(given, Path(folder))


def serve(words: list[str], program: str) -> int:
    """Kill stages of `llmpq-dist serve`; 1 if a stream was lost or differs."""
    parser = _parser(program, every_s=30.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--costs", type=Path, help="of llmpq-profile: predict by them")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        return server_load(given, Path(folder))


def _parser(program: str, *, every_s: float) -> argparse.ArgumentParser:
    """Return the flags that both have."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=float, default=every_s, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="add a row to results/chaos.jsonl")
    return parser


def batch_job(given: argparse.Namespace, folder: Path) -> int:
    """Run the rows without and with kills, and compare."""
    plan, rows = folder / "plan.json", folder / "rows.jsonl"
    job = {"batch": 32, "prompt_len": 64, "gen_len": given.tokens}
    plan.write_text(unequal_plan(DEMO, **job).dump_json())
    write_rows(rows, given.rows, given.tokens)
    whole, whole_s, _ = run_rows(plan, rows, folder / "whole.jsonl")
    took, took_s, kills = run_rows(plan, rows, folder / "killed.jsonl", given)
    report = json.loads((folder / "killed.json").read_text())
    recoveries = report["recoveries"]
    different = [
        index for index, pair in enumerate(zip(whole, took, strict=False)) if pair[0] != pair[1]
    ]
    in_order = [json.loads(line)["index"] for line in took] == list(range(given.rows))
    asked = [json.loads(line) for line in rows.read_text().splitlines()]
    rounded = by_rounding(
        Plan.load(plan),
        {number: (asked[number]["prompt"], row_params(asked[number])) for number in different},
        {number: json.loads(took[number])["text"] for number in different},
    )
    for one in recoveries:
        print(f"{one['reason'][:70]}...: {one['action']}, predicted {one['predicted_s']:.2f} s, "
              f"measured {one['measured_s']:.2f} s, pause {one['pause_s'] or 0:.2f} s")  # fmt: skip
    print(
        f"{given.rows} rows in {took_s:.1f} s ({whole_s:.1f} s undisturbed), {kills} kills, "
        f"{len(recoveries)} recoveries, in order: {in_order}, different: {different}, of these by "
        f"rounding: {rounded}"
    )
    if given.write:
        write_row(
            "chaos.jsonl",
            bench="batch_under_kills",
            case={
                "model": "demo-7m", "stages": 3, "rows": given.rows, "every_s": given.every,
                "kills": kills, "in_order": in_order, "different": len(different),
                "by_rounding": len(rounded),
                "recoveries": [
                    {key: one[key] for key in ("action", "predicted_s", "measured_s", "pause_s")}
                    for one in recoveries
                ],
                "load_average": os.getloadavg()[0],
            },
            unit="s", samples=[took_s], baselines={"undisturbed": whole_s}, noisy=is_noisy(),
        )  # fmt: skip
    times = [one[key] for one in recoveries for key in ("measured_s", "predicted_s")]
    listed = all(seconds is not None for seconds in times)
    unlike = len(different) > len(rounded)
    return int(unlike or not in_order or len(took) != given.rows or not listed)


def row_params(row: Mapping[str, Any]) -> SamplingParams:
    """Return what a row of `write_rows` asks for."""
    return SamplingParams(**{key: value for key, value in row.items() if key != "prompt"})


def write_rows(path: Path, count: int, tokens: int) -> None:
    """Write rows of different lengths, greedy and sampled."""
    rng = random.Random(11)
    with path.open("w") as file:
        for number in range(count):
            row = {
                "prompt": [rng.randrange(3, 4000) for _ in range(rng.randint(1, 60))],
                "temperature": 0 if number % 2 else 0.8,
                "seed": number,
                "max_tokens": rng.randint(tokens // 4, tokens),
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


def killing(command: psutil.Process, given: argparse.Namespace) -> Chaos:
    """Return what kills stages of a command every so many seconds."""
    return Chaos(lambda: stage_pids(command), given.every, evenly=True, seed=given.seed)


def run_rows(
    plan: Path, rows: Path, output: Path, given: argparse.Namespace | None = None
) -> tuple[list[str], float, int]:
    """Run a batch file, under kills where they are `given`: lines, seconds, kills."""
    began_s = time.monotonic()
    command = [*COMMAND, "run", "--plan", str(plan), "-i", str(rows), "-o", str(output),
               "--report", str(output.with_suffix(".json"))]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    kills = 0
    if given is not None:
        with killing(psutil.Process(process.pid), given) as chaos:
            process.wait()
        kills = len(chaos.kills)
    if process.wait():
        sys.exit(f"the command ended with code {process.returncode}")
    return output.read_text().splitlines(), time.monotonic() - began_s, kills


@dataclass
class Seen:
    """What clients and a watcher saw of one replay; times by `time.monotonic`."""

    began_s: float
    texts: dict[int, str] = field(default_factory=dict)
    """Of the streams that ended, by request."""
    token_times_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    """503 with Retry-After."""
    served: dict[int, ServedRequest] = field(default_factory=dict)
    """When requests were served, from when they were taken."""
    driver_bytes: list[int] = field(default_factory=list)
    down_s: list[tuple[float, float]] = field(default_factory=list)
    """When stages were being recovered."""


def server_load(given: argparse.Namespace, folder: Path) -> int:
    """Replay the trace without and with kills, and compare."""
    path, jobs = folder / "plan.json", trace_jobs(given)
    plan = unequal_plan(DEMO, batch=16, prompt_len=512, gen_len=256)
    if given.costs is not None:
        plan = planned(given, path)
    path.write_text(plan.dump_json())
    with LLM(DEMO, plan=plan, backend="threads", use_tqdm=False) as llm:
        whole = answers_of(llm, jobs)
    seen, kills, recoveries = replayed(path, jobs, given)
    differ = [number for number, text in seen.texts.items() if whole[number].text != text]
    rounded = by_rounding(
        plan,
        {n: (jobs[n][1].prompt(4096, n), params_of(n, jobs[n][1])) for n in differ},
        {number: seen.texts[number] for number in differ},
    )
    lost = len(jobs) - len(seen.texts)
    third = len(seen.driver_bytes) // 3
    memory = [sum(part) / len(part) / 2**20 for part in
              (seen.driver_bytes[third : 2 * third], seen.driver_bytes[2 * third :])]  # fmt: skip
    up = between(seen, [at_s for at_s, _ in kills], given.seconds)
    wanted = sum(
        row.output_tokens for at_s, row in jobs if any(start <= at_s < end for start, end in up)
    )
    share = tokens_in(seen, up) / max(1, wanted)
    predicted = {} if given.costs is None else beside_predicted(plan, jobs, seen, up)
    print(*seen.wrong[:5], sep="\n")
    said = {
        "model": "demo-7m", "stages": 3, "trace": "azure_2023_conv", "requests": len(jobs),
        "rate": given.rate,
        "every_s": given.every, "kills": len(kills), "recoveries": len(recoveries),
        "wrong": len(seen.wrong), "lost": lost, "different": len(differ),
        "by_rounding": len(rounded), "refused": seen.refused,
        "within_limits": sum(map(LIMITS.keeps, seen.served.values())) / len(jobs),
        **predicted,
        "measured_s": sorted(one["measured_s"] for one in recoveries),
        "predicted_s": sorted(one["predicted_s"] for one in recoveries),
        "pause_p50_s": quantile(sorted(one["pause_s"] or 0.0 for one in recoveries), 0.5),
        "driver_mib": memory, "load_average": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps({"goodput between faults": share} | said, indent=1))
    if given.write:
        write_row("chaos.jsonl", bench="goodput_under_kills", case=said, unit="of tokens asked for",
                  samples=[share], noisy=is_noisy())  # fmt: skip
    return int(bool(seen.wrong or lost or len(rounded) < len(differ)))


def planned(given: argparse.Namespace, path: Path) -> Plan:
    """Return the planner's plan over the three stages for the trace's lengths."""
    words = ["--model", str(DEMO), "--cluster", str(Path(__file__).parents[1] / "chaos.yaml")]
    words += ["--costs", str(given.costs), "--bits", "16", "--dtype", "float32"]
    # So many requests have room beside the weights.
    words += ["--batch", "6", "--s", "512", "--n", "256", "--engines", "1", "-o", str(path)]
    if plan_main(words):
        sys.exit("there is no plan")
    plan = read_plan(path)
    assert isinstance(plan, Plan) and len(plan.stages) == 3, plan
    return plan


def beside_predicted(
    plan: Plan,
    jobs: Sequence[tuple[float, Arrival]],
    seen: Seen,
    up: Sequence[tuple[float, float]],
) -> dict[str, float]:
    """Return what came between faults by what the plan predicts of a server without any."""
    traffic = [replace(row, at_s=at_s) for at_s, row in jobs]
    simulated = simulate([EngineModel.of_plan(plan)], traffic)
    tokens = sum(tokens_between(one, span) for one in simulated for span in up)
    whole = {one.number: one for one in simulated}
    untouched = [
        one
        for one in seen.served.values()
        if any(start <= one.at_s and one.end_s < end for start, end in up)
    ]
    shares = [
        sum(map(LIMITS.keeps, some)) / max(1, len(untouched))
        for some in (untouched, [whole[one.number] for one in untouched])
    ]
    return {
        "tokens_by_predicted": tokens_in(seen, up) / max(1.0, tokens),
        "untouched": len(untouched),
        "untouched_within_limits": shares[0],
        "untouched_within_limits_predicted": shares[1],
    }


def tokens_between(served: ServedRequest, span: tuple[float, float]) -> float:
    """Return how many tokens of an answer come in a span, evenly behind the first."""
    first = float(span[0] <= served.first_token_s < span[1])
    common_s = min(span[1], served.end_s) - max(span[0], served.first_token_s)
    took_s = served.end_s - served.first_token_s
    return first + (served.output_tokens - 1) * max(0.0, common_s) / max(took_s, 1e-9)


def answers_of(llm: LLM, jobs: Sequence[tuple[float, Arrival]]) -> list[RequestOutput]:
    """Return the answers of an engine of this process, whose stages are threads."""
    prompts = [row.prompt(4096, number) for number, (_, row) in enumerate(jobs)]
    params = [params_of(number, row) for number, (_, row) in enumerate(jobs)]
    return llm.generate(prompts, params, use_tqdm=False)


def params_of(number: int, row: Arrival) -> SamplingParams:
    """Return what the server is asked for, too."""
    return SamplingParams(
        max_tokens=row.output_tokens,
        temperature=0 if number % 2 else 0.8,
        seed=number,
        ignore_eos=True,
    )


def by_rounding(
    plan: Plan,
    requests: Mapping[int, tuple[Sequence[int], SamplingParams]],
    texts: Mapping[int, str],
) -> list[int]:
    """Return which texts also come where no stage is lost, from some token of theirs on anew.

    Keys and values of a prompt may differ in their last bits from those of single steps: a token
    on the edge between two is another one then.
    """
    found = []
    with LLM(DEMO, plan=plan, backend="threads", use_tqdm=False) as llm:
        for number, (prompt, params) in requests.items():
            whole = llm.generate([list(prompt)], [params], use_tqdm=False)[0]
            tokens = whole.outputs[0].token_ids
            anew = [
                llm.prepare(prompt, params).going_on(tokens[: count + 1])
                for count in range(1, len(tokens))
            ]
            if any(answer.text == texts[number] for _, answer in llm.as_completed(anew)):
                found.append(number)
    return found


def trace_jobs(given: argparse.Namespace) -> list[tuple[float, Arrival]]:
    """Return when each request comes, in seconds, and its lengths."""
    rows = read_trace("azure_2023_conv")
    taken = [
        Arrival(row.at_s, min(480, max(1, row.prompt_tokens // SHRINK)),
                min(240, max(1, row.output_tokens // SHRINK)))
        for row in rows
    ]  # fmt: skip
    spread = (len(rows) / rows[-1].at_s) / given.rate
    return [(row.at_s * spread, row) for row in taken if row.at_s * spread < given.seconds]


def replayed(
    plan: Path,
    jobs: Sequence[tuple[float, Arrival]],
    given: argparse.Namespace,
) -> tuple[Seen, list[tuple[float, int]], list[dict[str, Any]]]:
    """Start a server, send the requests, and kill its stages meanwhile."""
    port = free_port()
    command = [*COMMAND, "serve", "--plan", str(plan), "--port", str(port), "--no-access-log",
               "--max-requests", "10000"]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None and get(port, "/ready") is None:
                time.sleep(0.1)
            server, seen = psutil.Process(process.pid), Seen(time.monotonic())
            over = threading.Event()
            watcher = threading.Thread(target=watch, args=(port, server, seen, over), daemon=True)
            watcher.start()
            with killing(server, given) as chaos:
                asyncio.run(play(port, jobs, seen))
            kills = [(kill.at_s, kill.pid) for kill in chaos.kills]
            over.set()
            watcher.join()
            stats = json.loads(get(port, "/page/state") or b"{}")
        finally:
            process.send_signal(signal.SIGTERM)
    if process.returncode:
        seen.wrong.append(f"the server ended with code {process.returncode}")
    return seen, kills, [r for r in stats["recoveries"] if r["measured_s"] is not None]


def get(port: int, path: str) -> bytes | None:
    """Return the body of a page of the server, None unless it is 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def watch(port: int, server: psutil.Process, seen: Seen, over: threading.Event) -> None:
    """Note the driver's memory, and when the server is not ready."""
    down_s, sampled_s = None, 0.0
    while not over.wait(0.05):
        now_s = time.monotonic()
        ready = get(port, "/ready") is not None
        if ready and down_s is not None:
            seen.down_s.append((down_s, time.monotonic()))
        down_s = None if ready else down_s or now_s
        if now_s - sampled_s > SAMPLE_S:
            sampled_s = now_s
            with suppress(psutil.Error):
                seen.driver_bytes.append(server.memory_info().rss)


async def play(port: int, jobs: Sequence[tuple[float, Arrival]], seen: Seen) -> None:
    """Send every request at its time."""

    async def one(number: int, at_s: float, row: Arrival) -> None:
        await asyncio.sleep(max(0.0, seen.began_s + at_s - time.monotonic()))
        try:
            async with asyncio.timeout(300):
                await stream(port, number, row, seen)
        except (OSError, TimeoutError, IndexError, ValueError) as error:
            seen.wrong.append(f"request {number}: {type(error).__name__} {error}")

    await asyncio.gather(*(one(number, *job) for number, job in enumerate(jobs)))


async def stream(port: int, number: int, row: Arrival, seen: Seen) -> None:
    """Send a request, again where it is refused as it may be, and read its stream to the end."""
    body = json.dumps(
        {
            "prompt": row.prompt(4096, number), "max_tokens": row.output_tokens,
            "temperature": 0 if number % 2 else 0.8, "seed": number, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for _ in range(MOST_TRIES):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            sent_s, status, headers = time.monotonic(), *await head_of(reader)
            if status == 503 and "retry-after" in headers:
                seen.refused += 1
                await asyncio.sleep(float(headers["retry-after"]))
                continue
            if status != 200:
                seen.wrong.append(f"request {number}: status {status}")
                return
            await read_stream(reader, number, row, seen, sent_s)
            return
        finally:
            writer.close()
    seen.wrong.append(f"request {number}: refused {MOST_TRIES} times")


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of an answer."""
    status = int((await reader.readline()).split(b" ", 2)[1])
    headers = {}
    while (line := (await reader.readline()).decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def read_stream(
    reader: asyncio.StreamReader, number: int, row: Arrival, seen: Seen, sent_s: float
) -> None:
    """Read a stream to its end; note its text, and when its tokens came."""
    text, done, tokens, pieces_s = "", False, 0, list[float]()
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            seen.wrong.append(f"request {number}: {event['error']}")
            return
        text += "".join(choice["text"] for choice in event["choices"])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if event["choices"]:
            pieces_s.append(time.monotonic())
    if not done or tokens != row.output_tokens:
        seen.wrong.append(f"request {number}: {tokens} of {row.output_tokens} tokens, done: {done}")
        return
    seen.texts[number] = text
    seen.token_times_s += pieces_s
    seen.served[number] = ServedRequest(
        number=number,
        at_s=sent_s - seen.began_s,
        first_token_s=pieces_s[0] - seen.began_s,
        end_s=pieces_s[-1] - seen.began_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=tokens,
    )


def between(seen: Seen, kills_s: Sequence[float], seconds: float) -> list[tuple[float, float]]:
    """Return the times between faults, in seconds since the replay began.

    Up to its planned end: what comes later was not served in time.
    """
    edges, start_s, end_s = list[tuple[float, float]](), seen.began_s, seen.began_s + seconds
    for kill_s in [*(kill_s for kill_s in kills_s if kill_s < end_s), end_s]:
        if kill_s > start_s:
            edges.append((start_s - seen.began_s, kill_s - seen.began_s))
        ends_s = [up_s for _, up_s in seen.down_s if up_s > kill_s]
        start_s = min(ends_s, default=kill_s)
    return edges


def tokens_in(seen: Seen, spans: Sequence[tuple[float, float]]) -> int:
    """Return how many pieces of streams came within spans of time since the replay began."""
    counts = Counter(
        any(start_s <= at_s - seen.began_s < end_s for start_s, end_s in spans)
        for at_s in seen.token_times_s
    )
    return counts[True]


def is_noisy() -> bool:
    """Whether others keep the machine busy."""
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
