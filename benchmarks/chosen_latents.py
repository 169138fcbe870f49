"""A layer's attention over latents that an indexer chooses, beside attention to all of them.

    python benchmarks/chosen_latents.py [--rows 1,8,32] [--tokens 4096,131072] [--out FILE.jsonl]

DeepSeek-V3.2's sizes: 128 heads over entries of 576 channels, 64 heads of an indexer over 128, the
best 2,048. Rows of one token in graphs of launches over copies of the pool (kernels/gpu_timing.py),
every row of as many tokens. Of the time with a choice the parts: scores, topk, attention. The floor
reads an indexer's keys and the chosen entries once; that of all entries, every one of them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.kv.paged import chosen_latents
from llmpq.kernels.kv.paged.chosen_latents import attend_chosen_latents, token_rows
from llmpq.kernels.kv.paged.paged_latents import LatentPlan, attend_latent_pages
from llmpq.kernels.kv.paged.paged_rows import spread
from llmpq.kernels.kv.reference import IndexQueries
from llmpq.sizes.kv_format import BLOCK_TOKENS

HEADS, DIM, RANK, INDEX_HEADS, CHANNELS, TOPK = 128, 576, 512, 64, 128, 2048
DTYPE = torch.bfloat16
MOST_TOKENS = 4_500_000
"""Of all rows together: a pool of them and its copies fit a card."""
BANDWIDTH = 4.3e12
"""Bytes a second that an H200's copies reach."""


class Case:
    """A step of rows of one token, each with as many tokens before it."""

    def __init__(self, rows: int, tokens: int) -> None:
        device = torch.device("cuda", 0)
        columns = -(-tokens // BLOCK_TOKENS)
        blocks, self.tokens = rows * columns, tokens
        self.plan = LatentPlan.of(HEADS, DIM, RANK, DTYPE, device, index_dim=CHANNELS)
        self.table = torch.randperm(blocks).view(rows, columns).to(device, torch.int32)
        given = (range(rows), [tokens - 1] * rows, [1] * rows)
        numbers = self.plan.table(*map(list, given), num_rows=rows, num_places=rows)
        self.rows_FR = torch.tensor(numbers, dtype=torch.int32, device=device)
        self.rows_4T = token_rows(spread(self.rows_FR, self.table, rows, padding_slot=rows))
        shape = (blocks, 1, BLOCK_TOKENS, DIM + CHANNELS)
        nbytes = 2 * blocks * BLOCK_TOKENS * (DIM + CHANNELS)
        self.copies = min(16, copies_for(min(nbytes, 2 * rows * TOPK * DIM)))
        self.copies = max(1, min(self.copies, MOST_TOKENS // (blocks * BLOCK_TOKENS)))
        self.pools = [torch.randn(shape, device=device, dtype=DTYPE) for _ in range(self.copies)]
        self.q = torch.randn(rows, HEADS, DIM, device=device, dtype=DTYPE)
        queries = torch.randn(rows, INDEX_HEADS, CHANNELS, device=device, dtype=DTYPE)
        weights = torch.randn(rows, INDEX_HEADS, device=device, dtype=DTYPE)
        self.index = IndexQueries(queries, weights, TOPK)

    def chosen(self, i: int) -> torch.Tensor:
        """Attention to what the indexer chooses."""
        step = (self.q, self.index, self.pools[i], self.rows_4T, self.table, self.plan)
        return attend_chosen_latents(*step, scale=DIM**-0.5, longest=self.tokens)

    def whole(self, i: int) -> torch.Tensor:
        """Attention to all."""
        step = (self.q, self.pools[i], self.rows_FR, self.table, self.plan)
        return attend_latent_pages(*step, scale=DIM**-0.5, chunks=False)

    def scores(self, i: int) -> None:
        """What comes before attention: scores and topk."""
        attend = chosen_latents.attend_rows
        chosen_latents.attend_rows = lambda *_, **__: None
        try:
            self.chosen(i)
        finally:
            chosen_latents.attend_rows = attend


def main() -> None:
    """Time every case; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", default="4096,32768,131072")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("rows  tokens  chosen us  before attention us  all us  floor us, chosen and all")
    for rows in map(int, args.rows.split(",")):
        for tokens in map(int, args.tokens.split(",")):
            if rows * tokens > MOST_TOKENS:
                continue
            case = Case(rows, tokens)
            samples = time_launches(case.chosen, case.copies, repeats=6)
            scores, whole = (
                statistics.median(time_launches(call, case.copies, repeats=6))
                for call in (case.scores, case.whole)
            )
            keys, best = 2 * CHANNELS * tokens, 2 * DIM * min(TOPK, tokens)
            floors = [rows * n / BANDWIDTH * 1e6 for n in (keys + best, 2 * DIM * tokens)]
            print(
                f"{rows:>4} {tokens:>7} {statistics.median(samples):>10.1f} {scores:>20.1f} "
                f"{whole:>7.1f}  {floors[0]:.1f}, {floors[1]:.1f}",
                flush=True,
            )
            if args.out is not None:
                write_row(
                    args.out, bench="chosen_latents", unit="us", samples=samples, floor=floors[0],
                    case={
                        "rows": rows, "tokens": tokens, "heads": HEADS, "topk": TOPK,
                        "copies": case.copies,
                    },
                    baselines={"before attention": scores, "all": whole, "floor of all": floors[1]},
                    program="python benchmarks/chosen_latents.py",
                )  # fmt: skip
            del case


if __name__ == "__main__":
    main()
