"""Which reader an answer gets: by what was asked for, the model's template and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmpq.runtime.serve.parsers.harmony import HARMONY, HarmonyReader, is_harmony
from llmpq.runtime.serve.parsers.marked import MarkedReader
from llmpq.runtime.serve.parsers.parts import Delta, Parts
from llmpq.runtime.serve.parsers.tool_form import ToolForm
from llmpq.runtime.serve.parsers.tool_forms import tool_form
from llmpq.runtime.text.thinking import MARKS, ThinkingMarks, thinking_marks


class Reader(Protocol):
    """Takes an answer apart, piece by piece or whole."""

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> list[Delta]:
        """Take a piece of text; return what is certain by it."""


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
