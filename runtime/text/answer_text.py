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
_WINDOW = 64
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
    for stop in stop_texts:
        text = text.split(stop, 1)[0]
    return text


def _text_behind(decoder: Decoder, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of tokens as it is behind others.

    Some tokenizers drop a leading space at the start of what they decode.
    """
    before = decoder.decode(context)
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
    ) -> None:
        self._decoder, self._stop_ids, self._stop_texts = decoder, stop_ids, stop_texts
        self._context = list(prompt[-_CONTEXT:])
        self._tokens: list[int] = []
        """Those whose text is not settled."""
        self._settled = ""
        self._told = 0
        """Characters handed out."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text that is certain by them."""
        self._tokens += tokens
        text = self._text()
        certain = text[: len(text) - _held_back(text, self._stop_texts)]
        if text.endswith(_HALF):
            certain = certain.rstrip(_HALF)
        elif len(self._tokens) > _WINDOW and self._tokens[-1] not in self._stop_ids:
            self._settle()
        return self._hand_out(certain)

    def finish(self) -> str:
        """Return the rest of the text once no token will come."""
        return self._hand_out(self._text())

    def _text(self) -> str:
        tokens = self._tokens
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        text = self._settled + _text_behind(self._decoder, self._context, shown)
        return before_stop(text, self._stop_texts)

    def _hand_out(self, text: str) -> str:
        new, self._told = text[self._told :], max(self._told, len(text))
        return new

    def _settle(self) -> None:
        """Keep text instead of tokens, but for the last few as context."""
        self._settled += _text_behind(self._decoder, self._context, self._tokens)
        self._context, self._tokens = self._tokens[-_CONTEXT:], []


def _held_back(text: str, stop_texts: Sequence[str]) -> int:
    """Return how many characters at the end may be the beginning of a stop text."""
    longest = 0
    for stop in stop_texts:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
