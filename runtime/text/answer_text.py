"""From an answer's tokens to its text: whole, or piece by piece as the tokens come.

Both give the same text: the decoded tokens behind the prompt, without the token that ended them, up
to the first stop text. A piece is held back while it may be the beginning of a stop text, or half a
character.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_CONTEXT = 8
"""Tokens decoded before those that are new: how a token is spelled depends on the one before it."""
_WINDOW = 16
"""Tokens decoded again and again; text before them is settled."""
_HALF = "\ufffd"
"""What decoders write for a character whose other bytes are still to come."""


class Decoder(Protocol):
    """What this needs of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


def answer_text(
    decoder: Decoder,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    stop_ids: Collection[int] = (),
    stop_texts: Sequence[str] = (),
) -> str:
    """Return the text of a finished answer."""
    shown = tokens[:-1] if tokens and tokens[-1] in stop_ids else tokens
    return before_stop(_text_behind(decoder, prompt[-_CONTEXT:], shown), stop_texts)


def before_stop(text: str, stop_texts: Sequence[str]) -> str:
    """Return the text before the first stop text, all of it if it has none."""
    found = first_stop(text, stop_texts)
    return text if found is None else text[: found[0]]


def first_stop(text: str, stop_texts: Sequence[str], behind: int = 0) -> tuple[int, str] | None:
    """Return the first stop text that ends behind a place, and where it begins."""
    found = [
        (at, stop)
        for stop in stop_texts
        if (at := text.find(stop, max(0, behind - len(stop) + 1))) >= 0
    ]
    return min(found, default=None)


def settled_length(text: str) -> int:
    """Return the characters of a text that no further token changes."""
    return len(text.rstrip(_HALF))


def _text_behind(
    decoder: Decoder, context: Sequence[int], tokens: Sequence[int], before: str | None = None
) -> str:
    """Return the text of tokens as it is behind others; `before`: theirs, where it is known.

    Some tokenizers drop a leading space at the start of what they decode.
    """
    before = decoder.decode(context) if before is None else before
    whole = decoder.decode([*context, *tokens])
    return whole[len(before) :] if whole.startswith(before) else decoder.decode(tokens)


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
    ) -> None:
        """`min_tokens`: stop texts that end within so many do not count; `with_stop`: kept."""
        self._decoder, self._stop_ids, self._stop_texts = decoder, stop_ids, stop_texts
        self._uncounted, self._with_stop = min_tokens, with_stop
        self._behind = 0
        """Characters within which a stop text must not end."""
        self.stopped_at: str | None = None
        """The stop text that ended the answer."""
        self._context = list(prompt[-_CONTEXT:])
        self._before = decoder.decode(self._context)
        self._tokens: list[int] = []
        """Those whose text is not settled."""
        self._settled = ""
        self._told = 0
        """Characters handed out."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text that is certain by them."""
        free = min(len(tokens), self._uncounted)
        if free:
            self._uncounted -= free
            self._tokens += tokens[:free]
            self._behind = settled_length(self._whole())
        self._tokens += tokens[free:]
        text = self._text()
        certain = text[: len(text) - _held_back(text, self._stop_texts)]
        if text.endswith(_HALF):
            certain = certain.rstrip(_HALF)
        elif len(self._tokens) > _WINDOW and not (
            self.stopped_at or self._tokens[-1] in self._stop_ids
        ):
            self._settle(text)
        return self._hand_out(certain)

    def finish(self) -> str:
        """Return the rest of the text once no token will come."""
        return self._hand_out(self._text())

    def _text(self) -> str:
        text = self._whole()
        found = first_stop(text, self._stop_texts, self._behind)
        if found is None:
            return text
        at, self.stopped_at = found
        return text[: at + (len(self.stopped_at) if self._with_stop else 0)]

    def _whole(self) -> str:
        """Return the text of all tokens but the one that ended them."""
        tokens = self._tokens
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return self._settled + _text_behind(self._decoder, self._context, shown, self._before)

    def _hand_out(self, text: str) -> str:
        new, self._told = text[self._told :], max(self._told, len(text))
        return new

    def _settle(self, text: str) -> None:
        """Keep the text so far instead of tokens, but for the last few as context."""
        self._settled = text
        self._context, self._tokens = self._tokens[-_CONTEXT:], []
        self._before = self._decoder.decode(self._context)


def _held_back(text: str, stop_texts: Sequence[str]) -> int:
    """Return how many characters at the end may be the beginning of a stop text."""
    longest = 0
    for stop in stop_texts:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
