"""The application: which path is answered by what."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from llmpq.runtime.entrypoints.response_stream import ResponseStream
from llmpq.runtime.serve.answering import stream, while_connected
from llmpq.runtime.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from llmpq.runtime.serve.chat import Chat, conversation_length, plain_message
from llmpq.runtime.serve.completions import TextCompletion
from llmpq.runtime.serve.errors import ApiError, AsciiJson, handle_errors, unread
from llmpq.runtime.serve.gate import Gate, Gated
from llmpq.runtime.serve.messages import CountBody, Messages, MessagesBody
from llmpq.runtime.serve.page import add_page, state_of
from llmpq.runtime.serve.responses import Responses, ResponsesBody
from llmpq.runtime.serve.service import Service
from llmpq.version import __version__

_T = TypeVar("_T")
Body = TypeVar("Body", bound=BaseModel)
PARSED_AT_ONCE = 8
"""Bytes of a body that are read in the time in which one character is tokenised."""


def parsed(form: type[Body], raw: bytes) -> Body:
    """Return a body; `ApiError` or `ValidationError` for one that is not of this form."""
    if not raw:
        raise ApiError(400, "the body is empty; expected a JSON object")
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise unread(error) from None
    return form.model_validate(data)


def body_of(form: type[BaseModel]) -> dict[str, Any]:
    """Return what a route's description says of its body."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def describe_bodies(app: FastAPI, forms: Sequence[type[BaseModel]]) -> None:
    """Put the forms that `body_of` names into an application's description."""
    described = app.openapi

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schema = models_json_schema(
                [(form, "validation") for form in forms],
                ref_template="#/components/schemas/{model}",
            )
            schemas = described().setdefault("components", {}).setdefault("schemas", {})
            schemas.update(schema["$defs"])
        return described()

    app.openapi = with_bodies  # type: ignore[method-assign]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": about,
        "content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}},
    }
    for status, about in (
        ("4XX", "A request that is refused; OpenAI's error, Anthropic's under /v1/messages."),
        ("5XX", "No engine (503), too late (504)."),
    )
}

_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with 'stream': true, as it comes.",
        "content": {"text/event-stream": {}},
    }
}


BODIES = (
    CompletionBody,
    ChatBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    CountBody,
    DetokenizeBody,
)


LONG_LIST = 1 << 16


class Answering(Protocol):
    """A request of any form that may be streamed."""

    async def begin(self) -> list[ResponseStream]:
        """Queue it."""
        ...

    async def whole(self) -> dict[str, Any]:
        """Return the answer."""
        ...

    def events(self, begun: list[ResponseStream]) -> AsyncIterator[str]:
        """Yield the answer as it comes."""
        ...


async def _read(
    service: Service, request: Request, form: type[Body], make: Callable[[Body], _T]
) -> _T:
    """Return what `make` makes of a request's body, a long one beside the event loop."""
    raw = await request.body()
    return await service.read_text(lambda: make(parsed(form, raw)), len(raw) // PARSED_AT_ONCE)


async def _answer(
    request: Request, service: Service, form: type[Body], kind: Callable[[Service, Body], Answering]
) -> Response:
    """Answer a request, whole or as it comes; whatever can be refused is, before a stream."""
    streamed, asked = await _read(
        service, request, form, lambda body: (getattr(body, "stream", False), kind(service, body))
    )
    if streamed:
        begun = await while_connected(request, asked.begin())
        ended = partial(service.give_up, begun)
        return stream(asked.events(begun), request.url.path, ended=ended)
    return AsciiJson(await while_connected(request, asked.whole()))


def make_app(service: Service, *, gated: bool = True) -> FastAPI:
    """Return the application of a service, behind the gate unless a front has one."""
    app = FastAPI(
        title="llmpq",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=_REFUSALS,
        servers=[{"url": service.settings.root_path}] if service.settings.root_path else None,
    )
    handle_errors(app)
    describe_bodies(app, BODIES)
    _add_answers(app, service)
    _add_texts(app, service)
    _add_state(app, service)
    add_page(app, lambda: state_of(service))
    if gated:
        add_gate(app, service)
    return app


def add_gate(app: FastAPI, service: Gated) -> None:
    """Put the gate before an application, and what lets other sites' pages ask."""
    app.add_middleware(Gate, service=service)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_STREAMS, openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        return await _answer(request, service, CompletionBody, TextCompletion)

    @app.post("/v1/chat/completions", responses=_STREAMS, openapi_extra=body_of(ChatBody))
    async def chat(request: Request) -> Response:
        return await _answer(request, service, ChatBody, Chat)

    @app.post("/v1/messages", responses=_STREAMS, openapi_extra=body_of(MessagesBody))
    async def messages(request: Request) -> Response:
        return await _answer(request, service, MessagesBody, Messages)

    @app.post("/v1/responses", responses=_STREAMS, openapi_extra=body_of(ResponsesBody))
    async def responses(request: Request) -> Response:
        return await _answer(request, service, ResponsesBody, Responses)

    @app.get("/v1/responses/{name}")
    async def stored_response(name: str) -> Response:
        return AsciiJson(service.responses.get(name).response)

    @app.get("/v1/responses/{name}/input_items")
    async def stored_input(name: str) -> Response:
        items = service.responses.get(name).items[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return AsciiJson({"object": "list", "data": items, "has_more": False, **ends})

    @app.delete("/v1/responses/{name}")
    async def forget_response(name: str) -> dict[str, Any]:
        service.responses.delete(name)
        return {"id": name, "object": "response", "deleted": True}


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await _read(service, request, TokenizeBody, lambda body: body)
        service.check_model(body.model)
        llm = service.ready()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected either 'prompt' or 'messages'")
        if body.messages is not None and body.add_special_tokens:
            raise ApiError(
                400,
                "'add_special_tokens' is for a prompt: a chat template writes its own",
                param="add_special_tokens",
            )

        def response() -> Response:
            if body.messages is not None:
                tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
                tokens = service.encode_chat(
                    [plain_message(message) for message in body.messages],
                    tools=tools or None,
                    add_generation_prompt=body.opens_answer,
                    continue_final_message=body.continue_final_message,
                    options=body.chat_template_kwargs,
                )
            else:
                special = body.add_special_tokens is not False
                tokens = llm.tokenizer.encode(body.prompt or "", special=special)
            # Pieces: one call for millions of ids would not let the event loop go on.
            pieces = [tokens[at : at + LONG_LIST] for at in range(0, len(tokens), LONG_LIST)]
            ids = ",".join(",".join(map(str, piece)) for piece in pieces)
            more = f'"count":{len(tokens)},"max_model_len":{llm.max_model_len}'
            if body.return_token_strs:
                names = [llm.tokenizer.text_of(token) for token in tokens]
                more += f',"token_strs":{json.dumps(names)}'
            return Response(f'{{"tokens":[{ids}],{more}}}', media_type="application/json")

        length = conversation_length(body.messages or (), body.tools) + len(body.prompt or "")
        return await service.read_text(response, length)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_of(CountBody))
    async def count_messages(request: Request) -> dict[str, int]:
        asked = await _read(service, request, CountBody, partial(Messages, service))
        return {"input_tokens": await asked.num_tokens()}

    @app.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponsesBody))
    async def count_input(request: Request) -> dict[str, Any]:
        asked = await _read(service, request, ResponsesBody, partial(Responses, service))
        return {"object": "response.input_tokens", "input_tokens": await asked.num_tokens()}

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await _read(service, request, DetokenizeBody, lambda body: body)
        service.check_model(body.model)
        tokenizer = service.ready().tokenizer

        def response() -> Response:
            most, tokens = tokenizer.num_tokens - 1, body.tokens
            wrong = next((token for token in tokens if not 0 <= token <= most), None)
            if wrong is not None:
                raise ApiError(400, f"tokens must be from 0 to {most}, got {wrong}", param="tokens")
            return AsciiJson({"prompt": tokenizer.decode(tokens)})

        return await service.read_text(response, len(body.tokens))


def _add_state(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        length = service.max_model_len  # null says to some clients that there is no bound
        return {
            "id": name,
            "object": "model",
            "created": int(service.began_s),
            "owned_by": "llmpq",
            "root": service.model_name,
            "parent": None,
            **({} if length is None else {"max_model_len": length}),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = service.settings.model_names
        return {"object": "list", "data": [described(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return described(name)

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> dict[str, str]:
        service.check_engine()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        llm = service.ready()
        llm.check_alive()
        service.check_stages(llm)
        return {"status": "ready"}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.num_under_way}

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache() -> Response:
        # In a thread: the first stage is asked.
        service.ready().reset_prefix_cache()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        # In a thread: the stages are asked.
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
