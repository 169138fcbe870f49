"""The deltas of an answer as it is parsed: thoughts, text, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from llmpq.runtime.serve.parsers.tool_form import Call

Delta = dict[str, Any]
"""One of `content`, `reasoning_content` and `tool_calls`, as in OpenAI's and vLLM's streams."""


class Parts:
    """Collects what a reader finds, and trims it.

    Blanks around a thought, between calls and before the first thought are left out.
    """

    def __init__(
        self,
        *,
        separate: bool = True,
        with_calls: bool = True,
        one_call: bool = False,
        short_ids: bool = False,
    ) -> None:
        """`separate`: thoughts leave apart from the text, else within it.

        `with_calls`: whether tools may be called; `one_call`: calls after the first are dropped;
        `short_ids`: ids of nine letters and digits, as Mistral's templates want them.
        """
        self._separate, self._with_calls = separate, with_calls
        self._one_call, self._short_ids = one_call, short_ids
        self._deltas: list[Delta] = []
        self._blank = ""
        """Blanks that leave if more of the same comes behind them."""
        self._begun = ""
        """What the last delta was; empty before the first."""
        self._fresh = False
        """Whether the thought that is open has only blanks so far."""
        self._num_calls = 0
        self._has_thoughts = False

    @property
    def separate(self) -> bool:
        """Whether thoughts leave apart from the text."""
        return self._separate

    def take(self, *, ended: bool = False) -> list[Delta]:
        """Return what is new; `ended`: the answer is."""
        if ended and self._blank and self._begun in ("", "content"):
            self._deltas.append({"content": self._blank})
        deltas, self._deltas = self._deltas, []
        return deltas

    def thought(self, text: str) -> None:
        """Take a piece of a thought."""
        if not self._separate:
            self.content(text)
            return
        if self._begun != "thought":
            self._begun = "thought"
            self._blank = ""
            self._fresh = True
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            if self._has_thoughts:
                text = f"\n{text}"  # another thought, behind a call
            self._fresh = False
        shown = self._without_blank_end(text)
        if shown:
            self._has_thoughts = True
            self._deltas.append({"reasoning_content": shown})

    def content(self, text: str) -> None:
        """Take a piece of text."""
        if self._begun in ("thought", "call"):
            text, self._blank = text.lstrip(), ""
            if not text:
                return
        if not self._begun and self._separate:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
        if text:
            self._begun = "content"
            self._deltas.append({"content": text})

    def calls(self, calls: Iterable[Call]) -> bool:
        """Take calls; return whether there were any, and tools may be called."""
        found = list(calls)
        if not found or not self._with_calls:
            return False
        self._begun, self._blank = "call", ""
        for call in found:
            if self._one_call and self._num_calls:
                break
            new = uuid.uuid4().hex
            shown = {
                "index": self._num_calls,
                "id": call.id or (new[:9] if self._short_ids else f"call_{new[:24]}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            self._num_calls += 1
            self._deltas.append({"tool_calls": [shown]})
        return True

    def _without_blank_end(self, text: str) -> str:
        """Return what was held back and a text, without the blanks at its end, which are held."""
        whole = self._blank + text
        shown = whole.rstrip()
        self._blank = whole[len(shown) :]
        return shown


def overlap(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end may be the beginning of one of some marks."""
    longest = max(map(len, marks), default=1) - 1
    return next(
        (
            k
            for k in range(min(longest, len(text)), 0, -1)
            if any(len(mark) > k and mark.startswith(text[-k:]) for mark in marks)
        ),
        0,
    )
