"""A decode step's attention over a pool of packed blocks, beside 16 bits: our pool's and torch's.

python benchmarks/kv_pages.py [--heads 32/8x128,...] [--rows 1,8] [--tokens 300,9000] [--bits 4,8v4]
                              [--loops 1x2x12,...] [--out FILE.jsonl]

Over a pool, packed or in 16 bits, a step appends and attends as a layer of a model does: queries
and keys are rotated on the way; "attention" is the same step without append. Torch's attention
(cuDNN, FlashAttention) reads dense keys and values that are there. Graphs of launches find keys and
values in device memory (kernels/gpu_timing.py). Every row has as many tokens, or with `--tokens
mixed` one has 16,000 and the others 300. The floor reads packed blocks and rings once.

The last lines: of all cases of as many tokens and bits, how often as quick as the best in 16 bits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmpq.kernels.formats.kv_block import pool_format
from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.kv.paged import packed_pages
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows, attend_packed_pages
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_attend import paged_attend
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.paged.paged_rows import row_table, split_work
from llmpq.kernels.kv.storage import allocate_layer
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, packed_end

HEADS = "32/8x128,28/4x128,48/8x128,16/2x256,64/8x64"
DTYPE = torch.bfloat16
MOST_SETS = 100
MOST_TOKENS = 2_200_000
"""Of all rows together: 16 bits of them and their copies fit a card."""
BANDWIDTH = 4.3e12
"""Bytes a second that an H200's copies reach."""


def tables(ends: Sequence[int]) -> tuple[int, torch.Tensor]:
    """Blocks that rows of so many tokens have, and which: in no order."""
    needed = [-(-end // BLOCK_TOKENS) for end in ends]
    free = torch.randperm(sum(needed)).int().tolist()
    table = torch.zeros((len(ends), max(needed)), dtype=torch.int32)
    for row, own in enumerate(needed):
        table[row, :own] = torch.tensor([free.pop() for _ in range(own)])
    return sum(needed), table.to("cuda")


def on_device(values: Any) -> torch.Tensor:
    """Integers, as kernels read them."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class SixteenBits:
    """The same step over copies of a pool of 16-bit blocks."""

    def __init__(self, heads: int, groups: int, dim: int, ends: list[int]) -> None:
        batch, device = len(ends), torch.device("cuda", 0)
        self.plan = PagedPlan.of(heads, groups, dim, DTYPE, device)
        blocks, self.table = tables(ends)
        starts = [end - 1 for end in ends]
        rows = row_table(
            *(list(range(batch)), starts, [1] * batch),
            num_rows=batch,
            num_places=batch,
            tile_queries=self.plan.tile_queries,
            tile_keys=self.plan.tile_keys,
            window=0,
        )
        self.rows_FR = on_device(rows)
        self.work_split = on_device(split_work(rows, self.plan.programs, windowed=False))
        last = [self.table[row, start // BLOCK_TOKENS] for row, start in enumerate(starts)]
        self.places = on_device(
            [
                int(block) * BLOCK_TOKENS + start % BLOCK_TOKENS
                for block, start in zip(last, starts, strict=True)
            ]
        ).long()
        self.positions = on_device(starts).long()
        shape = (blocks, groups, BLOCK_TOKENS, dim)
        self.copies = min(MOST_SETS, copies_for(4 * blocks * groups * BLOCK_TOKENS * dim))
        self.pools = [
            torch.randn(2, *shape, device=device, dtype=DTYPE) for _ in range(self.copies)
        ]
        qkv = torch.randn(batch, heads + 2 * groups, dim, device=device, dtype=DTYPE)
        self.q, self.k, self.v = qkv.split([heads, groups, groups], dim=1)
        self.turned = self.q.contiguous()
        self.inv_freq = 5e5 ** (-torch.arange(dim // 2, device=device) / (dim // 2))
        self.scale = dim**-0.5

    def attention(self, i: int) -> torch.Tensor:
        """Attention, the step's keys and values being there."""
        return self._attend(self.turned, i)

    def _attend(self, q_THD: torch.Tensor, i: int) -> torch.Tensor:
        step = (self.rows_FR, self.work_split, self.table, self.plan)
        return paged_attend(q_THD, *self.pools[i], *step, scale=self.scale, chunks=False)

    def step(self, i: int) -> None:
        """Append and attend."""
        at = (self.places, self.positions, self.inv_freq)
        turned = rope_append_pages(self.q, self.k, self.v, *self.pools[i], *at)
        self._attend(turned, i)


class Step:
    """One layer's step of rows of one token, over copies of a pool."""

    def __init__(
        self, heads: int, groups: int, dim: int, kv: KVPrecision, ends: list[int], loop: str = ""
    ) -> None:
        self.fmt = pool_format(kv, dim)
        self.heads, self.groups, self.ends = heads, groups, ends
        device, batch = torch.device("cuda", 0), len(ends)
        self.plan = PackedPlan.of(self.fmt, heads, groups, DTYPE, device)
        if loop:
            tiles, stages, programs = map(int, loop.split("x"))
            parts = self.plan.head_parts
            self.plan = replace(
                self.plan, tiles=tiles, stages=stages, many_rows=None,
                programs=programs * multiprocessors(device) // parts,
            )  # fmt: skip
        blocks, table = tables(ends)
        starts = [end - 1 for end in ends]
        rows = self.plan.table(
            list(range(batch)), starts, [1] * batch, num_rows=batch, num_places=batch
        )
        self.step = PackedRows(
            rows_FR=on_device(rows),
            work_split=on_device(self.plan.work_split(rows)),
            table_SM=table,
            chunks=False,
        )
        ring_bytes = batch * 2 * RING_TOKENS * groups * dim * 2
        self.read_bytes = sum(
            packed_end(end - 1) // BLOCK_TOKENS * self.fmt.block_bytes(groups, DTYPE.itemsize)
            + 4 * (end - packed_end(end - 1)) * groups * dim
            for end in ends
        )
        copies = min(
            MOST_SETS,
            copies_for(blocks * self.fmt.block_bytes(groups, DTYPE.itemsize) + ring_bytes),
        )
        self.pools = [self._pool(blocks, batch) for _ in range(copies)]
        qkv = torch.randn(batch, heads + 2 * groups, dim, device=device, dtype=DTYPE)
        self.q, self.k, self.v = qkv.split([heads, groups, groups], dim=1)
        self.inv_freq = 5e5 ** (-torch.arange(dim // 2, device=device) / (dim // 2))
        self.scale = dim**-0.5
        self.turned = self.q.contiguous()

    def _pool(self, blocks: int, slots: int) -> PackedPages:
        fmt, groups = self.fmt, self.groups
        layer = allocate_layer(
            fmt, pages=blocks, slots=slots, kv_heads=groups, dtype=DTYPE, device="cuda"
        )
        for words in (layer.k_words_PGW, layer.v_words_PGW):
            if words.is_floating_point():  # keys as they are
                words.normal_()
            else:
                words.random_(-(2**31), 2**31 - 1)
        for params in (layer.k_params_PG, layer.v_params_PG):
            params.uniform_(0.001, 0.01)
        layer.k_ring_SGRD.normal_()
        layer.v_ring_SGRD.normal_()
        none = torch.zeros((0, groups, 1, fmt.head_dim), dtype=DTYPE, device="cuda")
        return PackedPages(layer=layer, k_behind_PGTD=none, v_behind_PGTD=none)

    def over_pool(self, i: int) -> torch.Tensor:
        """Append and attend as the pool does."""
        return attend_packed_pages(
            *(self.q, self.k, self.v, self.pools[i], self.step, self.plan),
            scale=self.scale,
            inv_freq=self.inv_freq,
        )

    def attention(self, i: int) -> torch.Tensor:
        """Attention, the step's keys and values being there."""
        return packed_pages._attend(
            *(self.turned, self.k, self.v, self.pools[i], self.step, self.plan, self.scale, None),
            packed_pages.EVERYTHING,
        )


def median_us(call: Any, copies: int) -> float:
    """Median microseconds of a launch."""
    return statistics.median(time_launches(call, copies, repeats=6))


def sixteen_bits_us(heads: int, groups: int, dim: int, ends: list[int]) -> dict[str, float]:
    """Attention in 16 bits: our pool's, with append and without, and torch's."""
    own = SixteenBits(heads, groups, dim, ends)
    found = {
        "pages16": median_us(own.step, own.copies),
        "pages16_attention": median_us(own.attention, own.copies),
    }
    del own
    batch, length = len(ends), max(ends)
    if min(ends) < length:
        return found
    copies = min(MOST_SETS, copies_for(4 * batch * groups * length * dim))
    shape = (batch, groups, length, dim)
    kv = [torch.randn(2, *shape, device="cuda", dtype=torch.float16) for _ in range(copies)]
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.float16)
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                found[name] = median_us(
                    lambda i: F.scaled_dot_product_attention(q, *kv[i], enable_gqa=True), copies
                )
        except RuntimeError:
            torch.cuda.synchronize()
    return found


def cases(args: argparse.Namespace) -> list[tuple[int, int, int, KVPrecision, int, str]]:
    """Heads, key/value heads, head_dim, KV precision, rows, tokens."""
    found = []
    for text in args.heads.split(","):
        of, dim = text.split("x")
        heads, groups = map(int, of.split("/"))
        for kv in map(KVPrecision.parse, args.bits.split(",")):
            for rows in args.rows.split(","):
                for tokens in args.tokens.split(","):
                    if tokens != "mixed" and int(rows) * int(tokens) > MOST_TOKENS:
                        continue
                    found.append((heads, groups, int(dim), kv, int(rows), tokens))
    return found


def ends_of(rows: int, tokens: str) -> list[int]:
    """The rows' lengths."""
    return [16_000] + [300] * (rows - 1) if tokens == "mixed" else [int(tokens)] * rows


def compile_share(job: tuple[list[Any], int, int, list[str]]) -> None:
    """Compile what every `of`-th case needs, in a process of its own."""
    some, first, of, loops = job
    for heads, groups, dim, kv, rows, tokens in some[first::of]:
        ends = ends_of(rows, tokens)
        for loop in loops:
            Step(heads, groups, dim, kv, ends, loop).over_pool(0)
        SixteenBits(heads, groups, dim, ends).step(0)
        torch.cuda.synchronize()


def summary(found: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Print how often as quick as in 16 bits: least and mean, with append and without."""
    print("tokens  bits  step / our 16-bit pool's: least, mean   attention / best of 16 bits")
    for (tokens, bits), ratios in sorted(found.items(), key=lambda item: (item[0][0], item[0][1])):
        steps, attentions = zip(*ratios, strict=True)
        print(
            f"{tokens:>6}  {bits:>4}  {min(steps):20.2f} {statistics.mean(steps):6.2f}"
            f"  {min(attentions):24.2f} {statistics.mean(attentions):6.2f}"
        )


def main() -> None:
    """Time the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--bits", default="8,4,2")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--tokens", default="300,1500,9000,33000")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--loops", default="", help="TILESxSTAGESxPROGRAMS_OF_AN_SM,... to try beside the plan's"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--compilers", type=int, default=14)
    args = parser.parse_args()
    todo, loops = cases(args), ["", *filter(None, args.loops.split(","))]
    forms = {(h, g, d, b, r): (h, g, d, b, r, "300") for h, g, d, b, r, _ in todo}
    if args.compilers:
        shares = [(list(forms.values()), i, args.compilers, loops) for i in range(args.compilers)]
        with multiprocessing.get_context("spawn").Pool(args.compilers) as pool:
            pool.map(compile_share, shares)
    peers: dict[tuple[Any, ...], dict[str, float]] = {}
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for heads, groups, dim, kv, rows, tokens in todo:
        ends = ends_of(rows, tokens)
        step = Step(heads, groups, dim, kv, ends)
        floor, copies = step.read_bytes / BANDWIDTH * 1e6, len(step.pools)
        samples = time_launches(step.over_pool, copies, repeats=6)
        us, attention = statistics.median(samples), median_us(step.attention, copies)
        del step
        line = f"{heads}/{groups}x{dim} {kv.value} {rows:3} x {tokens:>6}: {us:7.1f} us, attention "
        line += f"{attention:6.1f}, floor {floor:6.1f}"
        for loop in loops[1:]:
            other = Step(heads, groups, dim, kv, ends, loop)
            line += f", {loop} {median_us(other.attention, copies):.1f}"
            del other
        key = (heads, groups, dim, rows, tokens)
        if key not in peers and not args.no_peers:
            peers[key] = sixteen_bits_us(heads, groups, dim, ends)
        beside = peers.get(key, {})
        if beside:
            alone = {name: value for name, value in beside.items() if name != "pages16"}
            best = min(alone, key=alone.__getitem__)
            pair = (beside["pages16"] / us, alone[best] / attention)
            ratios.setdefault((tokens, kv.typed), []).append(pair)
            line += f" | 16 bits: {beside['pages16']:.1f} ({pair[0]:.2f}x), attention {best} "
            line += f"{alone[best]:.1f} ({pair[1]:.2f}x)"
        print(line, flush=True)
        if args.out:
            write_row(
                args.out, bench="kv_pages", unit="us", samples=samples, floor=floor,
                case={
                    "heads": heads, "kv_heads": groups, "head_dim": dim, "kv": kv.value,
                    "rows": rows, "tokens": tokens, "copies": copies,
                },
                baselines={"attention": attention, **beside},
                program="python benchmarks/kv_pages.py",
            )  # fmt: skip
    summary(ratios)


if __name__ == "__main__":
    main()
