"""Load on a server of its own: many streams, slow readers, clients that vanish, malformed bodies.

    python benchmarks/serve_load.py [--clients 200] [--seconds 180] [--write]
    python benchmarks/serve_load.py --model llama-dir --clients 256 --streams-only --compare --write

Starts `llmpq-dist serve` over a plan or this machine's devices, keeps so many clients asking, and
compares every answer that was read to its end with the one of a quiet server (greedy, by prompt).
Reports lost or mixed-up streams, tokens/s, and the server's resident memory at a third of the time
and at its end. `--compare`: also the same prompts through `LLM` alone: the share HTTP costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from rows import write_row

MAX_TOKENS = 32
NUM_PROMPTS = 16


@dataclass
class Seen:
    """What the clients saw."""

    whole: int = 0
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    refused: int = 0
    tokens: int = 0
    memory_bytes: list[int] = field(default_factory=list)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def client(
    api: openai.AsyncOpenAI,
    number: int,
    prompts: dict[str, str],
    seen: Seen,
    options: argparse.Namespace,
) -> None:
    """Ask again and again until the time is over."""
    rng = random.Random(number)
    end_s = options.began_s + options.seconds
    while time.monotonic() < end_s:
        prompt = rng.choice(list(prompts))
        kind = "read" if options.streams_only else rng.choices(
            ("read", "slow", "vanish", "malformed"), (70, 10, 10, 10))[0]  # fmt: skip
        temperature = -1.0 if kind == "malformed" else 0.0
        try:
            stream = await api.completions.create(
                model="model", prompt=prompt, max_tokens=MAX_TOKENS, temperature=temperature,
                stream=True,
            )  # fmt: skip
            text, ended = "", False
            async for part in stream:
                text += part.choices[0].text
                seen.tokens += 1
                ended = part.choices[0].finish_reason is not None
                if kind == "slow":
                    await asyncio.sleep(0.05)
                if kind == "vanish" and rng.random() < 0.3:
                    await stream.close()
                    seen.left += 1
                    break
            else:
                if not ended or text != prompts[prompt]:
                    seen.wrong.append(f"{prompt!r}: {text!r}")
                seen.whole += 1
        except openai.BadRequestError:
            seen.refused += 1
            if kind != "malformed":
                seen.wrong.append(f"{prompt!r} was refused")


async def load(url: str, server: psutil.Process, options: argparse.Namespace) -> Seen:
    """Ask every prompt alone, then all clients at once."""
    seen = Seen()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as api:
        prompts = {}
        for number in range(NUM_PROMPTS):
            prompt = f"def f{number}(x):\n    "
            answer = await api.completions.create(
                model="model", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
            )
            prompts[prompt] = answer.choices[0].text
        options.began_s = time.monotonic()
        tasks = [
            asyncio.create_task(client(api, number, prompts, seen, options))
            for number in range(options.clients)
        ]
        for share in (1 / 3, 1.0):
            await asyncio.sleep(
                max(0.0, options.began_s + share * options.seconds - time.monotonic())
            )
            family = [server, *server.children(recursive=True)]
            seen.memory_bytes.append(sum(process.memory_info().rss for process in family))
        await asyncio.gather(*tasks)
    return seen


def main() -> None:
    """Start a server, load it, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/demo-7m")
    parser.add_argument("--plan")
    parser.add_argument("--dtype", default="float32", help="16 bits: near ties fall by the batch")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--streams-only", action="store_true", help="no client misbehaves")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    port = free_port()
    what = ["--plan", options.plan] if options.plan else ["--max-num-seqs", "32"]
    if not options.plan:
        what += ["--dtype", options.dtype]
    command = [sys.executable, "-m", "llmpq.runtime", "serve", "--model", options.model, *what,
               "--port", str(port), "--served-model-name", "model", "--no-access-log"]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            wait_until_ready(port, process)
            seen = asyncio.run(
                load(f"http://127.0.0.1:{port}", psutil.Process(process.pid), options)
            )
        finally:
            process.terminate()
    took_s = time.monotonic() - options.began_s
    told = {
        "whole": seen.whole, "wrong": len(seen.wrong), "left": seen.left, "refused": seen.refused,
        "tokens_per_s": seen.tokens / took_s, "memory_bytes": seen.memory_bytes,
        "exit_code": process.returncode,
    }  # fmt: skip
    if options.compare:
        told["engine_alone_tokens_per_s"] = engine_alone(options)
    print(json.dumps(told, indent=1), *seen.wrong[:5], sep="\n")
    if options.write:
        asked = {
            name: getattr(options, name) for name in ("clients", "seconds", "dtype", "streams_only")
        }
        case = {"model": Path(options.model).name, **asked, **told}
        write_row("serve.jsonl", bench="serve_load", case=case, unit="tokens/s",
                  samples=[seen.tokens / took_s], noisy=True)  # fmt: skip


def engine_alone(options: argparse.Namespace) -> float:
    """Return the tokens/s of the same prompts without HTTP."""
    from llmpq import LLM, SamplingParams

    prompts = [f"def f{number % NUM_PROMPTS}(x):\n    " for number in range(4 * options.clients)]
    more = {"plan": options.plan} if options.plan else {"max_num_seqs": 32, "dtype": options.dtype}
    with LLM(options.model, **more) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        llm.generate(prompts[: options.clients], params)
        started_s = time.perf_counter()
        answers = llm.generate(prompts, params)
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        return tokens / (time.perf_counter() - started_s)


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait for the server's first 200."""
    import urllib.request

    end_s = time.monotonic() + 600
    while time.monotonic() < end_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server did not become ready")


if __name__ == "__main__":
    main()
