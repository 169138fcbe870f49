"""Settings of a server. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How the server answers; the defaults are those of the flags."""

    model_names: tuple[str, ...] = ()
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
    """How long answers under way may take once the server is asked to end."""
    uds: str | None = None
    """A socket of the file system to listen at, instead of host and port."""
    root_path: str = ""
    """Under which a proxy shows the server; paths are answered with and without it."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    """None: the key is in the certificate's file."""
    ssl_ca_certs: str | None = None
    """Who signs the clients' certificates."""
    ssl_cert_reqs: int | None = None
    """Whether clients must show one: 0 no, 1 a right one if any, 2 yes; None: with a CA yes."""
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    """Whether the log tells what was asked."""
    metrics_prefix: Literal["vllm", "llmpq"] = "vllm"
    tool_parser: str = "auto"
    """Name of the form in which the model writes calls; "auto": as its template shows."""
    reasoning_parser: str | None = "auto"
    """Name of the marks between which it thinks; None: thoughts stay part of the text."""
    chat_template: str | None = None
    """A template's text instead of the model's own."""

    @property
    def client_certificates(self) -> int:
        """Whether clients must show one, `None` resolved."""
        if self.ssl_cert_reqs is not None:
            return self.ssl_cert_reqs
        return 0 if self.ssl_ca_certs is None else 2

    def url(self, host: str, port: int) -> str:
        """Return where the server is to be found."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        shown = f"[{host}]" if ":" in host else host
        kind = "http" if self.ssl_certfile is None else "https"
        return f"{kind}://{shown}:{port}{self.root_path}"
