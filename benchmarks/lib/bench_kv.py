"""`kernel_bench.py bench kv`: low-bit KV kernels against torch's fp16 attention.

Cases are BitDecoding's settings (single, batches, page): heads, kv_heads, batch, context. Random
codes and scales fill the cache (timings do not depend on values, and checks are `check kv`);
inputs rotate past the L2, launches run from a CUDA graph, the median of the samples is reported.

    attend    one decode or verify step, part kernel and combine
    append    write one token per request, no block completed / packed at every step
    prefill   pack a whole prompt
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmpq.kernels.formats.kv_block import KVFormat, channel_gain, to_thread_order, token_gain
from llmpq.kernels.gpu_timing import copies_for, time_launches
from llmpq.kernels.kv import launch_plan
from llmpq.kernels.kv.launch_plan import (
    AHEAD,
    AttendPlan,
    KvLaunch,
    num_programs,
    plan_attend,
    programs_per_sm,
    shared_memory,
)
from llmpq.kernels.kv.ops import run_append, run_attend
from llmpq.kernels.kv.storage import DeviceRows, KVLayer, allocate_layer, contiguous_table
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, HOLDBACK_TOKENS, packed_blocks, packed_end
from reference.kernel_commands import BenchKV

BANDWIDTH = 4.3e12
"""Bytes/s an H200 copies (read + written), the ceiling that floors are given against."""


@dataclass(frozen=True, kw_only=True)
class KVCase:
    """The case keys of a row."""

    heads: int
    kv_heads: int
    batch: int
    context: int
    kv: str
    q_len: int = 1
    layout: str = "contiguous"
    keys: str = "kc128"
    head_dim: int = 128
    op: str = "attend"

    @property
    def fmt(self) -> KVFormat:
        """The packed format."""
        group = None if self.keys == "kt" else int(self.keys.removeprefix("kc"))
        precision = KVPrecision.parse(self.kv)
        return KVFormat(precision=precision, head_dim=self.head_dim, key_group=group)

    @property
    def setting(self) -> str:
        """BitDecoding's name for the setting."""
        if self.layout == "paged":
            return "page"
        return "single" if self.batch == 1 else "batches"

    @property
    def floor_us(self) -> float:
        """Microseconds to read the keys and values once."""
        if self.kv == "kv16":
            nbytes = self.batch * self.context * self.kv_heads * self.head_dim * 4
        else:
            line = packed_end(self.context)
            ring = (self.context + self.q_len - line) * self.kv_heads * self.head_dim * 4
            blocks = line // BLOCK_TOKENS * self.fmt.block_bytes(self.kv_heads)
            nbytes = self.batch * (blocks + ring)
        return nbytes / BANDWIDTH * 1e6


SHAPES = (
    (32, 8, 8, 32768),
    (32, 8, 32, 8192),
    (32, 8, 1, 131072),
    (32, 8, 1, 32768),
    (32, 8, 1, 8192),
    (32, 32, 32, 4096),
    (32, 32, 1, 131072),
)
"""heads, kv_heads, batch, context: the settings with measured peers."""

SETTINGS = ("single", "batches", "page")
"""Batch 1, larger batches, and pages in random order: the settings of BitDecoding's paper."""


def random_layer(case: KVCase, pages: int, device: torch.device) -> KVLayer:
    """Fill a cache with random codes, and scales that make keys and values about N(0, 1)."""
    fmt = case.fmt
    kv_heads, slots = case.kv_heads, case.batch
    layer = allocate_layer(
        fmt, pages=pages, slots=slots, kv_heads=kv_heads, dtype=torch.float16, device=device
    )
    step = 4.5 / (2**fmt.bits - 1)
    for words in (layer.k_words_PGW, layer.v_words_PGW):
        words.random_(-(2**31), 2**31 - 1)
    for params in (layer.k_params_PG, layer.v_params_PG):
        params.select(-2, 0).uniform_(0.7 * step, 1.3 * step)
        params.select(-2, 1).uniform_(-2.5, -2.0)
    if fmt.key_group is not None:
        layer.k_params_PG.select(-2, 0).mul_(channel_gain(fmt, device))
    layer.v_params_PG.select(-2, 0).mul_(to_thread_order(token_gain(fmt, device)))
    layer.k_ring_SGRD.normal_()
    layer.v_ring_SGRD.normal_()
    return layer


class AttendBench:
    """A case's rotated inputs; `sample` times it under a plan."""

    def __init__(self, case: KVCase, device: torch.device) -> None:
        self.case, self.device = case, device
        batch = case.batch
        end = case.context + case.q_len
        self.blocks = packed_blocks(end)
        pages = batch * self.blocks
        bytes_each = max(1, pages * case.fmt.block_bytes(case.kv_heads))
        self.copies = min(64, copies_for(bytes_each))
        self.layers = [random_layer(case, pages, device) for _ in range(self.copies)]
        self.table = contiguous_table(batch, self.blocks, device)
        if case.layout == "paged":
            self.table = torch.randperm(pages, device=device).int().reshape(batch, self.blocks)
        shape = (batch, case.q_len, case.heads, case.head_dim)
        self.q = torch.randn(shape, device=device, dtype=torch.float16)
        rows = torch.arange(batch, device=device, dtype=torch.int32)
        self.rows = DeviceRows(
            slots=rows,
            starts=torch.full_like(rows, case.context),
            counts=torch.full_like(rows, case.q_len),
        )
        self.tickets = torch.zeros(batch * case.heads * 16, device=device, dtype=torch.int32)
        self.plan = plan_attend(
            batch=batch,
            q_len=case.q_len,
            heads=case.heads,
            kv_heads=case.kv_heads,
            max_end=end,
            device=device,
            bits=case.fmt.bits,
            head_dim=case.head_dim,
            key_group=case.fmt.key_group,
        )

    def run(self, copy: int, plan: AttendPlan | None = None) -> Tensor:
        """One step on one input set."""
        return run_attend(
            self.case.fmt,
            self.layers[copy],
            self.table,
            self.q,
            self.rows,
            plan or self.plan,
            scale=self.case.head_dim**-0.5,
            paged=self.case.layout == "paged",
            tickets=self.tickets,
        )

    def sample(self, plan: AttendPlan | None = None, repeats: int = 20) -> list[float]:
        """Microseconds of a step, `repeats` samples."""
        return time_launches(partial(self.run, plan=plan), self.copies, repeats=repeats)


def sdpa_sample(
    case: KVCase, backend: SDPBackend, device: torch.device, repeats: int
) -> list[float]:
    """Microseconds of torch's fp16 attention over the same context."""
    shape = (case.batch, case.kv_heads, case.context, case.head_dim)
    nbytes = 4 * case.batch * case.kv_heads * case.context * case.head_dim
    copies = copies_for(nbytes)
    kv = [torch.randn(2, *shape, device=device, dtype=torch.float16) for _ in range(copies)]
    q = torch.randn(case.batch, case.heads, case.q_len, case.head_dim, device=device)
    q = q.to(torch.float16)
    gqa = case.heads != case.kv_heads

    def call(copy: int) -> None:
        F.scaled_dot_product_attention(q, kv[copy][0], kv[copy][1], enable_gqa=gqa)

    with sdpa_kernel(backend):
        return time_launches(call, copies, repeats=repeats)


def append_sample(
    case: KVCase, device: torch.device, repeats: int, *, packing: bool
) -> list[float]:
    """Microseconds to append a token to every request; `packing` completes a block in each."""
    bench = AttendBench(case, device)
    line = packed_end(case.context)
    start = line + HOLDBACK_TOKENS + (0 if packing else 40)
    bench.rows.starts.fill_(start)
    shape = (2, case.batch, 1, case.kv_heads, case.head_dim)
    kv = torch.randn(shape, device=device, dtype=torch.float16)

    def call(copy: int) -> None:
        layer = bench.layers[copy]
        run_append(case.fmt, layer, bench.table, kv[0], kv[1], bench.rows, paged=False)

    return time_launches(call, bench.copies, repeats=repeats)


def prefill_sample(case: KVCase, device: torch.device, repeats: int) -> list[float]:
    """Microseconds to pack a whole prompt of `context` tokens."""
    bench = AttendBench(case, device)
    bench.rows.starts.zero_()
    bench.rows.counts.fill_(case.context)
    shape = (2, case.batch, case.context, case.kv_heads, case.head_dim)
    kv = [torch.randn(shape, device=device, dtype=torch.float16) for _ in range(bench.copies)]

    def call(copy: int) -> None:
        layer, (k, v) = bench.layers[copy], kv[copy]
        run_append(case.fmt, layer, bench.table, k, v, bench.rows, paged=False)

    return time_launches(call, bench.copies, repeats=repeats)


TUNE_SHAPES = {
    8: ((1, 3), (2, 2), (1, 2)),
    4: ((1, 3), (1, 4), (2, 2)),
    2: ((2, 3), (1, 4), (1, 3)),
}
"""Tiles a step and stages that `--tune` tries, by bits."""


def candidates(
    bits: int, head_dim: int, columns: int, rows: int, tiles_all: int, sms: int
) -> set[KvLaunch]:
    """Return the launches `--tune` tries for rows of `tiles_all` packed tiles."""
    found = set()
    shared = shared_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))[1]
    for tiles, stages in TUNE_SHAPES[bits]:
        resident = sms * programs_per_sm(bits, head_dim, columns, tiles, stages, shared=shared)
        ring = 5 if rows * 5 < resident else 1
        loop = {"ring_parts": ring, "tiles": tiles, "stages": stages}
        for programs in (resident * w // 12 for w in (8, 10, 12, 16, 24, 36)):
            chunk = -(-tiles_all // max(1, programs // rows - ring))
            chunk = min(max(tiles, chunk + chunk % tiles), tiles_all)
            together = rows * (-(-tiles_all // chunk) + ring) <= resident
            aheads = (0, AHEAD) if together else (0,)
            found |= {KvLaunch(**loop, chunk=chunk, ahead=ahead) for ahead in aheads}
        loop["ring_parts"] = 1 if rows >= 32 else ring
        drawing = max(1, resident // rows - loop["ring_parts"])
        share = tiles_all // drawing
        for first in {share * k // 8 // tiles * tiles for k in (2, 5, 6, 7)}:
            found |= {KvLaunch(**loop, chunk=c, programs=drawing, first=first) for c in (2, 4)}
    return found


def tune(bench: AttendBench) -> dict[str, int]:
    """Time a case's launches and return the fastest as an entry of kv/tuning.json."""
    case, columns = bench.case, bench.plan.columns
    blocks = packed_end(case.context + case.q_len - 1) // BLOCK_TOKENS
    rows = case.batch * case.kv_heads * -(-case.heads // case.kv_heads * case.q_len // columns)
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count

    def time(launch: KvLaunch) -> float:
        tried = replace(bench.plan, launch=launch, splits=num_programs(launch, blocks))
        return min(bench.sample(tried, repeats=5))

    tried = candidates(case.fmt.bits, case.head_dim, columns, rows, 2 * blocks, sms)
    best = min(tried, key=time)
    best = min((best, replace(best, ring_parts=6 - best.ring_parts)), key=time)
    best = min((replace(best, merge=merge) for merge in (4096, 8192, 16384)), key=time)
    return {
        "bits": case.fmt.bits,
        "columns": columns,
        "rows": rows,
        "blocks": blocks,
        **asdict(best),
    }


def tune_all(device: torch.device, only: str) -> None:
    """Write kv/tuning.json anew from the suite's contiguous KC cases."""
    entries = []
    for case in suite():
        plain = case.layout == "contiguous" and case.keys == "kc128" and case.op == "attend"
        if not plain or case.kv == "kv16" or only not in json.dumps(asdict(case)):
            continue
        entries.append(tune(AttendBench(case, device)))
        sys.stdout.write(f"{json.dumps(entries[-1])}\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    Path(launch_plan.__file__).with_name("tuning.json").write_text(
        f"[\n{lines}\n]\n", encoding="utf-8"
    )


def suite() -> Iterator[KVCase]:
    """All rows of the benchmark."""
    shapes = [
        KVCase(heads=heads, kv_heads=kv_heads, batch=batch, context=context, kv="kv16")
        for heads, kv_heads, batch, context in SHAPES
    ]
    for shape in shapes:
        yield shape
        yield from (replace(shape, kv=kv) for kv in ("kv8", "kv4", "kv2"))
    base = KVCase(heads=32, kv_heads=8, batch=8, context=32768, kv="kv4")
    layer = replace(base, batch=32, context=2048)
    yield from (replace(layer, op=op) for op in ("append", "append_pack", "attend"))
    yield replace(base, batch=1, op="prefill")
    yield from (replace(base, q_len=q_len) for q_len in (4, 8, 2))
    yield from (replace(base, keys=keys) for keys in ("kc64", "kc32", "kt"))
    yield from (replace(shape, kv="kv4", layout="paged") for shape in shapes)


def measure(case: KVCase, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Return samples by name; the first is the case's own, others are baselines."""
    if case.op == "prefill":
        return {"value": prefill_sample(case, device, repeats)}
    if case.op.startswith("append"):
        packing = case.op == "append_pack"
        return {"value": append_sample(case, device, repeats, packing=packing)}
    if case.kv != "kv16":
        return {"value": AttendBench(case, device).sample(repeats=repeats)}
    backends = {"value": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
    return {name: sdpa_sample(case, backend, device, repeats) for name, backend in backends.items()}


def main(asked: BenchKV) -> int:
    """Run the suite on the current GPU."""
    if not torch.cuda.is_available():
        raise ValueError("bench kv needs a CUDA GPU; on a CPU the low-bit cache is plain torch")
    device = torch.device("cuda")
    if asked.tune:
        tune_all(device, asked.only)
        return 0
    fp16: dict[tuple[int, ...], dict[str, float]] = {}
    for case in suite():
        wanted = case.kv == "kv16" or asked.setting in ("", case.setting)
        if not wanted or asked.only not in json.dumps(asdict(case)):
            continue
        samples = measure(case, device, asked.repeats)
        medians = {name: sorted(s)[len(s) // 2] for name, s in samples.items()}
        shape = (case.heads, case.kv_heads, case.batch, case.context)
        us = medians.pop("value")
        baselines = dict(medians)
        if case.kv == "kv16":
            fp16[shape] = {"sdpa_cudnn_fp16": us, "sdpa_flash_fp16": baselines["sdpa_flash"]}
        elif case.op == "attend":
            baselines |= fp16.get(shape, {})
        _report(asked, case, us, samples["value"], baselines)
        torch.cuda.empty_cache()
    return 0


def _report(
    asked: BenchKV,
    case: KVCase,
    us: float,
    samples: list[float],
    baselines: dict[str, float],
) -> None:
    """Print one line and, with --rows, append the row."""
    keys: dict[str, Any] = asdict(case)
    speed = f"{baselines['sdpa_cudnn_fp16'] / us:5.2f}x" if "sdpa_cudnn_fp16" in baselines else ""
    floor = case.floor_us if case.op == "attend" else None
    share = f"{100 * floor / us:4.0f}% of floor" if floor else ""
    name = f"{case.op} {case.heads}/{case.kv_heads} B={case.batch} {case.context} {case.kv}"
    more = f"{case.keys} q{case.q_len} {case.layout}"
    others = " ".join(f"{key} {value:.1f}" for key, value in baselines.items())
    sys.stdout.write(f"{name:38} {more:22} {us:8.2f} us {share} {speed} {others}\n")
    sys.stdout.flush()
    if asked.rows:
        write_row: Callable[..., object] = importlib.import_module("benchmarks.lib.rows").write_row
        write_row(
            "kv.jsonl",
            bench="kv",
            case=keys,
            unit="us",
            samples=samples,
            device=torch.cuda.get_device_name(),
            floor=floor,
            baselines=baselines,
        )
