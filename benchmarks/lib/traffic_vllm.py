"""The simulator beside vLLM on an RTX 4090, as LLMServingSim measured both kernels and requests.

    python benchmarks/traffic.py vllm out/LLMServingSim [--write]

The folder is a clone of casys-kaist/LLMServingSim (MIT, 5daddb2). Its profile of Llama-3.1-8B
becomes cost entries as `llmpq-algo costs import` makes them; its 300 requests come to llmpq's
scheduler as they came to vLLM 0.19, with as many blocks of as many tokens of KV cache, the same
token budget of a step and requests at once. Blocks have vLLM's 16 tokens here, set before the
scheduler is imported: of the runtime's 128 a request leaves 56 more of its last block empty, so
fewer run, and the median of first tokens is 14 % late (`--block-tokens 128`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from lib.rows import write_row

from llmpq.service_measures import ServedRequest, ServiceLimits, ServiceMeasures
from llmpq.sizes import kv_format
from llmpq.traffic import Arrival

PROFILE = "profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"
RUN = "bench/examples/RTX4090/Llama-3.1-8B/vllm"


def measured_requests(path: Path) -> list[ServedRequest]:
    """Return when vLLM served each request; arrivals are by another clock than tokens."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    begin = min(row["arrival_time"] for row in rows)
    apart = min(row["queued_ts"] - row["arrival_time"] for row in rows) + begin
    found = [
        ServedRequest(
            number=number,
            at_s=row["arrival_time"] - begin,
            first_token_s=row["first_token_ts"] - apart,
            end_s=row["last_token_ts"] - apart,
            prompt_tokens=row["input_toks"],
            output_tokens=row["output_toks"],
        )
        for number, row in enumerate(rows)
    ]
    return sorted(found, key=lambda one: one.at_s)


def main(words: list[str], program: str) -> None:
    """Import, simulate, compare."""
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="clone of LLMServingSim")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="append rows to results/traffic.jsonl")
    options = parser.parse_args(words)
    kv_format.BLOCK_TOKENS = options.block_tokens
    from llmpq.planner.__main__ import main as planner
    from llmpq.planner.evaluate.engine_simulation import EngineModel, simulate
    from llmpq.planner.make import make_plan

    served = measured_requests(options.folder / RUN / "requests.jsonl")
    measured = ServiceMeasures.of(served, ServiceLimits())
    meta = json.loads((options.folder / RUN / "meta.json").read_text())
    kwargs, cache = meta["engine_kwargs"], meta["kv_cache"]
    with tempfile.TemporaryDirectory() as folder:
        costs = f"{folder}/costs.json"
        words = ["costs", "import", str(options.folder / PROFILE), "--kind", "4090"]
        assert planner([*words, "--model", "llama-3.1-8b", "-o", costs]) == 0
        plan = make_plan("llama-3.1-8b", devices="4090", costs=costs, bits="16", batch=4)
    model = EngineModel.of_plan(plan)
    traffic = [Arrival(one.at_s, one.prompt_tokens, one.output_tokens) for one in served]
    limits = replace(
        model.limits,
        num_blocks=cache["num_kv_tokens"] // options.block_tokens,
        max_rows=kwargs["max_num_seqs"],
        decode_rows=kwargs["max_num_seqs"],
        step_tokens=kwargs["max_num_batched_tokens"],
        max_len=kwargs["max_model_len"],
        host_blocks=0,
    )
    predicted = ServiceMeasures.of(
        simulate([replace(model, limits=limits)], traffic), ServiceLimits()
    )
    print(f"{limits.num_blocks} blocks, {predicted.preemptions} preemptions")
    for name in ("ttft_s", "tpot_s", "latency_s"):
        for of in ("mean", "p50", "p90", "p99"):
            ours, theirs = (getattr(getattr(m, name), of) for m in (predicted, measured))
            print(f"  {name:10} {of:5} {ours:9.4f} {theirs:9.4f}  {ours / theirs - 1:+.1%}")
            if options.write:
                write_row(
                    "traffic.jsonl",
                    bench="traffic",
                    case={
                        "what": "vLLM 0.19, requests of LLMServingSim",
                        "model": "llama-3.1-8b",
                        "measure": name.removesuffix("_s"),
                        "of": of,
                        "requests": len(traffic),
                        "blocks": f"{options.block_tokens} tokens",
                    },
                    unit="s",
                    samples=[theirs],
                    predicted=ours,
                    device="RTX 4090 (measured by LLMServingSim)",
                )
