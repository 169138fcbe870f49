"""The pool of KV blocks on a GPU: kernels against twins, tokens against slots, then both timed.

    python benchmarks/gpu_pool.py [--rows FILE] [--parts kernels,tokens,speed,packed,packed_tokens]

kernels  attention and append at real sizes against their twins, and attention's time beside the
         slots' kernel (CUDA graphs, median)
tokens   the demo model in float32 through `LLM`, with slots and with a pool: equal greedy tokens of
         prompts of many lengths, alone and sharing beginnings
speed    Llama-3.1-8B, dummy, 16 bits, 32 x 512/100: tokens/s with slots and with a pool, in turns
packed   8, 4 and 2 bits: kernels against their twin; steps beside slots' and beside 16-bit blocks
packed_tokens   the demo model's tokens at these precisions: equal but for ties
stages   two GPUs, only if asked for: tokens of two stages equal those of one, by each kind of link

Exit code 0 if everything holds. Needs no Ray.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lib.gpu_pool_packed import packed_kernels, packed_tokens
from lib.gpu_pool_stages import stages_tokens
from torch import Tensor

from llmpq.kernels.fused.rope_append import rope_append_pages, rope_append_pages_reference
from llmpq.kernels.gemm.reference import relative_error
from llmpq.kernels.gpu_timing import write_row
from llmpq.kernels.kv.paged.paged_attend import paged_attend
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.paged.paged_rows import dealt_out, row_table, spread, spread_reference
from llmpq.kernels.kv.plain_attend import plain_attend
from llmpq.kernels.kv.reference import EVERYTHING, ScoreRule, paged_attend_reference
from llmpq.model_spec import ModelSpec
from llmpq.runtime.launch.launcher import Launch
from llmpq.runtime.launch.plans.hand_plan import hand_plan, on_gpu
from llmpq.runtime.llm import LLM
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.tools.bench_jobs import Bench, run_jobs
from llmpq.sizes.kv_format import BLOCK_TOKENS
from llmpq.workload import Workload

DEMO = Path(__file__).parents[1] / "examples" / "demo-7m"
# Operands rounded once; attention also rounds probabilities.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [
    (32, 8, 128, torch.bfloat16, False),
    (32, 8, 128, torch.float16, False),
    (32, 8, 128, torch.float32, False),
    (28, 4, 128, torch.bfloat16, False),
    (32, 32, 80, torch.float16, True),
    (12, 12, 64, torch.bfloat16, False),
    (32, 32, 96, torch.bfloat16, False),
    (16, 2, 192, torch.float16, False),
    (16, 8, 256, torch.bfloat16, False),
]
RULES = [
    ("gpt-oss", 64, 8, 64, ScoreRule(window=128, sinks_H=torch.linspace(-1, 5, 64))),
    ("gemma 2", 16, 8, 256, ScoreRule(window=4096, cap=50.0)),
    ("mistral", 32, 8, 128, ScoreRule(window=1000)),
]
MIXES = {
    "decode": [(row, 40 + 311 * row, 1) for row in range(32)],
    "long": [(0, 16_000, 1), (1, 3, 1)],
    "mixed": [*((row, 90 + 57 * row, 1) for row in range(1, 25)), (30, 1024, 431), (31, 0, 57)],
}
Row = dict[str, Any]


def main() -> int:
    """Run the parts asked for; print a line each and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", help="append a result row (JSONL) of every time and rate here")
    parser.add_argument("--commit", help="commit a row names, where git cannot tell")
    parser.add_argument("--parts", default="kernels,tokens,speed,packed,packed_tokens", help="some")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_pool.py measures a GPU, torch sees none here; run it where nvidia-smi shows one")
        return 2
    torch.manual_seed(0)
    parts: dict[str, Callable[[], list[Row]]] = {
        "kernels": kernels,
        "tokens": tokens,
        "speed": speed,
        "packed": lambda: packed_kernels(MIXES),
        "packed_tokens": lambda: packed_tokens(DEMO),
        "stages": lambda: stages_tokens(DEMO),
    }
    held, lines = True, []
    for name in options.parts.split(","):
        started_s = time.perf_counter()
        for row in parts[name]():
            held &= bool(row["holds"])
            lines.append(f"{'ok  ' if row['holds'] else 'FAIL'} {name:8} {row['what']}")
            print(lines[-1], flush=True)
            if options.rows and "samples" in row:
                _write(Path(options.rows), name, row, options.commit)
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", flush=True)
    print("\n".join(["", *lines]))
    return 0 if held else 1


def _write(path: Path, part: str, row: Row, commit: str | None) -> None:
    """Append a measured row, that of the slots as its baseline."""
    write_row(
        path,
        bench="gpu_pool",
        case={"part": part, **row["case"]},
        unit=row["unit"],
        samples=row["samples"],
        baselines={row.get("beside", "slots"): statistics.median(row["slots"])},
        commit=commit,
        program="python benchmarks/gpu_pool.py",
    )


def kernels() -> list[Row]:
    """Compare the kernels with their twins, and time a decode step's attention."""
    rows = [_spread()]
    for shape in SHAPES:
        rows += [_attention(name, *shape) for name in MIXES]
    for model, heads, groups, dim, rule in RULES:
        sinks = None if rule.sinks_H is None else rule.sinks_H.cuda()
        own = replace(rule, sinks_H=sinks)
        shape = (heads, groups, dim, torch.bfloat16, False)
        rows += [_attention(name, *shape, own, f", {model}") for name in MIXES]
    rows.append(_append())
    rows += [_timed_attention(batch, length) for batch, length in ((32, 562), (32, 4096), (1, 562))]
    return rows


def _step(mix: str, plan: PagedPlan, columns: int) -> tuple[Tensor, Tensor, int, int]:
    """Return rows, tables, places and tokens of a mix, each row with blocks of its own."""
    slots, starts, counts = zip(*MIXES[mix], strict=True)
    used = sum(counts)
    places = -(-used // 64) * 64
    table = row_table(
        *(slots, starts, counts),
        num_rows=33,  # of all mixes, so that kernels are compiled once
        num_places=places,
        tile_queries=plan.tile_queries,
        tile_keys=plan.tile_keys,
        window=plan.window,
    )
    tables = torch.zeros((32, columns), dtype=torch.int32)
    free = torch.randperm(_BLOCKS).tolist()
    for slot, start, count in MIXES[mix]:
        for block in range(-(-(start + count) // BLOCK_TOKENS)):
            tables[slot, block] = free.pop()
    return torch.tensor(table, dtype=torch.int32).cuda(), tables.cuda(), places, used


def dealt_on_gpu(table: list[list[int]], plan: PagedPlan) -> Tensor:
    """Return what the programs of a plan take of a rows' table."""
    dealt = dealt_out(table, plan.programs, windowed=plan.window > 0)
    return torch.tensor(dealt, dtype=torch.int32).cuda()


_BLOCKS, _COLUMNS = 1600, 128


def _spread() -> Row:
    plan = PagedPlan.of(32, 8, 128, torch.bfloat16, torch.device("cuda", 0))
    same = True
    for mix in MIXES:
        rows, tables, places, _ = _step(mix, plan, _COLUMNS)
        got = spread(rows, tables, places, nobody=32)
        want = spread_reference(rows.cpu(), tables.cpu(), places, nobody=32)
        same &= all(torch.equal(value.cpu(), vars(want)[key]) for key, value in vars(got).items())
    return {"what": "places of tokens", "holds": same}


def _attention(
    mix: str, heads: int, groups: int, dim: int, dtype: torch.dtype, alibi: bool,
    rule: ScoreRule = EVERYTHING, more: str = "",
) -> Row:  # fmt: skip
    plan = PagedPlan.of(heads, groups, dim, dtype, torch.device("cuda", 0), rule.window)
    rows, tables, places, used = _step(mix, plan, _COLUMNS)
    shape = (_BLOCKS, groups, BLOCK_TOKENS, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(places, heads, dim, device="cuda", dtype=dtype)
    slopes = torch.linspace(0.01, 0.5, heads, device="cuda") if alibi else None
    options: dict[str, Any] = {"scale": dim**-0.5, "alibi_slopes_H": slopes, "rule": rule}
    want = paged_attend_reference(q, k, v, rows, tables, **options)[:used]
    dealt = dealt_on_gpu(rows.tolist(), plan)
    got = paged_attend(q, k, v, rows, dealt, tables, plan, chunks=mix == "mixed", **options)[:used]
    error = relative_error(got, want)
    name = f"{heads}/{groups} heads of {dim}, {str(dtype)[6:]}{', alibi' if alibi else more}"
    what = f"{mix:6} {name}: error {error:.1e}"
    return {"what": what, "holds": bool(error < TOLERANCE[dtype]), "error": error}


def _append() -> Row:
    plan = PagedPlan.of(32, 8, 128, torch.bfloat16, torch.device("cuda", 0))
    rows, tables, places, _ = _step("mixed", plan, _COLUMNS)
    where = spread(rows, tables, places, nobody=32)
    q, k, v = torch.randn(places, 48, 128, device="cuda", dtype=torch.bfloat16).split(
        [32, 8, 8], dim=1
    )
    pools = [
        torch.zeros((_BLOCKS, 8, BLOCK_TOKENS, 128), device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    inv_freq = 1e4 ** (-torch.arange(64, device="cuda") / 64)
    at = (where.places_T, where.positions_T, inv_freq)
    got = [rope_append_pages(q, k, v, *pools[:2], *at), *pools[:2]]
    want = [rope_append_pages_reference(q, k, v, *pools[2:], *at), *pools[2:]]
    error = max(relative_error(a, b) for a, b in zip(got, want, strict=True))
    return {"what": f"append: error {error:.1e}", "holds": error < 8e-3, "error": error}


def _timed_attention(batch: int, length: int) -> Row:
    """Time a decode step's attention of Llama-3.1-8B over a pool and over slots."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    plan = PagedPlan.of(32, 8, 128, dtype, device)
    each = -(-length // BLOCK_TOKENS)
    pools = [torch.randn((batch * each, 8, 128, 128), device="cuda", dtype=dtype) for _ in "kv"]
    tables = torch.randperm(batch * each).view(batch, each).to(torch.int32).cuda()
    caches = [torch.randn((batch, 8, each * 128, 128), device="cuda", dtype=dtype) for _ in "kv"]
    q = torch.randn(batch, 32, 128, device="cuda", dtype=dtype)
    table = row_table(
        *(range(batch), [length - 1] * batch, [1] * batch),
        num_rows=batch,
        num_places=batch,
        tile_queries=plan.tile_queries,
        tile_keys=plan.tile_keys,
    )
    rows = torch.tensor(table, dtype=torch.int32).cuda()
    own = [torch.tensor(x).cuda() for x in (range(batch), [length - 1] * batch, [1] * batch)]
    scale = 128**-0.5
    dealt, same = dealt_on_gpu(table, plan), {"scale": scale, "chunks": False}
    pool = _graph_us(lambda: paged_attend(q, *pools, rows, dealt, tables, plan, **same))
    slots = _graph_us(
        lambda: plain_attend(q[:, None], *caches, *own, max_end=length + 50, scale=scale)
    )
    times = ", ".join(
        f"{name} {statistics.median(own):.1f} us"
        for name, own in (("pool", pool), ("slots", slots))
    )
    case = {"batch": batch, "context": length, "dtype": "bfloat16", "heads": "32/8 of 128"}
    what = f"attention {batch} x {length}: {times}"
    return {
        "what": what, "holds": True, "case": case, "unit": "us", "samples": pool, "slots": slots
    }  # fmt: skip


def _graph_us(run: Callable[[], Tensor], *, inside: int = 20, repeats: int = 15) -> list[float]:
    """Return times of one call among `inside` that a graph holds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inside):
                run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inside)
    return times


def tokens() -> list[Row]:
    """Compare greedy tokens of the demo model with slots and with a pool, in float32."""
    spec, rng = ModelSpec.from_directory(DEMO), random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(spec.vocab) for _ in range(length)]

    trunk = prompt(300)
    # The first two fill a step: whole prompts, which attend to their own tokens alone.
    lengths = (760, 760, 1, 2, 5, 17, 63, 64, 65, 100, 127, 128, 129, 250, 400, 511, 600, 700)
    prompts = [prompt(length) for length in lengths] + [trunk + prompt(n) for n in (1, 30, 77)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found: dict[bool, list[list[int]]] = {}
    rows: list[Row] = []
    plan = hand_plan(
        spec,
        Workload(batch=8, prompt_len=760, gen_len=40, dtype="float32"),
        prefill_microbatch=2,
        decode_microbatch=8,
    )
    for pool in (False, True):
        with LLM(DEMO, plan=on_gpu(plan), kv_pool=pool, backend="threads") as llm:
            asked = [{"prompt_token_ids": own} for own in prompts]
            rounds = [llm.generate(asked, params) for _ in range(1 + pool)]
            for answers in rounds:
                got = [list(answer.outputs[0].token_ids) for answer in answers]
                if not pool:
                    found[pool] = got
                    continue
                equal = sum(a == b for a, b in zip(got, found[False], strict=True))
                hits = sum(answer.num_cached_tokens for answer in answers)
                what = f"{equal} of {len(got)} requests equal, {hits} prompt tokens found again"
                rows.append({"what": what, "holds": equal == len(got)})
            if pool:
                drawn = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=7)
                one, two = (llm.generate(asked[:4], drawn) for _ in range(2))
                same = all(
                    a.outputs[0].token_ids == b.outputs[0].token_ids
                    for a, b in zip(one, two, strict=True)
                )
                rows.append({"what": "seeded sampling gives the same again", "holds": same})
    return rows


def speed() -> list[Row]:
    """Time the batch job with slots and with a pool."""
    spec = ModelSpec.by_name("llama-3.1-8b")
    plan = hand_plan(
        spec,
        Workload(batch=32, prompt_len=512, gen_len=100),
        prefill_microbatch=32,
        decode_microbatch=32,
    )
    rates: dict[bool, list[float]] = {False: [], True: []}
    for pool in (False, True):
        bench = Bench(
            plan=on_gpu(plan),
            spec=spec,
            model="llama-3.1-8b",
            dummy=True,
            graphs=True,
            gpu_pool=pool,
            warm_up=1,
            repeat=3,
            seed=0,
            launch=Launch(backend="threads"),
        )
        reports = run_jobs(bench)
        rates[pool] = [report["output_throughput"] for report in reports]
    slots, pooled = (statistics.median(rates[pool]) for pool in (False, True))
    what = (
        f"32 x 512/100 w16a16: slots {slots:.0f} tokens/s, pool {pooled:.0f}, {pooled / slots:.3f}"
    )
    case = {"model": spec.name, "weights": "dummy", "batch": 32, "prompt": 512, "gen": 100}
    return [
        {
            "what": what, "holds": True, "case": case, "unit": "tokens/s", "samples": rates[True],
            "slots": rates[False],
        }
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
