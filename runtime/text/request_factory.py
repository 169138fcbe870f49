"""RequestFactory: prompts to requests, and tokens back to text; owns the tokenizer."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from llmpq.models.model_spec import ModelSpec
from llmpq.runtime.requests.guides import GrammarCompiler, Newest
from llmpq.runtime.requests.request import Finished, Request, RequestOutputDelta, too_long
from llmpq.runtime.requests.request_output import (
    NO_ROOM,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from llmpq.runtime.requests.sampling_params import SamplingParams, token_list, whole_number
from llmpq.runtime.requests.token_rules import (
    Guide,
    LogitsConstraints,
    LogprobOutput,
    Thought,
    TokenScores,
)
from llmpq.runtime.text.answer_text import TextStream
from llmpq.runtime.text.conversation import Messages
from llmpq.runtime.text.text_threads import QUICK_LENGTH, TextThreads
from llmpq.runtime.text.thinking import template_marks
from llmpq.runtime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids (a list, an array), or `{"prompt": text}` or `{"prompt_token_ids": ids}`.

With both keys the tokens are run, and the text is only shown. Further keys (None: as without):
`cache_salt` (`Request.cache_salt`); `thinking_marks`, what stands before and behind a thought,
() for none; without it the model's template shows them."""
_KEYS = ("prompt", "prompt_token_ids")
_SALT = "cache_salt"
_MARKS = "thinking_marks"


class RequestLimits(Protocol):
    """What an engine has room for."""

    @property
    def max_rows(self) -> int:
        """Requests that may run at once."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        ...

    def check(self, request: Request) -> None:
        """Raise `ValueError` for a request that can never run."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt as tokens and requests, one for each answer."""

    name: str
    prompt: str | None
    """None where tokens were given."""
    tokens: tuple[int, ...]
    requests: tuple[Request, ...]
    """One for each answer."""
    params: SamplingParams

    @property
    def named(self) -> tuple[str, tuple[int, ...]]:
        """The name and the ids of the requests."""
        return self.name, tuple(request.id for request in self.requests)

    @property
    def most_tokens(self) -> int:
        """Tokens that its answers may have together."""
        return sum(request.max_new for request in self.requests)

    def going_on(self, tokens: Sequence[int]) -> PreparedPrompt:
        """Return the prompt with tokens of its one answer; the last of them is computed again.

        Whether an answer ends with a token is decided when the token comes.
        """
        (request,) = self.requests
        return replace(self, requests=(replace(request, output=list(tokens[:-1])),))

    def without_drafts(self) -> PreparedPrompt:
        """Return the prompt to be decoded plainly, whatever the engine's drafter wants."""
        plain = [replace(request, may_draft=False) for request in self.requests]
        return replace(self, requests=tuple(plain))


class RequestFactory:
    """Tokenises and validates prompts, and detokenises their answers, for one model."""

    def __init__(self, directory: Path, spec: ModelSpec, limits: RequestLimits) -> None:
        """`limits` refuse requests that can never run; the tokenizer is read meanwhile."""
        self._spec, self.limits = spec, limits
        self.max_len = min(limits.max_model_len, spec.max_positions) - 1
        """Tokens of a prompt and its answer that are run: all but the answer's last."""
        self._tokenizer: Future[Tokenizer] = _begun(directory, spec)
        self._guides = GrammarCompiler(directory, vocab=spec.vocab, end_ids=spec.eos_token_ids)
        self.wait_for_guide: Callable[[Guide], None] | None = None
        """Called before a request with a new guide is queued, once there is an engine."""
        self._compiled: Newest[None] = Newest()
        self.threads, self.guide_threads = TextThreads(), TextThreads()
        """For texts, and for requests with a guide: a schema may take seconds to compile."""
        self._lock = Lock()
        self._num_requests = 0

    def close(self) -> None:
        """End the threads for texts."""
        self.threads.close()
        self.guide_threads.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `ValueError` where there is none."""
        return self._tokenizer.result()

    def wait_until_read(self) -> None:
        """Wait for the tokenizer, or for why there is none.

        Who imports transformers in another thread meanwhile is left with half a module: it puts
        another in its place at its import's end.
        """
        self._tokenizer.exception()

    def use_limits(self, limits: RequestLimits) -> None:
        """Refuse requests by other limits from now on."""
        self.limits, self.max_len = limits, limits.max_model_len - 1

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self.max_len + 1

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; empty for a model without a tokenizer."""
        if self._tokenizer.exception() is not None:
            return ""
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def conversation(self, messages: Messages, *, whole: bool = True, **how: Any) -> Prompt:
        """Return a conversation as text and tokens, as `Tokenizer.render_chat` writes it.

        `whole`: it is not going to be truncated.
        """
        text = self.tokenizer.render_chat(messages, **how)
        room = self.max_model_len if whole else None
        tokens = self.tokenizer.encode(text, special=False, room=room)
        template = how.get("template") or self.tokenizer.chat_template(tools=bool(how.get("tools")))
        marks = template_marks(template, self.tokenizer.has_token)
        return {"prompt": text, "prompt_token_ids": tokens, _MARKS: marks}

    async def prepare_async(
        self, prompt: Prompt, params: SamplingParams, **more: Any
    ) -> PreparedPrompt:
        """Return what `prepare` does; the event loop goes on meanwhile if that takes long."""
        length = _length(prompt)
        if params.structured_outputs is not None or params.bad_words:
            length = max(length, QUICK_LENGTH + 1)
        threads = self.threads if params.structured_outputs is None else self.guide_threads
        return await threads.run(lambda: self.prepare(prompt, params, **more), length)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        name: str | None = None,
        stream: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PreparedPrompt:
        """Return the requests of a prompt; `ValueError` if they can never run.

        Answers end where the room does, whatever their `max_tokens`. A prompt that is only scored
        generates one token all the same, which is dropped: in the place of its last token, which
        need not be run.
        """
        priority = _priority(priority)
        for called, given in (("request_id", name), ("cache_salt", cache_salt)):
            if not isinstance(given, str | None):
                raise ValueError(f"{called} must be a text, got {given!r:.100}")
        if params.stop_texts:
            self._tokenizer.result()  # or why there is none: where texts are looked for is too late
        room = self.max_model_len if params.truncate_prompt_tokens is None else None
        text, tokens = self._tokens_of(prompt, room)
        tokens = self._truncated(tokens, params)
        stops = self._stop_ids(params)
        run = tokens[:-1] if params.max_tokens == 0 and len(tokens) > 1 else tokens
        room = max(1, self.max_len - len(run) + 1)
        marks = _marks_of(prompt)
        rules = logits_constraints(params, tokens, stops, self._spec, lambda: self.tokenizer, marks)
        if rules is not None and rules.guide is not None:
            self._tokenizer.result()  # or why there is none
            self._guides.check(rules.guide)
            if self.wait_for_guide is not None:
                self._compiled.get(rules.guide, self.wait_for_guide)
        first = Request(
            id=-1,
            prompt=run,
            max_new=room if params.max_tokens is None else min(max(1, params.max_tokens), room),
            stop_ids=stops,
            stop_texts=params.stop_texts,
            rules=rules,
            min_new=params.min_tokens,
            priority=priority,
            cache_salt=_salt_of(prompt, cache_salt),
            timeout_s=params.timeout_s,
            may_draft=rules is None,
            stream=stream,
        )
        if params.max_tokens != 0 and len(tokens) >= self.max_model_len:
            raise too_long(len(tokens), self.max_model_len, max_positions=self._spec.max_positions)
        self.limits.check(first)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        with self._lock:
            number = self._num_requests
            self._num_requests += params.n
        requests = tuple(
            replace(first, id=number + j, sampling=params.sampler_config(seed + j))
            for j in range(params.n)
        )
        shown = str(requests[0].id) if name is None else name
        return PreparedPrompt(
            name=shown, prompt=text, tokens=tokens, requests=requests, params=params
        )

    def has_room(self, prompt: PreparedPrompt) -> bool:
        """Whether a prompt that another engine's factory has prepared can run on this engine."""
        try:
            for request in prompt.requests:
                self.limits.check(request)
        except ValueError:
            return False
        return True

    def stream_of(self, ask: PreparedPrompt) -> TextStream:
        """Return what an answer's text is made with, whole or while its tokens come."""
        request = ask.requests[0]
        return TextStream(
            self,
            request.prompt,
            stop_ids=request.stop_ids,
            stop_texts=request.stop_texts,
            min_tokens=request.min_new,
            with_stop=ask.params.include_stop_str_in_output,
            skip_special=ask.params.skip_special_tokens,
        )

    def output_of(
        self, prompt: PreparedPrompt, finished: Mapping[int, RequestOutputDelta]
    ) -> RequestOutput:
        """Return the answers to a prompt whose requests have all ended, by their ids."""
        ends = [finished[request.id] for request in prompt.requests]
        noted = ends[0].noted
        scores = None
        if prompt.params.prompt_logprobs is not None and (noted or len(prompt.tokens) == 1):
            scores = [None, *self.logprobs(noted.prompt if noted else ())]
        return RequestOutput(
            request_id=prompt.name,
            prompt=prompt.prompt,
            prompt_token_ids=list(prompt.tokens),
            outputs=[
                self.output(prompt, index, end.finished, end.noted or LogprobOutput())
                for index, end in enumerate(ends)
                if end.finished is not None
            ],
            prompt_logprobs=scores,
            failure=next((str(end.error) for end in ends if end.error is not None), None),
            num_cached_tokens=ends[0].finished.num_prefix_hits if ends[0].finished else 0,
        )

    def output(
        self, ask: PreparedPrompt, index: int, finished: Finished, noted: LogprobOutput
    ) -> CompletionOutput:
        """Return one answer as users get it."""
        scored_only = ask.params.max_tokens == 0
        tokens = [] if scored_only else finished.tokens
        text = self.stream_of(ask)
        pieces = text.push(tokens) + text.finish()
        wanted = ask.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=pieces,
            token_ids=tokens,
            finish_reason=self.finish_reason(ask, finished),
            first_token_s=finished.first_token_s,
            total_s=finished.total_s,
            queue_s=finished.queue_s,
            num_preemptions=finished.num_preemptions,
            num_before=len(ask.requests[index].output),
            logprobs=self.logprobs(noted.output[: len(tokens)]) if wanted else None,
            stop_reason=self.stop_reason(ask, finished, text),
        )

    def finish_reason(self, ask: PreparedPrompt, finished: Finished) -> str:
        """Return why an answer ended; one of no tokens is as long as it was to be."""
        return "length" if ask.params.max_tokens == 0 else finished.finish_reason

    def stop_reason(
        self, ask: PreparedPrompt, finished: Finished, text: TextStream
    ) -> int | str | None:
        """Return the stop token or text that ended an answer, what failed, or `NO_ROOM`."""
        if finished.failure is not None:
            return finished.failure
        reason, most = self.finish_reason(ask, finished), ask.params.max_tokens
        if reason == "length" and (most is None or len(finished.tokens) < most):
            return NO_ROOM
        if reason != "stop":
            return None
        last = finished.tokens[-1]
        if last in (ask.params.stop_token_ids or ()):
            return last
        return text.stopped_at

    def logprobs(self, scores: Sequence[TokenScores]) -> list[dict[int, Logprob]]:
        """Return scores as users get them, the chosen token's first."""
        rows = []
        for scored in scores:
            row: dict[int, Logprob] = {}
            for score in scored:
                shown = self.text_of(score.token)
                own = Logprob(logprob=score.logprob, rank=score.rank, decoded_token=shown)
                row.setdefault(score.token, own)
            rows.append(row)
        return rows

    def text_of(self, token: int) -> str:
        """Return the text of one token, special ones too; empty without a tokenizer."""
        if self._tokenizer.exception() is not None:
            return ""
        return self.tokenizer.text_of(token)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset(params.stop_token_ids or ())
        if params.ignore_eos:
            return stops
        if params.structured_outputs is not None and not self._spec.eos_token_ids:
            raise ValueError(
                "structured_outputs need an end-of-text token and config.json names none"
            )
        return stops | frozenset(self._spec.eos_token_ids)

    def _truncated(self, tokens: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        """Return the last tokens of a prompt, as many as were asked for."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return tokens
        if keep == -1:
            keep = max(1, self.max_len - max(1, params.max_tokens or 1) + 1)
        return tokens[-keep:]

    def _tokens_of(self, prompt: Prompt, room: int | None) -> tuple[str | None, tuple[int, ...]]:
        """Return a prompt's text, if it has one, and its tokens."""
        text = None
        if isinstance(prompt, Mapping):
            given = {key for key, value in prompt.items() if value is not None}
            if not given & {*_KEYS} or given - {*_KEYS, _MARKS, _SALT}:
                raise ValueError(
                    f"a prompt has one of {', '.join(_KEYS)} (and {_SALT}), got "
                    f"{sorted(map(str, given))}{_hint(prompt)}"
                )
            text = prompt.get("prompt")
            if not isinstance(text, str | None):
                raise ValueError(f"'prompt' must be a text, got {text!r:.100}")
            prompt = next(prompt[key] for key in reversed(_KEYS) if key in given)
            if _KEYS[1] in given and isinstance(prompt, str):
                raise ValueError(
                    f"'prompt_token_ids' must be a list of token ids, got {prompt!r:.100}; a text "
                    "is 'prompt'"
                )
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt, room=room) or self._start())
        tokens = token_list(prompt)
        if tokens is None:
            raise ValueError(
                f"a prompt is a text or a list of token ids, got {prompt!r:.100}{_hint(prompt)}"
            )
        wrong = [token for token in tokens if not 0 <= token < self._spec.vocab]
        if wrong:
            raise ValueError(f"token {wrong[0]} is not in the vocabulary of {self._spec.vocab}")
        return text, tuple(tokens)

    def _start(self) -> list[int]:
        """Return what a text of nothing is run as: the token that begins a text, if there is one.

        Of token ids nothing is refused: they are run as they are.
        """
        start = self.tokenizer.start_token_id
        return [] if start is None else [start]


def _priority(given: object) -> int:
    """Return a priority as `int`; of another type it would end the engine, which orders by it."""
    rank = whole_number(given)
    if rank is None:
        raise ValueError(f"priority must be a whole number, got {given!r:.100}")
    return rank


def _marks_of(prompt: Prompt) -> tuple[str, ...] | None:
    """Return the marks of thoughts that a prompt comes with; None: the model's are meant."""
    if not isinstance(prompt, Mapping) or _MARKS not in prompt:
        return None
    marks = prompt[_MARKS]
    texts = isinstance(marks, (list, tuple)) and all(mark and type(mark) is str for mark in marks)
    if not texts or len(marks) not in (0, 2):
        raise ValueError(f"'{_MARKS}' must be two texts or none, got {marks!r:.100}")
    return tuple(marks)


def _salt_of(prompt: Prompt, otherwise: str | None) -> str | None:
    """Return the salt that a prompt comes with."""
    salt = prompt.get(_SALT) if isinstance(prompt, Mapping) else None
    if not isinstance(salt, str | None):
        raise ValueError(f"a prompt's '{_SALT}' must be a text, got {salt!r:.100}")
    return otherwise if salt is None else salt


def _hint(prompt: object) -> str:
    """Return what to do with what is no prompt but like one."""
    if isinstance(prompt, (bytes, bytearray)):
        return "; decode it first"
    first = next(iter(prompt), None) if isinstance(prompt, Sequence) else prompt
    if isinstance(first, Mapping) and "role" in first:
        return (
            "; messages go to LLM.chat, or as LLM.tokenizer.encode_chat(messages) to what takes "
            "prompts"
        )
    return ""


def _length(prompt: Prompt) -> int:
    """Return the characters or token ids of a prompt, whatever it is."""
    if isinstance(prompt, Mapping):
        return sum(map(_length, prompt.values()))
    return len(prompt) if isinstance(prompt, Sequence) else 0


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list; a single one may be a text, a mapping or token ids."""
    single = isinstance(prompts, (str, bytes, bytearray, Mapping))
    if single or not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, (set, frozenset)):
        raise ValueError("a set of prompts has no order that answers could have: give a list")
    if hasattr(prompts, "columns") or (
        getattr(prompts, "ndim", 1) > 1 and not hasattr(prompts, "tolist")
    ):
        raise ValueError(
            "a table is no list of prompts: give one of its columns, such as table['prompt']"
        )
    several = list(prompts)
    tokens = token_list(several)
    return [tokens] if tokens else several  # type: ignore[return-value]


def _begun(directory: Path, spec: ModelSpec) -> Future[Tokenizer]:
    """Read the tokenizer while the stages load: importing transformers takes seconds."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(Tokenizer, directory, max_positions=spec.max_positions)
    pool.shutdown(wait=False)
    return future


Named = tuple[str, tuple[int, ...]]
"""A prompt's name and the ids of its requests."""


class RequestNames:
    """Names of prompts under way and the ids of their requests; callers may be any threads."""

    def __init__(self) -> None:
        self._ids: dict[str, tuple[int, ...]] = {}
        self._lock = threading.RLock()  # a stream that is freed in here ends its own name

    def begin(self, prompts: Sequence[Named]) -> None:
        """Take the names of prompts, all or none; `ValueError` for one that is under way."""
        names = [name for name, _ in prompts]
        with self._lock:
            for place, name in enumerate(names):
                if name in self._ids:
                    raise ValueError(f"request_id '{name}' is under way; take another one")
                if name in names[:place]:
                    raise ValueError(
                        f"request_id '{name}' is that of prompts {names.index(name)} and {place}; "
                        "prepare each with a request_id of its own, or with none"
                    )
            self._ids |= dict(prompts)

    def end(self, prompt: Named) -> None:
        """Give up a prompt's name; again, or once another has taken it, does nothing."""
        with self._lock:
            name, ids = prompt
            if self._ids.get(name) == ids:
                del self._ids[name]

    def ids_of(self, name: str) -> tuple[int, ...]:
        """Return the ids of a prompt's requests, none if it is not under way."""
        return self._ids.get(name, ())

    def under_way(self) -> list[str]:
        """Return all names, the oldest first."""
        with self._lock:
            return list(self._ids)


def logits_constraints(
    params: SamplingParams,
    prompt: tuple[int, ...],
    stop_ids: frozenset[int],
    spec: ModelSpec,
    tokenizer: Callable[[], Tokenizer],
    marks: tuple[str, ...] | None = None,
) -> LogitsConstraints | None:
    """Return a request's constraints, None without any; `ValueError` for unknown tokens.

    `marks`: those of thoughts, () for none, None for the ones that the model's template shows.
    """
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
        end_ids=tuple(sorted({*stop_ids, *spec.eos_token_ids})) if params.min_tokens else (),
        bad_tokens=tuple(
            run for word in params.bad_words or () for run in _spellings(word, tokenizer())
        ),
        allowed_tokens=allowed,
        thinking=_thought(params, prompt, tokenizer, marks),
        guide=None if guided is None else guided.guide(),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt=prompt if needs_prompt else (),
    )
    return None if rules == LogitsConstraints() else rules


def _thought(
    params: SamplingParams,
    prompt: tuple[int, ...],
    tokenizer: Callable[[], Tokenizer],
    marks: tuple[str, ...] | None,
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
    if marks is None:
        marks = template_marks(known.chat_template(), known.has_token)
    if not marks:
        if budget is None:
            return None
        raise ValueError(
            "thinking_token_budget needs a model that thinks between marks such as <think>, and "
            "this one's chat template and tokenizer have none; leave it out"
        )
    begin, end = (known.encode(mark, special=False) for mark in marks)
    if len(end) != 1:
        if budget is None:
            return None
        raise ValueError(
            f"thinking_token_budget needs a mark that is one token, and {marks[1]!r} is "
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
