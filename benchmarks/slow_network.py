"""Two hosts on a slow network: is it measured right, and is it hidden behind the stages' work?

    python benchmarks/slow_network.py --write            100 Mb/s and 5 ms each way (root, TUN)
    python benchmarks/slow_network.py --window --write   1 Gb/s and 10 ms, windows of 256 KiB

The network is delayed_network.py's, so what is true of it is known. First llmpq-profile's own
measurement between the two ends, in both directions, against the truth. Then batch jobs of two
stages whose computing is replaced by waits of known length (two ends share this machine's cores):
the runtime's own loops, scheduler and transport, against the planner's formula with the measured
link, and against the same job on a network without delay. `--window`: prompts' messages over one
connection and over several, where a connection's window does not fill the link.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lib import rows
from lib.delayed_network import DelayedNetwork
from torch import Tensor

from llmpq.planner.costs.cost_book import LinkTerms
from llmpq.planner.evaluate.pipeline_time import StageTimes, makespan
from llmpq.profiler.timing.cases import LinkJob
from llmpq.profiler.timing.latency_fit import fit_rounds
from llmpq.profiler.timing.link_times import run_link
from llmpq.runtime.engine.mailbox import Mailbox
from llmpq.runtime.engine.scheduler import Scheduler, max_ahead
from llmpq.runtime.engine.slot_limits import Limits
from llmpq.runtime.engine.stage_loop import FirstStage, run_following_stage
from llmpq.runtime.launch.stages.stage_host import talk_over
from llmpq.runtime.links.transport import (
    CONNECTIONS,
    GlooTransport,
    join_gloo,
    more_connections,
)
from llmpq.runtime.pending import arrived
from llmpq.runtime.request import Request, StepKind
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step_message import StepMessage
from llmpq.runtime.trace import Recorder

FILE = "links.jsonl"
HIDDEN = 512
PORT = 29400
WINDOW_BYTES = 256 << 10
MESSAGES, MESSAGE_TOKENS = 6, 4096
"""8 MiB each."""
JOIN = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A fixed batch on two stages; what a micro-batch takes on each, in seconds."""

    batch: int = 16
    prompt_len: int = 32
    gen_len: int = 40
    prefill_microbatch: int = 4
    decode_microbatch: int = 4
    prefill_s: float = 0.06
    decode_s: float = 0.02


JOBS = {
    "hidden": BatchJob(),
    "one micro-batch": BatchJob(decode_microbatch=16, decode_s=0.04),
    "two micro-batches": BatchJob(decode_microbatch=8, decode_s=0.03),
}


class Waits:
    """A stage that waits instead of computing."""

    runs_ahead = whole_rounds = False

    def __init__(self, job: BatchJob, *, last: bool) -> None:
        self._job, self._last = job, last

    def run(self, message: StepMessage, hidden_BQH: Tensor | None) -> Tensor:
        """Wait; return hidden states, or tokens from the last stage."""
        prefill = message.kind is StepKind.PREFILL
        time.sleep(self._job.prefill_s if prefill else self._job.decode_s)
        if self._last:
            return torch.ones(message.num_rows, 1, dtype=torch.long)
        return torch.zeros(message.num_rows, message.q_len, HIDDEN)

    def take_tokens(self, slots: Sequence[int], tokens_B1: Tensor) -> None:
        """Not asked for: nothing runs ahead."""
        raise AssertionError


def run_job(rank: int, job: BatchJob, addresses: Sequence[str], port: int) -> float:
    """Run one stage of a job; the first returns the seconds from submission to the end."""
    talk_over(addresses[0], addresses[rank])
    store = dist.TCPStore(addresses[0], port, world_size=2, is_master=rank == 0, timeout=JOIN)
    join_gloo(store, rank, 2)
    transport = GlooTransport(
        hidden=HIDDEN,
        dtype=torch.float32,
        max_rows=max(job.prefill_microbatch, job.decode_microbatch),
        max_tokens=job.prefill_microbatch * job.prompt_len,
        max_pending=max_ahead(2),
    )
    dist.barrier()
    if rank == 1:
        run_following_stage(Waits(job, last=True), transport, Recorder(), last=True)
        return 0.0
    limits = Limits(
        num_slots=job.batch,
        prompt_len=job.prompt_len,
        max_len=job.prompt_len + job.gen_len,
        prefill_microbatch=job.prefill_microbatch,
        decode_microbatch=job.decode_microbatch,
        num_stages=2,
        batching="static",
    )
    mailbox = Mailbox()
    for number in range(job.batch):
        prompt = (1,) * job.prompt_len
        mailbox.requests.put(Request(id=number, prompt=prompt, max_new=job.gen_len))
    mailbox.requests.put(None)
    first = FirstStage(
        Scheduler(limits), Waits(job, last=False), transport, mailbox, Recorder(), num_stages=2
    )
    started_s = time.perf_counter()
    first.run()
    return time.perf_counter() - started_s


def run_messages(rank: int, several: bool, addresses: Sequence[str], port: int) -> float:
    """Send prompts' messages one after the other; return the seconds of all."""
    talk_over(addresses[0], addresses[rank])
    store = dist.TCPStore(addresses[0], port, world_size=2, is_master=rank == 0, timeout=JOIN)
    join_gloo(store, rank, 2)
    transport = GlooTransport(
        hidden=HIDDEN,
        dtype=torch.float32,
        max_rows=1,
        max_tokens=MESSAGE_TOKENS,
        max_pending=2,
        more=more_connections() if several else (),
    )
    hidden_BQH = torch.zeros(1, MESSAGE_TOKENS, HIDDEN)
    message = StepMessage(
        kind=StepKind.PREFILL, slots=[0], starts=[0], num_new=[MESSAGE_TOKENS], sample_steps=[0],
        sampling=[TokenChoice()],
    )  # fmt: skip
    dist.barrier()
    started_s = time.perf_counter()
    for _ in range(MESSAGES):
        if rank == 0:
            transport.send_step(message, hidden_BQH)
            arrived(transport.receive_tokens(1, 1))
        else:
            transport.receive_step()
            transport.send_tokens(torch.zeros(1, 1, dtype=torch.long))
    transport.close()
    return time.perf_counter() - started_s


def windows(repeats: int, delay_us: float, mbps: float) -> dict[str, Any]:
    """Return the row of large messages over several connections, and over one."""
    window = f"net.ipv4.tcp_%smem=4096 65536 {WINDOW_BYTES}"
    with DelayedNetwork(delay_us, mbps=mbps, mtu=9000) as network:
        for at in range(2):
            for way in ("r", "w"):
                subprocess.run(network.command(at, ["sysctl", "-qw", window % way]), check=True)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats):
            for several, found in rates.items():
                seconds = both_ends(network, {"port": PORT, "several": several})
                found.append(8e-6 * MESSAGES * MESSAGE_TOKENS * HIDDEN * 4 / seconds)
    middle = {several: sorted(found)[repeats // 2] for several, found in rates.items()}
    print(f"{CONNECTIONS} connections {middle[True]:.0f} Mb/s, one {middle[False]:.0f}")
    case = {"delay_us": delay_us, "mbps": mbps, "window_bytes": WINDOW_BYTES}
    return {"bench": "connections", "case": {**case, "connections": CONNECTIONS}, "unit": "Mb/s",
            "samples": rates[True], "baselines": {"one connection": middle[False]}}  # fmt: skip


def predicted_s(job: BatchJob, terms: LinkTerms, back: LinkTerms) -> float:
    """Return the planner's time of a job over a link."""
    row_bytes = HIDDEN * torch.float32.itemsize
    prefill_bytes = job.prefill_microbatch * job.prompt_len * row_bytes
    decode_bytes, token_bytes = job.decode_microbatch * row_bytes, 8
    times = StageTimes(
        prefill_s=(job.prefill_s,) * 2,
        decode_s=(job.decode_s,) * 2,
        hop_prefill_s=(terms.seconds(prefill_bytes),),
        hop_decode_s=(terms.seconds(decode_bytes),),
        back_prefill_s=back.seconds(job.prefill_microbatch * token_bytes),
        back_decode_s=back.seconds(job.decode_microbatch * token_bytes),
        busy_prefill_s=(terms.busy_s(prefill_bytes), back.busy_s(token_bytes)),
        busy_decode_s=(terms.busy_s(decode_bytes), back.busy_s(token_bytes)),
    )
    mp, md = job.batch // job.prefill_microbatch, job.batch // job.decode_microbatch
    return makespan(times, mp=mp, md=md, n=job.gen_len).total_s


def both_ends(network: DelayedNetwork, what: dict[str, Any], *, swapped: bool = False) -> Any:
    """Run this file at both ends; return what rank 0 says."""
    ends = (1, 0) if swapped else (0, 1)
    addresses = [network.addresses[end] for end in ends]
    started = []
    for rank, end in enumerate(ends):
        told = json.dumps({**what, "rank": rank, "addresses": addresses})
        command = network.command(end, [sys.executable, __file__, "--end", told])
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=600)[0] for process in started]
    assert all(process.returncode == 0 for process in started), answers
    return json.loads(answers[0].splitlines()[-1])


def end(told: dict[str, Any]) -> None:
    """Be one end, as a child."""
    rank, addresses = told["rank"], told["addresses"]
    torch.set_num_threads(1)
    if "job" in told:
        found: Any = run_job(rank, BatchJob(**told["job"]), addresses, told["port"])
    elif "several" in told:
        found = run_messages(rank, told["several"], addresses, told["port"])
    else:
        job = LinkJob(rank=rank, port=told["port"], hidden=HIDDEN, seconds=10.0,
                      host=addresses[0], own=addresses[rank])  # fmt: skip
        found = run_link(job, torch.device("cpu")).model_dump()
    print(json.dumps(found), flush=True)


def measure(network: DelayedNetwork, *, swapped: bool = False) -> tuple[LinkTerms, float]:
    """Return a direction's terms as llmpq-profile measures them, and alpha."""
    found = both_ends(network, {"port": PORT}, swapped=swapped)
    alpha_s, beta_s_per_byte, occupied_s = fit_rounds(
        found["sizes"], found["rounds_s"], found["burst_s"]
    )
    terms = LinkTerms(
        delay_s=alpha_s - occupied_s, handshake_s=occupied_s, per_byte_s=beta_s_per_byte
    )
    return terms, alpha_s


def main() -> None:
    """Measure, print, and write rows if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--end", help="be one end, as a child (JSON)")
    parser.add_argument("--delay-us", type=float, default=5000.0)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", action="store_true", help="one and several connections")
    parser.add_argument("--noisy", action="store_true", help="other programs are running")
    parser.add_argument("--write", action="store_true", help="append rows to results/links.jsonl")
    options = parser.parse_args()
    if options.end:
        end(json.loads(options.end))
        return
    if options.window:
        row = windows(options.repeats, 10_000.0, 1000.0)
        if options.write:
            rows.write_row(FILE, noisy=options.noisy, **row)
        return
    case = {"delay_us": options.delay_us, "mbps": options.mbps}
    found: list[dict[str, Any]] = []

    def note(bench: str, of: dict[str, Any], unit: str, samples: list[float], truth: float) -> None:
        middle = sorted(samples)[len(samples) // 2]
        print(f"{bench} {of}: {middle:.4g} {unit}, {middle / truth:.3f} of {truth:.4g}", flush=True)
        found.append({"bench": bench, "case": {**case, **of}, "unit": unit, "samples": samples,
                      "predicted": truth})  # fmt: skip

    with DelayedNetwork(options.delay_us, mbps=options.mbps, mtu=9000) as slow:
        terms = []
        for swapped in (False, True):
            taken = [measure(slow, swapped=swapped) for _ in range(options.repeats)]
            terms.append(min(taken, key=lambda pair: pair[1])[0])
            way = {"direction": "back" if swapped else "forth"}
            note("link alpha", way, "us", [1e6 * alpha for _, alpha in taken], options.delay_us)
            rates = [8e-6 / t.per_byte_s for t, _ in taken]
            note("link rate", way, "Mb/s", rates, options.mbps)
            print(f"  occupied: {[round(1e6 * t.handshake_s) for t, _ in taken]} us")
        times = {name: jobs(slow, job, options.repeats) for name, job in JOBS.items()}
    with DelayedNetwork(0.0) as fast:
        quick = {name: jobs(fast, job, options.repeats) for name, job in JOBS.items()}
    for name, job in JOBS.items():
        tokens = job.batch * job.gen_len
        rates = [tokens / seconds for seconds in times[name]]
        of = {"job": name, **asdict(job)}
        note("batch job", of, "tokens/s", rates, tokens / predicted_s(job, *terms))
        print(f"  of the fast network's: {min(quick[name]) / min(times[name]):.3f}")
        found[-1]["baselines"] = {"no delay": tokens / min(quick[name])}
    for row in found if options.write else ():
        rows.write_row(FILE, noisy=options.noisy, **row)


def jobs(network: DelayedNetwork, job: BatchJob, repeats: int) -> list[float]:
    """Return the seconds of a job, several times."""
    return [both_ends(network, {"port": PORT, "job": asdict(job)}) for _ in range(repeats)]


if __name__ == "__main__":
    main()
