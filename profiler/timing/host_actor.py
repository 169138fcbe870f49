"""One host of a Ray, for `llmpq-profile --ray-address`: times its devices and its links."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from llmpq.costs.costs_cache import cache_folder
from llmpq.profiler.timing.cases import LinkJob
from llmpq.profiler.timing.link_times import run_link
from llmpq.profiler.timing.profile_host import ProfileJob, run
from llmpq.profiler.timing.sample_file import SampleLog
from llmpq.runtime.launch.stages.stage_host import address_on


class HostWorker:
    """Lives on one host; every method answers with plain values."""

    def __init__(self) -> None:
        # An actor that reserves no GPU is shown none; here it looks at all of its host.
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            del os.environ["CUDA_VISIBLE_DEVICES"]
        torch.set_num_threads(1)

    def profile(self, job: ProfileJob) -> dict[str, Any]:
        """Time a job's devices here; samples stay in this host's cache for the next time."""
        name = f"{job.spec.fingerprint()}-{socket.gethostname()}.jsonl"
        folder = cache_folder().parent / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        with SampleLog(folder / name) as samples:
            outcome = run(job, samples, lambda case: None)
        return {
            "costs": outcome.costs.dump_json(),
            "failed": [case.title for case in outcome.failed] + list(outcome.failed_links),
        }

    def address(self, interface: str | None, own: str) -> str:
        """Return this host's address on a network interface, or its own where none is named."""
        return address_on(interface, own) or own

    def port(self, address: str) -> int:
        """Return a port that is free at an address of this host."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def link(self, job: dict[str, Any]) -> dict[str, Any]:
        """Exchange messages with another host's actor; rank 0's answer holds the times."""
        found = LinkJob.parse_data(job, where="link")
        gpu = found.on_device and torch.cuda.is_available()
        return run_link(found, torch.device("cuda", 0) if gpu else torch.device("cpu")).model_dump()
