"""How tokens are chosen: what a user asks for, and what one of its requests carries.

Standard library only; the arithmetic is in models/sampling.py and models/ruled_sampling.py.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import wraps
from typing import Any, Self

from llmpq.errors import nearest
from llmpq.runtime.options.vllm_options import VLLM_GUIDES, VLLM_SAMPLING, Other, without_neutral
from llmpq.runtime.requests.token_rules import Guide

MAX_LOGPROBS = 100
"""Most likely tokens that may be reported beside a chosen one."""
MAX_ANSWERS = 16_384
"""Answers to one prompt: each is a request, with a row of the scheduler's queue."""
MAX_TEXTS = 1024
"""Stop texts, or bad words, of one request: each is looked for at every token."""
MAX_BAD_LENGTH = 65536
"""Characters of all bad words of a request: their tokens go to the last stage."""
MAX_BIAS = 100.0
"""Most that may be added to a token's logit, or taken from it."""


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How one request's tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    """Only the k most likely tokens; None for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens with at least this share of the most likely one's probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k must be between 1 and 2^31 - 1, or absent for all, got {self.top_k}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2^63 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


# Fields of `StructuredOutputsParams`, of which one is set.
GUIDES = ("json", "regex", "choice", "grammar", "json_object", "calls")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer's text must be: one of these."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as data or text."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """A context-free grammar: llguidance's Lark, or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    calls: Sequence[tuple[str, Mapping[str, Any] | bool] | Mapping[str, Any]] | None = None
    """Tools as OpenAI's API has them, or pairs of a name and the schema of its arguments: one of
    them is called, as JSON of `name` and `arguments` (not one of vLLM's)."""
    after_thought: bool = False
    """Whether a thought that the prompt has opened comes first, whatever it says: the text behind
    it is what must be so. For models whose marks are one token each (not one of vLLM's)."""

    def __post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise ValueError(f"json_object must be True or False, got {self.json_object!r:.100}")
        given = [name for name in GUIDES if getattr(self, name) is not None]
        given = [name for name in given if name != "json_object" or self.json_object]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs one of {', '.join(GUIDES)}, got {given or 'none'}"
            )
        self.guide()

    def guide(self) -> Guide:
        """Return the guide as the last stage gets it: its kind, and one text."""
        if self.json_object:
            return Guide(kind="json", text=_schema_text({"type": "object"}))
        if self.json is not None:
            return Guide(kind="json", text=_schema_text(self.json))
        if self.regex is not None:
            return Guide(kind="regex", text=_text("regex", self.regex))
        if self.grammar is not None:
            return Guide(kind="grammar", text=_text("grammar", self.grammar))
        if self.calls is not None:
            pairs = [f"[{json.dumps(n)}, {_schema_text(s)}]" for n, s in _tools(self.calls)]
            return Guide(kind="calls", text=f"[{', '.join(pairs)}]")
        choice = self.choice
        if (
            not isinstance(choice, Sequence)
            or isinstance(choice, str)
            or not choice
            or not all(isinstance(text, str) and text for text in choice)
        ):
            members = isinstance(choice, Iterable) and any(isinstance(x, Enum) for x in choice)
            hint = "; an enum's texts are [one.value for one in ...]" if members else ""
            raise ValueError(
                f"choice must be a list of texts, none empty, got {choice!r:.100}{hint}"
            )
        for text in choice:
            require_whole(text, "a choice")
        return Guide(kind="choice", text=json.dumps(list(choice)))


def require_whole(text: str, what: str) -> None:
    """Raise `ValueError` for a text with half a character (a lone surrogate): no tokens have it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has half a character (a lone surrogate) at position {error.start}: it is not "
            "valid Unicode and has no tokens"
        ) from None


def _text(name: str, given: object) -> str:
    """Return what was given as a text of whole characters; `ValueError` for anything else."""
    if not isinstance(given, str):
        raise ValueError(f"{name} must be a text, got {given!r:.100}")
    require_whole(given, f"the {name}")
    return given


def _tools(given: object) -> list[tuple[str, Any]]:
    """Return name and schema of tools: of pairs, or as OpenAI's API has them."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f"calls must be a list of tools, at least one, got {given!r:.100}")
    return [_tool(tool) for tool in given]


def _tool(tool: object) -> tuple[str, Any]:
    """Return name and schema of one tool."""
    pair: object = tool
    if isinstance(tool, Mapping):
        own = tool.get("function", tool)
        if isinstance(own, Mapping):
            pair = own.get("name"), own.get("parameters", {"type": "object"})
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(
            "a tool of calls is as OpenAI's API has it, {'type': 'function', 'function': {'name': "
            "..., 'parameters': {...}}}, or a pair of its name and its arguments' schema, got "
            f"{tool!r:.100}"
        )
    require_whole(pair[0], "a tool's name")
    return pair[0], pair[1]


def _schema_text(schema: object) -> str:
    """Return a JSON schema as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("the JSON schema is nested too deep") from None
    if not isinstance(schema, (Mapping, bool)):
        makes = hasattr(schema, "model_json_schema")  # pydantic's
        hint = "; give its .model_json_schema()" if makes else ""
        raise ValueError(f"a JSON schema is an object or a boolean, got {schema!r:.100}{hint}")
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None
    except RecursionError:
        raise ValueError("the JSON schema is nested too deep") from None
    if "\\ud" in text:  # how JSON writes what may be half a character
        require_whole(json.dumps(schema, ensure_ascii=False), "the JSON schema")
    return text


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How answers are sampled and when they end; names and defaults as in vLLM."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = 16
    """None: as many as there is room for. 0: only the prompt is scored (`prompt_logprobs`)."""
    temperature: float = 1.0
    """0 is greedy: always the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 for all."""
    min_p: float = 0.0
    """Only tokens with at least this share of the most likely one's probability."""
    seed: int | None = None
    """None draws one, and so does -1, which becomes None; answer j of a prompt draws from seed + j.
    Other rows in a step may change the last bits of what it draws from."""
    stop: str | Sequence[str] | None = None
    """Texts at which an answer ends, without them."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    """Whether the text goes up to the end of the stop text that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens (ends of turns, marks of calls in some models) have no text."""
    ignore_eos: bool = False
    """Whether the end-of-text token ends nothing."""
    min_tokens: int = 0
    """Tokens before which no stop is looked for, and neither an end (with `ignore_eos`, too) nor a
    stop token is chosen."""
    timeout_s: float | None = None
    """Seconds after which an answer is ended as by an abort (not one of vLLM's)."""
    presence_penalty: float = 0.0
    """Taken from the logit of a token that is in the answer; -2..2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the answer; -2..2."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt and answer: divided by it if positive, else multiplied."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of tokens, -100..100."""
    bad_words: Sequence[str] | None = None
    """Texts whose tokens are never completed."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be chosen; an end is, if it is among them."""
    logprobs: int | None = None
    """Most likely tokens reported beside each chosen one, which is reported with 0, too."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    truncate_prompt_tokens: int | None = None
    """Only the last so many tokens of the prompt; -1 for as many as there is room for."""
    thinking_token_budget: int | None = None
    """Tokens after which a thought that is still open is closed; None: it may take any."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be: JSON of a schema, a match of a regex, one of some texts, ..."""

    def __post_init__(self) -> None:
        _use_plain_numbers(self)
        _check_counts(self)
        _check_numbers(self)
        _check_texts("stop", self.stop)
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words must be a list of texts, got {self.bad_words!r:.100}")
        _check_texts("bad_words", self.bad_words)
        length = sum(map(len, self.bad_words or ()))
        if length > MAX_BAD_LENGTH:
            raise ValueError(
                f"bad_words may have {MAX_BAD_LENGTH} characters together, got {length}"
            )
        _check_allowed(self)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} greedy answers would all be the same; set a temperature or leave n out"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens=0 asks for nothing; set prompt_logprobs to score prompts")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        if self.structured_outputs is not None:
            _check_guided(self)
        timeout_s: object = self.timeout_s
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
        self.sampler_config(0)  # refuses what a sampler cannot do

    def clone(self) -> Self:
        """Return a copy."""
        return replace(self)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts at which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampler_config(self, seed: int) -> SamplerConfig:
        """Return how the tokens of one answer are chosen, which draws from this seed on."""
        return SamplerConfig(
            temperature=float(self.temperature),
            top_k=self.top_k if self.top_k > 0 else None,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            seed=seed % 2**63,
        )


def _init_with_vllm_names(kind: type[Any], table: Mapping[str, Other]) -> Callable[..., None]:
    """Return a class's `__init__` that also takes vLLM's arguments, where they change nothing here.

    `table`: those arguments, and the values that change nothing. `TypeError` for a name that is
    neither's, with the nearest one.
    """
    own: Callable[..., None] = kind.__init__
    known, called = kind.__dataclass_fields__, kind.__name__

    @wraps(own)
    def init(self: object, **given: Any) -> None:
        left = without_neutral(given, table, whose=f"{called} has no")
        for name in left:
            if name not in known:
                raise TypeError(
                    f"{called} has no '{name}': {nearest(name, known)}see help({called})"
                )
        own(self, **left)

    return init


for _kind, _table in ((SamplingParams, VLLM_SAMPLING), (StructuredOutputsParams, VLLM_GUIDES)):
    setattr(_kind, "__init__", _init_with_vllm_names(_kind, _table))  # noqa: B010 (a method)


_COUNTS = {
    "n": 1,
    "max_tokens": 0,
    "top_k": -1,
    "min_tokens": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "truncate_prompt_tokens": -1,
    "thinking_token_budget": 0,
}
"""Whole numbers, and the least that each may be."""
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields that are numbers and have a default."""


def whole_number(value: object) -> int | None:
    """Return a value as `int`, NumPy's and torch's integers too; None for what is none."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def token_list(value: object) -> list[int] | None:
    """Return token ids as a list of `int`, of arrays and tensors too; None for what is none."""
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Iterable):
        return None
    several = list(value)
    if all(type(token) is int for token in several):
        return several
    tokens = [whole_number(token) for token in several]
    known = [token for token in tokens if token is not None]
    return known if len(known) == len(tokens) else None


def _number(value: object) -> float | None:
    """Return a value as `int` or `float`, NumPy's and torch's too; None for what is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # of several elements
        return None


def _use_plain_numbers(params: SamplingParams) -> None:
    """Replace numbers of NumPy and torch by Python's own.

    A number of a wrong type stays, for the checks; a list or a flag of one is a `ValueError`.
    """
    plain: dict[str, Any] = {}
    for name in (*_COUNTS, "seed"):
        plain[name] = whole_number(getattr(params, name))
    for name in (*_NUMBERS, "timeout_s"):
        plain[name] = _number(getattr(params, name))
    for name in ("stop_token_ids", "allowed_token_ids"):
        given = getattr(params, name)
        plain[name] = None if given is None else token_list(given)
        if given is not None and plain[name] is None:
            raise ValueError(f"{name} must be a list of token ids, got {given!r:.100}")
    for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
        given = getattr(params, name)
        if given is not True and given is not False:
            if type(given).__name__ not in ("bool_", "bool"):  # NumPy's
                raise ValueError(f"{name} must be True or False, got {given!r:.100}")
            plain[name] = bool(given)
    bias = params.logit_bias
    if isinstance(bias, Mapping):
        pairs = [(whole_number(token), _number(value)) for token, value in bias.items()]
        if None not in [part for pair in pairs for part in pair]:
            plain["logit_bias"] = dict(pairs)
    for name, value in plain.items():
        if value is not None:
            object.__setattr__(params, name, value)  # before anything reads it
    if params.seed == -1:  # vLLM's and llama.cpp's for none
        object.__setattr__(params, "seed", None)


def _check_texts(name: str, given: object) -> None:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if (
        isinstance(texts, bytes)
        or not isinstance(texts, (Sequence, Set))
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise ValueError(f"{name} must be a text or several, none empty, got {given!r:.100}")
    for text in texts:
        require_whole(text, f"a text of {name}")
    if len(texts) > MAX_TEXTS:
        raise ValueError(f"{name} may have {MAX_TEXTS} texts, got {len(texts)}")


def _check_counts(params: SamplingParams) -> None:
    for name, least in _COUNTS.items():
        value = getattr(params, name)
        may_be_absent = SamplingParams.__dataclass_fields__[name].type.endswith("None")
        if value is None and may_be_absent:
            continue
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    if params.n > MAX_ANSWERS:
        raise ValueError(f"n must be at most {MAX_ANSWERS:,}, got {params.n:,}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > MAX_LOGPROBS:
            raise ValueError(f"{name} must be at most {MAX_LOGPROBS}, got {getattr(params, name)}")
    if params.truncate_prompt_tokens == 0:
        raise ValueError("truncate_prompt_tokens=0 leaves no prompt; give 1 or more, or -1")
    if params.seed is not None and type(params.seed) is not int:
        raise ValueError(f"seed must be a whole number, got {params.seed!r}")


def _check_numbers(params: SamplingParams) -> None:
    for name, least, most in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 0.0, math.inf),
    ):
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if name == "temperature" and not 0.0 <= value < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {value!r}")
        if name == "top_p" and not 0.0 < value <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {value!r}")
        if name == "repetition_penalty" and not 0.0 < value < math.inf:
            raise ValueError(f"repetition_penalty must be positive, got {value!r}")
        if not least <= value <= most:
            raise ValueError(f"{name} must be from {least:g} to {most:g}, got {value!r}")
    bias = params.logit_bias
    if bias is not None and not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r:.100}")
    for token, value in (bias or {}).items():
        number = not isinstance(value, bool) and isinstance(value, (int, float))
        if type(token) is not int or not number or not abs(value) <= MAX_BIAS:
            raise ValueError(
                f"logit_bias must map token ids to numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, got "
                f"{token!r}: {value!r}"
            )


def _check_allowed(params: SamplingParams) -> None:
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise ValueError(f"allowed_token_ids must be token ids, at least one, got {allowed!r:.100}")
    if params.bad_words or params.min_tokens:
        name = "bad_words" if params.bad_words else "min_tokens"
        raise ValueError(
            f"{name} may forbid the only tokens of allowed_token_ids; leave one of them out"
        )


def _check_guided(params: SamplingParams) -> None:
    """Refuse what would leave a guide no token to choose."""
    if not isinstance(params.structured_outputs, StructuredOutputsParams):
        raise ValueError(
            "structured_outputs must be a StructuredOutputsParams, got "
            f"{params.structured_outputs!r:.100}"
        )
    for name, value, neutral in (
        ("ignore_eos", params.ignore_eos, False),
        ("min_tokens", params.min_tokens, 0),
        ("bad_words", tuple(params.bad_words or ()), ()),
        ("allowed_token_ids", tuple(params.allowed_token_ids or ()), ()),
    ):
        if value != neutral:
            raise ValueError(
                f"{name}={value!r} may forbid what structured_outputs demand; leave one of them out"
            )
