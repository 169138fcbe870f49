"""ASGI messages and scopes as JSON, between the process that listens and its replicas."""

from __future__ import annotations

from typing import Any

from llmpq.runtime.serve.gate import Message

_BYTES = ("body", "raw_path", "query_string")
"""Fields of ASGI messages and scopes that are bytes."""


def to_plain(message: Message) -> Message:
    """Return an ASGI message, or scope, for JSON: bytes as text of Latin-1."""
    plain = {key: _text(value) for key, value in message.items() if key != "headers"}
    if "headers" in message:
        plain["headers"] = [[_text(name), _text(value)] for name, value in message["headers"]]
    return plain


def from_plain(plain: Message) -> Message:
    """Return what `to_plain` was given."""
    message = {
        key: value.encode("latin-1") if key in _BYTES and value is not None else value
        for key, value in plain.items()
    }
    if "headers" in plain:
        message["headers"] = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in plain["headers"]
        ]
    return message


def _text(value: Any) -> Any:
    return bytes(value).decode("latin-1") if isinstance(value, (bytes, bytearray)) else value
