"""The paged scheduler alone over real traces: prefix hits against a plain LRU, blocks against need.

    python benchmarks/pool_traces.py [--rows FILE] [--limit N]

No model and no device: every request "generates" as many tokens as its trace says. Hits: Mooncake's
conversations one after the other at three pool sizes; a plain LRU over the same blocks must find
exactly as many. Memory: all requests at once, the pool always full; blocks held over all steps,
against what the same requests' tokens need (tokens / 128, rounded up for each).
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict

from lib.rows import write_row
from lib.traces import Arrival, read_trace

from llmpq.runtime.engine.paged_scheduler import PagedScheduler
from llmpq.runtime.engine.pool_limits import PoolLimits
from llmpq.runtime.request import Request
from llmpq.sizes.kv_format import BLOCK_TOKENS

VOCAB = 1 << 20
POOLS = (2_000, 10_000, 50_000)
"""Blocks of 128 tokens: 0.26, 1.3 and 6.4 million tokens."""


def limits(num_blocks: int, *, max_rows: int, prefix_cache: bool) -> PoolLimits:
    """Return a pool without other limits."""
    return PoolLimits(
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_len=1 << 20,
        step_tokens=8192,
        decode_rows=max_rows,
        prefix_cache=prefix_cache,
    )


def scheduler_hits(trace: list[Arrival], num_blocks: int) -> int:
    """Return the blocks that the scheduler found again, one request after the other."""
    scheduler = PagedScheduler(limits(num_blocks, max_rows=1, prefix_cache=True))
    hits = 0
    for number, row in enumerate(trace):
        prompt = tuple(row.prompt(VOCAB, number))
        request = Request(id=number, prompt=prompt, max_new=1)
        scheduler.submit(request)
        while not scheduler.idle:
            step = scheduler.next_micro_batch()
            assert step is not None
            scheduler.complete(step, [[0]] * len(step.requests))
        hits += request.num_prefix_hits // BLOCK_TOKENS
    return hits


def plain_hits(trace: list[Arrival], num_blocks: int) -> int:
    """Return the hits of a plain LRU over the prompts' full blocks, all but a last token's."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for row in trace:
        full = row.prompt_tokens // BLOCK_TOKENS
        # A block of Mooncake's stands for four of ours; what it is, its number says, and its place.
        keys = [(row.blocks[: 1 + n * BLOCK_TOKENS // 512][-1], n) for n in range(full)]
        found = 0
        usable = (row.prompt_tokens - 1) // BLOCK_TOKENS  # a token is left to compute
        while found < usable and keys[found] in cache:
            found += 1
        hits += found
        partial = -(-row.prompt_tokens // BLOCK_TOKENS) - full
        for key in keys[:found]:
            cache.move_to_end(key)
        # What it needs beside goes out, oldest first; then its own become the newest.
        needed = full - found + partial
        new = [key for key in keys[found:] if key not in cache]
        while num_blocks - len(cache) < needed:
            cache.popitem(last=False)
        for key in new:
            cache[key] = None
        for key in reversed(keys):
            cache.move_to_end(key)
    return hits


def held_share(trace: list[Arrival], num_blocks: int) -> tuple[float, int]:
    """Return blocks held / needed, summed over all steps of a full pool, and preemptions."""
    scheduler = PagedScheduler(limits(num_blocks, max_rows=512, prefix_cache=False))
    for number, row in enumerate(trace):
        prompt = (1 + number,) * row.prompt_tokens
        scheduler.submit(Request(id=number, prompt=prompt, max_new=max(1, row.output_tokens)))
    held = needed = 0
    while not scheduler.idle:
        step = scheduler.next_micro_batch()
        assert step is not None
        if scheduler.num_waiting:  # at saturation only
            held += scheduler.tables.pool.num_held
            computed = scheduler.cached_tokens()
            needed += sum(-(-tokens // BLOCK_TOKENS) for tokens in computed)
        scheduler.complete(step, [[0]] * len(step.requests))
    return held / needed, scheduler.num_preemptions


def main() -> None:
    """Measure, print and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="pool.jsonl", help="file in results/ to append to")
    parser.add_argument("--limit", type=int, help="rows of each trace; default: all")
    args = parser.parse_args()
    mooncake = read_trace("mooncake_conversation", args.limit)
    for num_blocks in POOLS:
        started_s = time.perf_counter()
        hits, plain = scheduler_hits(mooncake, num_blocks), plain_hits(mooncake, num_blocks)
        seconds = time.perf_counter() - started_s
        total = sum(row.prompt_tokens // BLOCK_TOKENS for row in mooncake)
        print(f"{num_blocks} blocks: {hits} hits, plain LRU {plain}, of {total} ({seconds:.0f} s)")
        case = {"trace": "mooncake_conversation", "requests": len(mooncake), "blocks": num_blocks}
        write_row(
            args.rows,
            bench="prefix_hits",
            case=case,
            unit="blocks",
            samples=[hits],
            baselines={"plain_lru": plain, "full_blocks": total},
        )
    for name, num_blocks in (("azure_2023_conv", 2_000), ("mooncake_conversation", 10_000)):
        trace = read_trace(name, min(args.limit or 1000, 1000))
        share, preemptions = held_share(trace, num_blocks)
        print(f"{name}: {share:.4f} of the ideal held, {preemptions} preemptions")
        case = {"trace": name, "requests": len(trace), "blocks": num_blocks}
        write_row(
            args.rows,
            bench="blocks_held",
            case=case,
            unit="held / ideal",
            samples=[share],
            baselines={"preemptions": preemptions},
        )


if __name__ == "__main__":
    main()
