"""Readers of answers: which one an answer gets, by what was asked for, the model's template and its
tokenizer, and the one of thoughts and calls that stand between marks (harmony.py has the other).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmpq.runtime.serve.parsers.harmony import HARMONY, HarmonyReader, is_harmony
from llmpq.runtime.serve.parsers.parts import Delta, Parts, overlap
from llmpq.runtime.serve.parsers.tool_form import EndFinder, Schemas, ToolForm
from llmpq.runtime.serve.parsers.tool_forms import tool_form
from llmpq.runtime.text.thinking import MARKS, ThinkingMarks, thinking_marks


class Reader(Protocol):
    """Takes an answer apart, piece by piece or whole."""

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Delta]:
        """Take a piece of text; return what is certain by it."""


class MarkedReader:
    """Reads an answer whose thoughts and calls stand between marks.

    No call is read inside a thought.
    """

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


@dataclass(frozen=True)
class AnswerForm:
    """How a model writes thoughts and calls."""

    thinking: ThinkingMarks | None = None
    tools: ToolForm | None = None
    harmony: bool = False

    @classmethod
    def of(
        cls,
        template: str,
        has_token: Callable[[str], bool],
        *,
        tool_parser: str = "auto",
        reasoning_parser: str | None = "auto",
    ) -> AnswerForm:
        """Return the form that was asked for, or that a template and a vocabulary show."""
        if HARMONY in (tool_parser, reasoning_parser) or (
            tool_parser == "auto" and reasoning_parser in ("auto", None) and is_harmony(template)
        ):
            return cls(harmony=True)
        # Calls inside a thought are none, whether or not thoughts leave apart.
        thinking = thinking_marks(reasoning_parser or "auto", template, has_token)
        return cls(thinking, tool_form(tool_parser, template))

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that an answer's text must show, special tokens or not."""
        if self.harmony:
            return ("<|channel|>", "<|message|>")
        thought = (self.thinking.begin, self.thinking.end) if self.thinking else ()
        if self.tools is None:
            return thought
        return (*thought, self.tools.begin, self.tools.end, *sum(self.tools.values, ()))

    def opens_thought(self, prompt_end: str) -> bool:
        """Return whether a prompt that ends like this has opened a thought."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.begin)

    def reader(
        self,
        *,
        separate: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        one_call: bool = False,
        in_thought: bool = False,
    ) -> Reader:
        """Return a reader of one answer.

        `tools`: functions that may be called, none where none may. `separate`: thoughts leave
        apart from the text. `in_thought`: the prompt has opened one.
        """
        form = self.tools if tools else None
        short = form is not None and form.short_ids
        parts = Parts(separate=separate, with_calls=bool(tools), one_call=one_call, short_ids=short)
        if self.harmony:
            return HarmonyReader(parts)
        schemas = {
            tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in tools
        }
        # A model whose template and tokenizer know no marks may write these as plain text.
        unknown = MARKS["think"] if form is not None else None
        return MarkedReader(
            parts,
            thinking=self.thinking or unknown,
            thoughts_are_text=self.thinking is None,
            tools=form,
            schemas=schemas,
            in_thought=in_thought,
        )
