"""One line of a batch file: how it is read, and how its answer or error is written.

Forms: OpenAI batch lines for /v1/completions and /v1/chat/completions (or, short, their body beside
a `custom_id`), plain `{"prompt": ...}` lines, and text. A line that cannot be served becomes a row
with an error; the others go on. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmpq.errors import nearest
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import (
    SamplerConfig,
    SamplingParams,
    StructuredOutputsParams,
)

Form = Literal["text", "plain", "completion", "chat"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_HASH = "prompt_hash"
"""Key of an OpenAI answer that tells --resume which prompt was answered."""
MADE_WITH = "made_with"
"""Key of what an answer was made with: model, precision, sampling."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "stream": (False, None),
    "echo": (False, None),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
}
"""Options that are accepted only with values that change nothing."""
_IGNORED = ("model", "user", "metadata", "store")
_OPTIONS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
)
_MORE = (
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "timeout_s",
    "structured_outputs",
    "skip_special_tokens",
    "thinking_token_budget",
)
"""Further options of `SamplingParams`, by its names; those that add to an answer are `_NEUTRAL`."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What rows that do not say otherwise use: the command's flags."""

    max_tokens: int | None = None
    """None for the plan's number of tokens to generate."""
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    """Row i draws from seed + i."""
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One request of a batch file, or the reason why it cannot be one."""

    index: int
    form: Form
    row_id: str | None = None
    """`custom_id` of an OpenAI line, `id` of a plain one."""
    prompt: str | tuple[int, ...] = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation of a chat row; `prompt` is unused then."""
    max_tokens: int | None = None
    sampling: SamplerConfig = SamplerConfig()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    """Lower ones are scheduled first."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else it asks of `SamplingParams`, as it was written."""
    error: str | None = None

    def params(self, default_tokens: int) -> SamplingParams:
        """Return how its answer is sampled; `default_tokens`: where it does not say how many."""
        choice = self.sampling
        return SamplingParams(
            max_tokens=self.max_tokens or default_tokens,
            temperature=choice.temperature,
            top_k=choice.top_k or 0,
            top_p=choice.top_p,
            seed=choice.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            **_as_params(self.more),
        )


def _as_params(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's further options as `SamplingParams` takes them."""
    params = dict(options)
    guide, bias = params.get("structured_outputs"), params.get("logit_bias")
    if isinstance(guide, dict):
        params["structured_outputs"] = StructuredOutputsParams(**guide)
    if isinstance(bias, dict):  # keys of JSON are texts
        params["logit_bias"] = {
            int(t) if t.lstrip("-").isdigit() else t: v for t, v in bias.items()
        }
    return params


def text_row(index: int, line: str, defaults: Defaults) -> BatchRow:
    """Return the row of one line of text."""
    return _with_options(index, "text", None, {}, defaults, prompt=line)


def json_row(index: int, line: str, defaults: Defaults, *, number: int | None = None) -> BatchRow:
    """Return the row of one JSON line, a bad one with its error; `number` is its line's."""
    number = index + 1 if number is None else number
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:  # numbers too long are a plain ValueError
        return BatchRow(index=index, form="plain", error=f"line {number} is not JSON: {error}")
    if not isinstance(data, dict):
        kind = type(data).__name__
        return BatchRow(
            index=index, form="plain", error=f"line {number}: expected an object, got {kind}"
        )
    openai = "custom_id" in data or "body" in data or "url" in data
    row_id = data.get("custom_id") if openai else data.get("id")
    form: Form = "completion" if openai else "plain"
    try:
        return _openai(index, data, defaults) if openai else _plain(index, data, defaults)
    except (ValueError, TypeError, OverflowError) as error:
        shown = row_id if isinstance(row_id, str) else None
        return BatchRow(index=index, form=form, row_id=shown, error=f"line {number}: {error}")


def answer_line(
    row: BatchRow, output: RequestOutput, model: str, made_with: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the output line of a finished row; `made_with` is what `--resume` compares."""
    (answer,), prompt_tokens = output.outputs, len(output.prompt_token_ids)
    tokens = list(answer.token_ids)
    made = {} if made_with is None else {MADE_WITH: dict(made_with)}
    ended = {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}
    if row.form in ("text", "plain"):
        line: dict[str, Any] = {"index": row.index}
        if row.row_id is not None:
            line["id"] = row.row_id
        shown = list(row.prompt) if isinstance(row.prompt, tuple) else row.prompt
        line |= {"messages": list(row.messages)} if row.messages else {"prompt": shown}
        return line | {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            **ended,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(tokens),
            "tokens": tokens,
            "error": None,
            **made,
        }
    chat = row.form == "chat"
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        **ended,
    }
    choice |= (
        {"message": {"role": "assistant", "content": answer.text}}
        if chat
        else {"text": answer.text}
    )
    body = {
        "id": f"cmpl-{row.index}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(tokens),
            "total_tokens": prompt_tokens + len(tokens),
        },
    }
    response = {"status_code": 200, "request_id": f"req-{row.index}", "body": body}
    line = {"response": response, "error": None, PROMPT_HASH: prompt_hash(row), **made}
    return _batch_line(row) | line


def prompt_hash(row: BatchRow) -> str:
    """Return 16 hex digits that differ, practically always, where prompts or messages do."""
    asked = list(row.messages) if row.messages else row.prompt
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def error_line(
    row: BatchRow,
    message: str,
    *,
    code: Literal["invalid_request", "server_error"] = "invalid_request",
) -> dict[str, Any]:
    """Return the output line of a row that failed; `code` says whose fault it is."""
    error = {"code": code, "message": message}
    if row.form in ("text", "plain"):
        line: dict[str, Any] = {"index": row.index}
        if row.row_id is not None:
            line["id"] = row.row_id
        return line | {"error": error}
    return _batch_line(row) | {"response": None, "error": error}


def _batch_line(row: BatchRow) -> dict[str, Any]:
    return {"id": f"batch_req_{row.index}", "custom_id": row.row_id}


def _plain(index: int, data: Mapping[str, Any], defaults: Defaults) -> BatchRow:
    row_id = data.get("id")
    options = {k: v for k, v in data.items() if k not in ("id", "prompt", "messages")}
    if ("prompt" in data) == ("messages" in data):
        known = [*_OPTIONS, "prompt", "messages", "id"]
        hint = "".join(nearest(key, known) for key in list(data)[:1])
        raise ValueError(f"expected either 'prompt' or 'messages', got {sorted(data)}. {hint}")
    return _with_options(
        index,
        "plain",
        None if row_id is None else str(row_id),
        options,
        defaults,
        prompt=_prompt(data["prompt"]) if "prompt" in data else "",
        messages=_messages(data["messages"]) if "messages" in data else (),
    )


def _openai(index: int, data: Mapping[str, Any], defaults: Defaults) -> BatchRow:
    if "body" not in data and "custom_id" in data and ("prompt" in data or "messages" in data):
        # The short form: what belongs into the body stands beside the id.
        rest = {key: value for key, value in data.items() if key not in ("custom_id", "url")}
        target = data.get("url", CHAT if "messages" in data else COMPLETIONS)
        data = {"custom_id": data["custom_id"], "url": target, "body": rest}
    for key in data:
        if key not in ("custom_id", "method", "url", "body"):
            known = ("custom_id", "method", "url", "body")
            raise ValueError(f"unknown key '{key}': {nearest(key, known)}expected {list(known)}")
    row_id, body, url = data.get("custom_id"), data.get("body"), data.get("url", COMPLETIONS)
    if not isinstance(row_id, str) or not row_id:
        raise ValueError(f"'custom_id' must be a text of its own for every line, got {row_id!r}")
    if url not in (COMPLETIONS, CHAT):
        raise ValueError(f"url must be {COMPLETIONS} or {CHAT}, got {url!r}")
    if data.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {data['method']!r}")
    if not isinstance(body, dict):
        raise ValueError(f"'body' must be an object, got {type(body).__name__}")
    needed = "messages" if url == CHAT else "prompt"
    if needed not in body:
        raise ValueError(f"'body' of {url} needs '{needed}', got {sorted(body)}")
    options = {key: value for key, value in body.items() if key != needed}
    if url == CHAT:
        messages = _messages(body["messages"])
        return _with_options(index, "chat", row_id, options, defaults, messages=messages)
    prompt = _prompt(body["prompt"])
    return _with_options(index, "completion", row_id, options, defaults, prompt=prompt)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise ValueError("'prompt' must be one text or one list of token ids")


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(
                "a message must have 'role' and a text as 'content', got "
                f"{json.dumps(message)[:120]}"
            )
        if not isinstance(message.get("role"), str):
            raise ValueError(
                "a message must have a text as 'role' ('system', 'user', 'assistant'), got "
                f"{json.dumps(message)[:120]}"
            )
    return tuple(value)


def _with_options(
    index: int,
    form: Form,
    row_id: str | None,
    options: Mapping[str, Any],
    defaults: Defaults,
    *,
    prompt: str | tuple[int, ...] = "",
    messages: tuple[Mapping[str, Any], ...] = (),
) -> BatchRow:
    """Build a row from its options, the command's defaults filling what it leaves out."""
    _check_options(options)
    given = {key: value for key, value in options.items() if value is not None}
    seed = _number(given, "seed", defaults.seed + index, int)
    top_k = _number(given, "top_k", defaults.top_k or 0, int)
    limit = given.get("max_completion_tokens", given.get("max_tokens", defaults.max_tokens))
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"'max_tokens' must be a number of at least 1, got {limit!r}")
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"'stop' must be a text or a list of texts, none empty, got {stop!r}")
    ignore_eos = given.get("ignore_eos", defaults.ignore_eos)
    if not isinstance(ignore_eos, bool):
        raise ValueError(f"'ignore_eos' must be true or false, got {ignore_eos!r}")
    priority = given.get("priority", 0)
    if type(priority) is not int:
        raise ValueError(f"'priority' must be a whole number, got {priority!r}")
    row = BatchRow(
        index=index,
        form=form,
        row_id=row_id,
        prompt=prompt,
        messages=messages,
        max_tokens=limit,
        sampling=SamplerConfig(
            temperature=float(_number(given, "temperature", defaults.temperature, float)),
            top_k=int(top_k) if top_k > 0 else None,
            top_p=float(_number(given, "top_p", defaults.top_p, float)),
            seed=int(seed) % 2**63,
        ),
        stop=tuple(stops),
        ignore_eos=ignore_eos,
        priority=priority,
        more={key: given[key] for key in _MORE if key in given},
    )
    row.params(2**31)  # refuses what cannot be
    return row


def _check_options(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in _OPTIONS or key in _MORE or key in _IGNORED:
            continue
        if key not in _NEUTRAL:
            known = [*_OPTIONS, *_MORE, *_NEUTRAL, *_IGNORED]
            options = ", ".join((*_OPTIONS, *_MORE))
            raise ValueError(f"unknown option '{key}': {nearest(key, known)}options: {options}")
        if value not in _NEUTRAL[key]:
            raise ValueError(f"'{key}' is not supported other than {_NEUTRAL[key][0]!r}")


def _number(
    given: Mapping[str, Any], key: str, default: float, kind: type[int] | type[float]
) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise ValueError(
            f"'{key}' must be {'a number' if kind is float else 'a whole number'}, got {value!r}"
        )
    return value
