"""Bodies of requests: OpenAI's fields, and the engine's further ones under vLLM's names.

A field that a path does not obey is refused (fields.py), unless it asks for nothing. Names that no
API has are ignored, which the log says once of each; nearly a known field's name is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from llmpq.errors import short_repr
from llmpq.runtime.requests.guide_schema import other_than_object
from llmpq.runtime.requests.sampling_params import (
    GUIDES,
    MAX_ANSWERS,
    MAX_BIAS,
    MAX_TEXTS,
    SamplingParams,
    StructuredOutputsParams,
)
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.fields import HINTS, REFUSED, REFUSED_IN_MESSAGES


def _whole(value: Any) -> Any:
    """Return 1.0 as 1: JSON has one kind of number, and some clients write whole ones so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(value: Any) -> Any:
    """Return whole numbers of a list as such; most lists, which may be long, need none of it."""
    if isinstance(value, list) and any(type(one) is float for one in value):
        return [_whole(one) for one in value]
    return value


_GUIDED = ("json", "regex", "choice", "grammar")
"""Guides that have a field of their own, as vLLM had."""


class _FirstError(FailFast):
    """Ends at a list's first error, and has a hash, which unions need before Python 3.13."""

    __hash__ = object.__hash__


FIRST_ERROR = _FirstError()
"""On lists that may be long: an error for each of a million items takes minutes."""
Whole = Annotated[int, BeforeValidator(_whole)]
Tokens = Annotated[list[int], FIRST_ERROR, BeforeValidator(_wholes)]
Texts = Annotated[list[str], FIRST_ERROR]
TokensOf = Callable[[str], Sequence[int]]
_log = logging.getLogger("llmpq.serve")
_ID = re.compile(r"\s*[+-]?[0-9]+\s*")


class Body(BaseModel):
    """A request's body; `None` is as good as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in data:
            if name in known or name in HINTS or name in REFUSED:
                continue
            near = get_close_matches(name, known, n=1, cutoff=0.88)
            if near:
                raise ValueError(f"unknown field '{name}', did you mean '{near[0]}'?")
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class RequestBody(Body):
    """A body that asks for an answer: what it asks for is done or refused."""

    @model_validator(mode="before")
    @classmethod
    def _obeyed_or_refused(cls, data: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in known or value is None:
                continue
            if name not in REFUSED:
                continue
            neutral, instead = REFUSED[name]
            if not any(value == same and type(value) is type(same) for same in neutral):
                raise ApiError(400, f"'{name}' is not supported here: {instead}", param=name)
        return data

    @model_validator(mode="after")
    def _ignored_are_noted(self) -> Self:
        """Log what changes nothing, once the body is otherwise one that is obeyed."""
        for name in self.model_extra or ():
            if name not in REFUSED and name not in HINTS:
                _note_ignored(name)
        return self

    @model_validator(mode="after")
    def _streams_have_options(self) -> Self:
        streamed = getattr(self, "stream", False)
        if getattr(self, "stream_options", None) is not None and not streamed:
            raise ApiError(400, "'stream_options' needs 'stream': true", param="stream_options")
        return self


@lru_cache(maxsize=1000)
def _note_ignored(name: str) -> None:
    """Log a field that changes nothing; a name among the newest thousand is not logged again."""
    _log.warning("the field %s of a request is ignored: no API known here has it", short_repr(name))


class ChoiceBody(RequestBody):
    """How tokens are chosen, beyond what every API has: obeyed on every path."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: Whole | None = None
    logit_bias: dict[str, float] | None = None
    """By token id, or by text: each of its tokens gets the bias."""
    # The engine's further ones.
    top_k: Whole = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: Whole = 0
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    bad_words: Texts | None = None
    allowed_token_ids: Tokens | None = None
    truncate_prompt_tokens: Whole | None = None
    skip_special_tokens: bool = True
    thinking_token_budget: Whole | None = Field(default=None, ge=0)
    priority: Whole = 0
    cache_salt: str | None = Field(None, min_length=1)
    """Prefixes are shared with requests of the same salt only."""
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    def choice_fields(self) -> dict[str, Any]:
        """Return what was given of these fields."""
        given = self.model_fields_set & ChoiceBody.model_fields.keys()
        return {name: getattr(self, name) for name in sorted(given)}

    @property
    def guided_by(self) -> str:
        """The field that says what the text must be, "" without any."""
        names = ("structured_outputs", *(f"guided_{name}" for name in _GUIDED))
        return next((name for name in names if getattr(self, name) is not None), "")


class JsonSchema(Body):
    """A schema of `response_format`."""

    name: str = ""
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Body):
    """What an answer's text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """Beside `type`, as llama.cpp and others have it."""

    def guide(self) -> dict[str, Any] | None:
        """Return it as `structured_outputs`, None where any text will do."""
        if self.type == "text":
            return None
        wanted = None if self.json_schema is None else self.json_schema.schema_
        if wanted is None:
            wanted = self.schema_
        if wanted is None and self.type == "json_object":
            return {"json": {"type": "object"}}
        if wanted is None:
            raise ApiError(
                400,
                "'response_format' of type json_schema needs 'json_schema.schema'",
                param="response_format",
            )
        _guide("response_format", {"json": wanted})
        return {"json": wanted}


class SamplingBody(ChoiceBody):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Whole = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | Texts | None = None
    prompt_logprobs: Whole | None = None
    return_token_ids: bool = False
    """Answers tell `token_ids` beside their text, and `prompt_token_ids` once."""
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _no_scores_in_streams(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(
                400,
                "'prompt_logprobs' are part of whole answers; leave 'stream' out",
                param="prompt_logprobs",
            )
        return self

    def wanted_format(self) -> tuple[str, dict[str, Any] | None]:
        """Return the field that says what the text must be, and what, unless by vLLM's names."""
        own = self.guided_by
        wanted = None if self.response_format is None else self.response_format.guide()
        if wanted is None:
            return own or "structured_outputs", None
        if own:
            raise ApiError(
                400,
                f"'response_format' and '{own}' both say what the text must be; leave one of "
                "them out",
                param=own,
            )
        return "response_format", wanted

    def params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        tokens_of: TokensOf,
        defaults: SamplingParams,
    ) -> SamplingParams:
        """Return the engine's parameters; `ValueError` for values that cannot be.

        `tokens_of` is asked for the tokens of texts in `logit_bias`. `defaults` has what a body
        leaves out of temperature, top_p, top_k, min_p and repetition_penalty.
        """

        def value(name: str) -> Any:
            return getattr(self if name in self.model_fields_set else defaults, name)

        temperature, top_p = value("temperature"), value("top_p")
        # Only the likeliest token: what OpenAI's top_p of 0 means, too.
        greedy = 0 <= temperature < 1e-5 or top_p == 0
        # Several greedy answers are the same one: the engine makes them of the likeliest token.
        same = greedy and self.n > 1
        return SamplingParams(
            n=min(self.n, MAX_ANSWERS),  # the server refuses by its own limit, which is lower
            max_tokens=max_tokens,
            temperature=1.0 if same else 0.0 if greedy else temperature,
            top_p=top_p or 1.0,
            top_k=1 if same else value("top_k"),
            min_p=value("min_p"),
            seed=self.seed,
            stop=_marks(self.stop),
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=value("repetition_penalty"),
            logit_bias=_biases(self.logit_bias, tokens_of),
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
            thinking_token_budget=self.thinking_token_budget,
            structured_outputs=self.guide(),
        )

    def guide(self) -> StructuredOutputsParams | None:
        """Return what the text must be, under either of vLLM's names."""
        given = dict(self.structured_outputs or {})
        for name in _GUIDED:
            value = getattr(self, f"guided_{name}")
            if value is not None:
                given[name] = value
        unknown = sorted(set(given) - {*GUIDES})
        if unknown:
            raise ValueError(f"structured_outputs takes {', '.join(GUIDES)}, got '{unknown[0]}'")
        return _guide(self.guided_by, given) if given else None


def _guide(field: str, given: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return what the text must be; `ApiError` names the field that says so."""
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None


def _marks(given: str | Texts | None) -> list[str]:
    """Return what ends an answer: forms send an empty text where nothing does."""
    return [mark for mark in ([given] if isinstance(given, str) else given or []) if mark]


def _biases(given: dict[str, float] | None, tokens_of: TokensOf) -> dict[int, float] | None:
    """Return biases by token id: the sum of its keys', bounded by what a bias may be."""
    if given is None:
        return None
    texts = sum(_ID.fullmatch(key) is None for key in given)
    if texts > MAX_TEXTS:
        raise ValueError(f"logit_bias may have {MAX_TEXTS} texts beside token ids, got {texts}")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if bias != bias:
            raise ValueError(f"logit_bias must map tokens to numbers, got {key!r:.100}: {bias}")
        for token in _biased(key, tokens_of):
            biases[token] = max(-MAX_BIAS, min(MAX_BIAS, biases.get(token, 0.0) + bias))
    return biases


def _biased(key: str, tokens_of: TokensOf) -> Iterable[int]:
    """Return the tokens that a key of `logit_bias` means: the one of this id, or all of a text."""
    try:
        return [int(key)] if _ID.fullmatch(key) else {*tokens_of(key)}
    except ValueError as error:
        raise ValueError(f"logit_bias: {error}, got {key!r:.100}") from None


class CompletionBody(SamplingBody):
    """A body of /v1/completions."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], FIRST_ERROR]
    max_tokens: Whole | None = 16
    logprobs: Whole | bool | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: Whole | None = Field(default=None, ge=0)

    def prompts(self) -> list[str | Tokens]:
        """Return the prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class CalledFunction(Body):
    """A function that an answer called."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """What an earlier turn thought, beside its content; `reasoning` is vLLM's newer name of it."""
    reasoning: str | None = None
    refusal: str | None = None
    """What an earlier turn said instead of a content."""
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    """OpenAI's older form of one call; its result is a message of role `function`."""
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_lost(cls, data: Any) -> Any:
        for name, (neutral, instead) in REFUSED_IN_MESSAGES.items():
            value = data.get(name) if isinstance(data, dict) else None
            if value is not None and value not in neutral:
                raise ApiError(
                    400,
                    f"'{name}' of a message is not supported here: {instead}",
                    param="messages",
                )
        return data

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Refuse a message without a content, as OpenAI's API does.

        A turn of the model's may come back as it was answered: calls alone, or cut before its text.
        """
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(
                "missing", "a message of role '{role}' needs 'content'", {"role": self.role}
            )
        return self


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        """Refuse a tool whose arguments are no object, as OpenAI's and Anthropic's APIs do."""
        other = other_than_object(self.parameters or {})
        if other is not None:
            raise ApiError(
                400,
                f"the parameters of the tool {self.name!r:.100} must be the schema of an object "
                f"('type': 'object'), got {other}",
                param="tools",
            )
        return self


class Tool(Body):
    """A tool: a function."""

    type: Literal["function"] = "function"
    function: Function


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: Function


def unknown_tool(name: str, tools: Sequence[Tool] | None) -> ApiError:
    """Return the refusal of a `tool_choice` that names a tool which is not there."""
    if not tools:
        return ApiError(400, "'tool_choice' needs 'tools'", param="tool_choice")
    known = ", ".join(tool.function.name for tool in tools)
    return ApiError(
        400,
        f"'tool_choice' names '{name}', which is not one of the tools {known}",
        param="tool_choice",
    )


class NamedTools(Body):
    """The tools of which one may, or must, be called."""

    mode: str = "auto"
    tools: list[NamedTool] = Field(default_factory=list)


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: NamedTools


class ChatBody(SamplingBody):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1)
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    """Of `AllowedTools` the mode is left, and `tools` are theirs."""
    parallel_tool_calls: bool = True
    """False: calls after the first are dropped."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on with the last message, which is the assistant's."""
    echo: bool = False
    """The answer's text begins with the message that it goes on with."""
    reasoning_effort: str | None = None
    """For templates that ask for it; "none" asks them for no thought."""
    include_reasoning: bool = True
    """False: thoughts are left out of the answer."""
    separate_reasoning: bool = True
    """False: thoughts are part of the text, marks and all."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _allows_some(self) -> Self:
        if isinstance(self.tool_choice, AllowedTools):
            chosen = self.tool_choice.allowed_tools
            if chosen.mode not in ("auto", "required") or not chosen.tools:
                raise ApiError(
                    400,
                    "'tool_choice' of allowed_tools needs a mode, auto or required, and at least 1 "
                    f"tool, got mode {chosen.mode!r:.100} and {len(chosen.tools)} tools",
                    param="tool_choice",
                )
            allowed = {tool.function.name for tool in chosen.tools}
            for name in sorted(allowed - {tool.function.name for tool in self.tools or ()}):
                raise unknown_tool(name, self.tools)
            self.tools = [tool for tool in self.tools or () if tool.function.name in allowed]
            self.tool_choice = "required" if chosen.mode == "required" else "auto"
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        if self.continue_final_message:
            last = self.messages[-1]
            if last.role != "assistant" or last.tool_calls or last.function_call:
                raise ApiError(
                    400,
                    "'continue_final_message' needs a text of the assistant as last message",
                    param="continue_final_message",
                )
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise ApiError(
                    400,
                    "'continue_final_message' and 'add_generation_prompt' exclude each other",
                    param="continue_final_message",
                )
            self.add_generation_prompt = False
        if self.echo and not self.continue_final_message:
            raise ApiError(400, "'echo' needs 'continue_final_message': true", param="echo")
        return self

    def template_options(self) -> dict[str, Any]:
        """Return what the template may ask for."""
        own: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            own["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            own["enable_thinking"] = False
        return own | (self.chat_template_kwargs or {})


class TokenizeBody(Body):
    """A body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """Where nothing is said: those of a text are, a template writes its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @property
    def opens_answer(self) -> bool:
        """Whether what opens an answer is part of it."""
        return self.add_generation_prompt and not self.continue_final_message


class DetokenizeBody(Body):
    """A body of /detokenize."""

    model: str | None = None
    tokens: Tokens
