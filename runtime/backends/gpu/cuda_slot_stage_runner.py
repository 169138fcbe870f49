"""A stage on a CUDA device: decode through graphs, tokens that stay on the device, late answers.

    decode          runtime/backends/gpu/cuda_graphs.py; a short prompt that came before:
                    cuda_prompts.py; other steps run as they come
    results         copied to pinned host memory behind the step; their reader waits for that
                    copy only, so the next step may be issued before (`run` returns a `Pending`)
    speculation     runtime/backends/gpu/cuda_speculate.py: drafts and verifies from graphs, too
    runs_ahead      a whole model on one device: a request's next step may be issued with the token
                    -1, "the one this slot produced last"

Legend: B rows, Q new tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmpq.runtime.backends.gpu.cuda_graphs import DecodeGraphs
from llmpq.runtime.backends.gpu.cuda_prompts import PromptGraphs
from llmpq.runtime.backends.gpu.cuda_speculate import CudaSpeculation
from llmpq.runtime.backends.gpu.device_times import DeviceTimes
from llmpq.runtime.backends.slot_stage_runner import SlotStageRunner
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.pending import Pending, on_its_way
from llmpq.runtime.request import StepKind
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.trace import KindTotals
from llmpq.runtime.upload import upload
from llmpq.sizes.gpu_workspace import padded_prompt
from llmpq.speculation import MeasuredTimes, SpeculationMode
from llmpq.workload import Workload


class CudaSlotStageRunner(SlotStageRunner):
    """One stage on a GPU, ready to run micro-batches."""

    def __init__(
        self,
        model: StageModel,
        kv: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        workload: Workload,
        decode_microbatch: int,
        graphs: bool = True,
    ) -> None:
        """`graphs`: capture decode steps."""
        super().__init__(model, kv, device, dtype)
        self._whole = model.embedding is not None and model.head is not None
        self._times = DeviceTimes(device)
        self._graph_options: dict[str, Any] = {
            "num_slots": workload.batch,
            "max_len": workload.max_len,
            "max_rows": max(decode_microbatch, 1),
            "dtype": dtype,
            "device": device,
            "capture": graphs,
        }
        learned = model.spec.positions == "learned"
        positions = model.spec.max_positions if learned else workload.max_len
        self._longest = min(workload.max_len, positions)
        self._decode = DecodeGraphs(model, kv, **self._graph_options)
        self._prompts = PromptGraphs(
            self._decode, **self._graph_options | {"capture": graphs and self._whole}
        )
        self.speculation: CudaSpeculation | None = None

    def enable_speculation(
        self, mode: SpeculationMode, workload: Workload, *, view: StageModel | None = None
    ) -> int:
        """As `SlotStageRunner.enable_speculation`; its steps are captured as they come."""
        extra, plain = super().enable_speculation(mode, workload, view=view), self._decode
        self._decode = DecodeGraphs(self.model, self.kv, **self._graph_options)
        self.speculation = CudaSpeculation(
            self._decode, self.draft, plain=plain, whole=self._whole, **self._graph_options
        )
        return extra

    def end_speculation(self) -> None:
        """As `SlotStageRunner.end_speculation`; the graphs of drafts go."""
        super().end_speculation()
        if self.speculation is not None:
            self._decode, self.speculation = self.speculation.plain, None

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1 that the step before has yet to produce."""
        return self._whole and not self._truncates

    @property
    def fused_rounds(self) -> bool:
        """Whether a round of drafts and its verify can be one step, fused on the device."""
        return self.speculation is not None and self.speculation.fused_rounds

    @property
    def captured_rows(self) -> list[int]:
        """Numbers of rows that decode from a graph."""
        return self._decode.captured_rows

    @torch.inference_mode()
    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Note tokens of slots, sampled elsewhere, for steps that name them by -1."""
        slots_B = upload(slots, torch.long, self._device)
        self._decode.remember(slots_B, tokens_B1[:, 0].to(self._device))

    def warm_up(self, rows: int, prompt_len: int) -> None:
        """As `SlotStageRunner.warm_up`; captures the decode step of so many rows as well."""
        super().warm_up(rows, prompt_len)
        self._times.forget()

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        """Return hidden states, or on the last stage the table of sampled tokens."""
        run = partial(self._run, message, hidden_BQH)
        return self._times.of(message.kind, message.num_rows, run)

    def step_times(self) -> MeasuredTimes:
        """Time drafts and verifies on the device, to choose draft lengths by; slots are free."""
        # Imported here: it builds on the graphs of speculation.
        from llmpq.runtime.backends.gpu.cuda_step_times import contexts_of, measure

        assert self.speculation is not None, "drafts need enable_speculation"
        most = self._graph_options["max_rows"]
        rows = sorted({1, max(1, most // 4), most})
        longest = self._longest
        return measure(self.speculation, rows, contexts_of(longest), max_len=longest)

    def device_totals(self) -> dict[str, KindTotals]:
        """Return the steps so far by kind, timed by the device, and forget them."""
        return self._times.totals()

    @torch.inference_mode()
    def _run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        if message.kind is StepKind.DECODE:
            return self._run_decode(message, hidden_BQH)
        if message.kind in (StepKind.DRAFT, StepKind.VERIFY, StepKind.ROUND):
            return self._run_speculation(message, hidden_BQH)
        width, scored = self._width(message), self.sampler.scores_prompts(message)
        if self.speculation is None and not scored and self._prompts.takes(message, width):
            logits_BV = self._prompts.logits_BV(message, width)
            slots_B = upload(message.slots, torch.long, self._device)
            return self._sampled(message, logits_BV, slots_B)
        step = message.step(self._device)
        x = message.tokens_BQ(self._device) if hidden_BQH is None else hidden_BQH.to(self._device)
        if self.speculation is not None:
            self.speculation.take_prompts(step.slots_B, x)
        step, x = widened(step, x, width)
        # The cost model prices whole layers: the last of several stages would beat its plan.
        y = self.model(x, step, self.kv, last_only=self._whole and not scored)
        if self.model.head is None:
            return self._leave(y[:, : message.q_len].contiguous())
        if scored:
            self.sampler.score_prompts(self.model.head, y, message)
        return self._sampled(message, self.model.logits(y, step), step.slots_B)

    def _sampled(
        self, message: StepMessage, logits_BV: Tensor, slots_B: Tensor
    ) -> Tensor | Pending:
        """Return the answer of a step whose rows' new tokens are drawn from logits."""
        tokens_B = self.sampler.pick(logits_BV, message)
        self._decode.remember(slots_B, tokens_B)
        return self._answer(tokens_B[:, None])

    def _width(self, message: StepMessage) -> int:
        """Return the tokens a row takes: fresh prompts are padded as `padded_prompt` says."""
        fresh, q_len = max(message.starts, default=0) == 0, message.q_len
        return padded_prompt(q_len, longest=self._longest) if fresh else q_len

    def _run_decode(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        out, rows = self._decode.run(message, hidden_BQH), message.num_rows
        if out.hidden_BQh is not None:
            return self._leave(out.hidden_BQh[:rows].clone())
        assert out.tokens_B is not None and out.logits_BV is not None
        if all(params.greedy for params in message.sampling) and not self.sampler.knows(message):
            return self._answer(out.tokens_B[:rows, None])
        tokens_B = self.sampler.pick(out.logits_BV[:rows], message)
        self._decode.remember(self._decode.slots_B(rows), tokens_B)
        return self._answer(tokens_B[:, None])

    def _run_speculation(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        assert self.speculation is not None, "drafts need enable_speculation"
        if message.kind is StepKind.ROUND:
            return self._answer(self.speculation.round(message))
        drafts = message.kind is StepKind.DRAFT
        run = self.speculation.draft_step if drafts else self.speculation.verify
        out = run(message, hidden_BQH)
        return self._leave(out) if self.model.head is None else self._answer(out)

    def _leave(self, hidden_BQH: Tensor) -> Tensor:
        return hidden_BQH if self._hidden_stay else hidden_BQH.cpu()

    def _answer(self, result_BK: Tensor) -> Tensor | Pending:
        if self._tokens_stay:
            return result_BK.clone()
        return result_BK.cpu() if not self._whole else on_its_way(result_BK)


def widened(step: Step, x: Tensor, width: int) -> tuple[Step, Tensor]:
    """Return a fresh step and its ids or hidden states with rows padded to `width` tokens."""
    extra = width - step.q_len
    if extra == 0:
        return step, x
    pad = (0, extra) if x.dim() == 2 else (0, 0, 0, extra)
    return step.padded(width), functional.pad(x, pad)
