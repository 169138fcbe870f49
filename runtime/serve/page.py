"""The page at `/`: what is running, as a person would look at it. Files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from llmpq.runtime.serve.service import Service
from llmpq.version import __version__

_FILES = {
    "/": ("page.html", "text/html"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/page.css": ("page.css", "text/css"),
}
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
    told = service.stats()
    gone = service.failure is not None or (service.llm is not None and not told)
    status = "failed" if gone else "ending" if service.draining else "ready"
    return {
        "version": __version__,
        "model": service.model_name,
        "status": "loading" if service.llm is None and not gone else status,
        "plan": None if service.llm is None else _plan(service),
        "stages": [
            {
                key: stage[key]
                for key in (
                    *("device", "node", "busy_s", "kinds", "predicted", "weights_bytes"),
                    "kv_bytes",
                )
            }
            for stage in told.get("stages", ())
        ],
        "running": told.get("running", 0),
        "waiting": told.get("waiting", 0),
        "blocks": told.get("gauges", {}).get("blocks", 0),
        "blocks_held": told.get("gauges", {}).get("blocks_held", 0),
        "sums": service.metrics.sums,
    }


def _plan(service: Service) -> dict[str, Any]:
    assert service.llm is not None
    plan = service.llm.plan
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
            }
            for stage in plan.stages
        ],
    }
