"""The marks between which a model thinks before it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkingMarks:
    """What stands before and behind a thought."""

    name: str
    begin: str
    end: str


_MARKS = (
    ThinkingMarks("think", "<think>", "</think>"),
    ThinkingMarks("mistral", "[THINK]", "[/THINK]"),
    ThinkingMarks("seed_oss", "<seed:think>", "</seed:think>"),
    ThinkingMarks("gemma", "<|channel>thought", "<channel|>"),
    ThinkingMarks("kimi", "\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
MARKS = {marks.name: marks for marks in _MARKS}
ALIASES = {
    "qwen3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "gemma4": "gemma",
    "openai_gptoss": "harmony",
}
"""vLLM's names of the parsers that look for these marks."""


def thinking_marks(
    wanted: str, template: str, has_token: Callable[[str], bool]
) -> ThinkingMarks | None:
    """Return the marks that were asked for, that a template shows, or that the vocabulary has.

    `has_token`: whether a text is one added token of the tokenizer.
    """
    if wanted != "auto":
        return MARKS.get(wanted)
    shown = (marks for marks in _MARKS if marks.begin in template or marks.end in template)
    known = (marks for marks in _MARKS if has_token(marks.end))
    return next(shown, None) or next(known, None)


def template_marks(template: str | None, has_token: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the marks before and behind the thoughts of a template, () where it has none."""
    found = thinking_marks("auto", template or "", has_token)
    return () if found is None else (found.begin, found.end)
