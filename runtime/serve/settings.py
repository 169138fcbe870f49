"""What a server is told once. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "granite", "deepseek"]


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the server answers; the defaults are those of the flags."""

    model_names: tuple[str, ...]
    """Names that requests may call the model by; answers carry the first."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the server; none: it is open."""
    max_body_bytes: int = 8 << 20
    max_prompts: int = 64
    """Prompts in one request."""
    max_n: int = 128
    """Answers to one prompt."""
    max_requests: int = 512
    """Requests under way; beyond them 429."""
    max_stored_responses: int = 1000
    """Answers of /v1/responses in memory, for later ones to go on from; 64 MiB at most."""
    request_timeout_s: float | None = None
    """How long an answer may take; 504 then."""
    read_timeout_s: float = 20.0
    """How long a request's head, and then its body, may take to arrive."""
    write_timeout_s: float = 20.0
    """How long a client may take nothing of an answer that waits for it."""
    drain_timeout_s: float = 30.0
    """How long answers under way may take once the server is told to end."""
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    """Whether the log tells what was asked."""
    metrics_prefix: Literal["vllm", "llmpq"] = "vllm"
    tool_format: ToolFormat = "auto"
    chat_template: str | None = None
    """A template's text instead of the model's own."""
