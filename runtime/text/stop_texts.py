"""Whether a request's newest text contains one of the texts it stops at."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from llmpq.runtime.request import Request
from llmpq.runtime.text.answer_text import first_stop, settled_length
from llmpq.runtime.text.tokenizer import Tokenizer

_BYTES_PER_CHARACTER = 4
"""A byte-level token may be a quarter of a character."""


class StopTexts:
    """Looks at the last tokens of a request; the tokenizer is read when first needed."""

    def __init__(self, model_dir: str | Path) -> None:
        self._model_dir = model_dir

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._model_dir)

    def __call__(self, request: Request) -> bool:
        """Return whether the newest token completed a stop text."""
        longest = max(len(text) for text in request.stop_texts)
        tail = request.output[-_BYTES_PER_CHARACTER * (longest + 1) :]
        behind = 0
        if request.min_new:  # then there may be stop texts that did not count
            behind = settled_length(self._tokenizer.decode(tail[:-1]))
        return first_stop(self._tokenizer.decode(tail), request.stop_texts, behind) is not None
