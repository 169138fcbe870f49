"""Load on a server of its own: many streams, slow readers, clients that vanish, malformed bodies.

    python benchmarks/serve.py load [--write]                        # 32 clients, then 200
    python benchmarks/serve.py load --clients 200 --seconds 180
    python benchmarks/serve.py load --replicas 2 --clients 32 --seconds 60

The answers of every prompt are made first, by an engine of this process that is then closed; then
`llmpq-dist serve` starts over the same plan of two CPU stages, with `--replicas` over as many
engines of it as processes. Of so many clients, each asking
again and again, 10 % of the requests are malformed, 10 % read slowly, 10 % left in the middle
(`--streams-only`: none). Every answer that is read to its end must be its twin's text, whole;
every malformed request must be refused. Beside that: tokens/s, the memory of every process of
the server over time, and how long the server itself held a token (`token_delivery_seconds`: from
its being read from the stages to its bytes' being sent; quantiles are read off the buckets).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from lib.rows import write_row
from lib.servers import free_port, wait_until_ready
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 32
NUM_PROMPTS = 48
STAGES = """\
schema: 1
name: cpu-stages
nodes: [{name: here, devices: [{kind: CPU, count: 2, threads: 1, memory: 512 MiB}]}]
"""
KINDS = {"read": 70, "slow": 10, "vanish": 10, "malformed": 10}
MALFORMED = (
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": "a", "stream": true, "temprature": 1}',
)
SAMPLE_S, PATIENCE_S = 2.0, 120.0
ROLES = {"stage_process": "stage", "replicas.replica": "replica", "ray": "ray"}
DELIVERY = "vllm:token_delivery_seconds_bucket"


@dataclass
class Seen:
    """What the clients saw, and what the server took, of one phase."""

    ended: Counter[str] = field(default_factory=Counter)
    """Requests by what became of them."""
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    memory_bytes: list[dict[str, int]] = field(default_factory=list)
    """Of each process, from time to time."""


async def asked(port: int, body: bytes) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a connection of its own; return its status and the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return int((await reader.readline()).split(b" ", 2)[1]), reader, writer


async def events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the data of a stream's events; the sizes of its chunks stand between them."""
    async for line in reader:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


async def one(
    port: int, kind: str, rng: random.Random, twins: Mapping[str, str], seen: Seen
) -> None:
    """Send one request and read what comes as its kind does."""
    prompt = rng.choice(list(twins))
    body = json.dumps(
        {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    ).encode()
    status, reader, writer = await asked(
        port, rng.choice(MALFORMED) if kind == "malformed" else body
    )
    try:
        if status != 200 or kind == "malformed":
            right = kind == "malformed" and 400 <= status < 500
            seen.ended["refused" if right else f"status {status}"] += 1
            if not right:
                seen.wrong.append(f"{kind}: status {status}")
            return
        text, done, leaves_after = "", False, rng.randrange(1, MAX_TOKENS)
        async for data in events(reader):
            if data == "[DONE]":
                done = True
                break
            text += json.loads(data)["choices"][0]["text"]
            seen.tokens += 1
            if kind == "slow":
                await asyncio.sleep(0.1)
            leaves_after -= 1
            if kind == "vanish" and leaves_after == 0:
                writer.transport.abort()
                seen.ended["left"] += 1
                return
        if not done or text != twins[prompt]:
            seen.wrong.append(f"{'mixed up' if done else 'lost'}: {prompt!r}: {text!r}")
        seen.ended["whole"] += 1
    finally:
        writer.close()


async def load(
    port: int, server: psutil.Process, clients: int, seconds: float, twins: Mapping[str, str],
    kinds: Mapping[str, int],
) -> Seen:  # fmt: skip
    """Have so many clients ask again and again for so long."""
    seen, end_s = Seen(), time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end_s:
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await one(port, kind, rng, twins, seen)
            except (OSError, TimeoutError, IndexError) as error:
                seen.wrong.append(f"{kind}: {type(error).__name__} {error}")

    async def watch() -> None:
        while time.monotonic() < end_s:
            seen.memory_bytes.append(memory_of(server))
            await asyncio.sleep(SAMPLE_S)

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    return seen


def memory_of(server: psutil.Process) -> dict[str, int]:
    """Return the resident bytes of a server's driver and of each process it started."""
    found, numbers = {"driver": server.memory_info().rss}, Counter[str]()
    for child in sorted(server.children(recursive=True), key=lambda p: p.pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            role, size = role_of(child.cmdline()), child.memory_info().rss
            found[f"{role} {numbers[role]}"] = size
            numbers[role] += 1
    return found


def role_of(words: Sequence[str]) -> str:
    """Return what a process of a server does, by its command line."""
    shown = " ".join(words[:3])
    return next((name for part, name in ROLES.items() if part in shown), "child")


def grown(memory_bytes: Sequence[Mapping[str, int]]) -> dict[str, list[float]]:
    """Return each process's mean MiB in the middle third of the time and in the last."""
    third = len(memory_bytes) // 3
    if not third:
        return {}
    parts = memory_bytes[third : 2 * third], memory_bytes[2 * third :]
    return {
        name: [statistics.fmean(m.get(name, 0) for m in part) / 2**20 for part in parts]
        for name in memory_bytes[-1]
    }


def buckets(port: int) -> dict[float, float]:
    """Return how many tokens the server has held for at most so many seconds, all replicas'."""
    found: Counter[float] = Counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name == DELIVERY:
                    found[float(sample.labels["le"])] += sample.value
    return found


def quantile_s(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float:
    """Return a quantile between two scrapes as Prometheus does: linear within its bucket."""
    new = {edge: count - before[edge] for edge, count in sorted(after.items())}
    wanted, low_s, below = share * max(new.values()), 0.0, 0.0
    for edge_s, count in new.items():
        if count >= wanted:
            inside = (wanted - below) / max(1.0, count - below)
            return low_s if edge_s == float("inf") else low_s + (edge_s - low_s) * inside
        low_s, below = edge_s, count
    raise AssertionError("the last bucket holds all")


def twins_of(options: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the plan, as a file, and the answer of every prompt, by an engine of this process."""
    from llmpq import LLM, SamplingParams

    cluster = folder / "cluster.yaml"
    cluster.write_text(STAGES)
    prompts = [f"def f{number}(x):\n    " for number in range(NUM_PROMPTS)]
    # In 16 bits near ties fall by who shares a step.
    with LLM(options.model, cluster=cluster, max_num_seqs=32, dtype="float32") as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        texts = [answer.outputs[0].text for answer in answers]
        plan = folder / "plan.json"
        plan.write_text(llm.plan.dump_json())
    return plan, dict(zip(prompts, texts, strict=True))


def told_of(
    seen: Seen, took_s: float, before: Mapping[float, float], after: Mapping[float, float]
) -> dict[str, Any]:
    """Return what came of a phase."""
    return {
        "ended": dict(seen.ended), "wrong": len(seen.wrong), "tokens_per_s": seen.tokens / took_s,
        "delivery_ms": {
            name: 1e3 * quantile_s(before, after, share)
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "memory_mib": grown(seen.memory_bytes),
    }  # fmt: skip


def main(words: list[str], program: str) -> None:
    """Start a server, load it phase by phase, say what came of it."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo-7m"))
    parser.add_argument("--clients", type=int, nargs="+", default=[32, 200], help="of each phase")
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0, 180.0])
    parser.add_argument("--replicas", type=int, default=1, help="engines behind the port")
    parser.add_argument("--streams-only", action="store_true", help="no client misbehaves")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(words)
    kinds = {"read": 100} if options.streams_only else KINDS
    port, ended_well = free_port(), True
    with tempfile.TemporaryDirectory() as name:
        plan, twins = twins_of(options, Path(name))
        command = [sys.executable, "-m", "llmpq.runtime", "serve", "--plan", str(plan), "--port",
                   str(port), "--no-access-log"]  # fmt: skip
        if options.replicas > 1:
            command += ["--replicas", str(options.replicas)]
        measured = []
        with subprocess.Popen(command) as process:
            try:
                wait_until_ready(port, process)
                server = psutil.Process(process.pid)
                for clients, seconds in zip(options.clients, options.seconds, strict=True):
                    before, began_s = buckets(port), time.monotonic()
                    seen = asyncio.run(load(port, server, clients, seconds, twins, kinds))
                    took_s = time.monotonic() - began_s
                    own = {"clients": clients, "seconds": seconds}
                    measured.append(own | told_of(seen, took_s, before, buckets(port)))
                    print(json.dumps(measured[-1], indent=1), *seen.wrong[:5], sep="\n", flush=True)
                    ended_well &= not seen.wrong
            finally:
                process.send_signal(signal.SIGTERM)
    if process.returncode:
        sys.exit(f"the server ended with code {process.returncode}")
    for own in measured if options.write else ():
        more = {"model": Path(options.model).name, "stages": 2, "dtype": "float32", "kinds": kinds}
        if options.replicas > 1:
            more["replicas"] = options.replicas
        write_row("serve.jsonl", bench="serve_load", case=more | own, unit="tokens/s",
                  samples=[own["tokens_per_s"]], noisy=psutil.cpu_percent(1.0) > 10)  # fmt: skip
    if not ended_well:
        sys.exit("some answers were lost, mixed up or wrongly refused")
