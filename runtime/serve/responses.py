"""/v1/responses: OpenAI's newer form of a chat: text, JSON schemas, calls of tools, a memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Literal

from pydantic import Field, ValidationError

from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.serve.answering import event
from llmpq.runtime.serve.bodies import ChatBody, ChoiceBody, StreamOptions, Whole
from llmpq.runtime.serve.chat import Chat
from llmpq.runtime.serve.errors import ApiError, as_api_error
from llmpq.runtime.serve.response_store import ResponseStore
from llmpq.runtime.serve.service import Service
from llmpq.runtime.text.tokenizer import Tokenizer

_SCHEMA_KEYS = ("name", "schema", "strict", "description")
_LOGPROBS = "message.output_text.logprobs"
_NOTHING_TO_INCLUDE = frozenset(("reasoning.encrypted_content",))
"""Parts of items that no answer of a model of text has."""
Data = dict[str, Any]


class ResponsesBody(ChoiceBody):
    """A body of /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include: list[str] | None = None
    top_logprobs: Whole | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool = True
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are sent with their logprobs."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def items(self) -> list[Data]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def messages(self, store: ResponseStore) -> list[Data]:
        """Return the conversation so far as a chat's, without instructions."""
        earlier: Sequence[Mapping[str, Any]] = ()
        if self.previous_response_id is not None:
            earlier = store.get(self.previous_response_id, field="previous_response_id").messages
        messages = [*map(dict, earlier), *messages_of(self.items(), store)]
        if not messages:
            raise ApiError(
                400, "'input' must be a text or at least one message, got []", param="input"
            )
        _require_calls(messages)
        return messages

    def as_chat(self, messages: list[Data]) -> ChatBody:
        """Return the same request as a chat; `ApiError` for what is not obeyed."""
        for wanted in self.include or ():
            if wanted != _LOGPROBS and wanted not in _NOTHING_TO_INCLUDE:
                raise ApiError(
                    400, f"'include' knows {_LOGPROBS}, got {wanted!r:.100}", param="include"
                )
        thinking = self.reasoning or {}
        for name in thinking.keys() - {"effort"}:
            if name in ("summary", "generate_summary") and thinking[name] == "auto":
                continue  # thoughts are sent whole
            if thinking[name] is not None:
                raise ApiError(
                    400,
                    f"'reasoning.{name}' is not supported here: thoughts are sent whole; leave it "
                    "out",
                    param="reasoning",
                )
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat = {
            **self.choice_fields(),
            "model": self.model,
            "messages": system + messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop,
            "response_format": self._format(),
            "tools": self._tools(),
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": True if self.wants_logprobs else None,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": thinking.get("effort"),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_validate(chat)

    def _format(self) -> Data | None:
        wanted = (self.text or {}).get("format")
        if wanted is None:
            return None
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        if kind not in ("text", "json_object", "json_schema"):
            raise ApiError(
                400,
                "'text.format' must be an object whose 'type' is text, json_object or json_schema, "
                f"got {wanted!r:.100}",
                param="text",
            )
        if kind != "json_schema":
            return {key: wanted[key] for key in ("type", "schema") if key in wanted}
        own = wanted.get("json_schema", wanted)  # a chat's form has it one level deeper
        schema = {key: own[key] for key in _SCHEMA_KEYS if key in own}
        if schema.get("schema") is None:
            raise ApiError(400, "'text.format' of type json_schema needs 'schema'", param="text")
        return {"type": "json_schema", "json_schema": schema}

    def _tools(self) -> list[Data] | None:
        """Return the functions that may be called, in a chat's form."""
        tools = []
        for tool in self.tools or ():
            if tool.get("type") != "function":
                raise ApiError(
                    400,
                    f"tools of type {tool.get('type')!r:.100} are not known here: this server "
                    "takes functions, which the client runs",
                    param="tools",
                )
            function = tool.get("function", {k: v for k, v in tool.items() if k != "type"})
            tools.append({"type": "function", "function": function})
        return tools or None

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "function":
            return _named(choice)
        if choice.get("type") == "allowed_tools":
            named = [_named(tool) for tool in choice.get("tools") or ()]
            allowed = {"mode": choice.get("mode", "auto"), "tools": named}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        raise ApiError(
            400,
            "'tool_choice' must be none, auto, required, a function or allowed_tools, got "
            f"{choice!r:.100}",
            param="tool_choice",
        )


def _named(tool: Data) -> Data:
    """Return a tool that is named, in a chat's form."""
    return {"type": "function", "function": {"name": tool.get("name", "")}}


def _chat_of(body: ResponsesBody, messages: list[Data]) -> ChatBody:
    """Return the conversation; what is wrong with a message is said of the input."""
    try:
        return body.as_chat(messages)
    except ValidationError as error:
        found = as_api_error(error)
        if not (found.param or "").startswith("messages."):
            raise
        _, _, field = (found.param or "").rpartition(".")
        said = "'input': " if field.isdigit() else f"'input': {field}: "
        text = found.message.replace(f"'{found.param}': ", said, 1)
        raise ApiError(400, text, param="input") from None


@contextmanager
def _said_of_input() -> Iterator[None]:
    """Have what is wrong with a chat's messages said of the input."""
    try:
        yield
    except ApiError as error:
        if error.param == "messages":
            error.param = "input"
        raise


class Responses:
    """One request of /v1/responses."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._service = service
        self._messages = body.messages(service.responses)
        self._chat = Chat(service, _chat_of(body, self._messages), format_field="text")
        self._body = body
        self._model = body.model or service.model_name
        self._store = service.responses
        self._id, self._created = _new("resp"), int(time.time())

    async def begin(self) -> list[ResponseStream]:
        """Queue the conversation."""
        with _said_of_input():
            return await self._chat.begin()

    async def num_tokens(self) -> int:
        """Return how many tokens the conversation has."""
        with _said_of_input():
            return len(await self._chat.prompt())

    async def whole(self) -> Data:
        """Return the answer."""
        response: Data = {}
        async with aclosing(self._read(await self.begin(), streamed=False)) as events:
            async for _, data in events:
                response = data.get("response", response)
        return response

    async def events(self, begun: list[ResponseStream]) -> AsyncIterator[str]:
        """Yield the answer as it comes, in numbered events."""
        number = 0

        def numbered(name: str, data: Data) -> str:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **data}, name)

        empty = self._response([], None, None)
        yield numbered("response.created", {"response": empty})
        yield numbered("response.in_progress", {"response": empty})
        async with aclosing(self._read(begun, streamed=True)) as events:
            async for name, data in events:
                yield numbered(name, data)

    async def _read(
        self, begun: list[ResponseStream], *, streamed: bool
    ) -> AsyncGenerator[tuple[str, Data]]:
        """Yield the events of an answer as it comes; the last one has all of it."""
        reason, used = "stop", None
        output = _Output(
            self._service.tokenizer,
            with_logprobs=self._body.wants_logprobs,
            forces_call=self._chat.forces_call,
        )
        async with aclosing(self._chat.parts(begun, streamed=streamed)) as parts:
            async for choice, now in parts:
                used, reason = now, choice["finish_reason"] or reason
                for one in output.take(choice):
                    yield one
        for one in output.end(_status(reason)):
            yield one
        response = self._ended(output.items, reason, used)
        yield f"response.{response['status']}", {"response": response}

    def _ended(self, output: list[Data], reason: str, used: Mapping[str, Any] | None) -> Data:
        """Return the response at its end; it is stored if it is to be."""
        response = self._response(output, reason, used)
        if self._body.store and self._store.most:
            # A forced call that was cut is no item; its turn is one of nothing.
            answer = messages_of(output, self._store) or [{"role": "assistant", "content": ""}]
            self._store.put(response, _with_ids(self._body.items()), [*self._messages, *answer])
        return response

    def _response(
        self, output: list[Data], reason: str | None, used: Mapping[str, Any] | None
    ) -> Data:
        body = self._body
        cut = reason == "length"
        usage = {}  # left out until it is known
        if used is not None:
            usage["usage"] = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    **used.get("completion_tokens_details", {}),
                },
                "total_tokens": used["total_tokens"],
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reason is None else _status(reason),
            "background": False,
            "model": self._model,
            "output": output,
            **usage,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "store": body.store and self._store.most > 0,
            "temperature": self._chat.params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self._chat.params.top_p,
            "truncation": "disabled",
        }


class _Output:
    """The items of a streamed answer: one open at a time."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool, forces_call: bool) -> None:
        self.items: list[Data] = []
        self._tokenizer = tokenizer
        self._open = False
        self._with_logprobs = with_logprobs
        self._forces_call = forces_call
        self._scores: list[Data] = []
        """Of tokens that showed no text yet; text that comes has them, a call has no room."""

    def take(self, choice: Mapping[str, Any]) -> Iterator[tuple[str, Data]]:
        """Yield the events of a chat's delta."""
        delta = choice["delta"]
        self._scores += (choice["logprobs"] or {}).get("content", [])
        if delta.get("reasoning_content"):
            self._scores_of(delta["reasoning_content"])  # they have nowhere to be
            yield from self._think(delta["reasoning_content"])
        elif delta.get("content"):
            yield from self._write(delta["content"], self._scores_of(delta["content"]))
        for call in delta.get("tool_calls", ()):
            self._scores = []
            if "id" in call:
                function = {"name": call["function"]["name"], "arguments": ""}
                item = _call(_new("fc"), call["id"], function, "in_progress")
                yield from self._begin(item)
            piece = call["function"]["arguments"]
            self.items[-1]["arguments"] += piece
            yield "response.function_call_arguments.delta", {**self._where(), "delta": piece}

    def end(self, status: str) -> Iterator[tuple[str, Data]]:
        """Yield how the last item ends; an answer of nothing is a message of nothing."""
        if self._is_open("message") or not (self.items or self._forces_call):
            yield from self._write("", self._scores)
        yield from self._close(status)

    def _is_open(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _think(self, text: str) -> Iterator[tuple[str, Data]]:
        if not self._is_open("reasoning"):
            yield from self._begin(_thought(_new("rs"), "", "in_progress"))
            part = {"type": "reasoning_text", "text": ""}
            place = {**self._where(), "content_index": 0, "part": part}
            yield "response.content_part.added", place
        self.items[-1]["content"][0]["text"] += text
        shown = {**self._where(), "content_index": 0, "delta": text}
        yield "response.reasoning_text.delta", shown

    def _write(self, text: str, scores: Sequence[Data]) -> Iterator[tuple[str, Data]]:
        if not self._is_open("message"):
            yield from self._begin(_message(_new("msg"), "", [], "in_progress"))
            place = {**self._where(), "content_index": 0, "part": _part("", [])}
            yield "response.content_part.added", place
        part = self.items[-1]["content"][0]
        part["text"] += text
        scores = [*scores] if self._with_logprobs else []
        part["logprobs"] += scores
        if text or scores:
            shown = {"delta": text, "logprobs": scores}
            yield "response.output_text.delta", {**self._where(), "content_index": 0, **shown}

    def _scores_of(self, text: str) -> list[Data]:
        """Take the scores of the tokens that spell a text, however many tokens came at once.

        Those before it (a mark, space that is left out) are dropped, those behind it kept for what
        comes next. Of a text that no tokens spell, all are.
        """
        wanted, scores = text.encode(), self._scores
        spells = [
            b"" if self._tokenizer.names_special([score["token"]]) else bytes(score["bytes"])
            for score in scores
        ]
        for first in (k for k, own in enumerate(spells) if own):
            spelled = b""
            for last in range(first, len(scores)):
                spelled += spells[last]
                if not wanted.startswith(spelled[: len(wanted)]):
                    break
                if len(spelled) >= len(wanted):
                    self._scores = scores[last + 1 :]
                    return scores[first : last + 1]
        self._scores = []
        return scores

    def _begin(self, item: Data) -> Iterator[tuple[str, Data]]:
        yield from self._close("completed")
        self.items.append(item)
        self._open = True
        shown = {**item, "content": []} if "content" in item else {**item}
        place = {"output_index": len(self.items) - 1}
        yield "response.output_item.added", {**place, "item": shown}

    def _close(self, status: str) -> Iterator[tuple[str, Data]]:
        if not self._open:
            return
        self._open, item = False, self.items[-1]
        item["status"] = status
        place = self._where()
        if item["type"] == "message":
            (part,) = item["content"]
            own = {**place, "content_index": 0}
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**own, **done}
            yield "response.content_part.done", {**own, "part": part}
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            own = {**place, "content_index": 0}
            yield "response.reasoning_text.done", {**own, "text": part["text"]}
            yield "response.content_part.done", {**own, "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _where(self) -> Data:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def messages_of(items: Sequence[Mapping[str, Any]], store: ResponseStore) -> list[Data]:
    """Return items as a chat's messages: calls of one turn go together, thoughts with what follows.

    References to items of stored answers are followed.
    """
    messages: list[Data] = []
    thought = ""
    for item in items:
        kind = item.get("type", "message")
        if kind == "item_reference":
            item = store.item(str(item.get("id")))
            kind = item["type"]
        if kind == "message" and "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            messages.append(result)
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            thought += "".join(part.get("text", "") for part in parts if isinstance(part, dict))
            continue
        else:
            raise ApiError(
                400,
                "the model reads messages, function calls and their outputs, got an item of type "
                f"{item.get('type')!r:.100}",
                param="input",
            )
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        elif thought and messages[-1]["role"] != "tool":
            messages.insert(-1, _cut_turn(thought))
        thought = ""
    return [*messages, _cut_turn(thought)] if thought else messages


def _require_calls(messages: Sequence[Data]) -> None:
    """Refuse the output of a call that is not in the conversation before it."""
    called: set[str] = set()
    for message in messages:
        called |= {str(call["id"]) for call in message.get("tool_calls", ())}
        if "tool_call_id" in message and str(message["tool_call_id"]) not in called:
            raise ApiError(
                400,
                f"'input': no function call {message['tool_call_id']!r:.100} comes before its "
                "output; send the call, too, or the response that has it as previous_response_id",
                param="input",
            )


def _cut_turn(thought: str) -> Data:
    """Return the turn of an answer that was cut while it thought."""
    return {"role": "assistant", "content": "", "reasoning_content": thought}


def _with_ids(items: Sequence[Mapping[str, Any]]) -> list[Data]:
    """Return a request's input as it is listed: every item has an id."""
    return [{"type": "message", "id": _new("msg"), **item} for item in items]


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _part(text: str, logprobs: Sequence[Data]) -> Data:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _message(name: str, text: str, logprobs: Sequence[Data], status: str) -> Data:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text, logprobs)],
    }


def _thought(name: str, text: str, status: str) -> Data:
    return {
        "id": name,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def _call(name: str, call_id: str, function: Mapping[str, Any], status: str) -> Data:
    return {
        "id": name,
        "type": "function_call",
        "call_id": call_id,
        "name": function["name"],
        "arguments": function["arguments"],
        "status": status,
    }
