"""How near parts of layers that were not timed are to those that were.

    llmpq-profile --model llama-3.1-8b --cluster two.yaml -tp 2,4,8,3:1,5:3,7:1 -o costs.json
    python benchmarks/part_times.py costs.json --model llama-3.1-8b --left-out 5:3,7:1

Each part that is left out is put together from the others as for a group of devices
(planner/costs/group_costs.py) and held against what was measured of it, in decode steps and prompts
of the sizes that were timed. Rows go to results/part_times.jsonl.
"""

from __future__ import annotations

import argparse
import math
import statistics
from itertools import product

from lib.rows import write_row

from llmpq.costs.cost_model import CostModel, LatencyEntry, Phase
from llmpq.models.model_spec import ModelSpec
from llmpq.models.tensor_parallel import parse_shares, shares_text
from llmpq.planner.costs.group_costs import PartTimes
from llmpq.planner.problem.named_inputs import read_model
from llmpq.planner.problem.requests import PlanRequest

ROWS = (1, 2, 4, 8, 16, 32)
"""Of steps, as far as they were timed: of the fewest tokens or keys, the most, and between."""
MOST_TOKENS = 2048
"""Of a step of prompts."""


def main() -> None:
    """Print a line for each part and phase."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("costs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--left-out", required=True, help="shares: 5:3,7:1")
    args = parser.parse_args()
    costs, spec = CostModel.load_json(args.costs), read_model(PlanRequest(model=args.model)).spec
    out = {parse_shares(text) for text in args.left_out.split(",")}
    kept = tuple(entry for entry in costs.entries if entry.shares not in out)
    rest = CostModel(model=costs.model, model_fingerprint=costs.model_fingerprint, entries=kept)
    for entry in costs.entries:
        if entry.shares in out:
            compare(entry, rest, spec)


def compare(entry: LatencyEntry, rest: CostModel, spec: ModelSpec) -> None:
    """Hold one part against what the others say of it."""
    made = PartTimes(rest, spec).of(entry)
    if made is None:
        raise SystemExit(f"no other part of {entry.device_kind} was timed")
    (least, most), (shortest, longest) = entry.sampled_v or (1, 1), entry.sampled_length or (1, 1)
    lengths = {shortest, round(math.sqrt(shortest * longest)), longest}
    sizes = [(v, n) for v, n in product(ROWS, sorted(lengths)) if least <= v <= most]
    if entry.phase is Phase.PREFILL:
        sizes = [(v, n) for v, n in sizes if v * n <= MOST_TOKENS]
    off = [made.seconds(v=v, length=n) / entry.seconds(v=v, length=n) - 1 for v, n in sizes]
    error = statistics.fmean(map(abs, off))
    print(
        f"{entry.device_kind} {entry.phase.value} {entry.precision.value}, part of "
        f"{shares_text(entry.shares)}: {error:.1%} off in the mean, {min(off):+.1%} to "
        f"{max(off):+.1%} ({len(off)} sizes)"
    )
    case = {"model": spec.name, "shares": shares_text(entry.shares), "phase": entry.phase.value}
    write_row(
        "part_times.jsonl",
        bench="part_times",
        case=case | {"bits": entry.precision.value, "kind": entry.device_kind},
        unit="relative error",
        samples=[abs(one) for one in off],
        predicted=None,
        device=entry.device_kind,
    )


if __name__ == "__main__":
    main()
