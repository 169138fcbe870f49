"""Messages of a conversation as chat templates take them: one text each, calls as data.

    {"role": "user", "content": [{"type": "text", "text": "hi"}]}  ->  content "hi"

Clients write messages as OpenAI's API has them. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.runtime.text.strict_json import DECODER

Messages = Sequence[Mapping[str, Any]]
"""A conversation: `role` and `content` of each message; the content is a text, or parts of it."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as templates take them; `ValueError` names the one that is none."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(
            "a conversation is a list of messages such as {'role': 'user', 'content': 'hi'}, got "
            f"{messages!r:.100}"
        )
    if not messages:
        raise ValueError("a conversation needs at least one message")
    plain = []
    for place, message in enumerate(messages):
        try:
            plain.append(plain_message(message))
        except ValueError as error:
            raise ValueError(f"message {place}: {error}") from None
    return plain


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return one message as templates take it."""
    if not isinstance(message, Mapping):
        raise ValueError(
            "it must be a mapping such as {'role': 'user', 'content': 'hi'}, got "
            f"{message!r:.100}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"it needs a role such as 'user', got {role!r:.100}")
    # Clients send turns back with every field that an answer has: null, or no calls.
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text_of(message)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:  # templates know it by either name
        plain |= {"reasoning_content": thought, "reasoning": thought}
    if role == "function":  # OpenAI's older form of a tool's result, which few templates know
        plain["role"] = "tool"
    calls, old = plain.pop("tool_calls", None), plain.pop("function_call", None)
    if calls and old is not None:
        raise ValueError("it has both tool_calls and function_call; leave one of them out")
    if old is not None:  # OpenAI's older form of one call
        calls = [{"type": "function", "function": old}]
    if calls:
        plain["tool_calls"] = _plain_calls(calls)
    return plain


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain message for templates that want a call's arguments as a text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:  # OpenAI's answers have a refusal beside the content
        content = message.get("refusal")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":  # calls alone, or cut before its text
        return ""
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(map(_text_of_part, content))
    raise ValueError(f"its content must be a text or a list of parts, got {content!r:.100}")


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"a content part must be a mapping with a type, got {part!r:.100}")
    if part.get("type") not in _TEXT_PARTS:
        kind = part.get("type")
        raise ValueError(f"the model reads text only, got a content part of type {kind!r:.100}")
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise ValueError(f"a content part needs its text, got {text!r:.100}")
    return text


def _plain_calls(calls: object) -> list[dict[str, Any]]:
    """Return calls with their arguments as data; `ValueError` for what is no JSON object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"tool_calls must be a list of calls, got {calls!r:.100}")
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"a call needs a function with a name, got {call!r:.100}")
        given = function.get("arguments")
        plain.append(
            {**call, "function": {**function, "arguments": _arguments(function["name"], given)}}
        )
    return plain


def _arguments(name: str, given: object) -> Mapping[str, Any]:
    """Return a call's arguments as data; none at all where nothing is said of them."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = DECODER.decode(given) if given.strip() else None
        except (ValueError, RecursionError):
            arguments = given
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of a call of {name!r:.100} must be a JSON object, got {given!r:.100}"
        )
    return arguments
