"""Requests that a schema allows, and some that it does not, sent to a server by the thousand.

    pip install schemathesis
    llmpq-dist serve --model examples/demo-7m --port 8000
    python benchmarks/serve_fuzz.py openapi.yml --url http://127.0.0.1:8000/v1 --model demo-7m

`openapi.yml` is OpenAI's schema of its API (openai-python's repository has it, under
api_reference/). Three of four requests fit the schema and name the server's model; the fourth does
not fit. Told: statuses, what did not come within --timeout, and for the requests that fit and are
for text alone, how many got a 2xx that fits the schema in turn (streams: each event), and why the
others were refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import requests
import schemathesis
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from lib.rows import write_row

ANSWERS = {
    "/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/responses": ("Response", "ResponseStreamEvent"),
}
"""Of each path: the schemas of an answer and of an event of a stream."""
NOT_YET = ('"finish_reason":null', '"finish_reason":"stop"')
TEXTS = ("text", "input_text", "output_text", "refusal")
ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
"""What asks for something that is stored."""


@dataclass
class Seen:
    """What came of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    told_to_wait: Counter[int] = field(default_factory=Counter)
    """Refusals for overload, after each of which the request came again."""
    late: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_text: int = 0
    num_right: int = 0
    num_fitting: int = 0
    num_fitting_right: int = 0
    whys: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Make the requests, send them, say what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schema")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo-7m")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--paths", nargs="+", choices=list(ANSWERS), default=list(ANSWERS),
                        help="of the requests only those to these")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    spec = with_nulls(yaml.safe_load(Path(options.schema).read_text()))
    seen, began_s = Seen(), time.monotonic()
    for path in options.paths:
        cases = [*made(options, path, fits=True), *made(options, path, fits=False)]
        by_name = {
            name: jsonschema_rs.validator_for({
                "$ref": f"#/components/schemas/{name}", "components": spec["components"],
            })
            for name in ANSWERS[path]
        }  # fmt: skip
        checks = [by_name[name] for name in ANSWERS[path]]
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(lambda case, p=path, c=checks: ask(options, p, *case, c, seen), cases))
    told = {
        "statuses": dict(sorted(seen.statuses.items())), "late": len(seen.late),
        "told_to_wait": dict(seen.told_to_wait),
        "failed": len(seen.failed), "text_requests": seen.num_text, "fitting": seen.num_fitting,
        "fitting_2xx": seen.num_fitting_right, "whys": dict(seen.whys.most_common(12)),
    }  # fmt: skip
    print(json.dumps(told | {"seconds": time.monotonic() - began_s}, indent=1))
    print(*seen.late[:5], *seen.failed[:10], sep="\n")
    share = seen.num_right / max(1, seen.num_text)
    print(f"{share:.1%} of the fitting requests for text got a 2xx that fits")
    if options.write:
        case = {"seed": options.seed, "requests": options.requests, **told}
        if options.paths != list(ANSWERS):
            case["paths"] = options.paths
        write_row("serve.jsonl", bench="serve_fuzz", case=case, unit="share of text requests "
                  "answered by a 2xx that fits", samples=[share])  # fmt: skip


def made(options: argparse.Namespace, path: str, *, fits: bool) -> Iterator[tuple[Any, bool]]:
    """Yield bodies of requests, and whether they fit the schema."""
    mode = schemathesis.GenerationMode
    operation = schemathesis.openapi.from_path(options.schema)[path]["POST"]
    wanted = max(1, round(options.requests / len(ANSWERS) * (0.75 if fits else 0.25)))
    bodies: list[Any] = []

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=2 * wanted,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(
        operation.as_strategy(generation_mode=mode.POSITIVE if fits else mode.NEGATIVE)
    )
    def collect(case: schemathesis.Case) -> None:
        if len(bodies) < wanted:
            bodies.append(case.body)

    collect()
    for body in bodies:
        if fits:
            body = {**body, "model": options.model}
        yield body, fits


def ask(
    options: argparse.Namespace, path: str, body: Any, fits: bool, checks: list[Any], seen: Seen
) -> None:
    """Send one request and note what came."""
    shown = f"{path} {body!r:.600}"
    data = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
    head = {"Content-Type": "application/json"}
    for _ in range(8):  # an overloaded server says when to come again
        try:
            got = requests.post(options.url + path, data, headers=head, timeout=options.timeout)
        except requests.RequestException as error:
            seen.late.append(f"{shown}: {error}")
            return
        if got.status_code not in (429, 503):
            break
        seen.told_to_wait[got.status_code] += 1
        time.sleep(float(got.headers.get("Retry-After", "1")))
    seen.statuses[got.status_code] += 1
    if got.status_code >= 500:
        seen.failed.append(f"{got.status_code} {shown}: {got.text:.300}")
    if not fits:
        return
    why = what_is_wrong(got, checks)
    seen.num_fitting += 1
    seen.num_fitting_right += why is None
    if is_text(path, body):
        seen.num_text += 1
        seen.num_right += why is None
        if why is not None:
            seen.whys[f"{path}: {why}"] += 1


def with_nulls(schema: Any) -> Any:
    """Return a schema in which `nullable`, OpenAPI's own word, is said in JSON Schema's."""
    if isinstance(schema, list):
        return [with_nulls(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = {name: with_nulls(part) for name, part in schema.items()}
    return {"anyOf": [told, {"type": "null"}]} if told.get("nullable") is True else told


def what_is_wrong(got: requests.Response, checks: list[Any]) -> str | None:
    """Return why an answer is no 2xx that fits; None where it is one."""
    if got.status_code >= 300:
        told = got.json()["error"]["message"].split(", got ")[0]
        return f"{got.status_code} " + re.sub(r"-?[0-9][0-9.e+]*", "N", told)[:100]
    whole, part = checks  # one and the same for /completions
    try:
        if not got.headers["content-type"].startswith("text/event-stream"):
            whole.validate(got.json())
            return None
        lines = [line[6:] for line in got.text.split("\n") if line.startswith("data: ")]
        for line in lines:
            if line != "[DONE]":
                # OpenAI's schema has no event of /completions of its own, where null is "not yet".
                part.validate(json.loads(line.replace(*NOT_YET) if part is whole else line))
    except jsonschema_rs.ValidationError as error:
        return f"the answer: {error.message[:100]} at {error.instance_path}"
    return None


def is_text(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request is for text alone, and asks for nothing stored or run elsewhere."""
    if path == "/completions":
        prompt = body["prompt"]
        given = prompt if isinstance(prompt, list) else [prompt]
        return bool(given) and all(isinstance(one, str) for one in given)
    tools = body.get("tools") or []
    if path == "/chat/completions":
        choice = body.get("tool_choice")
        named = choice.get("type") if isinstance(choice, dict) else "function"
        others = named != "function" or any(tool["type"] != "function" for tool in tools)
        heard = body.get("audio") or "audio" in (body.get("modalities") or ())
        return not (others or heard) and all(map(_is_text, body["messages"]))
    if tools or any(body.get(name) for name in ELSEWHERE):
        return False
    given = body.get("input")
    return isinstance(given, str) or (bool(given) and all(map(_is_text, given)))


def _is_text(message: Mapping[str, Any]) -> bool:
    """Whether a message is one, of text."""
    content = message.get("content")
    if message.get("type", "message") != "message" or message.get("audio"):
        return False
    if any(call.get("type") != "function" for call in message.get("tool_calls") or ()):
        return False
    return not isinstance(content, list) or all(part.get("type") in TEXTS for part in content)


if __name__ == "__main__":
    main()
