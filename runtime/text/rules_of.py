"""What a request's parameters mean in tokens of its model: the rules its last stage is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmpq.model_spec import ModelSpec
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.text.tokenizer import Tokenizer
from llmpq.runtime.token_rules import TokenRules


def rules_of(
    params: SamplingParams,
    prompt: tuple[int, ...],
    stop_ids: frozenset[int],
    spec: ModelSpec,
    tokenizer: Callable[[], Tokenizer],
) -> TokenRules | None:
    """Return a request's rules, None where it has none; `ValueError` for tokens that are not."""
    bias = dict(params.logit_bias or {})
    allowed = tuple(sorted({*(params.allowed_token_ids or ())}))
    for name, tokens in (("logit_bias", bias), ("allowed_token_ids", allowed)):
        wrong = [token for token in tokens if not 0 <= token < spec.vocab]
        if wrong:
            raise ValueError(
                f"{name} names token {wrong[0]}, which is not in the vocabulary of {spec.vocab}"
            )
    guided = params.structured_outputs
    told = params.repetition_penalty != 1.0 or params.prompt_logprobs is not None
    rules = TokenRules(
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
        guide=None if guided is None else guided.guide(),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt=prompt if told else (),
    )
    return None if rules == TokenRules() else rules


def _spellings(word: str, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Return a text's tokens at the beginning of an answer and behind a space."""
    bare = tuple(tokenizer.encode(word, special=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), special=False))
    return tuple(dict.fromkeys(run for run in (bare, spaced) if run))
