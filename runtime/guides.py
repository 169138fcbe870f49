"""Guided decoding: which tokens may come next, so that a text fits a schema, a regex or a choice.

llguidance decides (a Rust library without dependencies; `benchmarks/guides.py` compares it with
xgrammar). It reads the model's tokenizer; each request has an automaton of its own on the last
stage. JSON is written without free white space, `{"a": 1, "b": 2}`: a small model given the choice
may go on with blanks for ever.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmpq.checkpoints.gguf_file import is_gguf, open_gguf
from llmpq.checkpoints.gguf_tokenizer import tokenizer_of
from llmpq.runtime.token_rules import Guide

if TYPE_CHECKING:
    from torch import Tensor

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAKERS = 4
"""Threads that make automata of requests to come while others are answered."""
_MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that find what may come next, of several answers: it must be there before a GPU's next
step ends (5 ms). Inside a text of bounded length it takes 2 ms for one answer over 128,256 tokens,
0.04 elsewhere: 1.0 to 1.2 ms for 32 answers (median, 8 and 16 cores), one step in ten over 4.6. On
cores that others keep busy more threads take longer: all wait for the one that is woken last."""
_SHARED_OUT = 8
"""Answers from which on threads are woken for it."""
_LONGEST = 1 << 20
"""Characters of a schema, regex or choice."""
_KEPT = 256
"""Guides that are known when they are asked for again."""
_Made = TypeVar("_Made")


class Guides:
    """Makes the automata of one model's requests."""

    def __init__(self, model_dir: str | Path, *, vocab: int, end_ids: Sequence[int]) -> None:
        """Nothing is read before the first guide; `vocab` is that of the logits."""
        self._path, self._vocab, self._end_ids = Path(model_dir), vocab, list(end_ids)
        self._checked: _Newest[None] = _Newest()
        self._begun: _Newest[Future[Any]] = _Newest()
        """Matchers that no answer has moved on."""

    def check(self, guide: Guide) -> None:
        """Raise `ValueError` for a guide that no text can follow or that is not understood."""
        self._checked.get(guide, self._check)

    def _check(self, guide: Guide) -> None:
        if len(guide.text) > _LONGEST:
            raise ValueError(f"a {guide.kind} of {len(guide.text)} characters is too long")
        library = _llguidance()
        try:
            message = library.LLMatcher.validate_grammar(_grammar(guide), self._tokenizer)
        except ValueError as error:  # a schema that is no object
            message = str(error)
        if message and not message.startswith("WARNING"):
            reason = " ".join(message.split())[:200]
            raise ValueError(f"structured_outputs: the {guide.kind} cannot be followed: {reason}")

    def compile(self, guide: Guide) -> Automaton:
        """Return the automaton of one request; it is made meanwhile, beside others.

        Requests often ask for the same: theirs begin as copies (3 us; making one takes 400).
        """
        begun = self._begun.get(guide, self._begin)
        return Automaton(begun, self._end_ids, self._executor, self._beside)

    def _begin(self, guide: Guide) -> Future[Any]:
        make, grammar = partial(_llguidance().LLMatcher, log_level=0), _grammar(guide)
        return self._makers.submit(make, self._tokenizer, grammar)

    @cached_property
    def _makers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_MAKERS, thread_name_prefix="llmpq guides")

    @cached_property
    def _executor(self) -> Any:
        return _llguidance().LLExecutor(_MASK_THREADS)

    @cached_property
    def _beside(self) -> _Beside:
        return _Beside()

    @cached_property
    def _tokenizer(self) -> Any:
        in_gguf = is_gguf(self._path)
        path = self._path if in_gguf else self._path / "tokenizer.json"
        try:
            if in_gguf:
                text = tokenizer_of(open_gguf(path)).backend_tokenizer.to_str()
            else:
                text = path.read_text(encoding="utf-8")
            # Versions before 1.7 take one end only.
            ends = self._end_ids[0] if len(self._end_ids) == 1 else self._end_ids
            return _llguidance().LLTokenizer(text, n_vocab=self._vocab, eos_token=ends)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"'{path}' cannot be used for structured_outputs: {str(error)[:200]}"
            ) from None


class _Newest(Generic[_Made]):
    """What was made of guides, those asked for last; for any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Guide, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, guide: Guide, make: Callable[[Guide], _Made]) -> _Made:
        """Return what was made of a guide, or make it; what `make` raises is not kept."""
        with self._lock:
            if guide in self._kept:
                self._kept.move_to_end(guide)
                return self._kept[guide]
        made = make(guide)
        with self._lock:
            self._kept[guide] = made
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


class _Beside:
    """A thread that waits for Rust code, which needs no Python, while others go on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmpq masks")

    def start(self, find: Callable[[], None]) -> Callable[[], None]:
        """Have the thread call it; return what waits for its end.

        It has begun when this returns: else it would get its turn when the caller waits.
        """
        begun = threading.Event()

        def begin() -> None:
            begun.set()
            find()

        done = self._pool.submit(begin)
        begun.wait()
        return done.result


class Automaton:
    """What one answer may go on with."""

    def __init__(
        self, begun: Future[Any], end_ids: Sequence[int], executor: Any, beside: _Beside
    ) -> None:
        """`begun`: what this one copies.

        `executor`: the threads that look at many answers at once; `beside` waits for them.
        """
        self._begun, self._end_ids, self._executor = begun, list(end_ids), executor
        self._matcher: Any = None
        self._beside = beside
        self._taken: list[int] = []

    def allowed_of(
        self,
        answers: Sequence[tuple[Automaton, Sequence[int]]],
        vocab: int,
        *,
        pinned: bool = False,
        meanwhile: bool = False,
    ) -> Callable[[], Tensor]:
        """Find which tokens may follow each of several answers so far; the call returned has them.

        Bits of bytes, on the host; `pinned`: in memory from which a GPU copies on its own.
        `meanwhile`: by other threads, from now on.
        """
        import torch  # a server checks guides without it

        words = -(-vocab // 32)
        bits_GW = torch.empty((len(answers), words), dtype=torch.int32, pin_memory=pinned)
        # numpy: torch wakes all threads of the host for 0.5 MB (19 ms a step on busy cores).
        words_GW = bits_GW.numpy()
        start, each = bits_GW.data_ptr(), words * bits_GW.itemsize
        going_on = []
        for row, (automaton, tokens) in enumerate(answers):
            matcher = automaton._follow(tokens)
            if matcher is None:
                words_GW[row] = 0
            else:
                going_on.append((matcher, row))

        def find() -> None:
            if _MASK_THREADS > 1 and len(going_on) >= _SHARED_OUT:
                self._executor.unsafe_compute_mask_ptr(going_on, start, each, len(answers))
            else:
                for matcher, row in going_on:
                    matcher.unsafe_compute_mask_ptr(start + row * each, each)

        found = self._beside.start(find) if meanwhile else find

        def bits() -> Tensor:
            found()
            self._allow_ends(words_GW)
            return bits_GW.view(torch.uint8)

        return bits

    def _allow_ends(self, words_GW: NDArray[np.int32]) -> None:
        """Allow the end where nothing else is."""
        some_G = words_GW.any(axis=1)
        if some_G.all():
            return
        bytes_GB = words_GW.view(np.uint8)
        # The text is whole, or the guide is beyond what can be followed.
        for row in np.flatnonzero(~some_G).tolist():
            for token in self._end_ids:
                bytes_GB[row, token // 8] |= 1 << token % 8

    def _follow(self, tokens: Sequence[int]) -> Any:
        """Bring the matcher to where the answer is and return it, None where the text is whole.

        It may have gone another way before.
        """
        if self._matcher is None:
            self._matcher = self._begun.result().deep_copy()
        matcher, known = self._matcher, len(self._taken)
        if list(tokens[:known]) != self._taken:
            matcher.reset()
            self._taken, known = [], 0
        stopped = matcher.is_stopped()
        for token in tokens[known:]:
            if not stopped:
                matcher.consume_token(token)
                stopped = matcher.is_stopped()
            self._taken.append(token)
        return None if stopped else matcher


def _grammar(guide: Guide) -> str:
    """Return a guide as llguidance's grammar."""
    matcher = _llguidance().LLMatcher
    if guide.kind == "json":
        return str(matcher.grammar_from_json_schema(guide.text, overrides=_JSON_STYLE))
    if guide.kind == "regex":
        return str(matcher.grammar_from_regex(guide.text))
    texts = [json.dumps(text) for text in dict.fromkeys(json.loads(guide.text))]
    return str(matcher.grammar_from_lark(f"start: {' | '.join(texts)}"))


def _llguidance() -> Any:
    """Import it on first use: most jobs have no guides."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "structured_outputs need llguidance, which is not installed: pip install 'llmpq[run]'"
        ) from None
    return llguidance
