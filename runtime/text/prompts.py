"""Text to requests, and what came of them to text: the tokenizer's only way into the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmpq.model_spec import ModelSpec
from llmpq.runtime.request import Request
from llmpq.runtime.request_output import CompletionOutput
from llmpq.runtime.sampling_params import SamplingParams
from llmpq.runtime.text.answer_text import TextStream, answer_text
from llmpq.runtime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: `role` and `content` of each message."""
_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt on its way: the requests that answer it."""

    name: str
    prompt: str | None
    """None where tokens were given."""
    tokens: tuple[int, ...]
    requests: tuple[Request, ...]
    """One for each answer."""


class Prompts:
    """Reads prompts for one model and writes their answers."""

    def __init__(
        self, directory: Path, spec: ModelSpec, *, max_len: int, check: Callable[[Request], None]
    ) -> None:
        """`check` refuses requests that can never run; the tokenizer is read meanwhile."""
        self._spec, self._max_len, self._check = spec, max_len, check
        self._tokenizer: Future[Tokenizer] = _begun(directory)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `ValueError` where there is none."""
        return self._tokenizer.result()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; empty for a model without a tokenizer."""
        if self._tokenizer.exception() is not None:
            return ""
        return self.tokenizer.decode(tokens)

    def conversation(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation by the model's chat template."""
        return self.tokenizer.encode_chat(messages)

    def ask(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        name: str | None = None,
        stream: bool = False,
    ) -> Ask:
        """Return the requests of a prompt; `ValueError` if they can never run."""
        text, tokens = self._tokens_of(prompt)
        stops = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= frozenset(self._spec.eos_token_ids)
        room = max(1, self._max_len - len(tokens) + 1)
        first = Request(
            id=-1,
            prompt=tokens,
            max_new=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=stops,
            stop_texts=params.stop_texts,
            stream=stream,
        )
        self._check(first)
        seed = random.getrandbits(62) if params.seed is None else params.seed
        requests = tuple(
            replace(first, id=self._num_requests + j, sampling=params.choice(seed + j))
            for j in range(params.n)
        )
        self._num_requests += params.n
        shown = str(requests[0].id) if name is None else name
        return Ask(name=shown, prompt=text, tokens=tokens, requests=requests)

    def text_of(self, request: Request, tokens: Sequence[int]) -> str:
        """Return the text of a finished request."""
        return answer_text(
            self,
            request.prompt,
            tokens,
            stop_ids=request.stop_ids,
            stop_texts=request.stop_texts,
        )

    def stream_of(self, request: Request) -> TextStream:
        """Return the text of a request while its tokens come."""
        return TextStream(
            self, request.prompt, stop_ids=request.stop_ids, stop_texts=request.stop_texts
        )

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """Return a prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, Mapping):
            known = [key for key in _KEYS if key in prompt]
            if len(known) != 1 or len(prompt) != 1:
                raise ValueError(f"a prompt has one of {', '.join(_KEYS)}, got {sorted(prompt)}")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
            raise ValueError(f"a prompt is a text or a list of token ids, got {prompt!r:.100}")
        tokens = tuple(int(token) for token in prompt)
        wrong = [token for token in tokens if not 0 <= token < self._spec.vocab]
        if wrong:
            raise ValueError(f"token {wrong[0]} is not in the vocabulary of {self._spec.vocab}")
        return None, tokens


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list; one alone may be a text, a mapping or token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several = list(prompts)
    if several and all(type(token) is int for token in several):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def completion(index: int, text: str, finished: Any) -> CompletionOutput:
    """Return one answer as users get it."""
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=finished.tokens,
        finish_reason=finished.finish_reason,
        first_token_s=finished.first_token_s,
        total_s=finished.total_s,
    )


def _begun(directory: Path) -> Future[Tokenizer]:
    """Read the tokenizer while the stages load: importing transformers takes seconds."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(Tokenizer, directory)
    pool.shutdown(wait=False)
    return future
