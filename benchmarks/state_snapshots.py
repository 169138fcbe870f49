"""How many states of recurrent layers a prefix cache is to keep, and behind which blocks.

    python benchmarks/state_snapshots.py --trace mooncake_conversation.jsonl --write

Replays the prompts of a trace (Mooncake's form: `input_length`, `hash_ids` of blocks of 512 tokens)
against a cache of snapshots, the least recently used evicted first; every block of keys and values
is taken to be there. A prompt starts behind the longest of its prefixes whose snapshot is kept. The
value is the share of prompt tokens that are not computed again; `all blocks` is what attention
would find by itself. `where`: behind the last full block of each prompt (`prompt`), behind every
n-th block, too, or behind every block.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

BLOCK = 512
EVERY = {"prompt": 0, "prompt and every 8th": 8, "every block": 1}


def share_found(prompts: list[tuple[int, list[int]]], capacity: int, every: int) -> float:
    """Return the share of prompt tokens that a cache of so many snapshots saves."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for length, blocks in prompts:
        full = min(len(blocks), (length - 1) // BLOCK)
        total += length
        # A block's hash stands for all blocks before it, too.
        hit = next((n for n in range(full, 0, -1) if blocks[n - 1] in kept), 0)
        if hit:
            kept.move_to_end(blocks[hit - 1])
        found += hit * BLOCK
        for n in range(hit + 1, full + 1):
            if n == full or (every and n % every == 0):
                kept[blocks[n - 1]] = None
                kept.move_to_end(blocks[n - 1])
        while len(kept) > capacity:
            kept.popitem(last=False)
    return found / total


def main() -> None:
    """Replay, print, write rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--capacities", type=int, nargs="+", default=[8, 32, 128, 512, 10**9])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    lines = map(json.loads, args.trace.read_text().splitlines())
    prompts = [(line["input_length"], line["hash_ids"]) for line in lines]
    most = share_found(prompts, 10**9, 1)
    for where, every in EVERY.items():
        for capacity in args.capacities:
            share = share_found(prompts, capacity, every)
            print(f"{where}: {capacity} snapshots find {share:.1%} of prompts, all {most:.1%}")
            if args.write:
                case = {"trace": args.trace.name, "where": where, "snapshots": capacity}
                write_row(
                    "engine.jsonl",
                    bench="state_snapshots",
                    case=case,
                    unit="share of prompt tokens found",
                    samples=[share],
                    baselines={"all blocks": most},
                )


if __name__ == "__main__":
    main()
