"""Speculation on one GPU at a large model's shape: what `speculation.py --device cuda` runs.

Weights are dummies, so nothing a draft says would agree with the verifier: acceptance is replayed
at rates measured on trained models (`Replayed`), and prompts are not computed (`WithoutPrompts`:
their cache holds noise). Everything else is the engine as it serves: scheduler, loop, graphs.

    c, v     draft step and verify over a plain decode step, each a replayed graph
    S        (1 - a^(gamma+1)) / (1 - a) / (gamma c + v), the speed-up these allow
    value    tokens/s of the engine from its 4th round to the end of the first request
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import Precision
from llmpq.runtime.cuda_graphs import DecodeGraphs
from llmpq.runtime.cuda_speculate import VerifyGraphs
from llmpq.runtime.cuda_stage import CudaStageCompute
from llmpq.runtime.draft_model import Draft
from llmpq.runtime.dual_kv import DualKV
from llmpq.runtime.kv_cache import PlainKVCache
from llmpq.runtime.loader import RandomSource
from llmpq.runtime.low_bit_kv import LowBitKV
from llmpq.runtime.message import StepMessage
from llmpq.runtime.pending import Pending
from llmpq.runtime.request import Request, StepKind
from llmpq.runtime.sampling import SamplingParams
from llmpq.runtime.scheduler import Limits, Scheduler
from llmpq.runtime.speculate import FixedDrafter
from llmpq.runtime.stage_loop import FirstStage, Mailbox
from llmpq.runtime.stage_model import DTYPES, StageModel
from llmpq.runtime.trace import Recorder, StageRecord
from llmpq.speculation import MAX_GAMMA, SpeculationMode, expected_tokens
from llmpq.workload import Workload

ROUNDS = 1024
"""Rounds before replayed draws repeat."""
WARM_ROUNDS = 4
DEVICE = torch.device("cuda:0")


class Replayed:
    """A verdict by seeded draws, for dummy weights: a draft is kept with probability `rate`."""

    def __init__(self, slots: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = (ROUNDS, slots, MAX_GAMMA)
        self._numbers = torch.rand(shape, generator=generator, device=device)
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
        self.compute = compute
        self.runs_ahead, self.whole_rounds = compute.runs_ahead, compute.whole_rounds

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        """Answer prompts at once; run everything else."""
        if message.kind is StepKind.PREFILL:
            return torch.ones(message.num_rows, 1, dtype=torch.long)
        return self.compute.run(message, hidden_BQH)


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
        target, self.seen = self.target, {}
        self.workload = Workload(
            batch=self.batch, prompt_len=self.max_len - 512, gen_len=513, dtype=target.dtype
        )
        self.kv = PlainKVCache(
            target.spec,
            num_layers=target.spec.num_layers,
            slots=self.batch,
            max_len=self.workload.max_len,
            dtype=DTYPES[target.dtype],
            device=DEVICE,
        )
        for cache in (self.kv.k, self.kv.v):
            for layer in cache:
                layer.normal_()
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
        self.fast.enable_speculation(mode, self.workload)
        assert self.fast.speculation is not None
        self.fast.speculation.judge = self.replayed
        if isinstance(self.fast.kv, DualKV):
            _fill(self.fast.kv.copy)

    def rate(self, context: int, gamma: int, acceptance: float, new: int, drafter: Any = None
             ) -> list[float]:  # fmt: skip
        """Return samples of tokens/s with drafts of one length; 0 decodes plainly."""
        compute = self.plain if gamma == 0 and drafter is None else self.fast
        assert compute is not None
        self.replayed.rate.fill_(acceptance)
        if compute is self.fast and drafter is None:
            assert self.mode is not None
            drafter = FixedDrafter(self.mode, gamma)
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
        return _rates(loop.log)

    def step_ms(self, kind: str, context: int, q_len: int = 1, repeats: int = 12) -> float:
        """Return the milliseconds of a replayed "plain", "draft" or "verify" step."""
        graphs = self._graphs(kind, q_len)
        slots = range(self.batch)
        message = StepMessage(
            kind=StepKind.DECODE,
            slots=slots,
            starts=[context] * self.batch,
            num_new=[q_len] * self.batch,
            sample_steps=[1] * self.batch,
            sampling=[SamplingParams()] * self.batch,
            tokens=[[1] * q_len] * self.batch,
        )
        with torch.inference_mode():
            return _event_ms(partial(graphs.run, message, None), repeats)

    def _graphs(self, kind: str, q_len: int) -> DecodeGraphs:
        if kind == "plain":
            return self.plain._decode
        assert self.fast is not None and self.fast.speculation is not None
        speculation = self.fast.speculation
        if kind == "draft":
            assert speculation._drafts is not None
            return speculation._drafts
        key = (self.mode, q_len)
        if key not in self.seen:
            self.seen[key] = VerifyGraphs(
                self.fast.model, self.fast.kv, q_len, **speculation._options
            )
        found: DecodeGraphs = self.seen[key]
        return found


def _event_ms(call: Any, repeats: int) -> float:
    call()
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(
        a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)
    )


def _fill(copy: LowBitKV) -> None:
    """Fill a packed cache with noise."""
    for layer in copy.cache.layers:
        for words in (layer.k_words_PGW, layer.v_words_PGW):
            words.random_(-(2**31), 2**31 - 1)
        for rest in (layer.k_params_PG, layer.v_params_PG):
            rest.uniform_(0.01, 0.1)
        for ring in (layer.k_ring_SGRD, layer.v_ring_SGRD):
            ring.normal_()


def _rates(log: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return tokens/s of three even parts, from the 4th round to the first request's end."""
    end = next((i for i, (_, _, finished) in enumerate(log) if finished), len(log) - 1)
    marks = [WARM_ROUNDS + (end - WARM_ROUNDS) * part // 3 for part in range(4)]
    return [
        (log[b][1] - log[a][1]) / (log[b][0] - log[a][0])
        for a, b in zip(marks[:-1], marks[1:], strict=True)
        if b > a
    ]


def speedup(acceptance: float, gamma: int, c: float, v: float) -> float:
    """Return S(a, c, v)."""
    return expected_tokens(acceptance, gamma) / (gamma * c + v)


def free(*_: object) -> None:
    """Return a dropped engine's memory."""
    gc.collect()
    torch.cuda.empty_cache()


__all__ = ["Bed", "Draft", "Replayed", "StageRecord", "Target", "WithoutPrompts", "speedup"]
