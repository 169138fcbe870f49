"""Adds a device to a job that runs: tokens/s before and after beside what was predicted.

    python benchmarks/added_device.py [--threads 4,2 --more 2]

A random model over CPU stages of so many threads, whose layers are profiled first; then one more
device is added while requests decode. The last line has the ratio of tokens/s, predicted and
measured, and the longest time in which no request had a token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from lost_gpu import generated, stages_of

from llmpq import LLM, SamplingParams
from llmpq.cluster import Cluster
from llmpq.cost_model import CostModel
from llmpq.costs_cache import store_costs

PROMPT, GENERATED = 64, 128


def main() -> None:
    """Run, add, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="4,2", help="of the devices at first")
    parser.add_argument("--more", type=int, default=2, help="threads of the device that is added")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    given = parser.parse_args()
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
    """Keep requests under way, add a device, print what came of it."""
    over, gaps_s = threading.Event(), [0.0]
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)

    def one(number: int) -> None:
        with suppress(Exception):  # the engine is closed while they run
            while not over.is_set():
                prompt = [5 + (7 * number + i) % 400 for i in range(PROMPT)]
                llm.generate([prompt], params, use_tqdm=False)

    def watch() -> None:
        last_s, count = time.perf_counter(), 0
        while not over.wait(0.01):
            now_s, now = time.perf_counter(), generated(llm)
            if now != count:
                last_s, count = now_s, now
            gaps_s[0] = max(gaps_s[0], now_s - last_s)

    for number in range(given.requests):
        threading.Thread(target=one, args=(number,), daemon=True).start()
    time.sleep(4.0)
    threading.Thread(target=watch, daemon=True).start()
    before = rate(llm, given.seconds)
    usual_s, gaps_s[0] = gaps_s[0], 0.0
    name = more.devices[-1].name
    change = llm.add_devices(name, cluster=more, horizon_s=1e6)
    time.sleep(3.0)
    after = rate(llm, given.seconds)
    over.set()
    print(change.text, flush=True)
    print(f"after: {stages_of(llm.plan)}")
    if change.tokens_per_s is None:
        return
    predicted, measured = change.tokens_per_s[1] / change.tokens_per_s[0], after / before
    print(
        f"tokens/s {before:.1f} -> {after:.1f}: {measured:.3f} times, {predicted:.3f} predicted "
        f"({measured / predicted - 1:+.1%}); longest wait for a token {gaps_s[0]:.2f} s "
        f"({usual_s:.2f} before); pause {change.pause_s}"
    )


def rate(llm: LLM, seconds: float) -> float:
    """Return tokens/s over some seconds."""
    began_s, before = time.perf_counter(), generated(llm)
    time.sleep(seconds)
    return (generated(llm) - before) / (time.perf_counter() - began_s)


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


if __name__ == "__main__":
    main()
