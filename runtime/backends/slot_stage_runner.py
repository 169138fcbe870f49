"""The arithmetic of one stage whose requests have KV slots: on GPUs, where drafts still have them.

A step of it is padded: [rows, tokens of the longest].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.capabilities import Way, require
from llmpq.plan import Plan
from llmpq.runtime.cache.dual_kv import DualKV, make_copy
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.drafts.acceptance import accept, draft_tokens
from llmpq.runtime.drafts.draft_model import DraftModel, build_draft
from llmpq.runtime.models.ruled_sampling import ConstrainedSampler
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.pending import Pending
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import SamplerConfig
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.trace import KindTotals
from llmpq.sizes.pool_size import READS_KV4
from llmpq.speculation import SpeculationMode
from llmpq.workload import Workload

GREEDY = SamplerConfig()


class SlotStageRunner:
    """One stage, ready to run micro-batches."""

    def __init__(
        self, model: StageModel, kv: KVCache, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.kv, self._device, self._dtype = model, kv, device, dtype
        self.sampler = ConstrainedSampler()
        """Chooses tokens on the last stage; `StageWorker` gives it the requests' rules."""
        self._hidden_stay = self._tokens_stay = False
        self.draft: DraftModel | None = None
        self._truncates = False
        self._draft_probs: dict[int, list[Tensor]] = {}
        """Slot -> the distributions its unverified drafts were drawn from (last stage)."""

    def leave_on_device(self, *, hidden: bool, tokens: bool = False) -> None:
        """Say what this stage's links take from the device; the rest is brought to the host.

        Called before the first step, when the links are known.
        """
        self._hidden_stay, self._tokens_stay = hidden, tokens

    def enable_speculation(
        self, mode: SpeculationMode, workload: Workload, *, view: StageModel | None = None
    ) -> int:
        """Prepare for drafts of a mode; return the bytes they take beyond the stage's own.

        `view`: how another engine of the same weights and mode drafts, to share its copies.
        """
        packed: tuple[Way, ...] = ("packed_kv",) if mode in READS_KV4 else ()
        require(self.model.spec, ("drafts", *packed), max_len=workload.max_len)
        self._truncates = True
        if mode == "ngram":
            return 0
        if mode == "mtp":
            raise ValueError("the model's own head drafts over a pool of KV blocks, not over slots")
        kv, copy_bytes = self.kv, 0
        if mode in READS_KV4:
            copy = make_copy(self.model, workload, self._dtype, self._device)
            self.kv, kv, copy_bytes = DualKV(self.kv, copy), copy, copy.nbytes
        self.draft = build_draft(mode, self.model, kv) if view is None else DraftModel(view, kv, 0)
        return self.draft.extra_bytes + copy_bytes

    def end_speculation(self) -> None:
        """Go on without drafts, and without what was kept for them; no draft may be under way."""
        self.draft, self._truncates = None, False
        self._draft_probs.clear()
        if isinstance(self.kv, DualKV):
            self.kv = self.kv.inner

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may name tokens by -1 that the step before has yet to produce."""
        return False

    @property
    def fused_rounds(self) -> bool:
        """Whether a round of drafts and its verify can be one step, fused on the device."""
        return False

    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Not here: the host knows the tokens of a step before it issues the next."""
        raise RuntimeError(f"a stage that does not run ahead got tokens of slots {list(slots)}")

    def device_totals(self) -> dict[str, KindTotals]:
        """Return the steps so far as the device timed them; empty where the host's clock serves."""
        return {}

    @torch.inference_mode()
    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor | Pending:
        """Return hidden states on the host, or on the last stage the table of sampled tokens."""
        step = message.step(self._device)
        x = message.tokens_BQ() if hidden_BQH is None else hidden_BQH
        if self._truncates and message.kind is not StepKind.PREFILL:
            self.kv.truncate(step.slots_B, step.start_B)
        model, kv = self.model, self.kv
        if message.kind is StepKind.DRAFT:
            assert self.draft is not None, "drafts need enable_speculation"
            model, kv = self.draft.model, self.draft.kv
        output = model(x.to(self._device), step, kv)
        if self.model.head is None:
            return output if self._hidden_stay else output.cpu()
        return self._pick(output, step, message).cpu()

    def _pick(self, hidden_BQH: Tensor, step: Step, message: StepMessage) -> Tensor:
        """Return the result table of the last stage (see `stage_loop.result_tokens`)."""
        if message.kind is StepKind.VERIFY:
            return self._verify(hidden_BQH, step, message)
        if message.kind is not StepKind.DRAFT or self.draft is None:
            if self.sampler.scores_prompts(message) and self.model.head is not None:
                self.sampler.score_prompts(self.model.head, hidden_BQH, message)
            logits_BV = self.model.logits(hidden_BQH, step)
            return self.sampler.pick(logits_BV, message)[:, None]
        logits_BV = self.draft.model.logits(hidden_BQH, step)
        tokens_B, probs = draft_tokens(logits_BV, message.sampling, message.sample_steps)
        for slot, q_V in zip(message.slots, probs, strict=True):
            if q_V is not None:
                self._draft_probs.setdefault(slot, []).append(q_V)
        return tokens_B[:, None]

    def _verify(self, hidden_BQH: Tensor, step: Step, message: StepMessage) -> Tensor:
        logits_BQV = self.model.logits(hidden_BQH, step, all_positions=True)
        rows = accept(
            logits_BQV,
            [tokens[1:] for tokens in message.tokens],
            [self._draft_probs.pop(slot, None) for slot in message.slots],
            message.sampling,
            message.sample_steps,
        )
        width = message.q_len
        return torch.tensor([[len(row), *row, *[0] * (width - len(row))] for row in rows])

    def warm_up(self, rows: int, prompt_len: int) -> None:
        """Run one small step of each phase through slot 0 on, so that first times count as others.

        What it leaves in the cache is overwritten by the first prompts. No prompts with length 0.
        """
        if prompt_len > 0:
            self._run_zeros(StepKind.PREFILL, rows, prompt_len)
        self._run_zeros(StepKind.DECODE, rows, 1)

    def warm_up_prompts(self, plan: Plan) -> None:
        """Run the largest prompts of a plan, so that a lack of memory shows at the start."""
        workload = plan.workload
        prompt_len = min(workload.prompt_len, workload.max_len)
        rows = min(plan.prefill_microbatch, workload.batch)
        self._run_zeros(StepKind.PREFILL, rows, prompt_len)

    def _run_zeros(self, kind: StepKind, rows: int, q_len: int) -> None:
        """Run a step of token 0 through the slots from 0 on."""
        message = StepMessage(
            kind=kind,
            slots=range(rows),
            starts=[0] * rows,
            num_new=[q_len] * rows,
            sample_steps=[0] * rows,
            sampling=[GREEDY] * rows,
            tokens=[[0] * q_len] * rows,
        )
        hidden = None
        if self.model.embedding is None:
            hidden = torch.zeros((rows, q_len, self.model.spec.hop_features), dtype=self._dtype)
        self.run(message, hidden)
