"""Reads an answer whose thoughts and calls stand between marks."""

from __future__ import annotations

from llmpq.runtime.serve.parsers.parts import Delta, Parts, overlap
from llmpq.runtime.serve.parsers.tool_form import EndFinder, Schemas, ToolForm
from llmpq.runtime.text.thinking import ThinkingMarks


class MarkedReader:
    """Reads one answer, piece by piece or whole. No call is read inside a thought."""

    def __init__(
        self,
        parts: Parts,
        *,
        thinking: ThinkingMarks | None = None,
        thoughts_are_text: bool = False,
        tools: ToolForm | None = None,
        schemas: Schemas | None = None,
        in_thought: bool = False,
    ) -> None:
        """`in_thought`: the prompt has opened one; `thoughts_are_text`: they leave as they are."""
        self._parts = parts
        self._whole_thoughts = thoughts_are_text or not parts.separate
        self._thinking = thinking
        self._tools = tools
        self._schemas: Schemas = schemas or {}
        self._held = ""
        """Text that may be a mark or a call, or the beginning of one."""
        self._thinks = in_thought and thinking is not None
        self._bare = tools is not None
        """Whether the answer so far, behind thoughts, may be calls without marks."""
        self._finder: EndFinder | None = None
        """Of the calls that are open."""
        marks = [thinking.begin] if thinking else []
        self._marks = [*marks, *([tools.begin] if tools and tools.begin else [])]

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Delta]:
        """Take a piece of text; return what is certain by it. `cut`: ended by the token limit."""
        self._held += text
        while self._held:
            left = len(self._held)
            if self._thinks:
                self._think(ended)
            else:
                self._say(ended, cut)
            if len(self._held) == left:
                break
        return self._parts.take(ended=ended)

    def _think(self, ended: bool) -> None:
        """Take what belongs to the thought that is open."""
        assert self._thinking is not None
        end = self._thinking.end
        at = self._held.find(end)
        if at < 0:
            at = len(self._held) - (0 if ended else overlap(self._held, [end]))
            self._thought(self._held[:at])
            self._held = self._held[at:]
            return
        self._thought(self._held[:at])
        if self._whole_thoughts:
            self._parts.content(end)
        self._held = self._held[at + len(end) :]
        self._thinks, self._bare = False, self._tools is not None

    def _thought(self, text: str) -> None:
        (self._parts.content if self._whole_thoughts else self._parts.thought)(text)

    def _say(self, ended: bool, cut: bool) -> None:
        """Take text up to a mark, or what a mark opens."""
        if self._tools is not None and self._bare:
            self._bare = self._tools.may_be_bare(self._held, self._schemas)
            if self._bare and not self._opens_thought(self._held.lstrip()):
                if not ended:
                    return
                if self._parts.calls(self._tools.read(self._held.strip(), self._schemas, cut=cut)):
                    self._held = ""
                    return
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(-1, ""))
        if not mark:
            at = len(self._held) - (0 if ended else overlap(self._held, self._marks))
        if at > 0:
            self._parts.content(self._held[:at])
            self._held = self._held[at:]
        elif self._thinking is not None and mark == self._thinking.begin:
            self._thinks = True
            self._held = self._held[len(mark) :]
            if self._whole_thoughts:
                self._parts.content(mark)
        elif mark:
            self._call(ended, cut)

    def _opens_thought(self, text: str) -> bool:
        return self._thinking is not None and text.startswith(self._thinking.begin)

    def _call(self, ended: bool, cut: bool) -> None:
        """Take the calls behind a mark, once they are whole; what is none is text."""
        tools = self._tools
        assert tools is not None
        self._finder = self._finder or EndFinder(tools)
        rest = self._held[len(tools.begin) :]
        at = self._finder.find(rest)
        if at < 0 and not ended:
            return
        self._finder = None
        if at < 0:
            if self._parts.calls(tools.read(rest.strip(), self._schemas, cut=cut)):
                self._held = ""
                return
            at = rest.find(tools.end or tools.begin)  # a value that is not closed hides no end
        closed = at >= 0
        inside = rest[:at] if closed else rest
        shown = tools.begin + inside + (tools.end if closed else "")
        self._held = rest[at + len(tools.end) :] if closed else ""
        calls = tools.read(inside.strip(), self._schemas) if closed else []
        if not self._parts.calls(calls):
            self._parts.content(shown)
