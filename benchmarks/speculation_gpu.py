"""Speculation on one GPU at a large model's shape: what `speculation.py --device cuda` runs.

Weights are dummies, so nothing a draft says would agree with the verifier: acceptance is replayed
at rates measured on trained models (`Replayed`), and prompts are not computed (`WithoutPrompts`:
their cache holds noise). Everything else is the engine as it serves: scheduler, loop, graphs.

    c, v     draft step and verify over a plain decode step, each a replayed graph
    S        (1 - a^(gamma+1)) / (1 - a) / (gamma c + v)
    value    tokens/s of the engine from its 4th round to the end of the first request
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.timing import write_row
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.cuda_stage import CudaStageCompute
from llmpq.runtime.cuda_step_times import measure, seconds_of, step_message
from llmpq.runtime.dual_kv import DualKV
from llmpq.runtime.kv_cache import PlainKVCache
from llmpq.runtime.loader import RandomSource
from llmpq.runtime.low_bit_kv import LowBitKV
from llmpq.runtime.message import StepMessage
from llmpq.runtime.pending import Pending
from llmpq.runtime.request import Request, StepKind
from llmpq.runtime.scheduler import Limits, Scheduler
from llmpq.runtime.speculate import AutoDrafter, FixedDrafter
from llmpq.runtime.stage_loop import FirstStage, Mailbox
from llmpq.runtime.stage_model import DTYPES, StageModel
from llmpq.runtime.trace import Recorder
from llmpq.speculation import (
    MAX_GAMMA,
    WORTHWHILE,
    MeasuredTimes,
    SpeculationMode,
    expected_tokens,
)
from llmpq.workload import Workload

ACCEPTANCE = Path(__file__).parent / "results" / "speculation.jsonl"
ROUNDS = 1024
"""Rounds before replayed draws repeat."""
WARM_ROUNDS = 4
PLAIN_STEPS, ROUNDS_TIMED = 60, 40
ROOM = 512
"""Tokens a slot has beyond the longest context."""
DEVICE = torch.device("cuda:0")


class Replayed:
    """A verdict by seeded draws, for dummy weights: a draft is kept with probability `rate`."""

    def __init__(self, slots: int, device: torch.device, seed: int = 0) -> None:
        # Every 64 rounds a place's numbers are spread evenly: the rate is met without much noise.
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand((ROUNDS // 64, 64, slots, MAX_GAMMA), generator=generator).argsort(dim=1)
        self._numbers = ((order + 0.5) / 64).view(ROUNDS, slots, MAX_GAMMA).to(device)
        self._round = torch.zeros(1, dtype=torch.long, device=device)
        self.rate = torch.ones(1, device=device)

    def __call__(self, drafts_BG: Tensor, choices_BQ: Tensor, slots_B: Tensor) -> Tensor:
        """Return how many drafts each row keeps."""
        numbers = self._numbers.index_select(0, self._round % ROUNDS)[0]
        self._round += 1
        kept_BG = numbers[slots_B, : drafts_BG.shape[1]] < self.rate
        return kept_BG.to(torch.long).cumprod(dim=1).sum(dim=1)


class WithoutPrompts:
    """A stage that skips prompts: their cache is filled with noise beforehand."""

    def __init__(self, compute: CudaStageCompute) -> None:
        self._compute = compute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        """Answer prompts at once; run everything else."""
        if message.kind is not StepKind.PREFILL:
            return self._compute.run(message, hidden_BQH)
        if self._compute.model.head is None:
            shape = (message.num_rows, message.q_len, self._compute.model.spec.hidden)
            return torch.zeros(shape, dtype=self._compute._dtype)
        return torch.ones(message.num_rows, 1, dtype=torch.long)


class TimedLoop(FirstStage):
    """Keeps when each step's tokens were known, and how many there were by then."""

    log: list[tuple[float, int, int]]

    def _publish(self, kind: StepKind, finished: Sequence[Request], now_s: float) -> None:
        if kind is not StepKind.PREFILL:
            self.log.append((now_s, self._scheduler.generated_tokens, len(finished)))
        super()._publish(kind, finished, now_s)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model of dummy weights, and the caches that its engines share."""

    spec: ModelSpec
    model: StageModel
    precision: Precision
    dtype: str
    views: dict[str, StageModel] = field(default_factory=dict)
    """How each mode drafts: its copies of weights serve every batch size."""

    @classmethod
    def build(cls, name: str, precision: Precision, dtype: str) -> Target:
        """Make the weights on the device."""
        spec = ModelSpec.by_name(name)
        model = StageModel.build(
            spec,
            range(spec.num_layers),
            [precision] * spec.num_layers,
            first=True,
            last=True,
            dtype=DTYPES[dtype],
            device=DEVICE,
            scheme=Quantization().scheme,
            source=RandomSource(spec, device=DEVICE),
        )
        return cls(spec=spec, model=model, precision=precision, dtype=dtype)


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
        self.kv = PlainKVCache(
            target.spec,
            num_layers=target.spec.num_layers,
            slots=self.batch,
            max_len=self.workload.max_len,
            dtype=DTYPES[target.dtype],
            device=DEVICE,
        )
        fill_plain(self.kv)
        self.plain = self._compute()
        self.replayed = Replayed(self.batch, DEVICE)
        self.fast: CudaStageCompute | None = None

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
        """Make the engine with drafts."""
        self.mode, self.fast = mode, self._compute()
        self.fast.enable_speculation(mode, self.workload, view=self.target.views.get(mode))
        if self.fast.draft is not None:
            self.target.views[mode] = self.fast.draft.model
        assert self.fast.speculation is not None
        self.fast.speculation.judge = self.replayed
        if isinstance(self.fast.kv, DualKV):
            fill_copy(self.fast.kv.copy)

    def rate(self, context: int, gamma: int, acceptance: float, new: int, drafter: Any = None
             ) -> list[float]:  # fmt: skip
        """Return samples of tokens/s with drafts of one length; 0 decodes plainly."""
        compute = self.plain if gamma == 0 and drafter is None else self.fast
        assert compute is not None
        self.replayed.rate.fill_(acceptance)
        if compute is self.fast and drafter is None:
            assert self.mode is not None
            drafter = Guesser(self.mode, gamma)
        mailbox = Mailbox()
        for number in range(self.batch):
            mailbox.requests.put(Request(id=number, prompt=(1,) * context, max_new=new))
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

    def times(self, context: int) -> Times:
        """Time this batch's steps at one context: plain, draft, verifies."""
        assert self.fast is not None and self.fast.speculation is not None
        rows = self.batch
        plain = self.plain._decode
        message = step_message(rows, context, 1)
        return Times(
            plain_s=seconds_of(lambda: plain.run(message, None)),
            steps=measure(self.fast.speculation, [rows], (context, context)),
            rows=rows,
            context=context,
        )


@dataclass(frozen=True, kw_only=True)
class Times:
    """What steps take at one batch size and context."""

    plain_s: float
    """A plain step of the engine without drafts."""
    steps: MeasuredTimes
    rows: int
    context: int

    def ratios(self, gamma: int) -> tuple[float, float]:
        """Return c and v."""
        draft_s = self.steps.draft_s(self.rows, self.context)
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


class Guesser(FixedDrafter):
    """Proposes some token without a model, at once: n-gram lookup on text that never repeats."""

    def propose(self, request: Request, gamma: int) -> list[int] | None:
        """Return as many drafts as asked for."""
        return [1] * gamma if self.mode == "ngram" else None


def measured_acceptance(mode: str, target: str) -> float:
    """Return the share of judged drafts accepted on the trained models, all lengths together."""
    rows = [json.loads(line) for line in ACCEPTANCE.read_text().splitlines()]
    newest = {
        (row["case"]["model"], row["case"]["gamma"]): row["value"]
        for row in rows
        if row["bench"] == "acceptance" and row["case"]["mode"] == f"{mode} on {target}"
    }
    found = newest.values()
    # A draft of the same weights accepts alike whatever their precision.
    return statistics.fmean(found) if found else measured_acceptance(mode, "w16a16")


def acceptances(args: argparse.Namespace) -> dict[str, float]:
    """Return the rates to replay by name: numbers, and what trained models were measured at."""
    return {
        name: measured_acceptance(args.mode, args.target) if name == "measured" else float(name)
        for name in args.acceptance
    }


def main(args: argparse.Namespace) -> None:
    """Measure one target and mode over batches and contexts; append the rows."""
    target = Target.build(args.gpu_model, Precision.parse(args.target), args.gpu_dtype)
    accepted = acceptances(args)
    for batch, contexts in args.grid:
        bed = Bed(target=target, batch=batch, max_len=max(contexts) + ROOM)
        plain = {context: bed.rate(context, 0, 1.0, PLAIN_STEPS) for context in contexts}
        bed.speculate(args.mode)
        for context in contexts:
            times = bed.times(context)
            for name, rate in accepted.items():
                measure_cell(args, bed, times, plain[context], name, rate)
        del bed
        gc.collect()
        torch.cuda.empty_cache()


def measure_cell(
    args: argparse.Namespace,
    bed: Bed,
    times: Times,
    plain: Sequence[float],
    name: str,
    acceptance: float,
) -> None:
    """Measure the most promising fixed lengths, then the automatic choice."""
    target, base = bed.target, statistics.median(plain)
    case = {
        "model": target.spec.name,
        "mode": f"{bed.mode} on {target.precision.value}",
        "batch": bed.batch,
        "context": times.context,
        "dtype": target.dtype,
        "acceptance": name,
        "weights": "dummy, acceptance replayed",
    }
    fixed: dict[int, float] = {0: base}
    for gamma in args.gammas or times.best(acceptance, args.lengths):
        new = int(ROUNDS_TIMED * expected_tokens(acceptance, gamma))
        samples = bed.rate(times.context, gamma, acceptance, new)
        fixed[gamma] = statistics.median(samples)
        c, v = times.ratios(gamma)
        s = times.speedup(acceptance, gamma)
        add(args, "speculation_gpu", case | {"gamma": gamma}, samples, base,
            {"rate": acceptance, "c": c, "v": v, "S": s}, s * base)  # fmt: skip
        print(
            f"{case['mode']} b{bed.batch} ctx{times.context} a {acceptance:.3f} gamma {gamma}: "
            f"c {c:.3f} v {v:.3f} S {s:.2f}, got {fixed[gamma] / base:.3f}x "
            f"({fixed[gamma] / base / s:.1%} of S), plain {base:.0f} tok/s "
            f"(step {times.plain_s * 1e3:.2f} ms, loop {bed.batch / base * 1e3:.2f})"
        )
    if args.auto and bed.mode is not None:
        lengths = times.steps.lengths
        drafter = AutoDrafter(bed.mode, times.steps, acceptance=acceptance, lengths=lengths)
        pays = max(times.speedup(acceptance, gamma) for gamma in lengths) > WORTHWHILE
        samples = list(plain)
        if pays:  # else the engine is started without drafts
            new = int(ROUNDS_TIMED * 3)
            bed.rate(times.context, 1, acceptance, new // 2, drafter=drafter)  # captures
            samples = bed.rate(times.context, 1, acceptance, new, drafter=drafter)
        best = max(fixed.values())
        got = statistics.median(samples)
        add(args, "speculation_auto", case, samples, base, {"best_fixed": best}, None)
        print(
            f"    auto {drafter.chosen if pays else 'off'}: {got / base:.3f}x, "
            f"{got / best:.3f} of the best fixed length ({max(fixed, key=lambda g: fixed[g])})"
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
    row = {"bench": bench, "case": case, "unit": "tokens/s", "samples": samples}
    beside = {"plain": plain} | beside
    how = {"commit": args.commit, "program": "python benchmarks/speculation.py"}
    write_row(Path(args.rows), **row, **how, baselines=beside, predicted=predicted)


def fill_plain(kv: PlainKVCache) -> None:
    """Fill a cache with noise."""
    for cache in (kv.k, kv.v):
        for layer in cache:
            layer.normal_()


def fill_copy(copy: LowBitKV) -> None:
    """Fill a packed cache with noise."""
    for layer in copy.cache.layers:
        for words in (layer.k_words_PGW, layer.v_words_PGW):
            words.random_(-(2**31), 2**31 - 1)
        for rest in (layer.k_params_PG, layer.v_params_PG):
            rest.uniform_(0.01, 0.1)
        for ring in (layer.k_ring_SGRD, layer.v_ring_SGRD):
            ring.normal_()


def rates(log: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return tokens/s of three even parts, from the 4th round to the first request's end."""
    end = next((i for i, (_, _, finished) in enumerate(log) if finished), len(log) - 1)
    marks = [WARM_ROUNDS + (end - WARM_ROUNDS) * part // 3 for part in range(4)]
    return [
        (log[b][1] - log[a][1]) / (log[b][0] - log[a][0])
        for a, b in zip(marks[:-1], marks[1:], strict=True)
        if b > a
    ]
