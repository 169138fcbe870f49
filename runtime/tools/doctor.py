"""`llmpq-dist doctor`: what each device and node can run, what is missing, and what to do.

Looks at this machine, or with `--ray-address` at every node of a Ray. Every look is in a process of
its own and has a deadline, so that a GPU or a network that hangs is named like anything else.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from llmpq.errors import DoesNotFitError, ExitCode
from llmpq.missing_packages import require_modules
from llmpq.out_of_memory import first_line
from llmpq.runtime.cli.run_flags import check_timeouts
from llmpq.runtime.cli.tool_flags import DoctorOptions
from llmpq.runtime.launch.plans.auto_plan import fit_of
from llmpq.runtime.launch.probes import node_surveys
from llmpq.runtime.launch.stages.launcher import StageHandle
from llmpq.runtime.launch.stages.stage_host import meeting_host
from llmpq.runtime.tools.diagnosis import Finding, device_lines, differences, findings, products

_log = logging.getLogger("llmpq.doctor")


def main(options: DoctorOptions) -> int:
    """Look, print, and return 0 if every device that there is can run stages."""
    check_timeouts({"--timeout": options.timeout})
    require_modules("torch")  # of the processes that look
    with node_surveys(options.ray_address) as (handles, addresses):
        report = examine(handles, addresses, options.timeout)
    fit = None
    if options.model is not None:
        fit = fit_of(
            options.model,
            from_ray=options.ray_address,
            context=options.context,
            batch=options.batch,
            probe_cpu=options.probe_cpu,
        )
        report["fits"] = fit.data
    if options.json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 140))
        sys.stdout.write(fit.text if fit is not None else "")
    bad = [item for item in report["findings"] if item["level"] == "error"]
    for item in bad:
        sys.stderr.write(f"{item['text']}\n")
    if bad:
        return ExitCode.STAGE_LOST
    if fit is not None and fit.refusal is not None:
        raise DoesNotFitError(fit.refusal)
    _log.info("every device listed can run stages")
    return ExitCode.DONE


def examine(
    handles: Sequence[StageHandle], addresses: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Ask every node; return surveys, devices, links and findings as plain values."""
    looks, found = _ask([handle.call("look") for handle in handles], "look at itself", limit_s)
    surveys, seen = [], set[tuple[str, str]]()
    for index, look in enumerate(looks):
        if look is None:
            continue
        here = (look["host"], look["machine"])
        if here in seen:
            continue  # the second process of a single node
        seen.add(here)
        if look["torch_sees"]:
            surveys.append(look | _gpus(handles[index], look, limit_s, found))
        else:
            surveys.append(look)
    links: list[dict[str, Any]] = []
    if all(look is not None for look in looks):
        names = [str(look["host"]) for look in looks if look is not None]
        links = _links(handles, names, addresses, limit_s, found)
    for survey in surveys:
        found += findings(survey)
    found += differences(surveys) if surveys else []
    return {
        "nodes": surveys,
        "devices": [asdict(line) for survey in surveys for line in device_lines(survey)],
        "products": products(surveys),
        "links": links,
        "findings": [asdict(item) for item in found],
    }


def _gpus(
    handle: StageHandle, look: Mapping[str, Any], limit_s: float, found: list[Finding]
) -> dict[str, Any]:
    """Try a node's GPUs, and copies between them."""
    (tried,), failed = _ask([handle.call("try_gpus")], "compute on its GPUs", limit_s)
    found += failed
    if tried is None:
        return {"tried": [{"gpu": i, "problem": "no answer"} for i in range(len(look["gpus"]))]}
    copies: list[Any] = []
    if look["torch_sees"] > 1:
        (answer,), failed = _ask([handle.call("try_copies")], "copy between its GPUs", limit_s)
        found += failed
        copies = answer or []
    return {"tried": tried, "copies": copies}


def _links(
    handles: Sequence[StageHandle],
    names: Sequence[str],
    addresses: Sequence[str],
    limit_s: float,
    found: list[Finding],
) -> list[dict[str, Any]]:
    """Measure gloo between the nodes, or between two processes of one."""
    address = meeting_host(None, addresses)
    (port,), failed = _ask([handles[0].call("open_rendezvous", address)], "listen", limit_s)
    found += failed
    if port is None:
        return []
    calls = [
        handle.call("try_links", address, port, own)
        for handle, own in zip(handles, addresses, strict=True)
    ]
    answers, failed = _ask(calls, f"join the others at {address}:{port}", limit_s)
    found += failed
    return [
        {**link, "from": names[link["from"]], "to": names[link["to"]]}
        for answer in answers
        for link in answer or ()
    ]


def _ask(
    calls: Sequence[Future[Any]], doing: str, limit_s: float
) -> tuple[list[Any], list[Finding]]:
    """Return the answers, None for each that failed or is late, and what to say about those."""
    end_s = time.monotonic() + limit_s
    answers: list[Any] = []
    found: list[Finding] = []
    for index, call in enumerate(calls):
        wait([call], timeout=max(0.0, end_s - time.monotonic()))
        if not call.done():
            answers.append(None)
            found.append(
                Finding(
                    level="error",
                    text=(
                        f"node {index} did not {doing} within {limit_s:.0f} s: look at its host, "
                        "its GPUs (nvidia-smi) and the firewall between the hosts, or raise "
                        "--timeout"
                    ),
                )
            )
        elif (error := call.exception()) is not None:
            answers.append(None)
            found.append(
                Finding(
                    level="error",
                    text=(
                        f"node {index} could not {doing}: {first_line(error)}; look at its host "
                        "and, where it joins others, at the firewall"
                    ),
                )
            )
        else:
            answers.append(call.result())
    return answers, found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print nodes, devices, links, and what to do."""
    nodes = Table(title="nodes", title_justify="left")
    for column in ("node", "python", "llmpq", "torch", "CUDA", "triton", "ray", "NCCL"):
        nodes.add_column(column)
    for node in report["nodes"]:
        have = [node["packages"].get(name, "-") for name in ("llmpq", "torch")]
        more = [node["packages"].get(name, "-") for name in ("triton", "ray")]
        cuda, nccl = node["torch_cuda"] or "-", node["nccl"] or "-"
        nodes.add_row(node["host"], node["python"], *have, cuda, *more, nccl)
    devices = Table(title="devices", title_justify="left")
    for column in ("node", "device", "memory", "runs", "checkpoints' formats"):
        devices.add_column(column)
    for line in report["devices"]:
        devices.add_row(*(line[key] for key in ("node", "device", "memory", "runs", "stored")))
    links = Table(title="links (measured)", title_justify="left")
    for column in ("from", "to", "over", "latency", "Gb/s"):
        links.add_column(column)
    for link in report["links"]:
        latency = f"{link['latency_us']:.0f} us"
        links.add_row(link["from"], link["to"], "gloo", latency, f"{link['gbps']:.1f}")
    for node in report["nodes"]:
        for copy in node.get("copies", ()):
            over = "peer memory" if copy["direct"] else "the host"
            ends = (f"{node['host']} GPU {copy[end]}" for end in ("from", "to"))
            links.add_row(*ends, over, "-", f"{copy['gbps']:.0f}")
    multiplied = Table(title="products: rows of x and kernel (*: the quickest), else the next one")
    multiplied.title_justify = "left"
    for column in ("device", "weights", "rows and kernels"):
        multiplied.add_column(column)
    for device in report["products"]:
        for number, line in enumerate(device["summary"]):
            name = "" if number else device["device"]
            multiplied.add_row(name, line["weight"], line["kernels"])
    for table in (nodes, devices, links, multiplied):
        console.print(table)
    advice = [item["text"] for item in report["findings"] if item["level"] == "advice"]
    for text in advice:
        console.print(f"- {text}", highlight=False, soft_wrap=True, markup=False)
