"""A run as a person may show it to others: card kinds, links, versions, predicted and measured.

Made from the report of `llmpq-dist run`, without names, hosts, paths, prompts or answers: devices
are called by their kind, nodes by their number, a model by its built-in name or its shape. The plan
is in it with the entries that its prediction was computed from, so that `llmpq-algo check`
computes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from llmpq.devices.device_spec import device_specs
from llmpq.file_form import FileForm
from llmpq.models.model_spec import ModelSpec, builtin_configs
from llmpq.plans.plan import MAX_COUNT, Plan

KIND = "llmpq-run"
"""What a shared run says it is: other JSON files of llmpq have no such field."""
PRIVATE = ("host", "address", "device_uuid", "node")
"""Fields of a report's stages that are not published."""


class MeasuredStage(FileForm):
    """What one stage took."""

    reported: str | None = None
    """The card or processor as its driver or system calls it."""
    weights_bytes: int = Field(ge=0)
    kv_bytes: int = Field(ge=0)
    prefill_s: float | None = None
    """Mean time of a step of prefill."""
    decode_s: float | None = None
    """Mean time of a decode step."""
    busy_share: float | None = None


class SharedRun(FileForm):
    """One run, predicted and measured."""

    kind: Literal["llmpq-run"] = "llmpq-run"
    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    versions: Mapping[str, str]
    """Of llmpq, Python and what it computes with."""
    plan: Plan
    completed: int = Field(ge=1, le=MAX_COUNT)
    """Requests that were answered."""
    failed: int = Field(ge=0, le=MAX_COUNT)
    total_input_tokens: int = Field(ge=0, le=2**40)
    total_output_tokens: int = Field(ge=1, le=2**40)
    predicted_s: float | None = Field(default=None, ge=0)
    """The plan's time for as many requests and tokens as ran; None where it has none."""
    total_s: float = Field(gt=0)
    """From the first request to the end of the last answer."""
    output_throughput: float = Field(gt=0)
    """Tokens of answers a second."""
    drafts: str | None = None
    """How tokens were drafted, if they were."""
    stages: tuple[MeasuredStage, ...] = Field(min_length=1)


def predicted_of(
    plan: Plan, *, completed: int, prompt_tokens: int, output_tokens: int
) -> dict[str, float] | None:
    """Return the plan's times for as many requests and tokens as ran, None where it has none.

    More requests than the plan's batch follow as others end, at the plan's rate; fewer take as many
    decode steps as the batch would.
    """
    work, predicted = plan.workload, plan.predicted
    if predicted is None or not completed:
        return None
    prompts = prompt_tokens / (work.batch * work.prompt_len)
    batches = max(1.0, completed / work.batch)
    answers = batches * output_tokens / (completed * work.gen_len)
    prefill_s, decode_s = predicted.prefill_s * prompts, predicted.decode_s * answers
    return {"prefill_s": prefill_s, "decode_s": decode_s, "total_s": prefill_s + decode_s}


def shared_run(report: Mapping[str, Any], *, where: str) -> SharedRun:
    """Return what of a report may be shown; `ValueError` for a report that cannot be shared."""
    if not isinstance(report.get("plan"), dict):
        raise ValueError(
            f"'{where}' has no plan, expected a report of `llmpq-dist run --report` (an older "
            "llmpq wrote none into it); run it again with --report"
        )
    if not report.get("completed") or not report.get("stages"):
        raise ValueError(f"'{where}' is of a run that answered no request; share one that did")
    plan = Plan.parse_data(report["plan"], where=f"{where}: plan")
    speculation = report.get("speculation")
    predicted = predicted_of(
        plan,
        completed=report["completed"],
        prompt_tokens=report["total_input_tokens"],
        output_tokens=report["total_output_tokens"],
    )
    found = SharedRun(
        versions=report.get("versions", {}),
        plan=_without_names(plan),
        completed=report["completed"],
        failed=report["failed"],
        total_input_tokens=report["total_input_tokens"],
        total_output_tokens=report["total_output_tokens"],
        predicted_s=None if predicted is None else predicted["total_s"],
        total_s=report["measured"]["total_s"],
        output_throughput=report["output_throughput"],
        drafts=None if speculation is None else speculation.get("mode"),
        stages=tuple(_stage(stage) for stage in report["stages"]),
    )
    _require_nothing_private(found, plan, report, where=where)
    return found


def _stage(stage: Mapping[str, Any]) -> MeasuredStage:
    steps = stage["steps"]
    return MeasuredStage(
        reported=stage.get("device_name"),
        weights_bytes=stage["memory"]["weights_bytes"],
        kv_bytes=stage["memory"]["kv_bytes"],
        prefill_s=steps.get("prefill", {}).get("mean_s"),
        decode_s=steps.get("decode", {}).get("mean_s"),
        busy_share=stage["busy_share"],
    )


def _without_names(plan: Plan) -> Plan:
    """Return a plan with names of model, cluster, nodes and devices that say no more than kinds."""
    known = device_specs()
    kinds = {k: k for k in (stage.kind for stage in plan.stages) if k in known}
    for stage in plan.stages:
        kinds.setdefault(stage.kind, f"card-{len(kinds)}")
    nodes: dict[str, str] = {}
    for stage in plan.stages:
        nodes.setdefault(stage.node, f"node-{len(nodes)}")
    names = {stage.device: f"{kinds[stage.kind]}-{i}" for i, stage in enumerate(plan.stages)}
    profiles = {
        stage.profile_kind: stage.profile_kind.replace(stage.kind, kinds[stage.kind])
        for stage in plan.stages
    }
    data = plan.model_dump(mode="json", by_alias=True)
    model = _model_name(plan)
    data["model"] |= {"name": model, "path": None}
    counts = ",".join(sorted(kinds[stage.kind] for stage in plan.stages))
    data["cluster"] = {"name": counts, "fingerprint": ""}
    data["nodes"] = []
    data["solver"]["note"] = ""
    for stage in data["stages"]:
        _rename(stage, "device", names)
        _rename(stage, "node", nodes)
        _rename(stage, "kind", kinds)
        _rename(stage, "profile_kind", profiles)
    if data["predicted"] is not None:
        _rename(data["predicted"], "bottleneck", names)
    if data["inputs"] is not None:
        data["inputs"]["model"]["name"] = model
        for device in data["inputs"]["devices"]:
            own = device["kind"] in known
            _rename(device, "name", names)
            _rename(device, "node", nodes)
            _rename(device, "kind", kinds)
            _rename(device, "profile_kind", profiles)
            if not own:
                device["spec"] |= {"source": "described by its owner", "aliases": []}
        for link in data["inputs"]["links"]:
            _rename(link, "source", names)
            _rename(link, "target", names)
        for cost in data["inputs"]["costs"]:
            _rename(cost, "device_kind", profiles)
    return Plan.parse_data(data, where="the plan without names")


def _rename(entry: dict[str, Any], field: str, names: Mapping[str, str]) -> None:
    entry[field] = names.get(entry[field], entry[field])


def _model_name(plan: Plan) -> str:
    """Return a built-in model's name, or what a model's shape is."""
    name = plan.model.name
    if (
        name in builtin_configs()
        and ModelSpec.by_name(name).fingerprint() == plan.model.fingerprint
    ):
        return name
    if plan.inputs is None:
        return f"a model of {plan.model.num_layers} layers"
    spec = plan.inputs.model
    return f"{spec.family}, {spec.num_layers} layers of {spec.hidden}"


def _require_nothing_private(
    found: SharedRun, plan: Plan, report: Mapping[str, Any], *, where: str
) -> None:
    """Raise `ValueError` where a text that is the user's own is left in what would be shared."""
    private = {str(stage[key]) for stage in report["stages"] for key in PRIVATE if stage.get(key)}
    private |= {node.host for node in plan.nodes if node.host}
    private |= {str(plan.model.path)} if plan.model.path else set()
    shared = set(_texts(found.model_dump(mode="json")))
    left = sorted(text for text in private if text in shared)
    if left:
        raise ValueError(
            f"'{where}': {', '.join(left)} would be shared; it is also the name of a device kind "
            "or of a model: call it otherwise in the cluster file"
        )


def _texts(data: object) -> list[str]:
    """Return every text in plain data but the keys of mappings."""
    if isinstance(data, str):
        return [data]
    if isinstance(data, Mapping):
        return [text for value in data.values() for text in _texts(value)]
    if isinstance(data, (list, tuple)):
        return [text for value in data for text in _texts(value)]
    return []


def is_shared_run(text: str) -> bool:
    """Whether a JSON text is a shared run."""
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("kind") == KIND
