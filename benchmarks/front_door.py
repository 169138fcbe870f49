"""From the command to the first token, and what stages cost beside their weights.

    python benchmarks/front_door.py [--runs 5] [--model examples/demo-7m] [--rows FILE]

`first token`: seconds from the start of `llmpq-dist run --model DIR -i ... -o ...` (no plan; one
device) until the first answer of one token stands in the output file, process start, planning and
loading included; `processor time`: what that command takes of it, whatever else the machine does.
`two stages`: the same rows over two stages of this machine as plain processes;
the most processes there were at once, and the most memory they took together (proportional set
size: what they share counts once). `import`: seconds of `import llmpq` in a new interpreter,
beside an interpreter that imports nothing. Each row is the median of the runs; one taken while
other programs used the processor is marked noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from lib.rows import write_row

from llmpq.devices.this_machine import this_machine

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "examples" / "prompts.jsonl"
LOOK_S = 0.02
MEMORY_EVERY = 5
"""Looks at the output for each look at the memory, which takes longer."""
BUSY = 0.1
"""Share of the processor that others may use before a run counts as disturbed."""
LIMIT_S = 300.0
TWO_CPUS = """\
schema: 1
name: two-cpu-stages
nodes:
  - name: here
    devices:
      - {kind: CPU, threads: 1, memory: MEMORY}
      - {kind: CPU, threads: 1, memory: MEMORY}
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a command."""

    first_token_s: float
    processor_s: float
    """Of all its processes, to its end."""
    processes: int
    memory_bytes: int
    disturbed: bool


def main() -> None:
    """Measure, print, write rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-7m")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (default 5)")
    parser.add_argument("--rows", default="front_door.jsonl", help="file of benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = [run_once(args.model, folder, ["--max-tokens", "1"]) for _ in range(args.runs)]
        cluster = folder / "two.yaml"
        cluster.write_text(TWO_CPUS.replace("MEMORY", memory_of_half(args.model)))
        flags = ["--cluster", str(cluster), "--backend", "processes"]
        two = [run_once(args.model, folder, flags) for _ in range(args.runs)]
    model = args.model.name
    report(args, "first token", {"model": model, "stages": 1}, "s", one, "first_token_s")
    report(args, "processor time", {"model": model, "stages": 1}, "s", one, "processor_s")
    case = {"model": model, "stages": 2, "backend": "processes"}
    report(args, "processes", case, "processes", two, "processes")
    report(args, "memory", case, "bytes", two, "memory_bytes")
    plain, ours = (import_seconds(line, args.runs) for line in ("pass", "import llmpq"))
    write(args, "import", {"statement": "import llmpq"}, "s", ours, baselines={
        "python": statistics.median(plain)
    })  # fmt: skip


def run_once(model: Path, folder: Path, flags: list[str]) -> Run:
    """Run the command; watch its output file and its processes."""
    out, cores = folder / "out.jsonl", psutil.cpu_count() or 1
    out.unlink(missing_ok=True)
    psutil.cpu_percent()
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmpq.runtime", "run", "--model", str(model), "-i", str(PROMPTS),
         "-o", str(out), *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first_s, most, memory, looks, used_s = 0.0, 0, 0, 0, 0.0
    tree = psutil.Process(process.pid)
    while process.poll() is None and time.monotonic() < started_s + LIMIT_S:
        if not first_s and out.exists() and out.stat().st_size:
            first_s = time.monotonic() - started_s
        if looks % MEMORY_EVERY == 0:
            count, size, used_s = look(tree, used_s)
            most, memory = max(most, count), max(memory, size)
        looks += 1
        time.sleep(LOOK_S)
    took_s = time.monotonic() - started_s
    _, said = process.communicate(timeout=LIMIT_S)
    if process.returncode != 0 or not first_s:
        raise SystemExit(f"the command ended with code {process.returncode}: {said}")
    others = psutil.cpu_percent() / 100 - used_s / took_s / cores
    return Run(
        first_token_s=first_s,
        processor_s=used_s,
        processes=most,
        memory_bytes=memory,
        disturbed=others > BUSY,
    )


def look(tree: psutil.Process, used_s: float) -> tuple[int, int, float]:
    """Return a tree's number of processes, their memory, and the processor time so far."""
    count, size, seconds = 0, 0, 0.0
    try:
        members = [tree, *tree.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0, used_s
    for member in members:
        try:
            size += member.memory_full_info().pss
            times = member.cpu_times()
        except (psutil.Error, OSError):
            continue
        count, seconds = count + 1, seconds + times.user + times.system
    return count, size, max(used_s, seconds)


def memory_of_half(model: Path) -> str:
    """Return a memory in which half of a model fits, and not the whole of it."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    width = 2 if json.loads((model / "config.json").read_text()).get("torch_dtype") else 1
    return f"{int(weights * width * 1.07) // 2**20} MiB"


def import_seconds(statement: str, runs: int) -> list[float]:
    """Return the seconds of a statement in a new interpreter."""
    found = []
    for _ in range(runs):
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        found.append(time.perf_counter() - started_s)
    return found


def report(
    args: argparse.Namespace, bench: str, case: dict[str, object], unit: str, runs: list[Run],
    field: str,
) -> None:  # fmt: skip
    """Write a row of one field of the runs."""
    noisy = sum(run.disturbed for run in runs) * 2 > len(runs)
    write(args, bench, case, unit, [float(getattr(run, field)) for run in runs], noisy=noisy)


def write(
    args: argparse.Namespace,
    bench: str,
    case: dict[str, object],
    unit: str,
    samples: list[float],
    *,
    noisy: bool = False,
    baselines: dict[str, float] | None = None,
) -> None:
    """Write a row and print it."""
    device = this_machine().devices[0]
    write_row(
        args.rows, bench=f"front door: {bench}", case=case, unit=unit, samples=samples,
        device=device.profile_kind, noisy=noisy, baselines=baselines,
    )  # fmt: skip
    print(f"{bench}: {statistics.median(samples):.4g} {unit}" + (" (noisy)" if noisy else ""))


if __name__ == "__main__":
    main()
