"""The page at `/`: what is running, as a person would look at it. Files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from llmpq.errors import LlmpqError
from llmpq.runtime.entrypoints.llm import LLM
from llmpq.runtime.requests.request_output import RequestOutput
from llmpq.runtime.requests.sampling_params import SamplingParams
from llmpq.runtime.serve.service import Service
from llmpq.version import __version__

_FILES = {
    "/": ("page.html", "text/html"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/markdown-it.min.js": ("markdown/markdown-it.min.js", "text/javascript"),
    "/page/page.css": ("page.css", "text/css"),
}
EXAMPLES = ("Once upon a time, there was", "def main():\n    parser =", "The capital of France is")
"""Beginnings of the texts that most models were trained on."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, drawn: Callable[[], Any]) -> None:
    """Answer the page, its files and the numbers that it draws, which `drawn` returns."""
    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, _file(name, kind), methods=["GET"], include_in_schema=False)
    app.add_api_route(
        "/page/state", drawn, methods=["GET"], response_model=None, include_in_schema=False
    )


def _file(name: str, kind: str) -> Any:
    content = (Path(__file__).parent / name).read_bytes()

    def answer() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer


def state_of(service: Service) -> dict[str, Any]:
    """Return what the page draws; asks the stages."""
    stats = service.stats()
    gone = service.failure is not None or (service.llm is not None and not stats)
    status = "failed" if gone else "ending" if service.draining else "ready"
    if status == "ready" and service.llm is not None and service.llm.recovering is not None:
        status = "recovering"
    return {
        "version": __version__,
        "model": service.model_name,
        "status": "loading" if service.llm is None and not gone else status,
        "plan": None if service.llm is None else _plan(service),
        "asks": _asks(service),
        "stages": [
            {
                key: stage[key]
                for key in (
                    *("device", "node", "busy_s", "kinds", "predicted", "weights_bytes"),
                    "kv_bytes",
                )
            }
            for stage in stats.get("stages", ())
        ],
        "running": stats.get("running", 0),
        "waiting": stats.get("waiting", 0),
        "blocks": stats.get("gauges", {}).get("blocks", 0),
        "blocks_held": stats.get("gauges", {}).get("blocks_held", 0),
        "sums": service.metrics.sums,
        "recoveries": stats.get("recoveries", []),
    }


def _asks(service: Service) -> dict[str, Any] | None:
    """Return what `asks_of` does, asked once."""
    if service.asks is None and service.llm is not None and not service.draining:
        service.asks = asks_of(service.llm, service.settings.chat_template)
    return service.asks


def asks_of(llm: LLM, template: str | None) -> dict[str, Any]:
    """Return whether a model can chat, and a text that suits it to continue."""
    try:
        chat = template is not None or llm.tokenizer.has_chat_template
    except ValueError:  # no tokenizer
        return {"chat": False, "example": ""}
    return {"chat": chat, "example": _likeliest(llm)}


def _likeliest(llm: LLM) -> str:
    """Return the example that the model itself finds the likeliest, by the character."""
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    try:
        scored = llm.generate(list(EXAMPLES), score)
    except (ValueError, LlmpqError, RuntimeError, OSError):
        return EXAMPLES[0]

    def mean(output: RequestOutput) -> float:
        rows = output.prompt_logprobs or ()
        pairs = zip(output.prompt_token_ids, rows, strict=True)
        logprobs = [row[token].logprob for token, row in pairs if row]
        return sum(logprobs) / len(output.prompt or " ")

    return EXAMPLES[max(range(len(scored)), key=lambda place: mean(scored[place]))]


def _plan(service: Service) -> dict[str, Any]:
    assert service.llm is not None
    plan, recovery = service.llm.plan, service.llm.recovering
    lost = None if recovery is None else recovery.stage
    predicted = plan.predicted
    return {
        "kv": plan.workload.kv.value,
        "method": plan.solver.method,
        "tokens_per_s": None if predicted is None else predicted.output_tokens_per_s,
        "stages": [
            {
                "device": stage.device,
                "kind": stage.kind,
                "node": stage.node,
                "first_layer": stage.layers[0],
                "bits": [precision.value for precision in stage.precisions],
                "lost": index == lost,
            }
            for index, stage in enumerate(plan.stages)
        ],
    }
