"""From a request's bytes to its body's class, where the caller likes; what FastAPI says of that.

FastAPI would read bodies in the event loop, where one of megabytes holds everything else up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llmpq.runtime.serve.errors import UNREAD, ApiError

_T = TypeVar("_T", bound=BaseModel)
PARSED_AT_ONCE = 8
"""Bytes of a body that are read in the time in which one character is tokenised."""


def parsed(form: type[_T], raw: bytes) -> _T:
    """Return a body; `ApiError` or `ValidationError` for one that is not of this form."""
    if not raw:
        raise ApiError(400, "the body is empty; expected a JSON object")
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise ApiError(400, UNREAD) from None
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
