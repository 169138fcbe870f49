"""The model class `llmpq` for lm-evaluation-harness: its tasks on dense and quantised models.

    python -m llmpq.runtime.tools.lm_eval run --model llmpq --model_args pretrained=DIR ARGS

where ARGS are the harness's own (`--tasks`, `--device cpu` where there is no GPU). `model_args`:
pretrained=DIR, and as for `llmpq-dist eval` precision=w4a16, plan=FILE, dtype=bfloat16;
max_length=N shortens the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness is not installed ({error}): pip install 'llmpq[eval]'"
    ) from None

from llmpq.runtime.engine.plain_loop import pad
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step import Step
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.tools.evaluate import MAX_WINDOW, load

BATCH_SIZE = 8
MAX_NEW_TOKENS = 256
"""Of `generate_until`, where a task says nothing: the harness's own default."""

_Scored = tuple[Any, list[int], list[int]]
"""A request's text, context tokens and continuation tokens."""


@register_model("llmpq")
class LlmpqModel(TemplateLM):
    """One model in this process; requests are answered in batches of similar length."""

    def __init__(
        self,
        pretrained: str,
        *,
        precision: str | None = None,
        plan: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """`max_batch_size` is taken for the harness's sake and not used."""
        super().__init__()
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"the harness asks for --device {device}, its default, and torch sees no CUDA "
                "device here; add --device cpu"
            )
        self.pipeline, self.precision = load(
            pretrained, precision=precision, plan=plan, dtype=dtype, device=device or "cpu"
        )
        self.tokens = Tokenizer(pretrained)
        longest = min(MAX_WINDOW, self.pipeline.spec.max_positions)
        self.max_length = min(int(max_length or longest), longest)
        self.batch_size = _batch_size(batch_size)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token: what a text without context is taken to follow."""
        ends = self.pipeline.spec.eos_token_ids
        if not ends:
            raise ValueError("config.json names no eos_token_id, which empty contexts stand for")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: beginning-of-text where the tokenizer has one."""
        begin = self.tokens.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its caches after."""
        return self.pipeline.spec.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text, without special ones unless asked."""
        return self.tokens.encode(string, special=bool(add_special_tokens))

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[_Scored], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood of each continuation, and whether it is the greedy one."""
        answers: dict[int, tuple[float, bool]] = {}
        longest_first = sorted(
            range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])
        )
        for first in range(0, len(requests), self.batch_size):
            batch = longest_first[first : first + self.batch_size]
            scored = self._score([requests[i][1:] for i in batch])
            answers |= dict(zip(batch, scored, strict=True))
        return [answers[i] for i in range(len(requests))]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """Score (context, continuation) pairs in one step; contexts are cut on the left."""
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in pairs]
        lengths = [len(row) - 1 for row in rows]
        device, last = self.pipeline.device, self.pipeline.stages[-1]
        step = Step.of(range(len(rows)), [0] * len(rows), lengths, device=device)
        caches = self.pipeline.caches(len(rows), max(lengths))
        hidden_BQh = self.pipeline.hidden(pad([row[:-1] for row in rows], device), step, caches)
        assert last.head is not None
        for row, (_, continuation) in enumerate(pairs):
            judged = min(len(continuation), lengths[row])
            # The head runs on the judged positions only: logits of all would be gigabytes.
            at = slice(lengths[row] - judged, lengths[row])
            logits_NV = last.head(hidden_BQh[row, at]).float()
            targets_N = torch.tensor(rows[row][len(rows[row]) - judged :], device=device)
            yield _likelihood(logits_NV, targets_N)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, each token in the window that it ends up in."""
        totals = []
        for request in requests:
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows = [(None, *make_disjoint_window(pair)) for pair in cut]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(windows)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what follows each context, up to its first stop text."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        answers: dict[int, str] = {}
        for chosen in alike.values():
            for first in range(0, len(chosen), self.batch_size):
                batch = chosen[first : first + self.batch_size]
                contexts = [requests[i].args[0] for i in batch]
                texts = self._generate(contexts, requests[batch[0]].args[1])
                answers |= dict(zip(batch, texts, strict=True))
        return [answers[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        max_new = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
        if max_new >= self.max_length:
            raise ValueError(
                f"a task asks for {max_new} new tokens, the model has a context of "
                f"{self.max_length}; give --gen_kwargs max_gen_toks=N"
            )
        room = self.max_length - max_new
        prompts = [self.tok_encode(c)[-room:] or [self.prefix_token_id] for c in contexts]
        ends = set(self.pipeline.spec.eos_token_ids)

        def enough(rows: list[list[int]]) -> bool:
            return all(
                not ends.isdisjoint(row) or _before(self.tokens.decode(row), stops) is not None
                for row in rows
            )

        rows = self.pipeline.generate(
            prompts,
            max_new=max_new,
            params=[_sampling(options)] * len(prompts),
            stop_at_eos=True,
            enough=enough,
        )
        texts = [self.tokens.decode(row) for row in rows]
        return [text if (cut := _before(text, stops)) is None else cut for text in texts]


def _before(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before its first stop text, None if it has none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def _likelihood(logits_NV: Tensor, targets_N: Tensor) -> tuple[float, bool]:
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    value = (chosen_N - logits_NV.logsumexp(1)).sum()
    return float(value), bool((logits_NV.argmax(1) == targets_N).all())


def _sampling(options: dict[str, Any]) -> TokenChoice:
    """Return greedy sampling unless a task asks for another."""
    if not options.get("do_sample", float(options.get("temperature") or 0) > 0):
        return TokenChoice()
    return TokenChoice(
        temperature=float(options.get("temperature") or 1.0),
        top_k=options.get("top_k"),
        top_p=float(options.get("top_p", 1.0)),
    )


def _batch_size(asked: int | str | None) -> int:
    if asked is None:
        return BATCH_SIZE
    if not str(asked).isdecimal() or int(asked) < 1:
        raise ValueError(f"batch_size must be a number of requests, got '{asked}'")
    return int(asked)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
