"""Harmony, gpt-oss's form: messages in channels, each with a head.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}
    <|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The marks are special tokens, so that a text's decoder must show them. `<|call|>` and `<|return|>`
end an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmpq.runtime.serve.parsers.parts import Delta, Parts, overlap
from llmpq.runtime.serve.parsers.tool_form import Call, json_of

HARMONY = "harmony"
_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADS = ("<|channel|>", "<|start|>", _BODY)
_CALLED = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def is_harmony(template: str) -> bool:
    """Return whether a chat template writes channels."""
    return "<|channel|>" in template and _BODY in template


class HarmonyReader:
    """Reads one answer, piece by piece or whole; the same methods as `MarkedReader`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._held = ""
        self._head: str | None = None
        """The head of the message that is open, None between messages."""

    @property
    def _thinks(self) -> bool:
        """Whether the answer so far ends within a thought."""
        return self._head is not None and _channel(self._head) == "analysis"

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Delta]:
        """Take a piece of text; return what is certain by it. `cut`: ended by the token limit."""
        self._held += text
        while self._held:
            left = len(self._held)
            if self._head is None:
                self._open(ended)
            else:
                self._write(ended, cut)
            if len(self._held) == left:
                break
        return self._parts.take(ended=ended)

    def _open(self, ended: bool) -> None:
        """Take a head, or text that has none."""
        if not any(self._held.startswith(mark) for mark in _HEADS):
            at, _ = _first(self._held, _HEADS)
            if at < 0:
                at = len(self._held) - (0 if ended else overlap(self._held, _HEADS))
            self._parts.content(self._held[:at])
            self._held = self._held[at:]
            return
        at = self._held.find(_BODY)
        if at >= 0:
            self._head, self._held = self._held[:at], self._held[at + len(_BODY) :]
        elif ended:  # a head without a message says nothing
            self._held = ""

    def _write(self, ended: bool, cut: bool) -> None:
        """Take what belongs to the message that is open."""
        assert self._head is not None
        called = _CALLED.search(self._head)
        at, mark = _first(self._held, _ENDS)
        closed = at >= 0
        if called is not None:
            if not closed and not ended:
                return
            text = self._held[: at if closed else len(self._held)]
            # `<|call|>` ends the answer, whose text is without it.
            whole = closed or not cut
            arguments = text.strip() or "{}"
            calls = [Call(called[1], arguments)] if isinstance(json_of(arguments), dict) else []
            if not whole or not self._parts.calls(calls):
                self._parts.content(text if whole else "")
        else:
            if not closed:
                at = len(self._held) - (0 if ended else overlap(self._held, _ENDS))
            text = self._held[:at]
            write = self._parts.thought if self._thinks else self._parts.content
            write(text)
        if closed:
            self._head = None
            at += 0 if mark == "<|start|>" else len(mark)
            self._held = self._held[at:]
        else:
            self._held = "" if called is not None else self._held[len(text) :]


def _channel(head: str) -> str:
    found = re.search(r"<\|channel\|>\s*(\w+)", head)
    return found[1] if found else "final"


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of some marks is, and which; -1 for none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))
