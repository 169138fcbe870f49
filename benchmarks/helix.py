"""Helix's placements of layers on nodes, with a proof: most tokens/s where links do not bind.

    python benchmarks/helix.py [--write]

The rates of Helix's nodes by layers (Mei et al., ASPLOS 2025; Thesys-lab/Helix-ASPLOS25) are those
of its planner's cases of 10 nodes (LLaMA-30B), 24 and 42 (Llama-2-70B, one cluster of 10 Gb/s and
more: 61,000 tokens/s and more of any link, which no placement needs). Beside it what Helix's own
traces end with: tokens/s and seconds of Gurobi.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from lib.layer_cover import best_cover
from lib.rows import write_row

DATA = Path(__file__).parent / "data" / "helix_node_throughput.csv"
CASES: dict[str, tuple[int, dict[str, int], float, float]] = {
    "10": (60, {"L4": 4, "T4": 6}, 286.587, 3802.88),
    "24": (80, {"A100": 4, "L4": 8, "T4": 12}, 1289.556, 599.97),
    "42": (
        80,
        {"A100": 4, "L4": 8, "L4x2": 4, "T4": 10, "T4x2": 6, "T4x4": 4, "V100": 6},
        4892.242,
        4382.41,
    ),
}
"""Layers, nodes, and the best tokens/s of Helix's traces and its seconds."""


def main() -> None:
    """Place each case, print and write rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case (60)")
    parser.add_argument("--write", action="store_true", help="append rows to results/helix.jsonl")
    options = parser.parse_args()
    rates: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    with DATA.open() as file:
        for row in csv.DictReader(file):
            rates[row["case"]][row["node_type"]][int(row["layers"])] = float(row["tokens_per_s"])
    for case, (layers, counts, helix, seconds) in CASES.items():
        found = best_cover(rates[case], counts, layers, time_limit_s=options.seconds)
        print(
            f"{case} nodes: {found.rate:.3f} tokens/s, at most {found.bound:.3f} (gap "
            f"{found.gap:.2%}) in {found.seconds:.2f} s; Helix {helix} in {seconds:.0f} s"
        )
        if options.write:
            write_row(
                "helix.jsonl",
                bench="helix",
                case={"nodes": int(case), "layers": layers, "seconds": round(found.seconds, 2)},
                unit="tokens/s",
                samples=[found.rate],
                floor=found.bound,
                baselines={"helix": helix, "helix seconds": seconds},
            )


if __name__ == "__main__":
    main()
