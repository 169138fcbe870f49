"""/v1/messages: Anthropic's API, as another form of a chat: text, tools, streams."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.requests.request_output import NO_ROOM
from llmpq.runtime.serve.answering import event
from llmpq.runtime.serve.bodies import FIRST_ERROR, Body, ChatBody, ChoiceBody, Whole
from llmpq.runtime.serve.chat import Chat
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.service import Service, usage
from llmpq.runtime.text.strict_json import DECODER

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessage(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class AnthropicTool(Body):
    """A tool that the client runs."""

    type: str = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class OutputConfig(Body):
    """What an answer must be."""

    format: dict[str, Any] | None = None
    effort: str | None = None
    """For templates that ask for it."""


class MessagesBody(ChoiceBody):
    """A body of /v1/messages."""

    model: str
    max_tokens: Whole = Field(ge=1)
    messages: Annotated[list[AnthropicMessage], FIRST_ERROR] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """What `output_config` holds now, as clients sent it before."""

    def as_chat(self) -> ChatBody:
        """Return the same request in OpenAI's form."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            messages += _plain(message)
        if not messages:
            raise ApiError(400, "'messages' must hold a text", param="messages")
        goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        config = self.output_config or OutputConfig()
        chat: dict[str, Any] = {
            **self.choice_fields(),
            **self._thinks(),
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop_sequences or None,
            "tools": self._tools(),
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            "response_format": self._format(),
            "continue_final_message": goes_on,
            "reasoning_effort": config.effort,
        }
        return ChatBody.model_validate(chat)

    @property
    def budget_field(self) -> str:
        """What the client calls the bound of a thought: Anthropic's name or ours."""
        anthropics = "budget_tokens" in (self.thinking or {})
        return "thinking.budget_tokens" if anthropics else "thinking_token_budget"

    def _format(self) -> dict[str, Any] | None:
        """Return what the text must be, in OpenAI's form."""
        wanted = (self.output_config or OutputConfig()).format or self.output_format
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise ApiError(
                400,
                f"output_config.format must be of type json_schema, got {wanted!r:.100}",
                param="output_config",
            )
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}

    def _thinks(self) -> dict[str, Any]:
        """Return what `thinking` says in a chat's fields."""
        if self.thinking is None:
            return {}
        kind, budget = self.thinking.get("type"), self.thinking.get("budget_tokens")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise ApiError(
                400,
                f"thinking.type must be enabled, adaptive or disabled, got {kind!r:.100}",
                param="thinking",
            )
        fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}}
        if kind == "enabled" and budget is not None:
            if type(budget) is not int or budget < 1:
                raise ApiError(
                    400,
                    f"thinking.budget_tokens must be a number of tokens, got {budget!r:.100}",
                    param="thinking",
                )
            fields["thinking_token_budget"] = budget
        return fields

    def _tools(self) -> list[dict[str, Any]] | None:
        for tool in self.tools or ():
            if tool.type != "custom":
                raise ApiError(
                    400,
                    f"tools of type '{tool.type:.100}' are not known here: this server takes those "
                    "that have an input_schema, which the client runs",
                    param="tools",
                )
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or []
        ]
        return tools or None

    def _tool_choice(self) -> Any:
        if self.tool_choice is None:
            return None
        kind = self.tool_choice.get("type")
        if kind == "tool":
            name = self.tool_choice.get("name", "")
            return {"type": "function", "function": {"name": name}}
        if kind not in ("auto", "any", "none"):
            raise ApiError(400, f"tool_choice.type must be auto, any, tool or none, got {kind!r}")
        return "required" if kind == "any" else kind


class CountBody(MessagesBody):
    """A body of /v1/messages/count_tokens: a message's, without its limit."""

    max_tokens: Whole = Field(default=1, ge=1)


class Messages:
    """One request of /v1/messages."""

    def __init__(self, service: Service, body: MessagesBody) -> None:
        self._chat, self._model = (
            Chat(
                service,
                body.as_chat(),
                format_field="output_config",
                budget_field=body.budget_field,
            ),
            body.model,
        )
        self._id = f"msg_{uuid.uuid4().hex}"
        self._stops = set(body.stop_sequences or ())

    async def begin(self) -> list[ResponseStream]:
        """Queue the conversation."""
        return await self._chat.begin()

    async def num_tokens(self) -> int:
        """Return how many tokens the conversation has."""
        return len(await self._chat.prompt())

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        answer = await self._chat.whole()
        choice, used = answer["choices"][0], answer["usage"]
        content: list[dict[str, Any]] = []
        if thought := choice["message"].get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if choice["message"]["content"]:
            content.append({"type": "text", "text": choice["message"]["content"]})
        for call in choice["message"].get("tool_calls", ()):
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": _data(function["arguments"]),
                }
            )
        return {
            **self._head(),
            "content": content,
            **self._reason(choice, bool(choice["message"].get("tool_calls"))),
            "usage": _usage(used),
        }

    async def events(self, begun: list[ResponseStream]) -> AsyncIterator[str]:
        """Yield the answer as it comes: blocks of text or of a tool's input."""
        length = len(begun[0].prompt_token_ids)
        used = _usage(usage(length, 0))
        not_yet = {"stop_reason": None, "stop_sequence": None}
        start = {**self._head(), "content": [], **not_yet, "usage": used}
        yield event({"type": "message_start", "message": start}, "message_start")
        blocks = _Blocks()
        async for choice, used_now in self._chat.parts(begun):
            for name, data in blocks.take(choice["delta"]):
                yield event(data, name)
            if choice["finish_reason"] is not None:
                for name, data in blocks.close():
                    yield event(data, name)
                ended = {
                    "type": "message_delta",
                    "delta": self._reason(choice, blocks.called),
                    "usage": _usage(used_now),
                }
                yield event(ended, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _reason(self, choice: dict[str, Any], called: bool) -> dict[str, Any]:
        stopped, ended = choice.get("stop_reason"), choice["finish_reason"]
        if ended == "length" and stopped == NO_ROOM:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        if stopped in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        reason = _REASONS.get(ended, "end_turn")
        if called and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}


class _Blocks:
    """The content blocks of a stream: one open at a time."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""
        self.called = False

    def take(self, delta: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a chat's delta."""
        events: list[tuple[str, dict[str, Any]]] = []
        if delta.get("reasoning_content"):
            events += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(
                self._delta({"type": "thinking_delta", "thinking": delta["reasoning_content"]})
            )
        if delta.get("content"):
            events += self._open("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": delta["content"]}))
        for call in delta.get("tool_calls", ()):
            self.called = True
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
                events += self._open(call["id"], {**block, "input": {}})
            arguments = call["function"]["arguments"]
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def close(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the end of the block that is open."""
        if not self._kind:
            return []
        signed = self._kind == "thinking"
        self._kind = ""
        name = "content_block_stop"
        stop = (name, {"type": name, "index": self._index})
        own = self._delta({"type": "signature_delta", "signature": ""})
        return [own, stop] if signed else [stop]

    def _open(self, kind: str, block: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        if kind == self._kind:
            return []
        events = self.close()
        self._index, self._kind = self._index + 1, kind
        name = "content_block_start"
        return [*events, (name, {"type": name, "index": self._index, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name = "content_block_delta"
        return name, {"type": name, "index": self._index, "delta": delta}


def _plain(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Return a message in OpenAI's form; results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    messages: list[dict[str, Any]] = []
    texts, calls, thoughts = [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking", "")))
            continue
        if kind == "tool_result":
            result = {"role": "tool", "tool_call_id": str(block.get("tool_use_id", ""))}
            messages.append({**result, "content": _text(block.get("content") or "")})
        elif kind == "tool_use":
            given = block.get("input")
            given = {} if given is None else given
            if not isinstance(given, dict):
                raise ApiError(
                    400,
                    f"the input of a tool_use block must be an object, got {given!r:.100}",
                    param="messages",
                )
            function = {"name": block.get("name"), "arguments": given}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(_text([block]))
    if texts or calls or message.role == "assistant":  # A turn cut while it thought, or before.
        own: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if any(thoughts):
            own["reasoning_content"] = "".join(thoughts)
        messages.append(own | ({"tool_calls": calls} if calls else {}))
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"content must be a text or a list of blocks, got {content!r:.100}")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else block
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"the model reads text only, got a block of type {kind!r:.100}")
    return "".join(block["text"] for block in content)


def _usage(used: dict[str, Any]) -> dict[str, int]:
    """Return what an answer took: tokens found in the prefix cache beside the others."""
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used["completion_tokens"],
    }


def _data(arguments: str) -> Any:
    try:
        return DECODER.decode(arguments)
    except ValueError:
        return {"text": arguments}
