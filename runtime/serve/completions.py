"""/v1/completions: text behind prompts, with echo and logprobs in OpenAI's older form."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.requests.request_output import Logprob
from llmpq.runtime.serve.answering import DONE, event
from llmpq.runtime.serve.bodies import CompletionBody, SamplingBody
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.service import Choice, Service, usage
from llmpq.runtime.text.answer_text import TextStream
from llmpq.runtime.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not know."""


class TextCompletion:
    """One request of /v1/completions."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        service.check_model(body.model)
        if body.suffix:
            raise ApiError(
                400, "'suffix' is not supported: the model continues text", param="suffix"
            )
        self._service, self._body = service, body
        self._scores_prompt = body.prompt_logprobs is not None
        self._guided_by, guide = body.wanted_format()
        if guide is not None:
            body.structured_outputs = guide
        # OpenAI's default of best_of is 1: clients send it along with any n.
        if 1 < (body.best_of or 0) < body.n <= service.settings.max_n:
            raise ApiError(
                400,
                f"best_of={body.best_of} is less than n={body.n}, the answers that are chosen from "
                "them; leave best_of out",
                param="best_of",
            )
        self._n, self._best_of = body.n, max(body.n, body.best_of or 0) if body.n > 0 else body.n
        wanted = int(body.logprobs) if body.logprobs else body.logprobs
        self._logprobs = None if wanted is None or wanted is False else int(wanted)
        max_tokens = body.max_tokens
        if "max_tokens" not in body.model_fields_set:
            max_tokens = service.default_max_tokens or max_tokens
        if max_tokens == 0 or (body.echo and self._logprobs is not None):
            body.prompt_logprobs = self._logprobs or 0
        body.n = self._best_of
        ranked = 0 if self._best_of > self._n else None
        asked = ranked if self._logprobs is None else self._logprobs
        self._params = body.params(
            max_tokens=max_tokens,
            logprobs=asked,
            tokens_of=service.tokens_of,
            defaults=service.default_sampling,
        )
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
        }

    async def begin(self) -> list[ResponseStream]:
        """Queue the prompts."""
        self._service.ready()
        body = self._body
        return await self._service.begin(
            body.prompts(),
            self._params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            guided_by=self._guided_by,
            n_field="best_of" if self._best_of > self._n else "n",
        )

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        choices, used = await self._gathered(await self.begin())
        return {**self._head, "choices": choices, "usage": used}

    async def _gathered(
        self, begun: list[ResponseStream]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the answers that are sent, once all have ended, and what they took."""
        choices = await self._service.gather(begun, self._params.n)
        best = []
        for index, choice in enumerate(self._best(choices)):
            answers = begun[choice.index // self._best_of]
            best.append(self._choice(answers, choice, self._shown(answers)) | {"index": index})
        answered = sum(len(choice.token_ids) for choice in choices)
        cached = sum(c.num_cached_tokens for c in choices if c.index % self._params.n == 0)
        return best, usage(_prompt_tokens(begun), answered, cached)

    def _best(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return each prompt's `n` answers, the likeliest by the token first of `best_of`."""
        if self._best_of == self._n:
            return [*choices]
        kept: list[Choice] = []
        for first in range(0, len(choices), self._best_of):
            own = choices[first : first + self._best_of]
            kept += sorted(own, key=mean_logprob, reverse=True)[: self._n]
        return kept

    async def events(self, begun: list[ResponseStream]) -> AsyncIterator[str]:
        """Yield the answer as it comes; the best of more than are sent, once they are known."""
        options, n, answered, cached = self._body.stream_options, self._params.n, 0, 0
        with_usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        none = {"usage": None} if with_usage else {}
        if self._best_of > self._n:
            best, used = await self._gathered(begun)
            for choice in best:
                yield event({**self._head, "choices": [choice], **none})
            yield self._end(used if with_usage else None)
            return
        shown: dict[int, TextStream] = {}
        async with aclosing(self._service.choices(begun, n)) as choices:
            async for new in choices:
                answered += len(new.token_ids)
                cached += new.num_cached_tokens if new.index % n == 0 else 0
                ids = self._body.return_token_ids and new.token_ids
                if not (new.text or new.logprobs or new.finish_reason or ids):
                    continue
                answers = begun[new.index // n]
                if first := new.index not in shown:
                    shown[new.index] = self._shown(answers)
                choice = self._choice(answers, new, shown[new.index], first=first)
                now = {"usage": usage(_prompt_tokens(begun), answered)} if running else none
                yield event({**self._head, "choices": [choice], **now})
        yield self._end(usage(_prompt_tokens(begun), answered, cached) if with_usage else None)

    def _end(self, used: dict[str, Any] | None) -> str:
        """Return what ends a stream, behind what the answers took if that is asked."""
        return (event({**self._head, "choices": [], "usage": used}) if used else "") + DONE

    def _shown(self, answers: ResponseStream) -> TextStream:
        """Return what reads an answer's text again, for where each token begins in it."""
        prompt = () if self._body.echo else answers.prompt_token_ids
        hides = self._params.skip_special_tokens
        return TextStream(self._service.tokenizer, prompt, skip_special=hides)

    def _choice(
        self, answers: ResponseStream, choice: Choice, shown: TextStream, *, first: bool = True
    ) -> dict[str, Any]:
        """Return an answer, or what is new of it, behind the prompt if that is asked."""
        text, rows = choice.text, [*zip(choice.token_ids, choice.logprobs, strict=False)]
        asked: list[tuple[int, Mapping[int, Logprob] | None]] = [*rows]
        if self._body.echo and first:
            text = self._echo(answers) + text
            scores = answers.prompt_logprobs or []
            asked = [*zip(answers.prompt_token_ids, scores, strict=False), *rows]
        logprobs = None
        if self._logprobs is not None:
            logprobs = logprobs_of(self._service, asked, self._logprobs, shown)
        ids: dict[str, Any] = {}
        if self._body.return_token_ids:
            prompt = [*answers.prompt_token_ids] if first else None
            ids = {"token_ids": [*choice.token_ids], "prompt_token_ids": prompt}
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **ids,
            **(prompt_scores(self._body, answers) if self._scores_prompt else {}),
        }

    def _echo(self, answers: ResponseStream) -> str:
        if answers.prompt is not None:
            return answers.prompt
        return self._service.tokenizer.decode(answers.prompt_token_ids)


def prompt_scores(body: SamplingBody, answers: ResponseStream) -> dict[str, Any]:
    """Return how likely a prompt's tokens were, where that was asked for, in vLLM's form."""
    if body.prompt_logprobs is None:
        return {}
    rows = [
        None
        if row is None
        else {
            str(token): {
                "logprob": max(score.logprob, LEAST_LOGPROB),
                "rank": score.rank,
                "decoded_token": score.decoded_token,
            }
            for token, score in row.items()
        }
        for row in answers.prompt_logprobs or []
    ]
    return {"prompt_logprobs": rows}


def mean_logprob(choice: Choice) -> float:
    """Return the mean log-probability of an answer's tokens; minus infinity for none."""
    scores = [row[t].logprob for t, row in zip(choice.token_ids, choice.logprobs, strict=True)]
    return sum(scores) / len(scores) if scores else -math.inf


def logprobs_of(
    service: Service,
    rows: Sequence[tuple[int, Mapping[int, Logprob] | None]],
    most: int,
    text: TextStream,
) -> dict[str, Any]:
    """Return logprobs in the older form; `text` has read the tokens before these."""
    logprobs: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    tokenizer = service.tokenizer
    for token, scores in rows:
        logprobs["tokens"].append(token_name(tokenizer, token))
        logprobs["text_offset"].append(text.num_sent)
        text.push([token])
        if scores is None:
            logprobs["token_logprobs"].append(None)
            logprobs["top_logprobs"].append(None)
            continue
        logprobs["token_logprobs"].append(max(scores[token].logprob, LEAST_LOGPROB))
        likeliest = sorted(scores.items(), key=lambda item: item[1].rank)
        logprobs["top_logprobs"].append(
            {
                token_name(tokenizer, other): max(score.logprob, LEAST_LOGPROB)
                for other, score in likeliest
                if score.rank <= most or other == token
            }
        )
    return logprobs


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; its bytes where they are no whole characters."""
    text = tokenizer.text_of(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.bytes_of(token))


def _prompt_tokens(begun: Sequence[ResponseStream]) -> int:
    return sum(len(answers.prompt_token_ids) for answers in begun)
