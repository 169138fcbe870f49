"""Two GPUs as two hosts: NCCL over sockets against peer memory, one plan, equal tokens.

    python benchmarks/two_nodes_gpu.py --model DIR --write        two GPUs of one machine

Two Ray nodes on this machine with a GPU each, which may share no memory (NCCL_P2P_DISABLE,
NCCL_SHM_DISABLE): stages talk as between two hosts. The same plan runs again as two processes with
peer memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from lib import rows

from llmpq.devices.this_machine import read_gpus, visible
from llmpq.model_spec import ModelSpec
from llmpq.plan import ClusterRef, ModelRef, NodePlan, Plan, StagePlan
from llmpq.precision import Precision
from llmpq.workload import Workload

FILE = "links.jsonl"
BATCH, PROMPT, GEN = 16, 256, 128
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""Settings with which NCCL takes sockets, as between two hosts without InfiniBand."""


def half_and_half(model: Path) -> Plan:
    """Return a plan whose two halves are on the first two GPUs, as nodes `x` and `y`."""
    spec, gpus = ModelSpec.from_directory(model), visible(read_gpus())[:2]
    if len(gpus) < 2:
        raise SystemExit(f"needs two GPUs, this machine has {len(gpus)}")
    middle = spec.num_layers // 2
    stages = tuple(
        StagePlan(
            device=f"{gpu.kind}-{index}",
            node=node,
            device_index=index,
            kind=str(gpu.kind),
            profile_kind=str(gpu.kind),
            layers=layers,
            precisions=(Precision.W16A16,) * (layers[1] - layers[0]),
        )
        for index, (gpu, node, layers) in enumerate(
            zip(gpus, "xy", ((0, middle), (middle, spec.num_layers)), strict=True)
        )
    )
    return Plan(
        model=ModelRef(
            name=spec.name,
            num_layers=spec.num_layers,
            fingerprint=spec.fingerprint(),
            path=str(model),
        ),
        cluster=ClusterRef(name="two-gpus", fingerprint="0" * 16),
        workload=Workload(batch=BATCH, prompt_len=PROMPT, gen_len=GEN, dtype=spec.dtype),
        prefill_microbatch=2,
        decode_microbatch=BATCH // 2,
        stages=stages,
        nodes=tuple(NodePlan(name=node, labels={"gpu": node}) for node in "xy"),
    )


@contextlib.contextmanager
def two_ray_nodes() -> Iterator[str]:
    """Start a Ray node for each GPU on 127.0.0.1; end what was started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    before = {process.pid for process in psutil.process_iter()}
    with tempfile.TemporaryDirectory(prefix="llmpq-", dir="/tmp") as folder:
        common = ["--num-gpus=1", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
        head = ["--head", f"--port={address[10:]}", f"--temp-dir={folder}"]
        try:
            for index, words in enumerate((head, [f"--address={address}"])):
                own = {**APART, "CUDA_VISIBLE_DEVICES": str(index), "RAY_worker_niceness": "0"}
                ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
                subprocess.run(
                    [*ray, f"--labels=gpu={'xy'[index]}"], env={**os.environ, **own}, check=True
                )
            yield address
        finally:
            for process in psutil.process_iter(["cmdline"]):
                mine = any(folder in word for word in process.info["cmdline"] or ())
                if mine and process.pid not in before:
                    process.kill()


def run(folder: Path, *words: str, own: Mapping[str, str]) -> tuple[float, list[Any]]:
    """Run the folder's plan; return tokens per second and the answers' tokens."""
    command = [sys.executable, "-m", "llmpq.runtime", "run", "--plan", "plan.json", "-i",
               "in.jsonl", "-o", "out.jsonl", "--report", "report.json", *words]  # fmt: skip
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True)
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    return report["output_throughput"], [line["tokens"] for line in lines]


def main() -> None:
    """Measure, compare tokens, and write a row if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="append a row to results/links.jsonl")
    options = parser.parse_args()
    plan = half_and_half(options.model.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save_json(folder / "plan.json")
        prompts = [{"prompt": [1 + row] * PROMPT, "ignore_eos": True} for row in range(BATCH)]
        (folder / "in.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
        with two_ray_nodes() as address:
            words = ("--ray-address", address, "--links", "nccl")
            apart = [run(folder, *words, own=APART) for _ in range(options.repeats)]
        words = ("--backend", "processes", "--links", "peer")
        peer = [run(folder, *words, own={}) for _ in range(options.repeats)]
    same = all(tokens == peer[0][1] for _, tokens in apart + peer)
    rates, best = [rate for rate, _ in apart], max(rate for rate, _ in peer)
    print(f"sockets {max(rates):.1f} tokens/s, peer {best:.1f} tokens/s, tokens equal: {same}")
    if not same:
        raise SystemExit("the tokens differ")
    if options.write:
        case = {"model": plan.model.name, "batch": BATCH, "prompt": PROMPT, "gen": GEN}
        rows.write_row(
            FILE, bench="two nodes, NCCL over sockets", case=case, unit="tokens/s", samples=rates,
            device=f"2 x {plan.stages[0].kind}", baselines={"peer memory": best},
        )  # fmt: skip


if __name__ == "__main__":
    main()
