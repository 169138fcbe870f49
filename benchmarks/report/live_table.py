"""The table of traces replayed: a line a replay, whatever benches its rows are of."""

from __future__ import annotations

import json
from dataclasses import dataclass

from report.table_cells import RESULTS, Row, markdown

SHOWN = {
    "throughput": "tokens/s",
    "requests": "requests/s",
    "ttft_p50": "first token p50 ms",
    "ttft_p99": "p99",
    "tpot_p50": "per token p50 ms",
    "tpot_p99": "p99",
    "token_gap_p99": "gaps p99 ms",
    "goodput_server": "within MLPerf server's limits",
}
"""Benches without `live_`, and what stands above their columns."""


@dataclass(frozen=True)
class LiveTable:
    """Replays of one number of stages on GPUs, the newest row of each."""

    stages: int

    def render(self) -> str:
        """Return the table as Markdown."""
        lines: dict[tuple[str, ...], dict[str, Row]] = {}
        path = RESULTS / "live.jsonl"
        for text in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(text)
            if row["case"].get("stages") == self.stages and "CPU" not in row["device"]:
                cells = lines.setdefault(_named(row), {})
                cells[row["bench"].removeprefix("live_")] = row
        busy = {f"busy_{number}": f"busy {number}" for number in range(self.stages)}
        shown = SHOWN | (busy if self.stages > 1 else {})
        body = [
            [*name, *(f"{cells[key]['value']:.4g}" if key in cells else "" for key in shown)]
            for name, cells in lines.items()
        ]
        return markdown(
            ["GPU", "weights", "KV", "requests", "arrivals", "how", *shown.values()], body
        )


def _named(row: Row) -> tuple[str, ...]:
    """Return what tells a replay from others."""
    case = row["case"]
    how = "chunks, one pool" if case["pool"] else "prompts alone, slots"
    if case["pool"] and not case["step_tokens"]:
        how = "prompts whole, one pool"
    if case["stages"] > 1:
        layers = " + ".join(map(str, case["layers"]))
        how = f"{layers} layers"
        if any(case["sms"]):
            how += f" on {' + '.join(map(str, case['sms']))} SMs"
    gpu = row["device"].removeprefix("NVIDIA ")
    return gpu, case["precision"], case["kv"], str(case["requests"]), case["arrivals"], how
