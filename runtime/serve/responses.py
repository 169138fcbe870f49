"""/v1/responses: OpenAI's newer form of a chat, for text; nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field

from llmpq.runtime.answers import Answers
from llmpq.runtime.serve.answering import event
from llmpq.runtime.serve.bodies import Body, ChatBody, Whole
from llmpq.runtime.serve.chat import Chat
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.service import Service

_SCHEMA_KEYS = ("name", "schema", "strict", "description")


class ResponsesBody(Body):
    """A body of /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None

    def as_chat(self) -> ChatBody:
        """Return the same request as a chat; `ApiError` for what needs a memory of others."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ApiError(
                    400, f"'{name}' is not supported: nothing is stored; send the whole input",
                    param=name,
                )  # fmt: skip
        if self.tools and self.tool_choice != "none":
            raise ApiError(
                400, "'tools' are not supported here; use /v1/chat/completions", param="tools"
            )
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(item) for item in self.input]
        if not messages:
            raise ApiError(400, "'input' must be a text or at least one message, got []",
                           param="input")  # fmt: skip
        chat = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._format(),
        }
        return ChatBody.model_validate(chat)

    def _format(self) -> dict[str, Any] | None:
        wanted = (self.text or {}).get("format")
        if not isinstance(wanted, dict) or wanted.get("type") in (None, "text"):
            return None
        if wanted["type"] != "json_schema":
            return {"type": wanted["type"]}
        schema = {key: wanted[key] for key in _SCHEMA_KEYS if key in wanted}
        return {"type": "json_schema", "json_schema": schema}


class Responses:
    """One request of /v1/responses."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._chat, self._body = Chat(service, body.as_chat()), body
        self._model = body.model or service.model_name
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def begin(self) -> list[Answers]:
        """Queue the conversation."""
        return await self._chat.begin()

    def num_tokens(self) -> int:
        """Return how many tokens the conversation has."""
        return len(self._chat.prompt())

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        told = await self._chat.whole()
        choice = told["choices"][0]
        text = choice["message"]["content"] or ""
        return self._response(text, choice["finish_reason"], told["usage"])

    async def events(self, begun: list[Answers]) -> AsyncIterator[str]:
        """Yield the answer as it comes, in numbered events."""
        text, reason, used, number = "", "stop", None, 0
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}

        def told(name: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **data}, name)

        empty = self._response("", None, None)
        yield told("response.created", response=empty)
        yield told("response.in_progress", response=empty)
        item = {**self._item("", "in_progress"), "content": []}
        yield told("response.output_item.added", output_index=0, item=item)
        yield told("response.content_part.added", **place, part=_part(""))
        async for choice, now in self._chat.parts(begun):
            used = now
            piece = choice["delta"].get("content")
            reason = choice["finish_reason"] or reason
            if piece:
                text += piece
                yield told("response.output_text.delta", **place, delta=piece, logprobs=[])
        yield told("response.output_text.done", **place, text=text, logprobs=[])
        yield told("response.content_part.done", **place, part=_part(text))
        status = "incomplete" if reason == "length" else "completed"
        item = self._item(text, status)
        yield told("response.output_item.done", output_index=0, item=item)
        yield told(f"response.{status}", response=self._response(text, reason, used))

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _response(
        self, text: str, reason: str | None, used: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        cut = reason == "length"
        status = "in_progress" if reason is None else "incomplete" if cut else "completed"
        usage = {}  # left out until it is known
        if used is not None:
            usage["usage"] = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [] if reason is None else [self._item(text, status)],
            **usage,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._body.instructions,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": self._chat.params.temperature,
            "top_p": self._chat.params.top_p,
            "tool_choice": "auto",
            "tools": [],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the input as a message."""
    if item.get("type", "message") != "message" or "role" not in item:
        raise ApiError(
            400, f"the model reads messages only, got an item of type {item.get('type')!r}",
            param="input",
        )  # fmt: skip
    return {"role": item["role"], "content": item.get("content")}
