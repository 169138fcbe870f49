"""From sampling parameters to the constraints on logits that the last stage applies, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmpq.model_spec import ModelSpec
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.text.thinking import thinking_marks
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.token_rules import LogitsConstraints, Thought


def logits_constraints(
    params: SamplingParams,
    prompt: tuple[int, ...],
    stop_ids: frozenset[int],
    spec: ModelSpec,
    tokenizer: Callable[[], Tokenizer],
) -> LogitsConstraints | None:
    """Return a request's constraints, None without any; `ValueError` for unknown tokens."""
    bias = dict(params.logit_bias or {})
    allowed = tuple(sorted({*(params.allowed_token_ids or ())}))
    named = (
        ("logit_bias", bias),
        ("allowed_token_ids", allowed),
        ("stop_token_ids", params.stop_token_ids or ()),
    )
    for name, tokens in named:
        wrong = [token for token in tokens if not 0 <= token < spec.vocab]
        if wrong:
            raise ValueError(
                f"{name} names token {wrong[0]}, which is not in the vocabulary of {spec.vocab}"
            )
    guided = params.structured_outputs
    needs_prompt = params.repetition_penalty != 1.0 or params.prompt_logprobs is not None
    rules = LogitsConstraints(
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias={token: float(value) for token, value in bias.items() if value},
        min_tokens=params.min_tokens,
        end_ids=tuple(sorted(stop_ids)) if params.min_tokens else (),
        bad_tokens=tuple(
            run for word in params.bad_words or () for run in _spellings(word, tokenizer())
        ),
        allowed_tokens=allowed,
        thinking=_thought(params, prompt, tokenizer),
        guide=None if guided is None else guided.guide(),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt=prompt if needs_prompt else (),
    )
    return None if rules == LogitsConstraints() else rules


def _thought(
    params: SamplingParams, prompt: tuple[int, ...], tokenizer: Callable[[], Tokenizer]
) -> Thought | None:
    """Return what bounds a thought, or what a guide waits for; None where neither is asked for.

    `ValueError` for a bound of a model whose marks are several tokens. A guide waits for the end of
    a thought that the prompt has opened, by marks of one token.
    """
    budget, guide = params.thinking_token_budget, params.structured_outputs
    waits = guide is not None and guide.after_thought
    if budget is None and not waits:
        return None
    if budget is not None and guide is not None and not waits:
        raise ValueError(
            "thinking_token_budget bounds a thought, and structured_outputs allow none but with "
            "after_thought; leave one of them out"
        )
    known = tokenizer()
    marks = thinking_marks("auto", known.chat_template() or "", known.has_token)
    if marks is None:
        if budget is None:
            return None
        raise ValueError(
            "thinking_token_budget needs a model that thinks between marks such as <think>, and "
            "this one's chat template and tokenizer have none; leave it out"
        )
    begin = known.encode(marks.begin, special=False)
    end = known.encode(marks.end, special=False)
    if len(end) != 1:
        if budget is None:
            return None
        raise ValueError(
            f"thinking_token_budget needs a mark that is one token, and {marks.end!r} is "
            f"{len(end)} of this tokenizer; leave it out"
        )
    last = next((token for token in reversed(prompt) if token in (begin[0], end[0])), end[0])
    is_open = last == begin[0]
    if waits and not is_open:
        return None
    return Thought(tokens=budget, begin=begin[0], end=end[0], is_open=is_open)


def _spellings(word: str, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Return a text's tokens at the beginning of an answer and behind a space."""
    bare = tuple(tokenizer.encode(word, special=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), special=False))
    return tuple(dict.fromkeys(run for run in (bare, spaced) if run))
