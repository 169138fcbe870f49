"""Devices that share a stage (tensor parallel) beside other ways to use them.

    python benchmarks/shared_stages.py decode --cluster clusters/h200x2.yaml --model llama-3.1-8b
    python benchmarks/shared_stages.py uneven --sms 132,48 --model llama-3.1-8b

Every job is planned, run by `llmpq-dist bench` with random weights made on the devices, and
held against its prediction.

`decode`: one request and several, on one device, on all that share every layer, and through a
pipeline of all: milliseconds a token, and the gain over one device.

`uneven`: two GPUs of which each has some of its SMs (`emulate:`), sharing every layer by every pair
of shares of so many parts, and by the shares that the planner takes; it also says what even shares
take beside the best ones. Rows go to results/shared_stages.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lib.rows import write_row

from llmpq.plans.plan import Plan

ONE = ("--engines", "1")
"""The planner's flags for one engine."""


class Timed(NamedTuple):
    """A plan's decode step, in ms: as measured, job by job, and as predicted."""

    ms: list[float]
    predicted_ms: float
    shares: tuple[int, ...]
    device: str

    @property
    def median_ms(self) -> float:
        """The job in the middle."""
        return sorted(self.ms)[len(self.ms) // 2]


def main() -> None:
    """Run one part."""
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        (decode if args.part == "decode" else uneven)(args)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("decode", "uneven"))
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--cluster", type=Path, help="of decode, and of uneven in place of --sms")
    parser.add_argument("--sms", default="132,48", help="of each GPU, for uneven")
    parser.add_argument("--memory", default="60 GiB", help="of each GPU, for uneven")
    parser.add_argument("--parts", type=int, default=8, help="into which uneven divides layers")
    parser.add_argument("--costs", help="costs.json of llmpq-profile (default: by the roofline)")
    parser.add_argument("--bits", default="16", help="of the weights: 16,4")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    return parser


def decode(args: argparse.Namespace) -> None:
    """Compare one device, all in one stage, and a pipeline."""
    if args.cluster is None:
        sys.exit("decode needs --cluster")
    count = len(devices_of(args.cluster))
    ways = {
        "one device": (*ONE, "--tensor-parallel", "1", "--max-devices", "1"),
        "shared": (*ONE, "--tensor-parallel", str(count)),
        "pipeline": (*ONE, "--tensor-parallel", "1"),
    }
    for bits in args.bits.split(","):
        for batch in map(int, args.batches.split(",")):
            alone = None
            for way, flags in ways.items():
                timed = time_plan(args, args.cluster, bits, batch, flags)
                alone = timed if alone is None else alone
                gain = alone.median_ms / timed.median_ms
                show(f"{bits} bits, batch {batch}, {way}", timed, f"{gain:.2f}x of one device")
                write(args, timed, bits=bits, batch=batch, way=way)


def uneven(args: argparse.Namespace) -> None:
    """Compare every pair of shares on two unlike devices, and the planner's own."""
    cluster = args.cluster or emulated(args)
    for bits in args.bits.split(","):
        for batch in map(int, args.batches.split(",")):
            swept = {}
            for first in range(args.parts // 2, args.parts):
                shares = f"{first}:{args.parts - first}"
                flags = (*ONE, "--tensor-parallel", shares)
                swept[shares] = timed = time_plan(args, cluster, bits, batch, flags)
                show(f"{bits} bits, batch {batch}, {shares}", timed)
                write(args, timed, bits=bits, batch=batch, way=shares)
            even, best = next(iter(swept.values())), min(swept, key=lambda s: swept[s].median_ms)
            own = time_plan(args, cluster, bits, batch, ONE)
            write(args, own, bits=bits, batch=batch, way="planner")
            chosen = ":".join(map(str, own.shares)) or "one device"
            show(f"{bits} bits, batch {batch}, the planner's ({chosen})", own)
            print(f"best {best}: {even.median_ms / swept[best].median_ms:.2f}x of even shares")


def emulated(args: argparse.Namespace) -> Path:
    """Return a cluster file of H200s with some of their SMs."""
    devices = [
        {
            "kind": "H200",
            "count": 1,
            "reserve": "1 GiB",
            "emulate": {"sms": int(sms), "memory": args.memory},
        }
        for sms in args.sms.split(",")
    ]
    data = {
        "schema": 1,
        "name": "emulated",
        "nodes": [{"name": "box", "devices": devices}],
        "links": {"within_node": {"gbps": 1600, "latency_us": 5}},
    }
    path: Path = args.folder / "emulated.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def devices_of(cluster: Path) -> list[Any]:
    """Return a cluster's devices."""
    from llmpq.devices.cluster import Cluster

    return list(Cluster.load(cluster).devices)


def time_plan(
    args: argparse.Namespace, cluster: Path, bits: str, batch: int, flags: Sequence[str]
) -> Timed:
    """Plan a job, run it, and return its decode steps; a command that fails ends this one."""
    path = args.folder / "plan.json"
    costs = () if args.costs is None else ("--costs", args.costs)
    job = ("--prompt-len", args.prompt, "--gen-len", args.gen, "--batch", batch)
    asked = ("--model", args.model, "--bits", bits, "--kv", "16", *job, *costs, *flags)
    command("llmpq.planner", "--cluster", cluster, *asked, "-o", path)
    options = ("--model", args.model, "--load-format", "dummy", "--repeat", args.repeat, "--json")
    report = json.loads(command("llmpq.runtime", "bench", "--plan", path, *options))
    plan = Plan.load(path)
    assert plan.predicted is not None, "the planner always predicts"
    steps = args.gen - 1
    decode_s = plan.predicted.total_s - plan.predicted.prefill_s
    shares = next((tuple(stage.shares) for stage in plan.stages if stage.shares), ())
    name = report["stages"][0].get("device_name") or plan.stages[0].kind
    return Timed(report["decode_step_ms"], 1e3 * decode_s / steps, shares, name)


def command(module: str, *words: object) -> str:
    """Run a command; return what it prints."""
    asked = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(asked)}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def show(what: str, timed: Timed, more: str = "") -> None:
    """Print one line."""
    off = timed.predicted_ms / timed.median_ms - 1
    line = (
        f"{what}: {timed.median_ms:.3f} ms a token ({timed.predicted_ms:.3f} predicted, {off:+.1%})"
    )
    print(line, more, flush=True)


def write(args: argparse.Namespace, timed: Timed, **case: Any) -> None:
    """Write a row."""
    job = {"model": args.model, "prompt": args.prompt, "gen": args.gen, "shares": timed.shares}
    write_row(
        "shared_stages.jsonl",
        bench=f"shared_stages_{args.part}",
        case=job | case | ({"sms": args.sms} if args.part == "uneven" else {}),
        unit="ms/token",
        samples=timed.ms,
        predicted=timed.predicted_ms,
        device=timed.device,
    )


if __name__ == "__main__":
    main()
