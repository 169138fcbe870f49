"""What of a hop occupies the stages and the link, and what only delays the message.

    python benchmarks/link_occupancy.py                          two processes of this machine, gloo
    python benchmarks/link_occupancy.py --delay-us 2000          the same over a slow network (root)
    python benchmarks/link_occupancy.py --backend nccl           two GPUs (or `peer`: CUDA IPC)

One stage sends hidden states to the next over the runtime's own transport. Each quantity is what a
message adds to the time between two messages, so what overlaps with computing costs nothing:

    latency     from the sender's call to the receiver's return, who was waiting
    link        time per message when neither end computes
    sender      what a message adds to a sender that computes; the receiver waits
    receiver    what a message adds to a receiver that computes; messages wait for it
    both        what a message adds where both compute the same

One row of microseconds for each, by size, with the CPU time that both processes spent on it. The
rows of `share` say what of alpha (latency's straight line at 0 bytes) is in a quantity's line at 0
bytes: 0 means that alpha only delays a message, 1 that each message costs alpha there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lib import rows
from lib.delayed_network import DEVICE, DelayedNetwork

from llmpq.profiler.timing.gpu_link_times import DTYPE, room, run_rounds
from llmpq.profiler.timing.gpu_link_times import TOKENS as GPU_TOKENS
from llmpq.runtime.links.device_links import DeviceLinks, StageLinks
from llmpq.runtime.links.peer_links import PeerLinks
from llmpq.runtime.links.transport import GlooTransport, join_gloo
from llmpq.runtime.request import StepKind
from llmpq.runtime.sampling_params import TokenChoice
from llmpq.runtime.step_message import StepMessage

FILE = "links.jsonl"
ROWS, HIDDEN = 8, 4096
HOST_TOKENS = (1, 4, 16, 64)
"""Tokens a row: 128 KiB to 8 MiB of float32."""
COMPUTES = {"alone": (True, True), "link": (False, False), "sender": (True, False),
            "receiver": (False, True), "both": (True, True)}  # fmt: skip
"""Quantity -> whether the sender and the receiver compute between messages; `alone`: no messages"""
QUANTITIES = ("latency", "link", "sender", "receiver", "both")
JOIN = timedelta(seconds=60)
WINDOW = 8
"""Messages a sender may have on their way: the runtime's for two stages."""
SENDER, RECEIVER = 1, 2

Found = dict[str, dict[str, list[float]]]
"""Quantity -> message's bytes -> microseconds of each block."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process of the measurement does."""

    rank: int
    """1 sends, 2 receives; 0 looks on: gloo's first stage would expect tokens back."""
    address: str
    port: int
    backend: str
    compute_us: float
    sleeps: bool
    messages: int
    rounds: int


class Host:
    """A stage on the CPU: gloo, and one thread that is busy."""

    def __init__(self, job: Job) -> None:
        store = dist.TCPStore(
            job.address, job.port, world_size=3, is_master=job.rank == 0, timeout=JOIN
        )
        join_gloo(store, job.rank, 3)
        torch.set_num_threads(1)
        self.tokens, self.itemsize = HOST_TOKENS, torch.float32.itemsize
        self._links = GlooTransport(
            hidden=HIDDEN,
            dtype=torch.float32,
            max_rows=ROWS,
            max_tokens=ROWS * max(HOST_TOKENS),
            max_pending=WINDOW,
        )
        self._hidden = {n: torch.zeros(ROWS, n, HIDDEN) for n in HOST_TOKENS}
        self._compute_s, self._sleeps = job.compute_us / 1e6, job.sleeps

    def compute(self) -> None:
        """Take the same CPU time whenever asked; a core that is taken away makes it longer."""
        if self._sleeps:
            time.sleep(self._compute_s)
            return
        end_s = time.thread_time() + self._compute_s
        while time.thread_time() < end_s:
            pass

    def send(self, tokens: int) -> None:
        """Send a message that says when it left."""
        message = StepMessage(
            kind=StepKind.PREFILL,
            seq=time.perf_counter_ns(),
            slots=range(ROWS),
            starts=[0] * ROWS,
            num_new=[tokens] * ROWS,
            sample_steps=[0] * ROWS,
            sampling=[TokenChoice()] * ROWS,
        )
        self._links.send_step(message, self._hidden[tokens])

    def receive(self, tokens: int) -> float:
        """Receive a message; return the microseconds since it left."""
        message, _ = self._links.receive_step()
        return (time.perf_counter_ns() - message.seq) / 1e3

    def settle(self) -> None:
        """Wait for what is on its way, and for the others."""
        self._links.close()
        dist.barrier()


class Gpu:
    """A stage on a GPU: NCCL or peer memory, and matrices on the current stream."""

    def __init__(self, job: Job) -> None:
        self._rank = job.rank - 1
        store = dist.TCPStore(
            job.address, job.port, world_size=2, is_master=self._rank == 0, timeout=JOIN
        )
        device = torch.device("cuda", self._rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        join_gloo(store, self._rank, 2)
        self.tokens, self.itemsize = GPU_TOKENS, DTYPE.itemsize
        self._links = self._connect(device, job.backend)
        problem = self._links.trial()
        if problem is not None:
            raise RuntimeError(f"{job.backend}: {problem}")
        self._x = torch.eye(2048, dtype=DTYPE, device=device)
        self._count = self._calibrate(job.compute_us)

    @staticmethod
    def _connect(device: torch.device, backend: str) -> StageLinks:
        if backend == "peer":
            return PeerLinks(device, room(HIDDEN), limit_s=JOIN.total_seconds())
        return DeviceLinks(device, room(HIDDEN), backend=backend, limit_s=JOIN.total_seconds())

    def latencies(self) -> dict[str, list[float]]:
        """Return one-way microseconds by size, by the profiler's own rounds."""
        found = run_rounds(self._links, self._rank, HIDDEN)
        return {str(n): [s * 1e6] for n, s in zip(found.sizes, found.seconds, strict=True)}

    def compute(self) -> None:
        """Enqueue the same work every time."""
        for _ in range(self._count):
            self._x = self._x @ self._x

    def send(self, tokens: int) -> None:
        """Enqueue a message."""
        self._links.send(torch.zeros(ROWS, tokens, HIDDEN, dtype=DTYPE, device=self._x.device))

    def receive(self, tokens: int) -> float:
        """Enqueue a message's receipt; when it left is not known."""
        self._links.release()
        self._links.receive((ROWS, tokens, HIDDEN), DTYPE)
        return 0.0

    def settle(self) -> None:
        """Wait for what is on its way, and for the others."""
        self._links.release()
        torch.cuda.synchronize()
        dist.barrier()

    def _calibrate(self, us: float) -> int:
        """Return how many products take about this long."""
        self._count, seconds = 20, []
        for _ in range(9):
            start = time.perf_counter()
            self.compute()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / self._count)
        return max(1, round(us / 1e6 / statistics.median(seconds)))


def run_stage(job: Job) -> Found:
    """Take part in every block; return what this stage saw."""
    if job.backend != "gloo":
        stage: Host | Gpu = Gpu(job)
        found: Found = {"latency": stage.latencies()}  # type: ignore[union-attr]
    else:
        stage, found = Host(job), {"latency": {}}
    for _ in range(job.rounds):
        for tokens in stage.tokens:
            size = str(ROWS * tokens * HIDDEN * stage.itemsize)
            for quantity in COMPUTES:
                stage.settle()
                cpu_s, block = time.process_time(), _block(stage, job, quantity, tokens)
                stage.settle()
                _keep(found, quantity, size, block.period_us)
                cpu_us = (time.process_time() - cpu_s) / (job.messages + 1) * 1e6
                _keep(found, f"cpu {quantity}", size, cpu_us)
                if quantity == "sender" and job.backend == "gloo" and job.rank == RECEIVER:
                    _keep(found, "latency", size, block.latency_us)
    stage.settle()
    dist.destroy_process_group()
    return found


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one stage saw of some messages."""

    period_us: float
    latency_us: float


def _block(stage: Host | Gpu, job: Job, quantity: str, tokens: int) -> Block:
    """Send or receive messages, computing as the quantity says; the first one is not counted."""
    computes = COMPUTES[quantity][max(0, job.rank - SENDER)]
    latencies, start = [0.0], time.perf_counter()
    for message in range(job.messages + 1):
        if quantity != "alone" and job.rank == RECEIVER:
            latencies.append(stage.receive(tokens))
        if computes and job.rank:
            stage.compute()
        if quantity != "alone" and job.rank == SENDER:
            stage.send(tokens)
        if message == 0:
            if isinstance(stage, Gpu):
                torch.cuda.synchronize()
            start = time.perf_counter()
    if isinstance(stage, Gpu):
        torch.cuda.synchronize()
    period_us = (time.perf_counter() - start) / job.messages * 1e6
    return Block(period_us=period_us, latency_us=low(latencies[2:] or latencies))


def _keep(found: Found, quantity: str, size: str, value: float) -> None:
    found.setdefault(quantity, {}).setdefault(size, []).append(value)


def low(values: Sequence[float]) -> float:
    """Return the lower quartile: other programs only ever add time."""
    return float(np.quantile(values, 0.25))


def added(sender: Found, receiver: Found, quantity: str, size: str) -> tuple[float, float]:
    """Return what a message adds to a period, and the CPU time that both ends spent on it."""
    computes = COMPUTES[quantity]
    cpu_us = 0.0
    for end, does in zip((sender, receiver), computes, strict=True):
        idle = low(end["cpu alone"][size]) if does else 0.0
        cpu_us += low(end[f"cpu {quantity}"][size]) - idle
    # The receiver sees every message arrive; how long the last ones took a sender it cannot tell.
    ends = [end for end, does in zip((sender, receiver), computes, strict=True) if does]
    alone_us = max((low(end["alone"][size]) for end in ends), default=0.0)
    return low(receiver[quantity][size]) - alone_us, cpu_us


def summed(sender: Found, receiver: Found) -> dict[str, dict[int, tuple[float, float | None]]]:
    """Return microseconds, and CPU microseconds where known, by quantity and size."""
    latency = sender["latency"] or receiver["latency"]
    table: dict[str, dict[int, tuple[float, float | None]]] = {
        "latency": {int(size): (low(values), None) for size, values in latency.items()}
    }
    for quantity in QUANTITIES[1:]:
        table[quantity] = {
            int(size): added(sender, receiver, quantity, size) for size in receiver["alone"]
        }
    return table


def line(points: Mapping[int, tuple[float, float | None]]) -> tuple[float, float]:
    """Return a line's value at 0 bytes and its slope per MiB, fitted on relative errors."""
    sizes = np.array(sorted(points), dtype=float)
    values = np.array([points[int(size)][0] for size in sizes])
    weights = 1 / np.maximum(np.abs(values), 1.0)
    slope, start = np.polyfit(sizes, values, 1, w=weights)
    return float(start), float(slope) * 2**20


def report(args: argparse.Namespace, sender: Found, receiver: Found) -> None:
    """Write the rows and print them."""
    table = summed(sender, receiver)
    case: dict[str, Any] = {"backend": args.backend, "delay_us": args.delay_us, "place": args.place}
    case["computes"] = not args.sleep
    device = None if args.backend == "gloo" else torch.cuda.get_device_name()
    for quantity, points in table.items():
        for size, (us, cpu_us) in points.items():
            print(f"{quantity:9} {size:>10} B {us:10.1f} us", end="")
            print("" if cpu_us is None else f"   CPU of both {cpu_us:8.1f} us")
            rows.write_row(
                FILE,
                bench="link_occupancy",
                case={**case, "quantity": quantity, "bytes": size, "compute_us": args.compute_us},
                unit="us",
                samples=[us],
                device=device,
                baselines={} if cpu_us is None else {"cpu": cpu_us},
                made_at=args.commit,
            )
    alpha, _ = line(table["latency"])
    for quantity, points in table.items():
        start, slope = line(points)
        print(f"{quantity:9} {start:8.1f} us + {slope:7.1f} us/MiB; share of alpha", end=" ")
        print(f"{start / alpha:.2f}")
        rows.write_row(
            FILE,
            bench="link_share",
            case={**case, "quantity": quantity},
            unit="of alpha",
            samples=[start / alpha],
            device=device,
            baselines={"at_0_bytes_us": start, "us_per_MiB": slope},
            made_at=args.commit,
        )


def main() -> None:
    """Start the stages, gather what they saw, write rows and print them."""
    args = _arguments()
    if args.job is not None:
        print(json.dumps(run_stage(Job(**json.loads(args.job)))))
        return
    with ExitStack() as stack:
        network = stack.enter_context(DelayedNetwork(args.delay_us)) if args.delay_us else None
        ranks = (0, SENDER, RECEIVER) if args.backend == "gloo" else (SENDER, RECEIVER)
        children = [_start(args, rank, network) for rank in ranks]
        texts = [child.communicate(timeout=args.limit_s)[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a stage failed; what it said is above")
    sender, receiver = (json.loads(text.splitlines()[-1]) for text in texts[-2:])
    report(args, sender, receiver)


def _start(
    args: argparse.Namespace, rank: int, network: DelayedNetwork | None
) -> subprocess.Popen[str]:
    """Start one process of the measurement; the receiver's is at the network's other end."""
    job = Job(
        rank=rank,
        address=network.addresses[0] if network else "127.0.0.1",
        port=args.port,
        backend=args.backend,
        compute_us=args.compute_us,
        sleeps=args.sleep,
        messages=args.messages,
        rounds=args.rounds,
    )
    command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
    if network is not None:
        command = network.command(int(rank == RECEIVER), command)
        command = ["env", f"GLOO_SOCKET_IFNAME={DEVICE}", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=("gloo", "nccl", "peer"), default="gloo")
    parser.add_argument("--delay-us", type=float, default=0, help="each packet, one way")
    parser.add_argument("--compute-us", type=float, default=20_000, help="between messages")
    parser.add_argument(
        "--sleep", action="store_true", help="instead of computing: where cores are fewer (gloo)"
    )
    parser.add_argument("--messages", type=int, default=20, help="in a block")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each kind")
    parser.add_argument("--place", default="alone", help="what else ran here, for the rows")
    parser.add_argument("--port", type=int, default=_free_port())
    parser.add_argument("--commit", help="for a machine without git")
    parser.add_argument("--limit-s", type=float, default=540)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
