"""Adds a device to a job that runs: tokens/s before and after beside what was predicted.

    python benchmarks/elastic.py added [--threads 4,2 --more 2] [--write]

A random model over CPU stages of so many threads, whose layers are profiled first, runs the job
that it was planned for; then one more device is added while that job decodes, and it runs again.
The last line has the ratio of tokens/s, predicted and measured, and the longest time in which no
request had a token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.lost_gpu import generated, stages_of
from lib.rows import write_row

from llmpq import LLM, SamplingParams
from llmpq.costs.cost_model import CostModel
from llmpq.costs.costs_cache import store_costs
from llmpq.devices.cluster import Cluster
from llmpq.runtime.elastic.elastic import DeviceChange
from llmpq.runtime.launch.plans.manual_plan import requests_of
from llmpq.workload import Workload

PROMPT, GENERATED = 64, 128


def main(words: list[str], program: str) -> None:
    """Run, add, compare."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="4,2", help="of the devices at first")
    parser.add_argument("--more", type=int, default=2, help="threads of the device that is added")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=3, help="before and after, each")
    parser.add_argument("--write", action="store_true", help="add a row to results/chaos.jsonl")
    given = parser.parse_args(words)
    first = [int(count) for count in given.threads.split(",")]
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), given.hidden, given.layers)
        more = cluster([*first, given.more])
        profile(Path(name), more, given.requests)
        with LLM(
            name,
            cluster=cluster(first),
            load_format="dummy",
            backend="processes",
            dtype="float32",
            max_model_len=PROMPT + GENERATED,
            max_num_seqs=given.requests,
            offline=True,  # as `llmpq-dist run`
            use_tqdm=False,
        ) as llm:
            print(f"before: {stages_of(llm.plan)}", flush=True)
            measure(llm, given, more)


def profile(folder: Path, devices: Cluster, requests: int) -> None:
    """Measure layers of 16 bits of every kind of device, and keep the costs where `LLM` looks."""
    described, costs = folder / "cluster.yaml", folder / "costs.json"
    described.write_text(json.dumps(devices.model_dump(mode="json", by_alias=True)))
    job = ["--bits", "16", "--kv", "16", "--dtype", "float32", "--quick"]
    sizes = ["--max-batch", str(requests), "--max-len", str(PROMPT + GENERATED)]
    where = ["--model", str(folder), "--cluster", str(described), "-o", str(costs)]
    subprocess.run([sys.executable, "-m", "llmpq.profiler", *where, *job, *sizes], check=True)
    store_costs(CostModel.load_json(costs))


def measure(llm: LLM, given: argparse.Namespace, more: Cluster) -> None:
    """Run jobs as the plan has them, add a device in the middle of one, run more; compare."""
    run_job(llm)  # what is kept from the first steps is there
    before = [run_job(llm) for _ in range(given.jobs)]
    name, usual_s = more.devices[-1].name, max(gap_s for _, gap_s in before)
    changes: list[DeviceChange] = []

    def add() -> None:
        time.sleep(0.5 * before[0][0])
        changes.append(llm.add_devices(name, cluster=more, horizon_s=1e6))

    adding = threading.Thread(target=add)
    adding.start()
    _, gap_s = run_job(llm)
    adding.join()
    change = changes[0]
    print(change.text, flush=True)
    print(f"after: {stages_of(llm.plan)}")
    if change.tokens_per_s is None:
        return
    after = [run_job(llm) for _ in range(given.jobs)]
    slow_s, quick_s = (statistics.median(took_s for took_s, _ in jobs) for jobs in (before, after))
    predicted, measured = change.tokens_per_s[1] / change.tokens_per_s[0], slow_s / quick_s
    tokens = job_of(llm).batch * job_of(llm).gen_len
    print(
        f"tokens/s {tokens / slow_s:.1f} ({change.tokens_per_s[0]:.1f} predicted) -> "
        f"{tokens / quick_s:.1f} ({change.tokens_per_s[1]:.1f}): {measured:.3f} times, "
        f"{predicted:.3f} predicted ({measured / predicted - 1:+.1%}); longest wait for a token "
        f"{gap_s:.2f} s ({usual_s:.2f} in jobs before); pause {change.pause_s}; seconds of jobs "
        f"{[round(took_s, 2) for took_s, _ in before]}, {[round(took_s, 2) for took_s, _ in after]}"
    )
    if given.write:
        jobs = [[took_s for took_s, _ in each] for each in (before, after)]
        add_row(change, tokens, jobs, (gap_s, usual_s))


def add_row(
    change: DeviceChange,
    tokens: int,
    jobs: Sequence[Sequence[float]],
    waits_s: tuple[float, float],
    **how: Any,
) -> None:
    """Add a row: `tokens` of a job, seconds of `jobs` before and after, longest waits for one."""
    assert change.tokens_per_s is not None and change.pause_s is not None
    slow_s, quick_s = map(statistics.median, jobs)
    write_row(
        "chaos.jsonl", bench="added_device",
        case={
            "tokens_per_s": (tokens / slow_s, tokens / quick_s),
            "tokens_per_s_predicted": change.tokens_per_s, "pause_s": change.pause_s,
            "wait_s": waits_s, "load_average": os.getloadavg()[0],
        },
        unit="times the tokens/s", samples=[slow_s / took_s for took_s in jobs[1]],
        predicted=change.tokens_per_s[1] / change.tokens_per_s[0], **how,
    )  # fmt: skip


def job_of(llm: LLM) -> Workload:
    """Return the job that plans with another device are made for."""
    work = llm.plan.workload
    return (
        work
        if work.gen_len > 1
        else requests_of(work.batch, work.max_len, kv=work.kv, dtype=work.dtype)
    )


def run_job(llm: LLM) -> tuple[float, float]:
    """Run the job of the plan; return its seconds, and the longest time without a token."""
    over, gaps_s, work = threading.Event(), [0.0], job_of(llm)
    prompts = [[5 + (7 * n + i) % 400 for i in range(work.prompt_len)] for n in range(work.batch)]
    params = SamplingParams(temperature=0, max_tokens=work.gen_len, ignore_eos=True)

    def watch() -> None:
        last_s, count = 0.0, generated(llm)
        while not over.wait(0.05):  # each look takes a core a quarter of a millisecond
            now_s, now = time.perf_counter(), generated(llm)
            if now != count:
                gaps_s[0] = max(gaps_s[0], now_s - last_s if last_s else 0.0)  # first: prompts
                last_s, count = now_s, now

    watching = threading.Thread(target=watch, daemon=True)
    llm.reset_prefix_cache()
    began_s = time.perf_counter()
    watching.start()
    llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - began_s
    over.set()
    watching.join()
    return took_s, gaps_s[0]


def cluster(threads: list[int]) -> Cluster:
    """Return CPU devices of so many threads each."""
    devices = [{"kind": "CPU", "threads": n, "memory": "2 GiB", "reserve": 0} for n in threads]
    node = {"name": "here", "devices": devices}
    return Cluster.parse_data({"name": "cpus", "nodes": [node]}, where="the benchmark")


def write_config(folder: Path, hidden: int, layers: int) -> None:
    """Write the config of a Llama of this size."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
        "eos_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
