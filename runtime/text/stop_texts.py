"""Whether a request's newest text contains one of the texts it stops at."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

from llmpq.runtime.request import Request
from llmpq.runtime.text.answer_text import TextStream
from llmpq.runtime.text.tokenizer import Tokenizer


class StopTexts:
    """Decodes running requests that have stop texts; the tokenizer is read when first needed."""

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
