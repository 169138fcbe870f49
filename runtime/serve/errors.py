"""Refusals as clients expect them: OpenAI's JSON, or Anthropic's under /v1/messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from llmpq.errors import ContextLengthError, DeadlineError, RequestFailedError, StageLostError
from llmpq.runtime.options.vllm_options import VLLM_OPTIONS
from llmpq.runtime.requests.sampling_params import SamplingParams

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1


class AsciiJson(JSONResponse):
    """JSON that stays ASCII: half a character of a request's text can be sent back."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class ApiError(HTTPException):
    """A request that is refused, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
        allow: str | None = None,
    ) -> None:
        """`retry_after_s`: what a client is to wait (429, 503); `allow`: the methods there are."""
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def response_headers(self) -> dict[str, str]:
        """What the answer says beside its body."""
        if self.status in (429, 503):
            return {"Retry-After": str(self.retry_after_s)}
        if self.allow is not None:
            return {"Allow": self.allow}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error as JSON data, in the form of the path's API."""
        kind = _KINDS.get(self.status, "server_error")
        if path.startswith("/v1/messages"):
            kind = "api_error" if kind == "server_error" else kind
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """Return what a client gets for an error."""
    match error:
        case ApiError():
            return error
        case RequestValidationError() | ValidationError():
            return _of_fields(error.errors()[0])
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case ClientDisconnect():
            return ApiError(499, "the client went away before its body was sent")
        case RecursionError():
            return unread(error)
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case ValueError():
            return ApiError(400, str(error), param=_named_first(str(error)))
        case TimeoutError():
            return ApiError(504, "the answer took longer than the server allows")
        case RequestFailedError():
            return ApiError(500, str(error).splitlines()[0][:300])
        case StageLostError() | DeadlineError() | ConnectionError() | RuntimeError():
            return ApiError(503, f"the engine has stopped: {str(error).splitlines()[0][:300]}")
    return ApiError(500, f"the server failed ({type(error).__name__})")


def handle_errors(app: FastAPI) -> None:
    """Have every error of an application answered as JSON."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        if found.status == 404 and found.message == "Not Found":
            found = _no_path(request)
        elif found.status == 405:
            found = _no_method(request)
        return AsciiJson(found.body(request.url.path), found.status, found.response_headers)

    known = (ApiError, RequestValidationError, HTTPException, ValueError, ClientDisconnect)
    # What is no fault of the program's leaves no traceback in the log, as `Exception` does.
    for kind in (*known, StageLostError, DeadlineError, ConnectionError, TimeoutError, Exception):
        app.add_exception_handler(kind, answer)


def _no_path(request: Request) -> ApiError:
    """Return what is said of a path that nothing answers."""
    path = request.url.path
    known = {route.path for route in request.app.routes if isinstance(route, Route)}
    short = "/" + re.sub("^(/*v1(?=/))+", "", path).strip("/")  # a base URL's /v1 twice, or not
    near = get_close_matches(f"/v1{short}", known, n=1, cutoff=0.9)
    found = next((one for one in (f"/v1{short}", short, *near) if one in known), "/")
    others = (said for own, said in OTHERS_PATHS.items() if short.startswith(own))
    of_others = next(others, _ANSWERS)
    meant = f"did you mean {found}?" if found != "/" else of_others
    return ApiError(404, f"nothing answers {path!r:.100}; {meant}", code="unknown_url")


_ANSWERS = (
    "this server generates text at /v1/chat/completions, /v1/completions, /v1/responses and "
    "/v1/messages; it makes no embeddings, scores of pairs or ranks (how likely a text is: "
    "/v1/completions with echo, logprobs and max_tokens 0)"
)
"""What is said of Ollama's paths, llama.cpp's, and of abilities that this server has not."""


_TEXT = "this server reads and writes text only"
_BATCHES = "a file of requests is llmpq-dist run -i FILE -o FILE, which takes OpenAI's batch files"
_AWAKE = "weights stay where they are: end the server, and start it again"
_STATE = "what runs is at /v1/models, /version, /ready and /metrics"
_TRACES = "each stage's steps are written by llmpq-dist serve --trace FILE"
OTHERS_PATHS: Mapping[str, str] = {
    **dict.fromkeys(("/load_lora", "/unload_lora", "/lora"), VLLM_OPTIONS["enable_lora"].instead),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _AWAKE),
    **dict.fromkeys(("/release_memory", "/resume_memory"), _AWAKE),
    **dict.fromkeys(("/server_info", "/get_server_info", "/get_model_info", "/props"), _STATE),
    **dict.fromkeys(("/slots", "/get_load", "/is_scaling"), _STATE),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _TRACES),
    "/scale_elastic_ep": "engines are as many as --replicas or the plan says",
    "/abort_request": "an answer ends when its client hangs up",
    **dict.fromkeys(("/files", "/batches"), _BATCHES),
    **dict.fromkeys(("/audio", "/images", "/videos"), _TEXT),
    "/moderations": "this server generates text, and rates none",
}
"""How a path of another server's begins, without `/v1` -> what stands for it."""


def _no_method(request: Request) -> ApiError:
    """Return what is said of a path that has other methods."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    allow = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
    path, method = request.url.path, request.method
    return ApiError(405, f"{path!r:.100} takes {allow}, got {method:.20}", allow=allow)


def unread(error: ValueError | RecursionError) -> ApiError:
    """Return what is said of a body that is no JSON that can be read."""
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, f"the body is not in UTF-8: byte {error.start} fits no character")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested hundreds of levels deep; send a flatter one")
    return ApiError(400, "the body has a number of thousands of digits; send a shorter one")


def _of_fields(first: Mapping[str, Any]) -> ApiError:
    """Return what is wrong with a field as one sentence."""
    words = [str(word) for word in first["loc"] if word != "body" and not _is_type(word)]
    name = ".".join(words)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    value = first.get("input")
    got = next((word for one, word in _WORDS if value is one), repr(value))
    shown = got if len(got) <= 100 else got[:100] + "..."
    if first["type"] == "value_error":  # of our own validators: a whole sentence
        said = str(first["ctx"]["error"])
        return ApiError(400, f"'{name}': {said}" if name else said, param=name or None)
    said = _EXPECTED.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    what = f"'{name}': {said}" if name else f"the body: {said}"
    missing = first["type"] == "missing"
    return ApiError(400, what if missing else f"{what}, got {shown}", param=name or None)


_WORDS = ((None, "null"), (True, "true"), (False, "false"))
"""JSON's words for what Python calls otherwise."""
_EXPECTED = {
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "dict_type": "expected an object",
    "dict_attributes_type": "expected an object",
    "mapping_type": "expected an object",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
}
"""What is expected, where pydantic's words are Python's."""


def _is_type(word: object) -> bool:
    """Whether a part of a place is pydantic's name for one form of a union."""
    return isinstance(word, str) and ("[" in word or word in ("str", "int", "bool", "float"))


def _named_first(message: str) -> str | None:
    """Return the parameter that an engine's sentence is about."""
    word = message.split("=")[0].split(" ")[0].rstrip(":")
    return word if word in SamplingParams.__dataclass_fields__ else None
