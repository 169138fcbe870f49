"""From an answer's tokens to its text: whole, or piece by piece as the tokens come.

Both give the same text: the decoded tokens behind the prompt, without the token that ended them, up
to the first stop text. A piece is held back while it may be the beginning of a stop text, or half a
character. The scheduler asks `StopTexts`, which reads the same text, so that a stop text ends the
request where it ends the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from llmpq.runtime.requests.request import Request
from llmpq.runtime.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens decoded before those that are new: how a token is spelled depends on the one before it."""
_WINDOW = 16
"""Tokens decoded again and again; text before them is settled."""
_HALF = "\ufffd"
"""What decoders write for a character whose other bytes are still to come."""


class Decoder(Protocol):
    """What this needs of a tokenizer."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; of more tokens, a text that begins with it.

        But for half a character at its end, which is U+FFFD until its other bytes are there.
        """
        ...


class TextStream:
    """The text of one answer while its tokens come."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        *,
        stop_ids: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        min_tokens: int = 0,
        with_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`min_tokens`: stop texts that end within so many tokens do not count.

        `with_stop`: the text goes up to the end of its stop text. `skip_special`: special tokens
        have no text.
        """
        self._decode = partial(decoder.decode, skip_special=skip_special)
        self._stop_ids, self._stop_texts = stop_ids, stop_texts
        self._uncounted, self._with_stop = min_tokens, with_stop
        self._searched = 0
        """Characters within which no stop text ends, or none that counts."""
        self.stopped_at: str | None = None
        """The stop text that ended the answer."""
        self._stop_begins = 0
        self._context = list(prompt[-_CONTEXT:])
        self._before = self._decode(self._context)
        self._tokens: list[int] = []
        """Those whose text is not settled."""
        self._settled = ""
        self.num_sent = 0
        """Characters handed out."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text that is certain by them."""
        free = min(len(tokens), self._uncounted)
        if free:
            self._uncounted -= free
            self._tokens += tokens[:free]
            self._searched = len(self._whole().rstrip(_HALF))
        self._tokens += tokens[free:]
        whole = self._whole()
        complete = whole.rstrip(_HALF)
        text = self._before_stop(complete)
        if self.stopped_at is None:
            text = text[: len(text) - _held_back(text, self._stop_texts)]
            ended = bool(self._tokens) and self._tokens[-1] in self._stop_ids
            if len(self._tokens) > _WINDOW and not ended and whole == complete:
                self._settle(whole)
        return self._hand_out(text)

    def finish(self) -> str:
        """Return the rest of the text once no token will come."""
        return self._hand_out(self._before_stop(self._whole()))

    def _before_stop(self, text: str) -> str:
        """Return a text up to its first stop text, all of it if it has none."""
        if self.stopped_at is None:
            found = _first_stop(text, self._stop_texts, self._searched)
            if found is None:
                self._searched = max(self._searched, len(text))
                return text
            self._stop_begins, self.stopped_at = found
        kept = len(self.stopped_at) if self._with_stop else 0
        return text[: self._stop_begins + kept]

    def _whole(self) -> str:
        """Return the text of all tokens but the one that ended them, as it is behind the context.

        Some tokenizers drop a leading space at the start of what they decode.
        """
        tokens = self._tokens
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        whole = self._decode([*self._context, *shown])
        if whole.startswith(self._before):
            return self._settled + whole[len(self._before) :]
        return self._settled + self._decode(shown)

    def _hand_out(self, text: str) -> str:
        new, self.num_sent = text[self.num_sent :], max(self.num_sent, len(text))
        return new

    def _settle(self, text: str) -> None:
        """Keep the text so far instead of tokens, but for the last few as context."""
        if text == self._settled:  # of special tokens, which have no text and are no context
            self._tokens = []
            return
        context = self._tokens[-_CONTEXT:]
        before = self._decode(context)
        if not before:
            context = self._tokens
            before = self._decode(context)
        self._settled = text
        self._context = context
        self._before = before
        self._tokens = []


class StopTexts:
    """Whether a request's newest token completed one of its stop texts: the scheduler asks.

    Decodes running requests that have stop texts; the tokenizer is read when first needed.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self._model_dir = model_dir
        self._streams: WeakKeyDictionary[Request, tuple[TextStream, int]] = WeakKeyDictionary()
        """Of each request: its text, and how many of its tokens that has."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._model_dir)

    def __call__(self, request: Request) -> bool:
        """Return whether the newest token completed a stop text."""
        stream, num_pushed = self._streams.get(request) or (self._begun(request), 0)
        stream.push(request.output[num_pushed:])
        self._streams[request] = stream, len(request.output)
        return stream.stopped_at is not None

    def _begun(self, request: Request) -> TextStream:
        return TextStream(
            self._tokenizer,
            request.prompt,
            stop_ids=request.stop_ids,
            stop_texts=request.stop_texts,
            min_tokens=request.min_new,
            skip_special=not self._tokenizer.names_special(request.stop_texts),
        )


def _first_stop(text: str, stop_texts: Sequence[str], behind: int) -> tuple[int, str] | None:
    """Return where the first stop text begins that ends behind so many characters, and which."""
    found = [
        (at, stop)
        for stop in stop_texts
        if (at := text.find(stop, max(0, behind - len(stop) + 1))) >= 0
    ]
    return min(found, default=None)


def _held_back(text: str, stop_texts: Sequence[str]) -> int:
    """Return how many characters at the end may be the beginning of a stop text."""
    longest = 0
    for stop in stop_texts:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
