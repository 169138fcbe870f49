"""What gpu_pool.py shows of packed blocks: kernels against the twin, tokens, times of chunks.

A chunk is timed as a layer has it: append and attention, keys and queries rotated on the way
(kv_pages.py times steps of one token a row).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.fused.rope_append import rope_append_pages
from llmpq.kernels.gemm.reference import relative_error
from llmpq.kernels.gpu_timing import time_launches
from llmpq.kernels.kv.paged.packed_pages import PackedPages, PackedRows, attend_packed_pages
from llmpq.kernels.kv.paged.packed_pages_plan import PackedPlan
from llmpq.kernels.kv.paged.paged_attend import paged_attend
from llmpq.kernels.kv.paged.paged_plan import PagedPlan
from llmpq.kernels.kv.paged.paged_rows import dealt_out, row_table, spread
from llmpq.kernels.kv.reference import pack_block
from llmpq.kernels.kv.storage import KVLayer, allocate_layer
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.paged_packed_kv import new_places, turned
from llmpq.runtime.launch.plans.hand_plan import hand_plan, on_gpu
from llmpq.runtime.llm import LLM
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.sizes.kv_format import BLOCK_TOKENS, TAIL_TOKENS
from llmpq.workload import Workload
from reference.packed_pages import attend_packed_pages_reference

Row = dict[str, Any]
Rows = list[tuple[int, int, int]]
"""Slot, start and count of each row."""
P = KVPrecision
PACKED = (P.KV8, P.KV4, P.KV2)
SLOTS = 32
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 4e-3}
"""fp16 operands, also of float32 rows of one token, and a bf16 output's own 1.1e-3."""
WORDS_EQUAL = 0.995
SHAPES = [
    (P.KV8, 32, 8, 128, torch.bfloat16, False),
    (P.KV4, 32, 8, 128, torch.bfloat16, False),
    (P.KV2, 32, 8, 128, torch.bfloat16, False),
    (P.KV4, 28, 4, 128, torch.float16, False),
    (P.KV4, 32, 32, 64, torch.float16, True),
    (P.KV8, 71, 1, 64, torch.bfloat16, False),
    (P.KV8, 16, 8, 256, torch.bfloat16, False),
    (P.KV4, 16, 2, 32, torch.float16, False),
]
TIE = 0.05
"""Where the best two tokens differ by less in log probability, either may be a step's."""


def packed_kernels(mixes: dict[str, Rows]) -> list[Row]:
    """Compare steps with the twin's, then time chunks beside 16-bit blocks."""
    lines = [(slot, 143 + 128 * (slot % 4), 1) for slot in range(SLOTS)]
    mixes = {**mixes, "packing": [(row, at + (row % 2), count) for row, at, count in lines]}
    rows = [_step(name, mix, *shape) for shape in SHAPES for name, mix in mixes.items()]
    return rows + [_timed_chunk(kv, start) for kv in PACKED for start in (0, 3584)]


def _pool(fmt: KVFormat, groups: int, dtype: torch.dtype, blocks: int, slots: int) -> PackedPages:
    """Return a layer's pool of packed normal numbers; 64 different blocks again and again."""
    layer = allocate_layer(
        fmt, pages=blocks, slots=slots, kv_heads=groups, dtype=dtype, device="cuda"
    )
    k, v = (torch.randn(64, groups, BLOCK_TOKENS, fmt.head_dim, device="cuda") for _ in "kv")
    chosen = torch.randint(0, 64, (blocks,), device="cuda")
    stored = (layer.k_words_PGW, layer.k_params_PG, layer.v_words_PGW, layer.v_params_PG)
    for part, some in zip(stored, pack_block(fmt, k, v), strict=True):
        part.copy_(some[chosen])
    layer.k_ring_SGRD.normal_()
    layer.v_ring_SGRD.normal_()
    shape = (blocks, groups, TAIL_TOKENS, fmt.head_dim)
    behind = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in "kv"]
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def _parts(pages: PackedPages) -> dict[str, Tensor]:
    return {**vars(pages.layer), "k_behind": pages.k_behind_PGTD, "v_behind": pages.v_behind_PGTD}


def _copied(pages: PackedPages) -> PackedPages:
    layer = KVLayer(**{f.name: getattr(pages.layer, f.name).clone() for f in fields(KVLayer)})
    behind = [pages.k_behind_PGTD.clone(), pages.v_behind_PGTD.clone()]
    return PackedPages(layer=layer, k_behind_PGTD=behind[0], v_behind_PGTD=behind[1])


def _told(mix: Rows, plan: PackedPlan) -> tuple[PackedRows, int, int]:
    """Return a step's rows with blocks of their own, in no order; its places, and all blocks."""
    slots, starts, counts = zip(*mix, strict=True)
    chunks, used = max(counts) > 1, sum(counts)
    places = -(-used // 64) * 64 if chunks else used
    num_rows = SLOTS + 1 if chunks else len(mix)
    table = plan.table(slots, starts, counts, num_rows=num_rows, num_places=places)
    each = -(-max(start + count for _, start, count in mix) // BLOCK_TOKENS)
    needed = [-(-(start + count) // BLOCK_TOKENS) for _, start, count in mix]
    free = torch.randperm(sum(needed)).tolist()
    tables = torch.zeros((SLOTS, each), dtype=torch.int32)
    for slot, own in zip(slots, needed, strict=True):
        tables[slot, :own] = torch.tensor([free.pop() for _ in range(own)])
    rows_FR = torch.tensor(table, dtype=torch.int32).cuda()
    dealt = torch.tensor(plan.dealt(table), dtype=torch.int32).cuda()
    step = PackedRows(rows_FR=rows_FR, dealt=dealt, table_SM=tables.cuda(), chunks=chunks)
    return step, places, sum(needed)


def _step(
    name: str, mix: Rows, kv: KVPrecision, heads: int, groups: int, dim: int, dtype: torch.dtype,
    alibi: bool,
) -> Row:  # fmt: skip
    """Compare what a step returns and leaves with the twin's."""
    fmt = KVFormat(precision=kv, head_dim=dim)
    plan = PackedPlan.of(fmt, heads, groups, dtype, torch.device("cuda", 0))
    step, places, blocks = _told(mix, plan)
    used = sum(count for _, _, count in mix)
    pages = _pool(fmt, groups, dtype, blocks, SLOTS)
    other = _copied(pages)
    q, k, v = torch.randn(places, heads + 2 * groups, dim, device="cuda", dtype=dtype).split(
        [heads, groups, groups], dim=1
    )
    options: dict[str, Any] = {
        "scale": dim**-0.5,
        "alibi_slopes_H": torch.linspace(0.01, 0.5, heads, device="cuda") if alibi else None,
        "inv_freq": None,
    }
    if not (alibi or step.chunks):
        options["inv_freq"] = 1e4 ** (-torch.arange(dim // 2, device="cuda") / dim * 2)
    want = attend_packed_pages_reference(q, k, v, other, step, fmt, **options)[:used]
    got = attend_packed_pages(q, k, v, pages, step, plan, **options)
    error = relative_error(got[:used], want)
    holds = error < TOLERANCE[dtype] and not bool(got[used:].any())
    equal = 1.0
    for part, mine in _parts(pages).items():
        theirs = _parts(other)[part]
        if "words" in part:
            equal = min(equal, float((mine == theirs).float().mean()))
        else:
            same = torch.equal(mine, theirs)
            holds &= same or relative_error(mine, theirs) < TOLERANCE[dtype]
    shape = f"{heads}/{groups} heads of {dim}, {str(dtype)[6:]}{', alibi' if alibi else ''}"
    what = f"{name:7} {kv.value} {shape}: error {error:.1e}, words equal {equal:.5f}"
    return {"what": what, "holds": bool(holds and equal > WORDS_EQUAL), "error": error}


def _timed_chunk(kv: KVPrecision, start: int) -> Row:
    """Time append and attention of a chunk of 512 over packed and over 16-bit blocks."""
    device, dtype, count = torch.device("cuda", 0), torch.bfloat16, 512
    fmt = KVFormat(precision=kv, head_dim=128)
    plan = PackedPlan.of(fmt, 32, 8, dtype, device)
    step, _, blocks = _told([(0, start, count)], plan)
    where = spread(step.rows_FR, step.table_SM, count, nobody=SLOTS)
    own_T = new_places(where)
    pages = _pool(fmt, 8, dtype, blocks, SLOTS)
    q, k, v = torch.randn(count, 48, 128, device=device, dtype=dtype).split([32, 8, 8], dim=1)
    inv_freq, scale = 5e5 ** (-torch.arange(64, device=device) / 64), 128**-0.5
    wide = PagedPlan.of(32, 8, 128, dtype, device)
    table = row_table(
        *([0], [start], [count]),
        num_rows=SLOTS + 1,
        num_places=count,
        tile_queries=wide.tile_queries,
        tile_keys=wide.tile_keys,
    )
    rows_FR = torch.tensor(table, dtype=torch.int32).cuda()
    dealt = torch.tensor(dealt_out(table, wide.programs, windowed=False), dtype=torch.int32).cuda()
    shape = (blocks, 8, BLOCK_TOKENS, 128)
    pools = [torch.randn(shape, device=device, dtype=dtype) for _ in "kv"]

    def over_packed(_: int) -> Tensor:
        new = turned(q, k, v, own_T, where.positions_T, inv_freq)
        return attend_packed_pages(*new, pages, step, plan, scale=scale)

    def over_plain(_: int) -> Tensor:
        at = (where.places_T, where.positions_T, inv_freq)
        turned = rope_append_pages(q, k, v, *pools, *at)
        return paged_attend(turned, *pools, rows_FR, dealt, step.table_SM, wide, scale=scale)

    case = {"kv": kv.value, "chunk": count, "start": start, "heads": "32/8 of 128"}
    what = f"{kv.value} chunk of {count} at {start}"
    return _timed(what, case, 0.0, ("16-bit blocks", over_plain), over_packed, 1)


def _timed(
    what: str,
    case: Row,
    apart: float,
    beside: tuple[str, Callable[[int], Tensor]],
    call: Callable[[int], Tensor],
    num_sets: int,
) -> Row:
    """Time two ways in turns; `apart`: how far their results differ."""
    name, other = beside
    samples, theirs = (
        [us for _ in range(3) for us in time_launches(way, num_sets, repeats=5)]
        for way in (call, other)
    )
    mine, other_us = statistics.median(samples), statistics.median(theirs)
    text = f"{what}: pool {mine:.1f} us, {name} {other_us:.1f} us ({mine / other_us:.2f})"
    if apart:
        text += f", {apart:.1e} apart"
    return {
        "what": text, "holds": apart < 4e-3, "case": case, "unit": "us", "samples": samples,
        "slots": theirs, "beside": name,
    }  # fmt: skip


def packed_tokens(demo: Path) -> list[Row]:
    """Compare greedy tokens of the demo model over slots (`packed_prompts`) and over a pool."""
    spec, rng = ModelSpec.from_directory(demo), random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(spec.vocab) for _ in range(length)]

    trunk = prompt(300)
    lengths = (1, 17, 63, 100, 127, 128, 129, 143, 144, 145, 250, 272, 273, 400, 511, 600, 700)
    prompts = [prompt(length) for length in lengths] + [trunk + prompt(n) for n in (1, 30, 77)]
    found: dict[KVPrecision, list[Any]] = {}
    rows: list[Row] = []
    for kv in PACKED:
        slots, pool = (_answers(demo, spec, kv, prompts, pool=pool) for pool in (False, True))
        found[kv] = slots[0]
        for answers in pool:
            equal, ties = _agreeing(slots[0], answers)
            hits = sum(answer.num_cached_tokens for answer in answers)
            rows.append(
                {
                    "what": f"{kv.value}: {equal} of {len(prompts)} requests equal, {ties} differ "
                    f"first at a tie, {hits} prompt tokens found again",
                    "holds": equal + ties == len(prompts),
                }
            )
        rows[-1]["holds"] &= hits > 0
    equal, ties = _agreeing(found[P.KV8], found[P.KV2])
    what = f"kv2's tokens are not kv8's: {equal} of {len(prompts)} equal, {ties} differ at a tie"
    return [*rows, {"what": what, "holds": equal + ties < len(prompts)}]


def _answers(
    demo: Path, spec: ModelSpec, kv: KVPrecision, prompts: list[list[int]], *, pool: bool
) -> list[list[Any]]:
    """Return the answers over slots with their likeliest tokens, or twice those over a pool."""
    plan = hand_plan(
        spec,
        Workload(batch=8, prompt_len=760, gen_len=40, dtype="float16", kv=kv),
        prefill_microbatch=2,
        decode_microbatch=8,
    )
    params = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=None if pool else 2
    )
    asked = [{"prompt_token_ids": own} for own in prompts]
    options: dict[str, Any] = {"kv_pool": pool} | ({} if pool else {"packed_prompts": True})
    with LLM(demo, plan=on_gpu(plan), backend="threads", **options) as llm:
        return [llm.generate(asked, params) for _ in range(1 + pool)]


def _agreeing(scored: list[Any], answers: list[Any]) -> tuple[int, int]:
    """Return how many answers are equal, and how many differ first where the best two are close."""
    equal = ties = 0
    for answer, other in zip(scored, answers, strict=True):
        want, got = answer.outputs[0], list(other.outputs[0].token_ids)
        apart = [i for i, token in enumerate(want.token_ids) if token != got[i]]
        if not apart:
            equal += 1
            continue
        best = sorted((entry.logprob for entry in want.logprobs[apart[0]].values()), reverse=True)
        ties += best[0] - best[1] < TIE
    return equal, ties
