"""A decode step's attention over a pool of packed blocks, beside slots' and torch's in 16 bits.

python benchmarks/kv_pages.py [--heads 32/8x128,...] [--rows 1,8] [--tokens 300,9000] [--bits 4]
                              [--out FILE.jsonl] [--apart]

Append and attention as a layer of a model has them: queries and keys are rotated on the way, graphs
of launches find keys and values in device memory (kernels/gpu_timing.py). Every row has as
many tokens, or with `--tokens mixed` one has 16,000 and the others 300. `--apart` also times append
and attention one by one. The floor reads packed blocks and rings once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lib.bench_kv import BANDWIDTH
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.gemm.reference import relative_error
from llmpq.kernels.gpu_timing import copies_for, time_launches, write_row
from llmpq.kernels.kv import ops
from llmpq.kernels.kv.launch_plan import plan_attend
from llmpq.kernels.kv.paged import packed_pages
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows, attend_packed_pages
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.storage import DeviceRows, allocate_layer
from llmpq.kernels.multiprocessors import multiprocessors
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, RING_TOKENS, packed_end

HEADS = "32/8x128,28/4x128,48/8x128,16/2x256,64/8x64"
DTYPE = torch.bfloat16
MOST_SETS = 100


class Step:
    """One layer's step of rows of one token, over copies of a pool."""

    def __init__(
        self, heads: int, groups: int, dim: int, bits: int, ends: list[int], loop: str = ""
    ) -> None:
        self.fmt = KVFormat(precision=KVPrecision(f"kv{bits}"), head_dim=dim)
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
        needed = [-(-end // BLOCK_TOKENS) for end in ends]
        blocks, columns = sum(needed), max(needed)
        free = torch.randperm(blocks).int().tolist()
        table = torch.zeros((batch, columns), dtype=torch.int32)
        for row, own in enumerate(needed):
            table[row, :own] = torch.tensor([free.pop() for _ in range(own)])
        starts = [end - 1 for end in ends]
        rows = self.plan.table(
            list(range(batch)), starts, [1] * batch, num_rows=batch, num_places=batch
        )
        rows_FR = torch.tensor(rows, dtype=torch.int32, device=device)
        work_split = torch.tensor(self.plan.work_split(rows), dtype=torch.int32, device=device)
        self.step = PackedRows(
            rows_FR=rows_FR, work_split=work_split, table_SM=table.to(device), chunks=False
        )
        ring_bytes = batch * 2 * RING_TOKENS * groups * dim * 2
        self.read_bytes = sum(
            packed_end(end - 1) // BLOCK_TOKENS * self.fmt.block_bytes(groups)
            + 4 * (end - packed_end(end - 1)) * groups * dim
            for end in ends
        )
        copies = min(MOST_SETS, copies_for(blocks * self.fmt.block_bytes(groups) + ring_bytes))
        self.pools = [self._pool(blocks, batch) for _ in range(copies)]
        qkv = torch.randn(batch, heads + 2 * groups, dim, device=device, dtype=DTYPE)
        self.q, self.k, self.v = qkv.split([heads, groups, groups], dim=1)
        self.inv_freq = 5e5 ** (-torch.arange(dim // 2, device=device) / (dim // 2))
        self.scale = dim**-0.5
        self.device_rows = DeviceRows(slots=rows_FR[0], starts=rows_FR[1], counts=rows_FR[2])
        self.attend = plan_attend(
            batch=batch, q_len=1, heads=heads, kv_heads=groups, max_end=max(ends) + 50,
            device=device, bits=bits, head_dim=dim,
        )  # fmt: skip
        self.tickets = torch.zeros(batch * groups * 16, dtype=torch.int32, device=device)

    def _pool(self, blocks: int, slots: int) -> PackedPages:
        fmt, groups = self.fmt, self.groups
        layer = allocate_layer(
            fmt, pages=blocks, slots=slots, kv_heads=groups, dtype=DTYPE, device="cuda"
        )
        for words in (layer.k_words_PGW, layer.v_words_PGW):
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

    def over_slots(self, i: int) -> torch.Tensor:
        """Append and attend as slots do, over the same tensors."""
        layer, table = self.pools[i].layer, self.step.table_SM
        turned = ops.run_append(
            self.fmt, layer, table, self.k[:, None], self.v[:, None], self.device_rows,
            paged=True, q=self.q[:, None], inv_freq=self.inv_freq,
        )  # fmt: skip
        assert turned is not None
        return ops.run_attend(
            *(self.fmt, layer, table, turned, self.device_rows, self.attend),
            scale=self.scale,
            paged=True,
            tickets=self.tickets,
        )[:, 0]

    def append(self, i: int) -> None:
        """The pool's append only."""
        packed_pages._append(
            *(self.q, self.k, self.v, self.pools[i], self.step, self.plan, self.inv_freq, 1.0)
        )

    def attention(self, i: int) -> None:
        """The pool's attention only."""
        q = self.q.contiguous() if i < 0 else self._q
        packed_pages._attend(
            *(q, self.k, self.v, self.pools[i], self.step, self.plan, self.scale, None),
            packed_pages.EVERYTHING,
        )

    def slots_append(self, i: int) -> None:
        """The slots' append only."""
        ops.run_append(
            self.fmt, self.pools[i].layer, self.step.table_SM, self.k[:, None], self.v[:, None],
            self.device_rows, paged=True, q=self.q[:, None], inv_freq=self.inv_freq,
        )  # fmt: skip

    def slots_attention(self, i: int) -> None:
        """The slots' attention only."""
        ops.run_attend(
            *(self.fmt, self.pools[i].layer, self.step.table_SM, self._q[:, None]),
            *(self.device_rows, self.attend),
            scale=self.scale,
            paged=True,
            tickets=self.tickets,
        )

    @property
    def _q(self) -> torch.Tensor:
        if not hasattr(self, "_contiguous"):
            self._contiguous = self.q.contiguous()
        return self._contiguous


def median_us(call: Any, copies: int) -> float:
    """Median microseconds of a launch."""
    return statistics.median(time_launches(call, copies, repeats=6))


def sixteen_bits_us(heads: int, groups: int, dim: int, ends: list[int]) -> dict[str, float]:
    """Torch's attention in 16 bits over rows of one length: cuDNN's and FlashAttention's."""
    batch, length = len(ends), max(ends)
    copies = min(MOST_SETS, copies_for(4 * batch * groups * length * dim))
    shape = (batch, groups, length, dim)
    kv = [torch.randn(2, *shape, device="cuda", dtype=torch.float16) for _ in range(copies)]
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.float16)
    found = {}
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


def cases(args: argparse.Namespace) -> list[tuple[int, int, int, int, int, str]]:
    """Heads, key/value heads, head_dim, bits, rows, tokens."""
    found = []
    for text in args.heads.split(","):
        of, dim = text.split("x")
        heads, groups = map(int, of.split("/"))
        for bits in args.bits.split(","):
            for rows in args.rows.split(","):
                for tokens in args.tokens.split(","):
                    if tokens != "mixed" and int(rows) * int(tokens) > 1_700_000:
                        continue
                    found.append((heads, groups, int(dim), int(bits), int(rows), tokens))
    return found


def ends_of(rows: int, tokens: str) -> list[int]:
    """The rows' lengths."""
    return [16_000] + [300] * (rows - 1) if tokens == "mixed" else [int(tokens)] * rows


def compile_share(job: tuple[list[Any], int, int, str]) -> None:
    """Compile what every `of`-th case needs, in a process of its own."""
    some, first, of, loop = job
    for heads, groups, dim, bits, rows, tokens in some[first::of]:
        step = Step(heads, groups, dim, bits, ends_of(rows, tokens), loop)
        step.over_pool(0)
        step.over_slots(0)
        torch.cuda.synchronize()
        del step


def main() -> None:
    """Time the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--bits", default="8,4,2")
    parser.add_argument("--rows", default="1,4,24,96")
    parser.add_argument("--tokens", default="300,1500,9000,33000")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--loop", default="", help="TILESxSTAGESxPROGRAMS_OF_AN_SM to try")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--compilers", type=int, default=14)
    args = parser.parse_args()
    todo = cases(args)
    forms = {(h, g, d, b, r): (h, g, d, b, r, "300") for h, g, d, b, r, _ in todo}
    if args.compilers:
        shares = [
            (list(forms.values()), i, args.compilers, args.loop) for i in range(args.compilers)
        ]
        with multiprocessing.get_context("spawn").Pool(args.compilers) as pool:
            pool.map(compile_share, shares)
    peers: dict[tuple[Any, ...], dict[str, float]] = {}
    for heads, groups, dim, bits, rows, tokens in todo:
        ends = ends_of(rows, tokens)
        step = Step(heads, groups, dim, bits, ends, args.loop)
        apart = relative_error(step.over_pool(0), step.over_slots(0))
        samples = time_launches(step.over_pool, len(step.pools), repeats=6)
        us, slots = statistics.median(samples), median_us(step.over_slots, len(step.pools))
        line = f"{heads}/{groups}x{dim} kv{bits} {rows:3} x {tokens:6}: {us:7.1f} us, slots "
        line += f"{slots:7.1f} ({us / slots:4.2f}), floor {step.read_bytes / BANDWIDTH * 1e6:6.1f}"
        if args.apart:
            for name in ("append", "slots_append", "attention", "slots_attention"):
                line += f", {name} {median_us(getattr(step, name), len(step.pools)):.1f}"
        floor, copies = step.read_bytes / BANDWIDTH * 1e6, len(step.pools)
        del step
        key = (heads, groups, dim, rows, tokens)
        if key not in peers:
            peers[key] = (
                {}
                if args.no_peers or tokens == "mixed"
                else sixteen_bits_us(heads, groups, dim, ends)
            )
        best = min(peers[key].values(), default=0.0)
        line += f", 16 bits {best:.1f} ({best / us:.2f}x)" if best else ""
        print(f"{line}{'' if apart < 4e-3 else f'  APART {apart:.1e}'}", flush=True)
        if args.out:
            write_row(
                args.out, bench="kv_pages", unit="us", samples=samples, floor=floor,
                case={
                    "heads": heads, "kv_heads": groups, "head_dim": dim, "kv": f"kv{bits}",
                    "rows": rows, "tokens": tokens, "copies": copies,
                },
                baselines={"slots": slots, **peers[key]},
                program="python benchmarks/kv_pages.py",
            )  # fmt: skip


if __name__ == "__main__":
    main()
