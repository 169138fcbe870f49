"""`kernel_bench.py check kv`: every low-bit KV variant against its twin and the definition.

A case is a few steps (start, new tokens) of some requests; each step is appended and attended by
the kernels. Packed words are compared with the plain-torch twin's, outputs with attention
recomputed in float64 from the whole history (kv_history.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from llmpq.kernels.formats.kv_block import KVFormat
from llmpq.kernels.kv import reference
from llmpq.kernels.kv.launch_plan import MAX_Q_LEN, AttendPlan, num_programs, plan_attend
from llmpq.kernels.kv.ops import run_append, run_attend
from llmpq.kernels.kv.step_view import Rows
from llmpq.kernels.kv.storage import DeviceRows, KVLayer, allocate_layer
from llmpq.precision import KVPrecision
from llmpq.sizes.kv_format import BLOCK_TOKENS, packed_blocks, packed_end
from reference.kernel_commands import CheckKV, share
from reference.kv_history import attend_from_history, relative_error

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3}
"""fp16 operands round at 2**-11; a bf16 output rounds at 2**-9 / sqrt(3) = 1.1e-3 by itself."""

WORDS_EQUAL = 0.995
"""Share of packed words equal to the twin's: a tie may round the other way."""

Steps = Sequence[Sequence[tuple[int, int]]]
"""Per step, per request: tokens before it, new tokens."""


@dataclass(frozen=True, kw_only=True)
class KvCase:
    """One variant of the kernels and what is done with it."""

    fmt: KVFormat
    heads: int
    kv_heads: int
    dtype: torch.dtype
    steps: Steps
    paged: bool = True
    alibi: bool = False
    rope: bool = False
    """The append rotates queries and keys."""
    programs: int = 0
    """Programs of a row that draw chunks of two tiles; 0: what the plan says."""
    first: int = 0
    """Tiles such a program is dealt before it draws."""
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    """What a rule does to the scores (`ScoreRule`); queries are 4 times as long under a cap."""
    width: int = 0
    """New tokens that every step is padded to, so that one kernel serves ragged steps."""

    @property
    def max_len(self) -> int:
        """Tokens of the longest request."""
        return max(start + count for step in self.steps for start, count in step)

    def rule(self, device: torch.device) -> reference.ScoreRule:
        """Return the rule of the scores."""
        sinks = torch.linspace(-2, 4, self.heads, device=device) if self.sinks else None
        return reference.ScoreRule(window=self.window, cap=self.cap, sinks_H=sinks)


@dataclass(frozen=True)
class KvError:
    """The worst of a case."""

    error: float
    """||kernel - float64|| / ||float64|| of one request's output."""
    words_equal: float


def build(
    case: KvCase, device: torch.device, gen: torch.Generator
) -> tuple[Tensor, KVLayer, KVLayer]:
    """Return a page table and two empty caches: the kernels' and the twin's."""
    slots = len(case.steps[0])
    blocks = packed_blocks(case.max_len)
    order = torch.randperm(slots * blocks, generator=gen)
    if not case.paged:
        order = order.sort().values
    layer, twin = (
        allocate_layer(
            case.fmt,
            pages=slots * blocks,
            slots=slots,
            kv_heads=case.kv_heads,
            dtype=case.dtype,
            device=device,
        )
        for _ in range(2)
    )
    return order.int().reshape(slots, blocks).to(device), layer, twin


def share_equal(layer: KVLayer, twin: KVLayer, *, rope: bool = False) -> float:
    """Return the least share of equal elements over the tensors; 0 if the rings differ.

    Rotated keys may differ in their last bit (sines), copied ones may not.
    """
    ours, theirs = layer.k_ring_SGRD, twin.k_ring_SGRD
    last_bit = torch.finfo(theirs.dtype).eps
    same = torch.equal(layer.v_ring_SGRD, twin.v_ring_SGRD)
    if rope:
        same &= torch.allclose(ours, theirs, rtol=last_bit, atol=last_bit)
    else:
        same &= torch.equal(ours, theirs)
    equal = 1.0 if same else 0.0
    for ours, theirs in (
        (layer.k_words_PGW, twin.k_words_PGW),
        (layer.v_words_PGW, twin.v_words_PGW),
        (layer.k_params_PG, twin.k_params_PG),
        (layer.v_params_PG, twin.v_params_PG),
    ):
        if ours.numel():
            equal = min(equal, (ours == theirs).float().mean().item())
    return equal


def run_case(case: KvCase, device: torch.device, seed: int = 0) -> KvError:
    """Run one case's steps on `device`."""
    fmt, slots, scale = case.fmt, len(case.steps[0]), case.fmt.head_dim**-0.5
    gen = torch.Generator().manual_seed(seed)
    table, layer, twin = build(case, device, gen)
    slopes = torch.linspace(0.01, 0.1, case.heads, device=device) if case.alibi else None
    inv_freq = 1e4 ** (-torch.arange(0, fmt.head_dim, 2, device=device) / fmt.head_dim)
    shape = (2, slots, case.max_len, case.kv_heads, fmt.head_dim)
    past = torch.zeros(shape, dtype=case.dtype, device=device)
    tickets = torch.zeros(slots * case.heads * MAX_Q_LEN, dtype=torch.int32, device=device)
    worst, equal = 0.0, 1.0
    for step in case.steps:
        start, count = (torch.tensor(x, device=device) for x in zip(*step, strict=True))
        q_len = max(int(count.max()), case.width)
        q = torch.randn(slots, q_len, case.heads, fmt.head_dim, generator=gen)
        kv = torch.randn(2, slots, q_len, case.kv_heads, fmt.head_dim, generator=gen)
        q, kv = q * (4 if case.cap else 1), kv.to(device, case.dtype)
        q = q.to(device, case.dtype)
        k, v = kv[0], kv[1]
        index = torch.arange(slots, device=device)
        rows = DeviceRows(slots=index.int(), starts=start.int(), counts=count.int())
        twin_rows = Rows(slots_B=index, start_B=start, num_new_B=count)
        if case.rope and q_len <= MAX_Q_LEN:
            want_q = reference.rope_append(fmt, twin, table, q, k, v, twin_rows, inv_freq)
            got_q = run_append(
                fmt, layer, table, k, v, rows, paged=case.paged, q=q, inv_freq=inv_freq
            )
            worst = max(worst, relative_error(got_q, want_q) if got_q is not None else math.inf)
            q, kv[0] = want_q, reference.rotated(k, twin_rows, inv_freq)
        else:
            reference.append(fmt, twin, table, k, v, twin_rows)
            run_append(fmt, layer, table, k, v, rows, paged=case.paged)
        for b, (first, num) in enumerate(step):
            past[:, b, first : first + num] = kv[:, b, :num]
        equal = min(equal, share_equal(layer, twin, rope=case.rope))
        if q_len > MAX_Q_LEN:
            continue
        heads = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": fmt.head_dim}
        end = max(first + num for first, num in step)
        plan = plan_attend(
            batch=slots,
            q_len=q_len,
            max_end=end,
            device=device,
            bits=fmt.bits,
            key_group=fmt.key_group,
            **heads,
        )
        if case.programs:
            plan = drawing(plan, case.programs, case.first, end)
        kinds = {"scale": scale, "slopes": slopes, "tickets": tickets, "rule": case.rule(device)}
        got = run_attend(fmt, layer, table, q, rows, plan, paged=case.paged, **kinds)
        for b, (first, num) in enumerate(step):
            history = {"start": first, "scale": scale, "alibi_slopes_H": slopes}
            history["rule"] = kinds["rule"]
            want = attend_from_history(fmt, q[b, :num], past[0, b], past[1, b], **history)
            worst = max(worst, relative_error(got[b, :num], want))
    return KvError(worst, equal if not tickets.any() else 0.0)


def drawing(plan: AttendPlan, programs: int, first: int, end: int) -> AttendPlan:
    """Return the plan with `programs` of each row, dealt `first` tiles, drawing two at a time."""
    launch = replace(plan.launch, chunk=2, programs=programs, first=first)
    blocks = packed_end(end - 1) // BLOCK_TOKENS
    return replace(plan, launch=launch, splits=num_programs(launch, blocks))


STEPS: Steps = [
    [(0, 400), (0, 20), (0, 1)],
    [(400, 1), (20, 1), (1, 1)],
    [(401, 4), (21, 3), (2, 4)],
]
LONG: Steps = [[(0, 3000), (0, 130)], [(3000, 1), (130, 1)], [(3001, 8), (131, 8)]]
EMPTY: Steps = [[(0, 1), (0, 1)], [(1, 1), (1, 1)], [(2, 8), (2, 1)]]
UNEQUAL: Steps = [[(0, 3000), (0, 300), (0, 700)], [(3000, 1), (300, 1), (700, 1)]]
"""Requests with fewer tiles than the longest one has programs."""
ONE_LONG: Steps = [[(0, 1), (0, 130), (0, 30000)], [(1, 1), (130, 1), (30000, 1)]]
EDGES = (127, 128, 143, 144, 145, 271, 272, 273, 400)


def cases() -> Iterator[KvCase]:
    """All variants: formats x types, then heads, q_len, layouts, lengths."""
    fp16, bf16 = torch.float16, torch.bfloat16
    for precision in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2):
        for group in (128, 64, 32, None):
            for dim in (64, 128):
                fmt = KVFormat(precision=precision, head_dim=dim, key_group=group)
                yield KvCase(fmt=fmt, heads=8, kv_heads=2, dtype=fp16, steps=STEPS)
                yield KvCase(fmt=fmt, heads=4, kv_heads=2, dtype=bf16, steps=STEPS, paged=False)
    kv4 = KVFormat(precision=KVPrecision.KV4, head_dim=128)
    for heads, kv_heads in ((8, 2), (4, 4), (8, 1), (12, 2), (16, 2)):
        yield KvCase(fmt=kv4, heads=heads, kv_heads=kv_heads, dtype=fp16, steps=LONG)
    yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=LONG, alibi=True)
    for first in (0, 2, 10):
        yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=LONG, programs=3, first=first)
        yield KvCase(
            fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=UNEQUAL, programs=16, first=first
        )
    yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=STEPS, rope=True)
    yield KvCase(fmt=kv4, heads=12, kv_heads=4, dtype=bf16, steps=STEPS, rope=True, paged=False)
    ruled: dict[str, Any] = {"window": 200, "cap": 5.0, "sinks": True}
    for bits in (KVPrecision.KV8, KVPrecision.KV4, KVPrecision.KV2):
        for group in (128, 64, 32, None):
            fmt = KVFormat(precision=bits, head_dim=64, key_group=group)
            yield KvCase(fmt=fmt, heads=8, kv_heads=2, dtype=fp16, steps=LONG, **ruled)
        wide = KVFormat(precision=bits, head_dim=256)
        yield KvCase(fmt=wide, heads=8, kv_heads=4, dtype=bf16, steps=LONG, cap=5.0, window=1024)
    rules: tuple[dict[str, Any], ...] = (
        {"window": 100},
        {"window": 1},
        {"cap": 5.0},
        {"sinks": True},
    )
    for rule in rules:
        for programs in (0, 3):
            case = KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=UNEQUAL, **rule)
            yield replace(case, programs=programs)
    for length in EDGES:
        steps = [[(0, length), (0, 1)], [(length, 2), (1, 2)]]
        yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=steps)
    yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=EMPTY)
    yield KvCase(fmt=kv4, heads=32, kv_heads=8, dtype=fp16, steps=ONE_LONG)
    kv8 = KVFormat(precision=KVPrecision.KV8, head_dim=128)
    steps = [[(0, 512)] * 4, [(512, 1)] * 4]
    yield KvCase(fmt=kv8, heads=32, kv_heads=8, dtype=bf16, steps=steps, paged=False)
    chunks = [[(0, 100)], [(100, 200)], [(300, 1)], [(301, 500)], [(801, 1)]]
    yield KvCase(fmt=kv4, heads=8, kv_heads=2, dtype=fp16, steps=chunks)


def random_steps(
    lengths: Sequence[int], moves: Sequence[Sequence[tuple[int, int]]]
) -> list[list[tuple[int, int]]]:
    """Make steps of prompts' lengths (0: none) and, per step and request, (new, then forgotten)."""
    steps = [[(0, max(1, length)) for length in lengths]]
    ends = [max(1, length) for length in lengths]
    for move in moves:
        steps.append([(end, new) for end, (new, _) in zip(ends, move, strict=True)])
        ends = [end + new - min(new, gone) for end, (new, gone) in zip(ends, move, strict=True)]
    return steps


def describe(case: KvCase) -> str:
    """Return one line that names the variant."""
    fmt = case.fmt
    keys = "KT" if fmt.key_group is None else f"KC{fmt.key_group}"
    layout = "paged" if case.paged else "contiguous"
    kind = str(case.dtype).removeprefix("torch.")
    drawn = f" {case.programs} programs dealt {case.first}" if case.programs else ""
    alibi = " alibi" if case.alibi else " rope" if case.rope else ""
    if case.window or case.cap or case.sinks:
        alibi += f" window {case.window} cap {case.cap} sinks {case.sinks}"
    return (
        f"{fmt.precision.value} {keys} d{fmt.head_dim} {kind} {case.heads}/{case.kv_heads} {layout}"
        f"{alibi}{drawn} steps {case.steps[-1]}"
    )


def main(asked: CheckKV) -> int:
    """Check all variants; 1 if one fails."""
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not triton.knobs.runtime.interpret:
        sys.stderr.write(
            "check kv: the kernels need a GPU, and this machine shows none; to run them in "
            "Triton's interpreter set TRITON_INTERPRET=1 (float16 alone: it truncates bfloat16)\n"
        )
        return 2
    failed = total = 0
    for case in share(cases(), asked.part):
        line = describe(case)
        if asked.only not in line:
            continue
        total += 1
        outcome = run_case(case, torch.device(device))
        good = outcome.error < TOLERANCE[case.dtype] and outcome.words_equal > WORDS_EQUAL
        failed += not good
        sys.stdout.write(
            f"{'ok  ' if good else 'FAIL'} error {outcome.error:.1e} words equal "
            f"{outcome.words_equal:.5f}  {line}\n"
        )
    sys.stdout.write(f"{total - failed} of {total} variants right\n")
    return 1 if failed else 0
