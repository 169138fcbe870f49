"""Speculation on one GPU at a large model's shape: what `speculation.py --device cuda` runs.

Weights are dummies, so nothing a draft says would agree with the verifier: acceptance is replayed
at rates measured on trained models, and prompts are not computed (speculation_replay.py).
Everything else is the engine as it serves: scheduler, loop, graphs.

    c, v     draft step and verify over a plain decode step, each a replayed graph; of n-grams, c is
             the look-up on the host, shared out over the drafts it brings
    S        (1 - a^(gamma+1)) / (1 - a) / (gamma c + v)
    value    tokens/s of the engine from its 4th round to the end of the first request

Weights are made once, a batch's caches once for all contexts, a mode's graphs once a batch. Rows
that the file has already are not measured again: a run that was cut off is taken up where it ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from atom_end_to_end import AtomSource
from speculation_replay import (
    ROOM,
    AutoGuesser,
    Guesser,
    Replayed,
    TimedLoop,
    WithoutPrompts,
    fill_packed,
    fill_plain,
    lookup_seconds,
    measured_acceptance,
    prompts,
    rates,
)

from llmpq.kernels.timing import write_row
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.cuda_stage import CudaStageCompute
from llmpq.runtime.cuda_step_times import measure, seconds_of, step_message
from llmpq.runtime.dual_kv import DualKV
from llmpq.runtime.dummy_layers import CopiedLayers
from llmpq.runtime.kv_cache import PlainKVCache
from llmpq.runtime.kv_factory import make_kv_cache
from llmpq.runtime.loader import RandomSource
from llmpq.runtime.low_bit_kv import LowBitKV
from llmpq.runtime.request import Request
from llmpq.runtime.scheduler import Limits, Scheduler
from llmpq.runtime.speculate import FixedDrafter
from llmpq.runtime.stage_loop import Mailbox
from llmpq.runtime.stage_model import DTYPES, StageModel
from llmpq.runtime.trace import Recorder
from llmpq.speculation import (
    PRIOR_ACCEPTANCE,
    WORTHWHILE,
    MeasuredTimes,
    SpeculationMode,
    expected_tokens,
)
from llmpq.workload import Workload

PLAIN_STEPS = 48
DEVICE = torch.device("cuda:0")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model of dummy weights, and the caches that its engines share."""

    spec: ModelSpec
    model: StageModel
    name: str
    """What rows call it: its precision, and what is not as usual of its weights and cache."""
    dtype: str
    kv: KVPrecision
    views: dict[str, StageModel] = field(default_factory=dict)
    """How each mode drafts: its copies of weights serve every batch size."""

    @classmethod
    def build(cls, args: argparse.Namespace) -> Target:
        """Make the weights on the device."""
        spec = ModelSpec.by_name(args.gpu_model)
        if args.layers is not None:
            spec = replace(spec, num_layers=args.layers)
        precision = Precision.parse(args.target)
        scheme = Quantization(symmetric=args.atom).scheme
        source = (AtomSource if args.atom else RandomSource)(spec, device=DEVICE)
        schemes = dict.fromkeys(range(spec.num_layers), scheme(precision))
        model = StageModel.build(
            spec,
            range(spec.num_layers),
            [precision] * spec.num_layers,
            first=True,
            last=True,
            dtype=DTYPES[args.gpu_dtype],
            device=DEVICE,
            scheme=scheme,
            source=CopiedLayers(source, schemes, DEVICE),  # type: ignore[arg-type]
        )
        kv = KVPrecision(args.kv)
        unusual = ["atom"] * args.atom + [kv.value] * (kv is not KVPrecision.KV16)
        name = " ".join([precision.value, *unusual])
        return cls(spec=spec, model=model, name=name, dtype=args.gpu_dtype, kv=kv)


@dataclass(kw_only=True)
class Bed:
    """The slots of one batch size, plain and with the drafts of a mode."""

    target: Target
    batch: int
    max_len: int
    mode: SpeculationMode | None = None

    def __post_init__(self) -> None:
        target = self.target
        self.workload = Workload(
            batch=self.batch, prompt_len=self.max_len - ROOM, gen_len=ROOM + 1, dtype=target.dtype
        )
        self.kv = make_kv_cache(
            target.spec,
            target.kv,
            num_layers=target.spec.num_layers,
            slots=self.batch,
            max_len=self.workload.max_len,
            dtype=DTYPES[target.dtype],
            device=DEVICE,
        )
        if isinstance(self.kv, PlainKVCache):
            fill_plain(self.kv)
        elif isinstance(self.kv, LowBitKV):
            fill_packed(self.kv)
        self.plain = self._compute()
        self.replayed = Replayed(self.batch, DEVICE)
        self.fast: CudaStageCompute | None = None

    @property
    def rounds(self) -> int:
        """Rounds that are timed: fewer where many rows average out what is accepted."""
        return max(20, 48 // self.batch)

    def _compute(self) -> CudaStageCompute:
        return CudaStageCompute(
            self.target.model,
            self.kv,
            DEVICE,
            DTYPES[self.target.dtype],
            workload=self.workload,
            decode_microbatch=self.batch,
        )

    def speculate(self, mode: SpeculationMode) -> None:
        """Make the engine with drafts, in place of the last mode's."""
        self.fast = None
        collect()
        self.mode, self.fast = mode, self._compute()
        self.fast.enable_speculation(mode, self.workload, view=self.target.views.get(mode))
        if self.fast.draft is not None:
            self.target.views[mode] = self.fast.draft.model
        assert self.fast.speculation is not None
        self.fast.speculation.judge = self.replayed
        if isinstance(self.fast.kv, DualKV):
            fill_packed(self.fast.kv.copy)

    def plain_rate(self, context: int) -> list[float]:
        """Return samples of tokens/s without drafts."""
        return self._rate(self.plain, None, context, PLAIN_STEPS)

    def rate(self, drafter: FixedDrafter, context: int, acceptance: float, tokens: float
             ) -> list[float]:  # fmt: skip
        """Return samples of tokens/s with drafts; `tokens`: what a round yields."""
        assert self.fast is not None
        self.replayed.rate.fill_(acceptance)
        return self._rate(self.fast, drafter, context, int(self.rounds * tokens))

    def _rate(
        self, compute: CudaStageCompute, drafter: FixedDrafter | None, context: int, new: int
    ) -> list[float]:
        mailbox = Mailbox()
        for number, prompt in enumerate(prompts(self.batch, context)):
            mailbox.requests.put(Request(id=number, prompt=prompt, max_new=min(new, ROOM)))
        mailbox.requests.put(None)
        limits = Limits(
            num_slots=self.batch,
            prompt_len=self.workload.prompt_len,
            max_len=self.workload.max_len,
            prefill_microbatch=self.batch,
            decode_microbatch=self.batch,
        )
        loop = TimedLoop(
            Scheduler(limits, drafter=drafter), WithoutPrompts(compute), None, mailbox, Recorder(),
            num_stages=1,
        )  # fmt: skip
        loop.log = []
        loop.run()
        torch.cuda.synchronize()
        return rates(loop.log)

    def plain_s(self, context: int) -> float:
        """Return the device time of a plain step of the engine without drafts."""
        message = step_message(self.batch, context, 1)
        return seconds_of(lambda: self.plain._decode.run(message, None))

    def times(self, context: int, plain_s: float) -> Times:
        """Time this batch's drafts and verifies at one context."""
        assert self.fast is not None and self.fast.speculation is not None
        steps = measure(self.fast.speculation, [self.batch], (context, context))
        lookup_s = lookup_seconds(self.batch, context) if self.mode == "ngram" else 0.0
        return Times(
            plain_s=plain_s, steps=steps, lookup_s=lookup_s, rows=self.batch, context=context
        )


@dataclass(frozen=True, kw_only=True)
class Times:
    """What steps take at one batch size and context."""

    plain_s: float
    """A plain step of the engine without drafts."""
    steps: MeasuredTimes
    lookup_s: float
    """Drafts of a round that the host finds, of all rows."""
    rows: int
    context: int

    def ratios(self, gamma: int) -> tuple[float, float]:
        """Return c and v."""
        draft_s = self.steps.draft_s(self.rows, self.context) + self.lookup_s / gamma
        verify_s = self.steps.verify_s(self.rows, self.context, gamma + 1)
        return draft_s / self.plain_s, verify_s / self.plain_s

    def speedup(self, acceptance: float, gamma: int) -> float:
        """Return S(a, c, v)."""
        c, v = self.ratios(gamma)
        return expected_tokens(acceptance, gamma) / (gamma * c + v)

    def best(self, acceptance: float, count: int) -> list[int]:
        """Return the draft lengths of the highest S."""
        ordered = sorted(self.steps.lengths, key=lambda gamma: -self.speedup(acceptance, gamma))
        return sorted(ordered[:count])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One batch, context, mode and acceptance: what is measured together."""

    bed: Bed
    times: Times
    plain: Sequence[float]
    acceptance: float
    case: dict[str, object]

    @property
    def base(self) -> float:
        """Tokens/s without drafts."""
        return statistics.median(self.plain)


def main(args: argparse.Namespace) -> None:
    """Measure one target over batches, modes and contexts; append the rows."""
    started_s = time.perf_counter()
    target = Target.build(args)
    done = cases_of(Path(args.rows))
    print(f"{target.name}: loaded in {time.perf_counter() - started_s:.1f} s", flush=True)
    for batch, contexts in args.grid:
        bed = Bed(target=target, batch=batch, max_len=max(contexts) + ROOM)
        plain = {context: (bed.plain_s(context), bed.plain_rate(context)) for context in contexts}
        for mode in args.modes or [args.mode]:
            bed.speculate(mode)
            for cell in cells(args, bed, plain):
                if args.seconds and time.perf_counter() - started_s > args.seconds:
                    return
                if key(cell.case) not in done:
                    measure_cell(args, cell)
        del bed
        collect()


def cells(
    args: argparse.Namespace, bed: Bed, plain: dict[int, tuple[float, list[float]]]
) -> Iterator[Cell]:
    """Yield what a mode is measured at, its steps timed at each context."""
    target, mode = bed.target, bed.mode
    assert mode is not None
    for context, (plain_s, samples) in plain.items():
        times = bed.times(context, plain_s)
        for name in args.acceptance:
            own = name == "measured"
            case: dict[str, object] = {
                "model": target.spec.name,
                "mode": f"{mode} on {target.name}",
                "batch": bed.batch,
                "context": context,
                "dtype": target.dtype,
                "acceptance": name,
                "weights": "dummy, acceptance replayed",
            }
            rate = measured_acceptance(mode, target.name.split()[0]) if own else float(name)
            yield Cell(bed=bed, times=times, plain=samples, acceptance=rate, case=case)


def measure_cell(args: argparse.Namespace, cell: Cell) -> None:
    """Measure the most promising fixed lengths, then the automatic choice."""
    bed, times, base, acceptance = cell.bed, cell.times, cell.base, cell.acceptance
    assert bed.mode is not None
    fixed: dict[int, float] = {0: base}
    for gamma in args.gammas or times.best(acceptance, args.lengths):
        drafter = Guesser(bed.mode, gamma)
        tokens = expected_tokens(acceptance, gamma)
        samples = bed.rate(drafter, times.context, acceptance, tokens)
        fixed[gamma] = statistics.median(samples)
        c, v = times.ratios(gamma)
        s = times.speedup(acceptance, gamma)
        beside = {"rate": acceptance, "c": c, "v": v, "S": s, "plain_step_ms": times.plain_s * 1e3}
        add(args, "speculation_gpu", cell.case | {"gamma": gamma}, samples, base, beside, s * base)
        print(
            f"{cell.case['mode']} b{bed.batch} ctx{times.context} a {acceptance:.3f} gamma {gamma}:"
            f" c {c:.3f} v {v:.3f} S {s:.2f}, got {fixed[gamma] / base:.3f}x "
            f"({fixed[gamma] / base / s:.1%} of S, {min(samples) / base:.3f}..), plain {base:.0f} "
            f"tok/s (step {times.plain_s * 1e3:.2f} ms, loop {bed.batch / base * 1e3:.2f})",
            flush=True,
        )
    if args.auto:
        measure_auto(args, cell, fixed)


def measure_auto(args: argparse.Namespace, cell: Cell, fixed: dict[int, float]) -> None:
    """Measure what the engine chooses by itself; it starts from what its mode usually accepts."""
    bed, times, base = cell.bed, cell.times, cell.base
    assert bed.mode is not None
    lengths = times.steps.lengths
    drafter = AutoGuesser(bed.mode, times.steps, lengths=lengths)
    usual = PRIOR_ACCEPTANCE[bed.mode]
    samples = list(cell.plain)
    fastest = max(fixed, key=lambda gamma: fixed[gamma])
    pays = max(times.speedup(usual, gamma) for gamma in lengths) > WORTHWHILE
    if pays:  # else the engine is started without drafts
        tokens = expected_tokens(cell.acceptance, max(fixed))
        bed.rate(drafter, times.context, cell.acceptance, tokens)  # captures graphs, learns
        drafter.chosen.clear()
        samples = bed.rate(drafter, times.context, cell.acceptance, tokens)
    got, best = statistics.median(samples), fixed[fastest]
    add(args, "speculation_auto", cell.case, samples, base, {"best_fixed": best}, None)
    print(
        f"    auto {drafter.chosen if pays else 'off'} (a {drafter.estimate:.3f}): "
        f"{got / base:.3f}x, {got / best:.3f} of the best fixed length ({fastest})",
        flush=True,
    )


def add(
    args: argparse.Namespace,
    bench: str,
    case: dict[str, object],
    samples: Sequence[float],
    plain: float,
    beside: dict[str, float],
    predicted: float | None,
) -> None:
    """Append a row."""
    row: dict[str, Any] = {"bench": bench, "case": case, "unit": "tokens/s", "samples": samples}
    beside = {"plain": plain} | beside
    how = {"commit": args.commit, "program": "python benchmarks/speculation.py"}
    write_row(Path(args.rows), **row, **how, baselines=beside, predicted=predicted)


def cases_of(rows: Path) -> set[str]:
    """Return the cells that a result file has fixed lengths of."""
    if not rows.exists():
        return set()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    cases = [row["case"] for row in found if row["bench"] == "speculation_gpu"]
    return {key({k: v for k, v in case.items() if k != "gamma"}) for case in cases}


def key(case: dict[str, object]) -> str:
    """Return a case as text."""
    return json.dumps(case, sort_keys=True)


def collect() -> None:
    """Give unused device memory back."""
    gc.collect()
    torch.cuda.empty_cache()
