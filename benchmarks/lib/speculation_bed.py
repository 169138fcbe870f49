"""What speculation is measured on: a target of dummy weights, its slots, what their steps take.

Target   the model, and how each mode drafts with it
Bed      the slots of one batch size: an engine without drafts, one with those of a mode
Times    plain steps, drafts and verifies, each a replayed graph
"""

from __future__ import annotations

import argparse
import copy
import gc
from dataclasses import dataclass, field, replace

import torch
from atom_end_to_end import AtomSource
from lib.speculation_replay import (
    ROOM,
    Replayed,
    TimedLoop,
    WithoutPrompts,
    fill_packed,
    fill_plain,
    prompts,
    rates,
)
from torch import nn

from llmpq.kernels.gpu_timing import median_us
from llmpq.memory import Quantization
from llmpq.model_spec import ModelSpec
from llmpq.precision import KVPrecision, Precision
from llmpq.runtime.backends.backend import backend_of
from llmpq.runtime.backends.gpu.cuda_slot_stage_runner import CudaSlotStageRunner
from llmpq.runtime.backends.gpu.cuda_speculate import look_up_drafts
from llmpq.runtime.backends.gpu.cuda_step_times import (
    measure,
    seconds_of,
    step_message,
    typical_context,
)
from llmpq.runtime.cache.dual_kv import DualKV
from llmpq.runtime.cache.kv_by_precision import make_kv_cache
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.cache.low_bit_kv import LowBitKV
from llmpq.runtime.cache.plain_kv import PlainKVCache
from llmpq.runtime.drafts.draft_model import build_draft
from llmpq.runtime.drafts.drafters import FixedDrafter
from llmpq.runtime.engine.mailbox import Mailbox
from llmpq.runtime.engine.slot_limits import SlotLimits
from llmpq.runtime.engine.slot_scheduler import SlotScheduler
from llmpq.runtime.models.stage_model import DTYPES, StageModel
from llmpq.runtime.request import Request
from llmpq.runtime.trace import Recorder
from llmpq.runtime.weights.dummy import CopiedLayers
from llmpq.runtime.weights.sources import RandomSource
from llmpq.speculation import MeasuredTimes, SpeculationMode, expected_tokens
from llmpq.workload import Workload

PLAIN_STEPS = 48
TIMED_ROUNDS = 64
"""Of drafts and a verify, timed in three parts: each row fills a block of a packed cache, during
which rounds take longer, whatever the batch."""
INTO = 128
"""Tokens a run has generated, about, when its steps are timed."""
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

    @classmethod
    def build(cls, args: argparse.Namespace) -> Target:
        """Make the weights on the device."""
        spec = ModelSpec.by_name(args.model)
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
            dtype=DTYPES[args.dtype],
            device=DEVICE,
            scheme=scheme,
            source=CopiedLayers(source, schemes, DEVICE),  # type: ignore[arg-type]
            runner=backend_of(DEVICE).layers(),
        )
        kv = KVPrecision(args.kv)
        unusual = ["atom"] * args.atom + [kv.value] * (kv is not KVPrecision.KV16)
        name = " ".join([precision.value, *unusual])
        return cls(spec=spec, model=model, name=name, dtype=args.dtype, kv=kv)

    def view(self, mode: SpeculationMode, kv: KVCache) -> StageModel | None:
        """Return how a mode drafts, made once: its copies of weights serve every batch size."""
        if mode == "ngram":
            return None
        if mode not in self.views:
            model = copy.copy(self.model)
            # Layers are equal, and so are the 4-bit copies of them.
            layers = self.model.layers[:1] if mode == "w4kv4" else self.model.layers
            model._modules = self.model._modules | {"layers": layers}
            view = build_draft(mode, model, kv).model
            more = [copy.deepcopy(view.layers[0]) for _ in self.model.layers[len(layers) :]]
            view.layers = nn.ModuleList([*view.layers, *more])
            self.views[mode] = view
        return self.views[mode]


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
        self.fast: CudaSlotStageRunner | None = None

    def _compute(self) -> CudaSlotStageRunner:
        return CudaSlotStageRunner(
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
        self.fast.enable_speculation(mode, self.workload, view=self.target.view(mode, self.kv))
        assert self.fast.speculation is not None
        self.fast.speculation.judge = self.replayed
        if isinstance(self.fast.kv, DualKV):
            fill_packed(self.fast.kv.copy)
        if self.fast.speculation.history_ST is not None:
            self.fast.speculation.history_ST.random_(2, 50_000)

    def plain_rate(self, context: int) -> list[float]:
        """Return samples of tokens/s without drafts."""
        return self._rate(self.plain, None, context, PLAIN_STEPS)

    def rate(
        self,
        drafter: FixedDrafter,
        context: int,
        acceptance: float,
        tokens: float,
        rounds: int = TIMED_ROUNDS,
    ) -> list[float]:
        """Return samples of tokens/s with drafts; `tokens`: what a round yields.

        Every run meets the same verdicts once its graphs are captured.
        """
        assert self.fast is not None
        self.replayed.rate.fill_(acceptance)
        self.replayed.restart()
        return self._rate(self.fast, drafter, context, int(rounds * tokens))

    def _rate(
        self, compute: CudaSlotStageRunner, drafter: FixedDrafter | None, context: int, new: int
    ) -> list[float]:
        mailbox = Mailbox()
        for number, prompt in enumerate(prompts(self.batch, context)):
            mailbox.requests.put(Request(id=number, prompt=prompt, max_new=min(new, ROOM)))
        mailbox.requests.put(None)
        limits = SlotLimits(
            num_slots=self.batch,
            prompt_len=self.workload.prompt_len,
            max_len=self.workload.max_len,
            prefill_microbatch=self.batch,
            decode_microbatch=self.batch,
        )
        loop = TimedLoop(
            SlotScheduler(limits, drafter=drafter), WithoutPrompts(compute, self.plain), None,
            mailbox, Recorder(), num_stages=1,
        )  # fmt: skip
        loop.log = []
        loop.run()
        torch.cuda.synchronize()
        return rates(loop.log)

    def plain_s(self, context: int) -> float:
        """Return the device time of a plain step of the engine without drafts."""
        message = step_message(self.batch, typical_context(context + INTO), 1)
        return seconds_of(lambda: self.plain._decode.run(message, None))

    def times(self, context: int, plain_s: float) -> Times:
        """Time this batch's drafts and verifies at one context."""
        assert self.fast is not None and self.fast.speculation is not None
        steps = measure(
            self.fast.speculation,
            [self.batch],
            [typical_context(context + INTO)],
            max_len=self.workload.max_len,
        )
        return Times(
            plain_s=plain_s,
            steps=steps,
            lookup_s=self._lookup_s(context),
            rows=self.batch,
            context=context,
        )

    def _lookup_s(self, context: int) -> float:
        """Return the device time of the n-gram drafts of a round; 0 where a model drafts."""
        assert self.fast is not None and self.fast.speculation is not None
        history_ST = self.fast.speculation.history_ST
        if history_ST is None:
            return 0.0
        rows_B = torch.arange(self.batch, device=DEVICE)
        at_B = torch.full_like(rows_B, context)
        return median_us(lambda _: look_up_drafts(history_ST, rows_B, at_B, rows_B, 3), 1) / 1e6


@dataclass(frozen=True, kw_only=True)
class Times:
    """What steps take at one batch size and context."""

    plain_s: float
    """A plain step of the engine without drafts."""
    steps: MeasuredTimes
    lookup_s: float
    """N-gram drafts of a round, of all rows."""
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


def collect() -> None:
    """Give unused device memory back."""
    gc.collect()
    torch.cuda.empty_cache()
