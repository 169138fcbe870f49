"""What HTTP costs: the same requests by an engine alone, and by one behind `llmpq-dist serve`.

    python benchmarks/serve.py share --model llama-3.1-8b --write         # on a GPU: 256 streams
    python benchmarks/serve.py share --model examples/demo-7m --streams 8 --prompt-tokens 32 \
        --answer-tokens 32                                               # a try on a CPU

A built-in name is written as a checkpoint of random weights, with a tokenizer of as many made-up
words, into a temporary folder (16 GB for an 8B model). Then, in turn: `LLM.generate` with as many
places as there are streams, and a server of the same settings that so many clients stream from over
connections of their own. Every answer must have all of its tokens. The value is the share of the
engine's tokens/s that is left behind HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from lib.rows import write_row
from lib.serve_load import asked, buckets, quantile_s
from lib.servers import free_port, wait_until_ready

TAIL_BYTES = 4096
SPECIAL = ["<unk>", "<s>", "</s>"]
PROCESSES = min(8, max(1, (os.cpu_count() or 2) // 2))
SHARE = 0.95
"""What must be left."""


LETTERS = "etaoinshrdlucmfwypvbgkqjxz"


def vocabulary(size: int) -> list[bytes]:
    """Return the end, all bytes, and so many random pieces of text that no two are alike."""
    rng = random.Random(size)
    tokens = [b"<end>", *(bytes([value]) for value in range(256))]
    seen = set(tokens)
    while len(tokens) < size:
        word = "".join(rng.choices(LETTERS, k=rng.randint(2, 9)))
        piece = rng.choice([word, " " + word, word.capitalize(), str(rng.randint(0, 9999)),
                            '": ', '", "', '"}', "], ", '{"' + word, word + '"'])  # fmt: skip
        if piece.encode() not in seen:
            seen.add(piece.encode())
            tokens.append(piece.encode())
    return tokens


def main(words: list[str], program: str) -> None:
    """Measure both, print, write a row."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="a directory or a built-in name")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--each", type=int, default=2, help="requests of a stream, in turn")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="as `llmpq-dist serve --backend`")
    parser.add_argument("--commit", help="commit to name in the row, where git is not at hand")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.model)
        if not directory.is_dir():
            directory = Path(folder)
            write_checkpoint(args.model, directory)
        vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        rng = random.Random(0)
        prompts = [
            [rng.randrange(3, vocab) for _ in range(args.prompt_tokens)]
            for _ in range(args.streams * args.each)
        ]
        alone, device = engine_alone(directory, prompts, args)
        behind, delivery_ms = behind_http(directory, prompts, args)
    share = statistics.median(behind) / statistics.median(alone)
    print(f"{device}: engine alone {statistics.median(alone):.0f} tokens/s {alone}")
    print(f"behind HTTP {statistics.median(behind):.0f} tokens/s {behind}: {share:.3f} of it")
    if args.write:
        names = ("streams", "each", "prompt_tokens", "answer_tokens", "backend")
        case = {"model": Path(args.model).name, "delivery_ms": delivery_ms} | {
            name: getattr(args, name) for name in names
        }
        rates = {"alone_tokens_per_s": statistics.median(alone),
                 "http_tokens_per_s": statistics.median(behind), "limit": SHARE}  # fmt: skip
        write_row("serve.jsonl", bench="serve_share", case=case, unit="share of tokens/s",
                  samples=[share], baselines=rates, device=device, made_at=args.commit)  # fmt: skip


def engine_alone(
    directory: Path, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[list[float], str]:
    """Return the tokens/s of each run without HTTP, and what device it was."""
    import torch

    from llmpq import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.answer_tokens, ignore_eos=True)
    rates = []
    length = args.prompt_tokens + args.answer_tokens
    with LLM(directory, max_num_seqs=args.streams, max_model_len=length) as llm:
        llm.generate(prompts[: args.streams], params)
        for _ in range(args.runs):
            started_s = time.perf_counter()
            answers = llm.generate(prompts, params)
            took_s = time.perf_counter() - started_s
            tokens = [len(answer.outputs[0].token_ids) for answer in answers]
            assert tokens == [args.answer_tokens] * len(prompts), "an answer is short"
            rates.append(sum(tokens) / took_s)
        device = llm.plan.stages[0].kind
    return rates, torch.cuda.get_device_name(0) if torch.cuda.is_available() else device


def behind_http(
    directory: Path, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """Return the tokens/s of each run through a server, and how long it held tokens."""
    port, length = free_port(), args.prompt_tokens + args.answer_tokens
    command = [sys.executable, "-m", "llmpq.runtime", "serve", "--model", str(directory),
               "--port", str(port), "--no-access-log", "--served-model-name", "model",
               "--max-num-seqs", str(args.streams), "--max-model-len", str(length),
               "--max-requests", str(2 * args.streams), "--backend", args.backend]  # fmt: skip
    pool = ProcessPoolExecutor(PROCESSES, get_context("spawn"))
    with pool, subprocess.Popen(command) as process:
        try:
            wait_until_ready(port, process)
            streamed(pool, port, prompts[: args.streams], args)
            before, rates = buckets(port), []
            for _ in range(args.runs):
                started_s = time.perf_counter()
                tokens = streamed(pool, port, prompts, args)
                rates.append(tokens / (time.perf_counter() - started_s))
            after = buckets(port)
        finally:
            process.send_signal(signal.SIGTERM)
    return rates, {
        name: 1e3 * quantile_s(before, after, share)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def streamed(pool: Executor, port: int, prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Stream the answers to prompts, so many at once; return their tokens, all of them there.

    Clients of several processes: one that reads so many streams would be measured itself.
    """
    shares = [
        [prompts[number :: args.streams] for number in range(first, args.streams, PROCESSES)]
        for first in range(PROCESSES)
    ]
    jobs = [pool.submit(clients, port, share, args.answer_tokens) for share in shares if share]
    tokens = sum(job.result() for job in jobs)
    assert tokens == len(prompts) * args.answer_tokens, "an answer is short"
    return tokens


def clients(port: int, prompts: list[list[list[int]]], answer_tokens: int) -> int:
    """Be a few clients, each with prompts of its own, in turn; return their answers' tokens."""
    return asyncio.run(all_of(port, prompts, answer_tokens))


async def all_of(port: int, prompts: list[list[list[int]]], answer_tokens: int) -> int:
    """As `clients`, in one event loop."""

    async def one(prompt: list[int]) -> int:
        body = json.dumps({
            "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        })  # fmt: skip
        status, reader, writer = await asked(port, body.encode())
        assert status == 200, status
        tail = b""
        while part := await reader.read(1 << 16):
            tail = (tail + part)[-TAIL_BYTES:]
        writer.close()
        events = [line for line in tail.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1].strip() == b"data: [DONE]", events[-1]
        return int(json.loads(events[-2][6:])["usage"]["completion_tokens"])

    async def client(own: list[list[int]]) -> int:
        return sum([await one(prompt) for prompt in own])

    return sum(await asyncio.gather(*map(client, prompts)))


def write_checkpoint(name: str, directory: Path) -> None:
    """Write a built-in model's shape with random weights, and a tokenizer of made-up words."""
    import tokenizers
    import torch
    import transformers
    import yaml

    import llmpq

    models = yaml.safe_load((Path(llmpq.__file__).parent / "models.yaml").read_text())
    shape = models.get("models", models)[name]
    kind = shape["model_type"]
    config = transformers.AutoConfig.for_model(**shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    vocab = {word: number for number, word in enumerate(made_up(shape["vocab_size"]))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(directory)
    print(f"wrote {name} ({kind}) with random weights", flush=True)


def made_up(size: int) -> list[str]:
    """Return special tokens, all bytes, and words and pieces of JSON, as byte-level BPE has them.

    The third one ends answers: transformers' default for Llama.
    """
    shown = tokenizers_alphabet()
    pieces = vocabulary(size - len(SPECIAL) + 1)[1:]
    return [*SPECIAL, *("".join(shown[byte] for byte in piece) for piece in pieces)]


def tokenizers_alphabet() -> dict[int, str]:
    """Return the character by which byte-level BPE shows each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
