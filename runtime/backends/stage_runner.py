"""The arithmetic of one stage: steps of rows of any lengths, packed.

The tokens of a step are padded (llmpq/sizes/step_padding.py); padding is never read and never sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llmpq.plans.capabilities import execution_modes, require
from llmpq.plans.speculation import SpeculationMode
from llmpq.precision import KVPrecision
from llmpq.runtime.cache.forwarding_kv import DraftedKV
from llmpq.runtime.cache.kv_cache import KVCache, PagedKV
from llmpq.runtime.cache.paged_by_precision import make_paged_kv
from llmpq.runtime.drafts.acceptance import DraftProbs, accept, draft_tokens
from llmpq.runtime.drafts.draft_model import DraftModel, build_draft
from llmpq.runtime.drafts.mtp_drafts import MtpDrafts
from llmpq.runtime.models.mtp_head import MtpHead
from llmpq.runtime.models.ruled_sampling import ConstrainedSampler
from llmpq.runtime.models.sampling import finite_choices, sample
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.requests.request import PagedRow, StepKind, StepMessage
from llmpq.runtime.steps.device_copies import HostCopy, upload
from llmpq.runtime.steps.step import RaggedStep, message_of_rows
from llmpq.runtime.steps.trace import KindTotals
from llmpq.sizes.pool_size import READS_KV4, PoolSize, draft_pool, mtp_pool
from llmpq.sizes.state_size import NOTED_TOKENS
from llmpq.sizes.step_padding import EXACT_TOKENS, cpu_padded

WARM_UP_S = 2.0
"""How long a stage on a CPU goes on running shapes to come."""


class StageRunner:
    """One stage on a CPU, ready to run the steps of a `Scheduler`."""

    _with_copy: Callable[[Any, Any], PagedKV] = DraftedKV

    def __init__(
        self, model: StageModel, kv: PagedKV, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.kv = kv
        self._device = device
        self._dtype = dtype
        self.sampler = ConstrainedSampler()
        """Chooses tokens on the last stage; `StageWorker` gives it the requests' rules."""
        self.draft: DraftModel | None = None
        """How the model drafts, if it does."""
        self.compiled_s = 0.0
        """Seconds that kernels took to compile when it warmed up."""
        self.mtp: MtpDrafts | None = None
        """The model's own head that drafts, on the last stage."""
        self._draft_probs = DraftProbs()

    def enable_speculation(
        self,
        mode: SpeculationMode,
        size: PoolSize,
        *,
        layers: Sequence[int],
        kv: KVPrecision = KVPrecision.KV16,
        head: MtpHead | None = None,
    ) -> int:
        """Prepare for drafts of a mode; return the bytes they take beyond the stage's own.

        `layers`: their numbers in the model. `kv`: the pool's precision. `head`: the model's own
        that drafts (mtp), on the last stage.
        """
        ways = execution_modes(
            gpu=self._device.type == "cuda",
            kv=KVPrecision.KV4 if mode in READS_KV4 else KVPrecision.KV16,
            drafts=True,
        )
        require(self.model.whole_spec, ways, max_len=size.max_len - 1)
        states, extra = self.kv.states, 0
        if states is not None:
            extra = states.keep_notes(NOTED_TOKENS)
        if mode == "mtp" and head is not None:
            own = make_paged_kv(
                self.model.whole_spec.of_mtp(),
                kv,
                mtp_pool(size),
                layers=range(1),
                dtype=self._dtype,
                device=self._device,
            )
            self.mtp = self._mtp_drafts(head, own)
            return extra + own.nbytes + head.own_nbytes(self.model)
        if mode == "ngram" or mode == "mtp":
            return extra
        read: KVCache = self.kv
        if mode in READS_KV4:
            copy = make_paged_kv(
                self.model.spec,
                KVPrecision.KV4,
                draft_pool(size),
                layers=layers,
                dtype=self._dtype,
                device=self._device,
            )
            extra += copy.nbytes
            self.kv, read, copy.states = self._with_copy(self.kv, copy), copy, states
        self.draft = build_draft(mode, self.model, read)
        return self.draft.extra_bytes + extra

    def _mtp_drafts(self, head: MtpHead, kv: PagedKV) -> MtpDrafts:
        """Return what drafts with the model's own head, over a pool of its own."""
        return MtpDrafts(head, kv, self._draft_probs)

    def end_speculation(self) -> None:
        """Go on without drafts and free what they take; no draft may be under way."""
        self.draft = None
        self._draft_probs = DraftProbs()
        self.mtp = None
        if self.kv.states is not None:
            self.kv.states.drop_notes()
        if isinstance(self.kv, DraftedKV):
            self.kv = self.kv.inner

    @property
    def fused_rounds(self) -> bool:
        """Whether a round of drafts and its verify can be one step, fused on the device."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1 that the step before has yet to produce."""
        return False

    def leave_on_device(self, *, tokens: bool = False) -> None:
        """Say that this stage's links take hidden states, and maybe tokens, from the device."""
        raise AssertionError("hosts keep nothing on a device")

    def wants_every_place(self, message: StepMessage) -> bool:
        """Whether hidden states of all places of a step are wanted behind the last layer."""
        own = self.model.head is not None and self.sampler.scores_prompts(message)
        return own or message.every_place

    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Not here: the host knows the tokens of a step before it issues the next."""
        raise RuntimeError(f"a stage that does not run ahead got tokens of slots {list(slots)}")

    def device_totals(self) -> dict[str, KindTotals]:
        """Return nothing: the host's clock serves."""
        return {}

    @torch.inference_mode()
    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | HostCopy:
        """Return hidden states [1, T, h], or on the last stage the new tokens of each row.

        A token each [B, 1], -1 of rows that sample nothing, `NOT_FINITE_TOKEN` where the logits are
        not finite; where drafts were verified, how many tokens and those (see `result_width`).
        """
        self.kv.take_rows(message.rows_with_news, message.starts_with_news)
        num_tokens = message.num_tokens
        step = RaggedStep.of_rows(
            message.slots_B.tolist(),
            message.starts_B.tolist(),
            message.num_new_B.tolist(),
            wanted=message.wanted_B.tolist(),
            revocable=message.revocable_B.tolist(),
            width=cpu_padded(num_tokens),
        )
        x = torch.from_numpy(message.tokens_T)[None] if hidden_BQH is None else hidden_BQH
        extra = step.q_len - num_tokens
        if extra:
            x = functional.pad(x, (0, extra) if x.dim() == 2 else (0, 0, 0, extra))
        model: StageModel = self.model
        kv: KVCache = self.kv
        if message.kind is StepKind.DRAFT:
            assert self.draft is not None, "drafts need enable_speculation"
            model, kv = self.draft.model, self.draft.kv
        states = self.kv.states
        if states is not None:
            states.load(message.rows_with_news)
        output = model(x.to(self._device), step, kv)
        if states is not None:
            states.save(message.rows_with_news)
        if self.model.head is None:
            return output[:, :num_tokens].cpu()
        if message.kind is StepKind.DRAFT:
            return self._drafted(model.logits(output, step), message)[:, None]
        if self.sampler.scores_prompts(message):
            self._score_prompts(output, step, message)
        rows = self._new_tokens(self.model.logits(output, step) if step.wanted else None, message)
        drafts = None
        if self.mtp is not None:
            drafts = self.mtp.draft(message, output[:, :num_tokens], rows)
        return result_table(message, rows, drafts)

    def _drafted(self, logits_BV: Tensor, message: StepMessage) -> Tensor:
        """Return the tokens [B] of a draft step, and note what they were drawn from."""
        steps = message.sample_steps_B.tolist()
        tokens_B, probs = draft_tokens(logits_BV, message.sampling, steps)
        self._draft_probs.note(message.slots_B.tolist(), message.starts_B.tolist(), probs)
        return tokens_B

    def repeatable(
        self, message: StepMessage, hidden_BQH: Tensor | None
    ) -> Callable[[], Tensor | HostCopy]:
        """Return a step as a call that computes it as often as it is called, to be timed."""
        return partial(self.run, message, hidden_BQH)

    def _new_tokens(self, logits_NV: Tensor | None, message: StepMessage) -> list[list[int]]:
        """Return the rows' new tokens of the logits they want, one row's behind the other's."""
        rows: list[list[int]] = [[-1]] * message.num_rows
        if logits_NV is not None:
            self._pick(logits_NV, message, rows)
        return rows

    def _pick(self, logits_NV: Tensor, message: StepMessage, rows: list[list[int]]) -> None:
        """Put the new tokens of the rows that sample in their places."""
        wanted_B = message.wanted_B
        first_B = np.cumsum(wanted_B) - wanted_B
        slots, starts, steps = (
            of_rows.tolist()
            for of_rows in (message.slots_B, message.starts_B, message.sample_steps_B)
        )
        for count in sorted(set(wanted_B.tolist()) - {0}):
            alike = np.flatnonzero(wanted_B == count).tolist()
            places = (first_B[alike][:, None] + np.arange(count)).ravel().tolist()
            logits = logits_NV[upload(places, torch.long, logits_NV.device)]
            if count == 1:
                some = message.of_rows(alike)
                ruled, own = self.sampler.knows(some), some.sample_steps_B.tolist()
                picked = (
                    self.sampler.pick(logits, some) if ruled else sample(logits, some.sampling, own)
                )
                plain = some.sampling.greedy and not ruled
                tokens = finite_choices(picked, logits, likeliest=plain)
                found = [[token] for token in tokens.tolist()]
            else:
                found = accept(
                    logits.view(len(alike), count, -1),
                    [message.row(row).drafts for row in alike],
                    [self._draft_probs.take(slots[row], starts[row], count - 1) for row in alike],
                    [message.sampling[row] for row in alike],
                    [steps[row] for row in alike],
                )
            for row, new in zip(alike, found, strict=True):
                rows[row] = new

    def _score_prompts(self, hidden_BQH: Tensor, step: RaggedStep, message: StepMessage) -> None:
        """Note scores of prompts' tokens, of one row after the other."""
        assert self.model.head is not None
        for row, span in enumerate(step.spans):
            own = hidden_BQH[:, span.first : span.first + span.count]
            self.sampler.score_prompts(self.model.head, own, message.of_rows([row]))

    def warm_up(self, rows: int, step_tokens: int, *, gamma: int = 0, capture: bool = True) -> None:
        """Run steps of zeros through the first block, so that first times count as others.

        No request owns what they leave in the cache. `gamma`: drafts that rows will have. Without
        `capture` what the process has run before is left out: here all of it.
        """
        if not capture:
            return
        left_s, token_s = WARM_UP_S, 0.0
        counts = [*range(rows, 0, -1), *_rungs(step_tokens)]
        for count in counts:
            if count * token_s > left_s:
                break
            kind = StepKind.DECODE if count <= rows else StepKind.PREFILL
            seconds = self._run_zeros(kind, count)
            left_s, token_s = left_s - seconds, seconds / count

    def _run_zeros(self, kind: StepKind, count: int) -> float:
        """Run `count` rows of one token, or chunks that fit the first block; return the seconds."""
        row = PagedRow(slot=0, samples=False, new_blocks=(0,), new_window_blocks=(0,))
        message = message_of_rows(kind, [0] * count, [0] * count, [1] * count, rows=[row] * count)
        hidden = None
        if self.model.embedding is None:
            hidden = torch.zeros((1, count, self.model.spec.hop_features), dtype=self._dtype)
        started_s = time.perf_counter()
        self.run(message, hidden)
        return time.perf_counter() - started_s


def result_table(
    message: StepMessage, rows: Sequence[list[int]], drafts: Sequence[list[int]] | None
) -> Tensor:
    """Return the table of new tokens, and of drafts behind them (`step.result_width`)."""
    table = [list(row) for row in rows]
    news = message.rows_with_news
    wanted = max((row.drafts_wanted for row in news), default=-1)
    longest = max((len(row.drafts) for row in news), default=0)
    if longest:
        width = 1 + longest
        table = [[len(row), *row, *[0] * (width - len(row))] for row in rows]
    if wanted > 0:
        assert drafts is not None, "drafts need the head that predicts them"
        for line, own in zip(table, drafts, strict=True):
            line += [len(own), *own, *[0] * (wanted - len(own))]
    return torch.tensor(table)


def _rungs(step_tokens: int) -> list[int]:
    """Return the numbers of places up to a step's tokens, the largest first."""
    rungs, count = [], cpu_padded(step_tokens)
    while count > EXACT_TOKENS:
        rungs.append(count)
        count -= 1 << max(0, (count - 1).bit_length() - 4)
    return rungs
