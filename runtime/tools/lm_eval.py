"""The model class `llmpq` for lm-evaluation-harness: its tasks on dense and quantised models.

    python -m llmpq.runtime.tools.lm_eval run --model llmpq --model_args pretrained=DIR ARGS

where ARGS are the harness's own (`--tasks`, `--device cpu` where there is no GPU). `model_args`:
pretrained=DIR, and as for `llmpq-dist eval` precision=w4a16, plan=FILE, dtype=bfloat16;
max_length=N shortens the context.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from llmpq.missing_packages import missing_package

try:
    import torch
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    missing = missing_package(error, ("run", "eval"))
    if __name__ == "__main__" and missing is not None:
        sys.exit(missing)
    raise ModuleNotFoundError(missing or str(error), name=error.name) from None

from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.backends.backend import usable_device
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.tools.evaluate import MeasuredJob, longest_window, measured_plan, open_model
from llmpq.workload import Dtype

BATCH_SIZE = 8
MAX_NEW_TOKENS = 256
"""Of `generate_until`, where a task says nothing: the harness's own default."""

_ROWS_AT_ONCE = 256
"""Rows whose scores are held together."""

_Scored = tuple[Any, list[int], list[int]]
"""A request's text, context tokens and continuation tokens."""


@register_model("llmpq")
class LlmpqModel(TemplateLM):
    """A model behind `LLM`, in this process; `batch_size` requests run at once."""

    def __init__(
        self,
        pretrained: str,
        *,
        precision: str | None = None,
        plan: str | None = None,
        dtype: Dtype | None = None,
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
        self.spec = ModelSpec.from_directory(pretrained)
        longest = longest_window(self.spec)
        self.max_length = min(int(max_length or longest), longest)
        job = MeasuredJob(
            max_len=self.max_length,
            batch=_batch_size(batch_size),
            dtype=dtype,
            device=usable_device(device or "cpu"),
        )
        made, self.precision = measured_plan(
            pretrained, self.spec, job, precision=precision, plan=plan
        )
        self.llm = open_model(pretrained, made)
        _ = self.llm.tokenizer  # read by now: the harness, too, imports Transformers

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token: what a text without context is taken to follow."""
        ends = self.spec.eos_token_ids
        if not ends:
            raise ValueError("config.json names no eos_token_id, which empty contexts stand for")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: beginning-of-text where the tokenizer has one."""
        begin = self.llm.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its caches after."""
        return self.spec.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text, without special ones unless asked."""
        return self.llm.tokenizer.encode(string, special=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[_Scored], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood of each continuation, and whether it is the greedy one.

        Contexts are cut on the left. Long rows first, as the harness does: a lack of memory shows.
        """
        rows = [(context + more)[-self.max_length - 1 :] for _, context, more in requests]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        answers: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), _ROWS_AT_ONCE):
            some = order[first : first + _ROWS_AT_ONCE]
            prompts = [rows[index] for index in some]
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            for index, answer in zip(some, self.llm.generate(prompts, params), strict=True):
                row = rows[index]
                judged = min(len(requests[index][2]), len(row) - 1)
                scored = answer.or_raise().prompt_logprobs or ()
                logprobs = [more for more in scored if more is not None]
                tail = zip(
                    row[len(row) - judged :], logprobs[len(logprobs) - judged :], strict=True
                )
                scores = [scored[token] for token, scored in tail]
                value = sum(score.logprob for score in scores)
                answers[index] = value, all(score.rank == 1 for score in scores)
        return [answers[index] for index in range(len(rows))]

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
        params = [_sampling(request.args[1]) for request in requests]
        prompts = []
        for request, own in zip(requests, params, strict=True):
            max_new = own.max_tokens or 0
            if max_new >= self.max_length:
                raise ValueError(
                    f"a task asks for {max_new} new tokens, the model has a context of "
                    f"{self.max_length}; give --gen_kwargs max_gen_toks=N"
                )
            context = self.tok_encode(request.args[0])[-(self.max_length - max_new) :]
            prompts.append(context or [self.prefix_token_id])
        return [answer.or_raise().text for answer in self.llm.generate(prompts, params)]


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """Return what a task asks for; greedy unless it says otherwise."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else [text for text in until if text]
    drawn = options.get("do_sample", float(options.get("temperature") or 0) > 0)
    temperature = float(options.get("temperature") or 1.0) if drawn else 0.0
    return SamplingParams(
        max_tokens=int(options.get("max_gen_toks", MAX_NEW_TOKENS)),
        temperature=temperature,
        top_k=int(options.get("top_k") or 0) if drawn else 0,
        top_p=float(options.get("top_p", 1.0)) if drawn else 1.0,
        stop=stops,
        seed=0,
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
