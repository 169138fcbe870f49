"""Speculation on a GPU: drafts and verifies as CUDA graphs over one static KV pool.

    a whole model    a round (gamma drafts, the verify, what of them is kept) is one graph. How far
                     each slot has come stays on the device, so the host issues a round before it
                     knows what the last one yielded, and reads counts and tokens once a round;
                     n-grams are looked up in tokens that the device keeps (ngram_lookup.py)
    a stage          a graph per draft step and one per verify; the last stage compares

Rows that are sampled are drafted and verified step by step (acceptance.py), from the same graphs.

Legend: B rows, G drafts, Q = G + 1 positions, V vocabulary, S slots, T slot length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmpq.kernels.fused.argmax import argmax
from llmpq.kernels.fused.ngram_lookup import look_up
from llmpq.runtime.backends.gpu.cuda_graphs import DecodeGraphs, StepOutput
from llmpq.runtime.cache.kv_cache import KVCache
from llmpq.runtime.drafts import ngram
from llmpq.runtime.drafts.acceptance import accept, draft_tokens
from llmpq.runtime.drafts.draft_model import DraftModel
from llmpq.runtime.models.stage_model import StageModel
from llmpq.runtime.step import Step
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.upload import upload
from llmpq.speculation import MAX_GAMMA

Judge = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(drafts [B, G], the verifier's choices [B, Q], slots [B]) -> drafts kept [B]."""


def agreeing_prefix(drafts_BG: Tensor, choices_BQ: Tensor, slots_B: Tensor) -> Tensor:
    """Return the length of each row's longest prefix of drafts that are the verifier's choices."""
    same_BG = (drafts_BG == choices_BQ[:, :-1]).to(torch.long)
    return same_BG.cumprod(dim=1).sum(dim=1)


class RoundGraphs(DecodeGraphs):
    """Rounds of one draft length on a whole model, greedy: a graph per number of rows.

    A position of -1 stands for where the slot stands, a token of -1 for the one it ended with.
    """

    def __init__(
        self,
        model: StageModel,
        kv: KVCache,
        draft: DraftModel | Tensor,
        gamma: int,
        length_S: Tensor,
        judge: Judge,
        **options: object,
    ) -> None:
        """`draft`: a model, or the tokens [S, T] of each slot to look n-grams up in."""
        super().__init__(model, kv, **options)  # type: ignore[arg-type]
        self._draft, self.gamma, self._length_S, self._judge = draft, gamma, length_S, judge
        self._places = torch.arange(gamma + 1, device=self._device)[:, None]

    def _state(self) -> list[Tensor]:
        return [self.last_token_S, self._length_S]

    def _forward(self, num_rows: int, hidden_BQh: Tensor | None) -> StepOutput:
        """Draft, verify, keep: the table has each row's number of new tokens, then the tokens."""
        slots_B, start_B, token_B = self._given(num_rows)
        start_B = torch.where(start_B < 0, self._length_S[slots_B], start_B)
        # A request may have ended in the round before, at the end of its slot.
        start_B = start_B.clamp_(max=self.max_end - 1)
        token_B = torch.where(token_B < 0, self.last_token_S[slots_B], token_B)
        room_B = (self.max_end - start_B).clamp_(max=self.gamma + 1)
        draft = self._draft
        if self.gamma == 0:
            tokens_BQ = token_B[:, None]
        elif isinstance(draft, DraftModel):
            tokens_BQ = self._drafted(draft, slots_B, start_B, token_B, room_B)
        else:
            tokens_BQ = look_up_drafts(draft, slots_B, start_B, token_B, self.gamma)
        step = self._step(slots_B, start_B, room_B)
        hidden = self._model(tokens_BQ, step, self._kv)
        choices_BQ = _likeliest(self._model.logits(hidden, step, all_positions=True))
        if self.gamma == 0:
            last_B, new_B = choices_BQ[:, 0], self._ones[:num_rows]
        else:
            kept_B = self._judge(tokens_BQ[:, 1:], choices_BQ, slots_B)
            kept_B = torch.minimum(kept_B, room_B - 1)
            last_B, new_B = choices_BQ.gather(1, kept_B[:, None])[:, 0], kept_B + 1
        self._length_S[slots_B] = start_B + new_B
        self.remember(slots_B, last_B)
        if isinstance(draft, Tensor):
            # What is kept; the rest is behind a slot's newest token and gets overwritten.
            draft[slots_B[:, None], start_B[:, None] + 1 + self._places[:, 0]] = choices_BQ.int()
        return StepOutput(table_BK=torch.cat((new_B[:, None], choices_BQ), dim=1))

    def _drafted(
        self, draft: DraftModel, slots_B: Tensor, start_B: Tensor, token_B: Tensor, room_B: Tensor
    ) -> Tensor:
        """Return the newest token and the drafts behind it [B, Q]."""
        model, kv, ones_B = draft.model, draft.kv, self._ones[: len(slots_B)]
        # Drafts beyond a slot's end repeat its last place; they are never kept.
        at_GB = start_B + torch.minimum(self._places, room_B - 1)
        tokens = [token_B]
        for place in range(self.gamma):
            step = self._step(slots_B, at_GB[place], ones_B, q_len=1)
            hidden = model(tokens[-1][:, None], step, kv)
            tokens.append(argmax(model.logits(hidden, step)))
        return torch.stack(tokens, dim=1)

    def _step(
        self, slots_B: Tensor, start_B: Tensor, count_B: Tensor, q_len: int | None = None
    ) -> Step:
        return Step(
            slots_B=slots_B,
            start_B=start_B,
            num_new_B=count_B,
            q_len=self.gamma + 1 if q_len is None else q_len,
            max_end=self.max_end,
            fresh=False,
            runs=(),
        )


class VerifyGraphs(DecodeGraphs):
    """Verifies of up to so many positions on any stage: a graph per number of rows."""

    def __init__(self, model: StageModel, kv: KVCache, q_len: int, **options: object) -> None:
        self.q_len = q_len
        self.fields = 3 + q_len
        super().__init__(model, kv, **options)  # type: ignore[arg-type]

    def _table(self, message: StepMessage) -> list[Sequence[int]]:
        rows = [[*row, *[0] * (self.q_len - len(row))] for row in message.tokens]
        columns = [[row[place] for row in rows] for place in range(self.q_len)]
        return [message.slots, message.starts, message.num_new, *columns]

    def _state(self) -> list[Tensor]:
        return []

    def _forward(self, num_rows: int, hidden_BQh: Tensor | None) -> StepOutput:
        """Run the stage; on the last one the logits are [B, Q, V], the tokens the likeliest."""
        slots_B, start_B, count_B, *columns = self._given(num_rows)
        step = Step(
            slots_B=slots_B,
            start_B=start_B,
            num_new_B=count_B,
            q_len=self.q_len,
            max_end=self.max_end,
            fresh=False,
            runs=(),
        )
        x = torch.stack(columns, dim=1) if hidden_BQh is None else hidden_BQh
        y = self._model(x, step, self._kv)
        if self._model.head is None:
            return StepOutput(hidden_BQh=y)
        logits_BQV = self._model.logits(y, step, all_positions=True)
        return StepOutput(logits_BV=logits_BQV, table_BK=_likeliest(logits_BQV))


class CudaSpeculation:
    """The draft, verify and round steps of one stage on a GPU."""

    def __init__(
        self,
        decode: DecodeGraphs,
        draft: DraftModel | None,
        *,
        plain: DecodeGraphs,
        whole: bool,
        **options: object,
    ) -> None:
        """`decode` runs the stage's steps without drafts, `plain` those of a stage that keeps
        nothing for them; `options` are those of every graph."""
        self.plain = plain
        self._model, self._kv = decode._model, decode._kv
        self._draft, self._options = draft, options | {"last_token_S": decode.last_token_S}
        self.judge: Judge = agreeing_prefix
        self.fused_rounds = whole
        self._length_S = torch.zeros_like(decode.last_token_S)
        self.history_ST: Tensor | None = None
        """Tokens of each slot, where n-grams are looked up: 4 bytes beside a token's 100 KB."""
        if whole and draft is None:
            shape = len(self._length_S), decode.max_end + MAX_GAMMA + 1
            self.history_ST = self._length_S.new_zeros(shape, dtype=torch.int32)
        self._rounds: dict[int, RoundGraphs] = {}
        self._verifies: dict[int, VerifyGraphs] = {}
        self.draft_graphs: DecodeGraphs | None = None
        if draft is not None:
            self.draft_graphs = DecodeGraphs(draft.model, draft.kv, **self._options)  # type: ignore[arg-type]
        self._probs: dict[int, list[Tensor]] = {}
        """Slot -> the distributions its unverified drafts were drawn from (last stage)."""

    def round(self, message: StepMessage) -> Tensor:
        """Return the table of a round on the device: per row a count, then that many tokens."""
        gamma = message.q_len - 1
        if gamma not in self._rounds:
            draft = self._draft if self.history_ST is None else self.history_ST
            assert draft is not None
            self._rounds[gamma] = RoundGraphs(
                self._model,
                self._kv,
                draft,
                gamma,
                self._length_S,
                self.judge,
                **self._options,
            )
        table_BK = self._rounds[gamma].run(message, None).table_BK
        assert table_BK is not None
        return table_BK[: message.num_rows]

    def take_prompts(self, slots_B: Tensor, tokens_BQ: Tensor) -> None:
        """Keep the prompts of slots, right padded, where drafts are looked up in them."""
        if self.history_ST is not None:
            self.history_ST[slots_B, : tokens_BQ.shape[1]] = tokens_BQ.int()

    def draft_step(self, message: StepMessage, hidden_BQh: Tensor | None) -> Tensor:
        """Return a draft step's hidden states, or on the last stage its tokens [B, 1]."""
        assert self.draft_graphs is not None, "drafts need enable_speculation"
        out, rows = self.draft_graphs.run(message, hidden_BQh), message.num_rows
        if out.hidden_BQh is not None:
            return out.hidden_BQh[:rows].clone()
        assert out.tokens_B is not None and out.logits_BV is not None
        if all(params.greedy for params in message.sampling):
            return out.tokens_B[:rows, None]
        logits_BV = out.logits_BV[:rows].clone()
        tokens_B, probs = draft_tokens(logits_BV, message.sampling, message.sample_steps)
        for slot, q_V in zip(message.slots, probs, strict=True):
            if q_V is not None:
                self._probs.setdefault(slot, []).append(q_V)
        return tokens_B[:, None]

    def verify(self, message: StepMessage, hidden_BQh: Tensor | None) -> Tensor:
        """Return a verify's hidden states, or on the last stage counts and new tokens."""
        width, rows = message.q_len, message.num_rows
        graphs = self.verify_graphs(_rounded_width(width))
        if hidden_BQh is not None and hidden_BQh.shape[1] < graphs.q_len:
            extra = graphs.q_len - hidden_BQh.shape[1]
            hidden_BQh = torch.nn.functional.pad(hidden_BQh, (0, 0, 0, extra))
        out = graphs.run(message, hidden_BQh)
        if out.hidden_BQh is not None:
            return out.hidden_BQh[:rows, :width].clone()
        assert out.logits_BV is not None and out.table_BK is not None
        drafts = [tokens[1:] for tokens in message.tokens]
        probs = [self._probs.pop(slot, None) for slot in message.slots]
        if all(params.greedy for params in message.sampling):
            return self._kept(message, out.table_BK[:rows, :width])
        kept = accept(
            out.logits_BV[:rows, :width], drafts, probs, message.sampling, message.sample_steps
        )
        return torch.tensor([[len(row), *row, *[0] * (width - len(row))] for row in kept])

    def _kept(self, message: StepMessage, choices_BQ: Tensor) -> Tensor:
        """Return counts and tokens of greedy rows, compared on the device."""
        device, drafted = choices_BQ.device, [len(row) - 1 for row in message.tokens]
        slots_B, drafted_B = upload([message.slots, drafted], torch.long, device)
        drafts_BG = message.tokens_BQ(device)[:, 1:]
        kept_B = torch.minimum(self.judge(drafts_BG, choices_BQ, slots_B), drafted_B)
        return torch.cat((kept_B[:, None] + 1, choices_BQ), dim=1)

    def forget_verifies(self) -> None:
        """Give up the graphs of verifies, and what they keep."""
        self._verifies.clear()

    def verify_graphs(self, q_len: int) -> VerifyGraphs:
        """Return the graphs of verifies of so many positions."""
        if q_len not in self._verifies:
            self._verifies[q_len] = VerifyGraphs(self._model, self._kv, q_len, **self._options)
        return self._verifies[q_len]


def look_up_drafts(
    history_ST: Tensor, slots_B: Tensor, start_B: Tensor, newest_B: Tensor, gamma: int
) -> Tensor:
    """Return the newest tokens and what followed them before [B, Q], as `ngram.propose`.

    Where that finds nothing the newest token is repeated, which is verified as well.
    """
    return look_up(
        history_ST,
        slots_B,
        start_B,
        newest_B,
        gamma,
        longest=ngram.LONGEST,
        shortest=ngram.SHORTEST,
        look_back=ngram.LOOK_BACK,
    )


def _likeliest(logits_BQV: Tensor) -> Tensor:
    return argmax(logits_BQV.flatten(0, 1)).view(logits_BQV.shape[:2])


def _rounded_width(width: int) -> int:
    """Return the positions a verify is padded to: fewer widths, fewer graphs."""
    return next(size for size in (2, 3, 4, 6, MAX_GAMMA + 1) if size >= width)
