"""Guided decoding: which tokens may come next, so that a text fits what was asked of it.

llguidance decides (a Rust library without dependencies; d2231297:benchmarks/guides.py compares it
with xgrammar). It reads the model's tokenizer; each request has an automaton of its own on the last
stage. JSON is written without free white space, `{"a": 1, "b": 2}`: a small model given the choice
may go on with blanks for ever.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmpq.checkpoints.tokenizer_files import (
    backend_json,
    with_replaced_spaces,
    without_special_names,
)
from llmpq.errors import GuideError
from llmpq.runtime.requests.guide_schema import Schema, followable, in_our_terms
from llmpq.runtime.requests.token_rules import Guide, Thought

if TYPE_CHECKING:
    from torch import Tensor

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAKERS = 4
"""Threads that compile guides of requests to come while others are answered."""
_MASK_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that compute the masks of several answers, which must be there before a GPU's next step
ends (5 ms). One of 128,256 tokens takes 2 ms inside a text of bounded length, 0.04 elsewhere: 1.0
to 1.2 ms for 32 answers (median, 8 and 16 cores), one step in ten over 4.6. On cores that others
keep busy more threads take longer: all wait for the one that is woken last."""
_SHARED_OUT = 8
"""Answers from which on these threads compute the masks."""
_LONGEST = 1 << 20
"""Characters of a guide."""
_LIMITS = {"max_items_in_row": 10_000, "verbose_errors": False}
"""Of llguidance: alternatives that are followed at once. With 3,000 branches of an anyOf a mask
takes 11 ms."""
_SAYS = {"json": "JSON schema", "calls": "tools' parameters"}
_KEPT = 256
"""Guides of which a `Newest` remembers what was made."""
_Made = TypeVar("_Made")


class GrammarCompiler:
    """Makes the automata of one model's requests."""

    def __init__(self, model_dir: str | Path, *, vocab: int, end_ids: Sequence[int]) -> None:
        """Nothing is read before the first guide; `vocab` is that of the logits."""
        self._path = Path(model_dir)
        self._vocab = vocab
        self._end_ids = list(end_ids)
        self._checked: Newest[None] = Newest()
        self._begun: Newest[Future[Any]] = Newest()
        """Matchers that no answer has moved on."""

    def check(self, guide: Guide) -> None:
        """Raise `ValueError` for a guide that no text can follow or that is not understood."""
        self._checked.get(guide, self._check)

    def _check(self, guide: Guide) -> None:
        if len(guide.text) > _LONGEST:
            raise GuideError(
                f"a {_SAYS.get(guide.kind, guide.kind)} of {len(guide.text)} characters is too "
                f"long; {_LONGEST} are followed"
            )
        why = self._unwritten(guide) or self._lack(guide)
        if why is None:
            return
        what = f"the {_SAYS.get(guide.kind, guide.kind)}"
        for name, schema in json.loads(guide.text) if guide.kind == "calls" else ():
            own = self._lack(Guide(kind="json", text=json.dumps(schema)))
            if own is not None:
                what, why = f"the parameters of the tool {name!r:.100}", own
                break
        raise GuideError(f"{what} cannot be followed: {why}")

    def _unwritten(self, guide: Guide) -> str | None:
        """Return what a guide asks for that the tokenizer writes as a space, None for nothing."""
        mark = self._space_mark
        if not mark or not any(mark in text for text in _literals(guide)):
            return None
        return (
            f"it asks for {mark} (U+{ord(mark[0]):04X}), which this model's tokenizer writes as a "
            "space; ask for a space"
        )

    def _lack(self, guide: Guide) -> str | None:
        """Return why no text can follow a guide, None if it takes a first token."""
        try:
            matcher = self._matcher(guide)
            if not matcher.is_error():
                # A guide that is too large fails behind its first token, after a second or two that
                # all requests of a step would wait for.
                matcher.consume_token(_first_of(matcher.compute_bitmask()))
            return in_our_terms(matcher.get_error()) if matcher.is_error() else None
        except ValueError as error:
            return in_our_terms(str(error))

    def _matcher(self, guide: Guide) -> Any:
        """Return an automaton at its beginning; it may be in error."""
        library = _llguidance()
        limits = library.LLParserLimits(**_LIMITS)
        # A grammar may name special tokens; in other guides their names are text.
        tokenizer = self._with_special if guide.kind == "grammar" else self._tokenizer
        return library.LLMatcher(tokenizer, _grammar(guide), log_level=0, limits=limits)

    def compile(self, guide: Guide, *, behind: Thought | None = None) -> Automaton:
        """Return the automaton of one request; it is made meanwhile, beside others.

        `behind`: the thought that the prompt has opened, which ends before the guide begins.

        Requests often ask for the same: theirs begin as copies (3 us; making one takes 400).
        """
        begun = self._begun.get(guide, self._begin)
        return Automaton(begun, self._end_ids, self._executor, self._beside, behind)

    def is_ready(self, guide: Guide) -> bool:
        """Whether `compile` has nothing to wait for; the automaton is begun if it was not."""
        return self._begun.get(guide, self._begin).done()

    def _begin(self, guide: Guide) -> Future[Any]:
        return self._makers.submit(lambda: self._matcher(guide))

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
    def _space_mark(self) -> str:
        """The character that the tokenizer has for a space, none where it is the space itself."""
        try:
            return with_replaced_spaces(backend_json(self._path))[1]
        except (OSError, ValueError):
            return ""  # said where the guide is compiled

    @cached_property
    def _tokenizer(self) -> Any:
        return self._read(without_special_names)

    @cached_property
    def _with_special(self) -> Any:
        return self._read(lambda text: text)

    def _read(self, changed: Callable[[str], str]) -> Any:
        """Return the model's tokenizer as llguidance takes it, its JSON `changed`."""
        try:
            text, _ = with_replaced_spaces(changed(backend_json(self._path)))
            # Versions before 1.7 take one end only.
            ends = self._end_ids[0] if len(self._end_ids) == 1 else self._end_ids
            return _llguidance().LLTokenizer(text, n_vocab=self._vocab, eos_token=ends)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the tokenizer of '{self._path}' cannot be used for structured_outputs: "
                f"{str(error)[:200]}"
            ) from None


class Newest(Generic[_Made]):
    """A cache by guide, of which the least recently used are forgotten; for any thread."""

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
        self,
        begun: Future[Any],
        end_ids: Sequence[int],
        executor: Any,
        beside: _Beside,
        behind: Thought | None = None,
    ) -> None:
        """`begun`: the compiled guide, of which this is a copy. `behind`: a thought that comes
        first, in which any text may stand.

        `executor`: the threads that look at many answers at once; `beside` waits for them.
        """
        self._thought_end = behind.end if behind is not None and behind.is_open else None
        self._begun = begun
        self._end_ids = list(end_ids)
        self._executor = executor
        self._matcher: Any = None
        self.failure: str | None = None
        """Why the guide could not be followed to its end: then the answer ends where it is."""
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
        """Return a call that returns masks: the tokens that may follow each of several answers.

        A mask is a row of bytes on the host, token t at bit t % 8 of byte t // 8; `pinned`: in
        memory from which a GPU copies on its own. They are computed in that call, or, `meanwhile`,
        by other threads from now on.
        """
        import torch  # a server checks guides without it

        words = -(-vocab // 32)
        bits_GW = torch.empty((len(answers), words), dtype=torch.int32, pin_memory=pinned)
        # numpy: torch wakes all threads of the host for 0.5 MB (19 ms a step on busy cores).
        words_GW = bits_GW.numpy()
        start, each = bits_GW.data_ptr(), words * bits_GW.itemsize
        going_on = []
        for row, (automaton, tokens) in enumerate(answers):
            guided = automaton._behind_thought(tokens)
            if guided is None:
                words_GW[row] = -1
                automaton._forbid_ends(words_GW[row])
                continue
            matcher = automaton._follow(guided)
            if matcher.is_stopped():
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
            for automaton, _ in answers:
                automaton._note_failure()
            return bits_GW.view(torch.uint8)

        return bits

    def _behind_thought(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """Return what an answer has behind its thought, None while it thinks."""
        if self._thought_end is None:
            return tokens
        if self._thought_end not in tokens:
            return None
        return tokens[list(tokens).index(self._thought_end) + 1 :]

    def _forbid_ends(self, words_W: NDArray[np.int32]) -> None:
        """Let no answer end within its thought: the guide asks for a text behind it."""
        bytes_B = words_W.view(np.uint8)
        for token in self._end_ids:
            bytes_B[token // 8] &= ~np.uint8(1 << token % 8)

    def _allow_ends(self, words_GW: NDArray[np.int32]) -> None:
        """Allow the end where nothing else is."""
        some_G = words_GW.any(axis=1)
        if some_G.all():
            return
        bytes_GB = words_GW.view(np.uint8)
        # The text is whole, or the guide has failed.
        for row in np.flatnonzero(~some_G).tolist():
            for token in self._end_ids:
                bytes_GB[row, token // 8] |= 1 << token % 8

    def _note_failure(self) -> None:
        if self.failure is None and self._matcher is not None and self._matcher.is_error():
            self.failure = in_our_terms(self._matcher.get_error())

    def _follow(self, tokens: Sequence[int]) -> Any:
        """Bring the matcher to where the answer is and return it: stopped where the text is whole.

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
        return matcher


def _literals(guide: Guide) -> Iterator[str]:
    """Yield the texts that an answer to a guide may have to have as they are."""
    if guide.kind == "choice":
        yield from json.loads(guide.text)
    elif guide.kind == "json":
        yield from _named_values(json.loads(guide.text))
    elif guide.kind == "calls":
        for name, schema in json.loads(guide.text):
            yield name
            yield from _named_values(schema)
    else:
        yield guide.text


def _named_values(schema: Any) -> Iterator[str]:
    """Yield the names of a JSON schema's properties, and its constants, as JSON."""
    if isinstance(schema, Mapping):
        yield from schema.get("properties") or ()
        for key in ("const", "enum", "pattern"):
            if key in schema:
                yield json.dumps(schema[key], ensure_ascii=False)
    for inner in schema.values() if isinstance(schema, Mapping) else schema:
        if isinstance(inner, Mapping | list):
            yield from _named_values(inner)


def _first_of(mask: bytes) -> int:
    """Return the lowest token that a mask allows, token t at bit t % 8 of byte t // 8."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _grammar(guide: Guide) -> str:
    """Return a guide as llguidance's grammar; `ValueError` if it is none."""
    library = _llguidance()
    matcher = library.LLMatcher
    if guide.kind == "json":
        schema = json.dumps(_followable(json.loads(guide.text)))
        return str(matcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE))
    if guide.kind == "regex":
        return str(matcher.grammar_from_regex(_whole(guide.text)))
    if guide.kind == "grammar":
        return str(matcher.grammar_from_lark(_lark(guide.text)))
    if guide.kind == "calls":
        return str(matcher.grammar_from_lark(_calls(json.loads(guide.text))))
    # One terminal: as alternatives of a rule, more than some thousand are too many at once.
    texts = [json.dumps(text) for text in dict.fromkeys(json.loads(guide.text))]
    return str(matcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(texts)}"))


def _calls(tools: Sequence[tuple[str, Schema]]) -> str:
    """Return a grammar of one call of a tool: each has a document of its own for its references."""
    rules = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (name, schema) in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        text = json.dumps({**_followable(schema), "x-guidance": _JSON_STYLE})
        rules.append(f'call_{i}: {head} arguments_{i} "}}"\narguments_{i}: %json {text}')
    return "\n".join(rules)


def _whole(regex: str) -> str:
    """Return a regex without the anchors of a whole text, which is what it must match anyway."""
    regex = regex.removeprefix("^")
    escapes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and escapes % 2 == 0 else regex


def _lark(text: str) -> str:
    """Return a grammar in Lark's form; GBNF is what vLLM's clients send, too."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # whatever its reader stumbles over
        raise ValueError(f"it is no GBNF: {error}") from None


def _followable(schema: Schema) -> Mapping[str, Any]:
    found = followable(schema, _knows_format)
    return found if isinstance(found, Mapping) else {"allOf": [found]}


@cache
def _knows_format(name: str) -> bool:
    schema = json.dumps({"type": "string", "format": name})
    matcher = _llguidance().LLMatcher
    return not matcher.validate_grammar(matcher.grammar_from_json_schema(schema))


def _llguidance() -> Any:
    """Import it on first use: most jobs have no guides."""
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "structured_outputs need llguidance, which is not installed: pip install 'llmpq[run]'"
        ) from None
    return llguidance
